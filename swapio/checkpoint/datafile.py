# SPDX-License-Identifier: Apache-2.0
"""Writing arrays into a file of a checkpoint, through two small buffers.

Invariant: what was appended is on storage, checksummed, when `close` has returned; memory is two
windows of 4 MiB, whatever is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from swapio.aio import Engine, IOFuture
from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool, Lease
from swapio.checkpoint.manifest import Piece, RecordEntry
from swapio.checksum import Hashes, block_hashes

WINDOW_BYTES = 4 << 20

# (first byte of the array, memory to fill)
Fill = Callable[[int, Lease, int], None]


class DataFile:
    """A file that arrays are appended to; a context manager.

    Args:
        engine: Writes it.
        path: A new file.
        index: Its number in the manifest's list of files.
    """

    def __init__(self, engine: Engine, path: Path, index: int) -> None:
        self.path = path
        self.index = index
        self.nbytes = 0
        self._engine = engine
        self._file = engine.open(path, create=True)
        self._pool = BufferPool(2 * WINDOW_BYTES, name="checkpoint", pin=False)
        self._buffers = [self._pool.lease(WINDOW_BYTES) for _ in range(2)]
        self._writes: list[IOFuture | None] = [None, None]
        self._turn = 0

    def append(self, dtype: str, nbytes: int, fill: Fill) -> RecordEntry:
        """Append one array.

        Args:
            dtype: For the entry.
            nbytes: Its length.
            fill: Called as `fill(start, lease, length)` for each window: puts bytes
                `start:start + length` of the array at the beginning of the lease.

        Raises:
            AioError: The disk is full, or failed.
        """
        if not nbytes:
            return RecordEntry(dtype, 0, (), np.zeros(0, np.uint64))
        offset = round_up(self.nbytes, PAGE_BYTES)
        hashes: list[Hashes] = []
        for start in range(0, nbytes, WINDOW_BYTES):
            length = min(WINDOW_BYTES, nbytes - start)
            lease = self._buffers[self._turn]
            self._wait(self._turn)
            fill(start, lease, length)
            hashes.append(block_hashes(lease.address, length))
            memory = lease.memory[:length]
            self._writes[self._turn] = self._engine.pwrite(self._file, memory, offset + start)
            self._turn = 1 - self._turn
        self.nbytes = offset + nbytes
        piece = Piece(self.index, offset, nbytes)
        return RecordEntry(dtype, nbytes, (piece,), np.concatenate(hashes))

    def sync(self) -> None:
        """Wait until everything is on storage."""
        for turn in (0, 1):
            self._wait(turn)
        self._engine.fsync(self._file).result()

    def close(self) -> None:
        """Give up the buffers and the file; what is on its way is waited for, errors ignored."""
        for future in self._writes:
            if future is not None:
                future.exception()
        self._writes = [None, None]
        self._pool.close(force=True)
        self._file.close()

    def __enter__(self) -> DataFile:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _wait(self, turn: int) -> None:
        future = self._writes[turn]
        if future is not None:
            future.result()
            self._writes[turn] = None
