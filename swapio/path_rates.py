# SPDX-License-Identifier: Apache-2.0
"""How fast each of several paths is, measured in a moment, to place extents in proportion.

Paths on one device share its speed. Invariant: nothing is left behind.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from swapio.aio import OP_READ, OP_WRITE, Engine, File, Request
from swapio.buffers import BufferPool, Lease
from swapio.device_turns import device_of

TRANSFER_BYTES = 8 << 20
FILE_BYTES = 64 << 20
SECONDS_MAX = 0.25  # for each direction of a device

_logger = logging.getLogger("swapio.store")


def measure_weights(paths: Sequence[str], engine: Engine) -> tuple[float, ...]:
    """Return the share of each path; equal ones if all are on one device. Blocks for a moment."""
    devices = [device_of(path) for path in paths]
    if len(set(devices)) == 1:
        return tuple(1.0 for _ in paths)
    rates = {}
    with (
        BufferPool(TRANSFER_BYTES, pin=False, name="path rates") as pool,
        pool.lease(TRANSFER_BYTES) as lease,
    ):
        lease.memory[:] = os.urandom(1 << 16) * (TRANSFER_BYTES >> 16)
        for path, device in zip(paths, devices, strict=True):
            if device not in rates:
                rates[device] = _rate(Path(path), engine, lease)
    weights = tuple(rates[device] / devices.count(device) for device in devices)
    shown = ", ".join(f"{p} {w / 1e9:.2f} GB/s" for p, w in zip(paths, weights, strict=True))
    _logger.info("extents are placed in proportion to what was measured: %s", shown)
    return weights


def _rate(path: Path, engine: Engine, lease: Lease) -> float:
    """Return the harmonic mean of what a folder's device reads and writes in a second."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="swapio-rate-", dir=path) as folder:
        file = engine.open(Path(folder) / "x", size=FILE_BYTES, create=True)
        try:
            file.allocate(FILE_BYTES)
            # What is written for the first time is slower; it also makes what is read.
            written, _ = _timed(OP_WRITE, engine, file, lease, seconds=2 * SECONDS_MAX)
            pace = 0.0
            for op in (OP_WRITE, OP_READ):
                moved, seconds = _timed(op, engine, file, lease, nbytes=written)
                pace += seconds / moved
            return 2 / pace
        finally:
            file.close()


def _timed(
    op: int,
    engine: Engine,
    file: File,
    lease: Lease,
    *,
    nbytes: int = FILE_BYTES,
    seconds: float = SECONDS_MAX,
) -> tuple[int, float]:
    """Move bytes until the time is over: (bytes, seconds)."""
    began = time.perf_counter()
    moved = 0
    while moved < nbytes:
        requests = [Request(op, file, lease.address, lease.nbytes, moved)]
        engine.submit(requests, owner=lease).result()
        moved += lease.nbytes
        if time.perf_counter() - began > seconds:
            break
    return moved, max(1e-9, time.perf_counter() - began)
