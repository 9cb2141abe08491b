# SPDX-License-Identifier: Apache-2.0
"""Measures what a folder's device does with the engine: bandwidth, CPU time and latency.

Facts: a file is written once before it is measured, because a fresh or growing one is slower;
buffers are 2 MiB-aligned huge pages, because scattered small pages halve the bandwidth; buffered
reads drop the page cache first and buffered writes end with fsync, or they would measure memory.
Consequence: a rate from here is what a swapped step can hope for, and no more.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

from swapio.aio import OP_READ, OP_WRITE, Engine, File, IOFuture, Request
from swapio.buffers import BufferPool, Lease

PATTERNS = ("read", "write", "mixed")
TRANSFER_BYTES = 16 << 20  # one submission; the engine cuts it into blocks
NUM_OUTSTANDING = 4
LATENCY_SAMPLES = 200
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine is opened for a measurement."""

    kind: Literal["auto", "io_uring", "threads"] = "auto"
    direct: Literal["auto", "required", "off"] = "auto"
    queue_depth: int = 32
    block_size: int = 512 << 10
    num_threads: int = 8


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One pattern's result.

    Attributes:
        gb_per_second: Bytes moved in both directions per second, in units of 1e9.
        cpu_seconds_per_gb: Processor time of this process, kernel time in it included.
        latency_ms: Percentile to milliseconds, of one block at queue depth 1; may be empty.
    """

    pattern: str
    engine: str
    direct: bool
    gb_per_second: float
    cpu_seconds_per_gb: float
    latency_ms: dict[str, float]


class Bench:
    """An engine, two files that were written once, and buffers to move; a context manager.

    Args:
        folder: Where the scratch files go; they are removed on close.
        settings: How the engine is opened.
        nbytes: Size of each file, rounded up to whole transfers.
    """

    def __init__(self, folder: Path, settings: EngineSettings, *, nbytes: int) -> None:
        self.settings = settings
        self.nbytes = max(1, -(-nbytes // TRANSFER_BYTES)) * TRANSFER_BYTES
        self._scratch = tempfile.TemporaryDirectory(prefix="swapio-bench-", dir=folder)
        try:
            self._pool = BufferPool(2 * NUM_OUTSTANDING * TRANSFER_BYTES, pin=False, name="bench")
            self._leases = [self._pool.lease(TRANSFER_BYTES) for _ in range(2 * NUM_OUTSTANDING)]
            self.engine = Engine(
                settings.kind,
                queue_depth=settings.queue_depth,
                block_size=settings.block_size,
                direct=settings.direct,
                num_threads=settings.num_threads,
            )
            self._files = [self._make_file(name) for name in ("a", "b")]
        except BaseException:
            self._scratch.cleanup()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and remove the files."""
        for file in self._files:
            file.close()
        self.engine.close()
        for lease in self._leases:
            lease.release()
        self._pool.close()
        self._scratch.cleanup()

    def _make_file(self, name: str) -> File:
        path = Path(self._scratch.name) / name
        file = self.engine.open(path, size=self.nbytes, create=True)
        file.allocate(self.nbytes)
        for lease in self._leases:
            lease.memory[:] = os.urandom(1 << 16) * (lease.nbytes >> 16)
        for offset in range(0, self.nbytes, TRANSFER_BYTES):
            self._submit(OP_WRITE, file, offset, self._leases[0]).result()
        self.engine.fsync(file).result()
        return file

    def _submit(self, op: int, file: File, offset: int, lease: Lease) -> IOFuture:
        request = Request(op, file, lease.address, TRANSFER_BYTES, offset)
        return self.engine.submit([request], owner=lease)

    def _sync(self) -> None:
        for file in self._files:
            self.engine.fsync(file).result()

    def _drop_cache(self) -> None:
        for file in self._files:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def rate(
        self,
        pattern: str,
        *,
        seconds: float = 2.0,
        latency: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Rate:
        """Move bytes for about `seconds`; blocks.

        Args:
            pattern: "read", "write" or "mixed" (a reader and a writer at once, equally fast).
            seconds: How long.
            latency: Also time single blocks at queue depth 1.
            progress: Called with the bytes of each completed transfer.
        """
        self._sync()
        self._drop_cache()
        cpu, start = _cpu_seconds(), time.perf_counter()
        moved = 0
        in_flight: deque[IOFuture] = deque()
        for op, file, offset, lease in self._transfers(pattern):
            late = time.perf_counter() - start >= seconds
            if late and (op == OP_READ or pattern == "write"):  # mixed ends after whole pairs
                break
            if len(in_flight) == (len(self._leases) if pattern == "mixed" else NUM_OUTSTANDING):
                nbytes = in_flight.popleft().result()
                moved += nbytes
                if progress is not None:
                    progress(nbytes)
            in_flight.append(self._submit(op, file, offset, lease))
        while in_flight:
            moved += in_flight.popleft().result()
        if not self.is_direct and pattern != "read":
            self._sync()
        elapsed, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        return Rate(
            pattern=pattern,
            engine=self.engine.kind,
            direct=self.is_direct,
            gb_per_second=moved / elapsed / GB,
            cpu_seconds_per_gb=cpu / moved * GB,
            latency_ms=self._latency(pattern) if latency else {},
        )

    @property
    def is_direct(self) -> bool:
        """Tell whether the transfers go past the page cache."""
        return self._files[0].is_direct

    def _transfers(self, pattern: str) -> Iterator[tuple[int, File, int, Lease]]:
        """Yield transfers without end: (operation, file, offset, buffer); mixed alternates."""
        kinds = {"read": [OP_READ], "write": [OP_WRITE], "mixed": [OP_READ, OP_WRITE]}[pattern]
        leases = cycle(self._leases if pattern == "mixed" else self._leases[:NUM_OUTSTANDING])
        for offset in cycle(range(0, self.nbytes, TRANSFER_BYTES)):
            for op in kinds:
                yield op, self._files[op == OP_WRITE], offset, next(leases)

    def _latency(self, pattern: str) -> dict[str, float]:
        block = self.settings.block_size
        offsets = range(0, self.nbytes - block, block)
        times = []
        for number in range(LATENCY_SAMPLES):
            op = OP_WRITE if pattern == "write" or (pattern == "mixed" and number % 2) else OP_READ
            offset = offsets[number * 7919 % len(offsets)]  # a prime stride: no read-ahead
            request = Request(
                op, self._files[op == OP_WRITE], self._leases[0].address, block, offset
            )
            start = time.perf_counter()
            self.engine.submit([request], owner=self._leases[0]).result()
            times.append((time.perf_counter() - start) * 1e3)
        cuts = statistics.quantiles(times, n=100)
        return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(times)}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
