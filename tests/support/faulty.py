# SPDX-License-Identifier: Apache-2.0
"""A store with faults from a seed, and an engine double that fails where it is told to.

`FaultyStore` wraps any `SwapStore`. Each transfer draws from one generator, so a run is a function
of its seed and of the order of calls; print the seed when a test fails.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from support.blocking_engine import BlockingEngine, IOFuture
from swapio.aio import OP_WRITE
from swapio.align import BLOCK_BYTES
from swapio.errors import AioError
from swapio.store import (
    CommitRecord,
    Hold,
    Piece,
    Progress,
    RecordLayout,
    StoreStats,
    SwapStore,
    TransferFuture,
    WriteTransaction,
)


class Faults:
    """Draws faults.

    Args:
        seed: Of the generator.
        eio: Probability that a transfer fails with EIO.
        enospc: Probability that a write fails with ENOSPC.
        short: Probability that a transfer ends early, without an error number.
        torn: Probability that a write reports success and leaves its last half unwritten.
        delay: Longest delay in seconds before a result is there.
    """

    def __init__(
        self,
        seed: int,
        *,
        eio: float = 0.0,
        enospc: float = 0.0,
        short: float = 0.0,
        torn: float = 0.0,
        delay: float = 0.0,
    ) -> None:
        self.seed = seed
        self.eio = eio
        self.enospc = enospc
        self.short = short
        self.torn = torn
        self.delay = delay
        self.is_active = True
        self.num_injected = 0
        self._generator = random.Random(seed)

    def error(self, op: str, what: str, nbytes: int) -> AioError | None:
        """Return the error of the next transfer, if it has one."""
        draw = self._generator.random()
        kinds = [(self.eio, errno.EIO), (self.short, 0)]
        if op == "pwrite":
            kinds.append((self.enospc, errno.ENOSPC))
        for probability, code in kinds:
            if draw < probability and self.is_active:
                self.num_injected += 1
                hint = f"injected with seed {self.seed}"
                return AioError(code, op, what, length=nbytes, transferred=nbytes // 2, hint=hint)
            draw -= probability
        return None

    def is_torn(self) -> bool:
        """Return whether the next write is torn."""
        is_torn = self._generator.random() < self.torn and self.is_active
        self.num_injected += is_torn
        return is_torn

    def wait(self) -> None:
        """Sleep as long as the next result takes."""
        if self.delay and self.is_active:
            time.sleep(self._generator.uniform(0, self.delay))


class FaultyFuture(TransferFuture):
    """A future that fails although the transfer may have been done."""

    def __init__(self, inner: TransferFuture, faults: Faults, error: AioError | None) -> None:
        self.nbytes = inner.nbytes
        self._inner = inner
        self._faults = faults
        self._error = error
        self._is_waited = False
        self.is_seen = False

    def result(self, timeout: float | None = None) -> int:
        if not self._is_waited:
            self._faults.wait()
            self._is_waited = True
        value = self._inner.result(timeout)
        self.wait_seconds = self._inner.wait_seconds
        self.is_seen = True
        if self._error is not None:
            raise self._error
        return value

    def done(self) -> bool:
        return self._inner.done()


class FaultyTransaction(WriteTransaction):
    """A transaction whose writes may fail, and whose seal fails if one did."""

    def __init__(self, store: FaultyStore, inner: WriteTransaction) -> None:
        self.key = inner.key
        self.generation = inner.generation
        self.slot_index = inner.slot_index
        self.is_in_place = inner.is_in_place
        self._store = store
        self._inner = inner
        self._error: AioError | None = None
        self._torn: list[tuple[str, int, int]] = []

    def write(self, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        faults = self._store.faults
        nbytes = sum(piece[2] for piece in pieces)
        error = faults.error("pwrite", f"{self.key}.slot{self.slot_index}", nbytes)
        self._error = self._error or error
        if error is None and pieces and faults.is_torn():
            record, start, length, _ = pieces[-1]
            self._torn.append((record, start, length))
        return FaultyFuture(self._inner.write(pieces, owner=owner), faults, error)

    def leave_out(self, pieces: Sequence[Piece]) -> None:
        self._inner.leave_out(pieces)

    def seal(self, meta: bytes = b"") -> TransferFuture:
        faults = self._store.faults
        error = self._error or faults.error("pwrite", f"{self.key}.table", 4096)
        self._store.failed_seals.pop(self.key, None)
        if error is not None:
            self._store.failed_seals[self.key] = error
            # As a real failure: another slot's old content stays; in place the rest was written.
            if self._error is not None and self.is_in_place:
                return FaultyFuture(self._inner.seal(meta), faults, error)
            self._inner.abort()
            return FaultyFuture(_Nothing(), faults, error)
        future = self._inner.seal(meta)
        if self._torn:
            future.result()
            for record, start, length in self._torn:
                self._store.tear(self.key, record, start, length)
        return FaultyFuture(future, faults, None)

    def abort(self) -> None:
        self._inner.abort()


class _Nothing(TransferFuture):
    def result(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return 0

    def done(self) -> bool:
        return True


class FaultyStore(SwapStore):
    """Wraps `inner` and injects the faults of `Faults`; torn writes need a `FileStore`."""

    def __init__(self, inner: SwapStore, seed: int, **probabilities: float) -> None:
        self.inner = inner
        self.faults = Faults(seed, **probabilities)
        self.failed_seals: dict[str, AioError] = {}  # by sub-group; no commit goes past one
        self.failed_commits: list[FaultyFuture] = []

    def tear(self, key: str, record: str, start: int, nbytes: int) -> None:
        """Zero the last half of the last block that was written, as if it never landed."""
        last = start + (nbytes - 1) // BLOCK_BYTES * BLOCK_BYTES
        end = start + nbytes
        position = 0
        for run in self.inner.locate(key).records[record]:  # type: ignore[attr-defined]
            first, stop = max(position, last + (end - last) // 2), min(position + run.nbytes, end)
            if first < stop:
                with run.path.open("r+b") as file:
                    file.seek(run.offset + first - position)
                    old = file.read(stop - first)
                    file.seek(run.offset + first - position)
                    file.write(bytes(byte ^ 0x55 for byte in old))
            position += run.nbytes

    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        error = self.faults.error("pread", key, sum(piece[2] for piece in pieces))
        return FaultyFuture(self.inner.read(key, pieces, owner=owner), self.faults, error)

    def begin_write(self, key: str, generation: int) -> WriteTransaction:
        return FaultyTransaction(self, self.inner.begin_write(key, generation))

    def commit(
        self, step: int, payload: bytes = b"", scalars: Mapping[str, Any] | None = None
    ) -> TransferFuture:
        for error in self.failed_seals.values():
            self.failed_commits.append(FaultyFuture(_Nothing(), self.faults, error))
            return self.failed_commits[-1]
        return FaultyFuture(self.inner.commit(step, payload, scalars), self.faults, None)

    def add(self, key: str, records: Sequence[RecordLayout], meta_bytes: int = 0) -> None:
        self.inner.add(key, records, meta_bytes)

    def allocate(self, progress: Progress | None = None) -> None:
        self.inner.allocate(progress)

    def meta(self, key: str) -> bytes:
        return self.inner.meta(key)

    def generation(self, key: str) -> int:
        return self.inner.generation(key)

    def is_written(self, key: str) -> bool:
        return self.inner.is_written(key)

    def hold(self, keys: Iterable[str] | None = None) -> Hold:
        return self.inner.hold(keys)

    def confirm(self, step: int) -> None:
        self.inner.confirm(step)

    def recover(self, step: int | None = None, **choice: Any) -> CommitRecord | None:
        return self.inner.recover(step, **choice)

    def drain(self) -> None:
        self.inner.drain()
        for future in self.failed_commits:
            if not future.is_seen:
                future.result()

    def close(self, *, remove: bool | None = None) -> None:
        self.inner.close(remove=remove)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def num_free_slots(self, key: str) -> int:
        return self.inner.num_free_slots(key)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.inner.keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FailingEngine(BlockingEngine):
    """Fails the submissions whose numbers are in `failing`; counts from 0 after `arm`.

    A failing write still writes its first half, as a device that fails in the middle does. Until
    `disarm` the same requests fail again, whatever their number, unless the fault is transient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[int] = set()
        self.code = errno.EIO
        self.count = -1
        self.is_transient = False
        self.bad_places: set[tuple[str, int]] = set()

    def arm(self, *failing: int, code: int = errno.EIO, is_transient: bool = False) -> None:
        self.disarm()
        self.failing = set(failing)
        self.code = code
        self.count = 0
        self.is_transient = is_transient

    def disarm(self) -> None:
        self.failing = set()
        self.bad_places = set()

    def submit(self, requests, *, owner=None):
        place = (str(requests[0].file.path), requests[0].offset)
        is_bad = place in self.bad_places
        number = self.count
        self.count += not is_bad
        if not is_bad and number not in self.failing:
            return super().submit(requests, owner=owner)
        if not self.is_transient:
            self.bad_places.add(place)
        op, file, address, nbytes, offset = requests[0]
        self._transfer(op, file, address, nbytes // 2, offset)
        name = "pwrite" if op == OP_WRITE else "pread"
        return IOFuture(
            0,
            AioError(
                self.code, name, file.path, offset=offset, length=nbytes, transferred=nbytes // 2
            ),
        )
