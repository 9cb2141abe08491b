# SPDX-License-Identifier: Apache-2.0
"""The commit files of a store: which one is next, writing and reading them.

Invariant: the file that holds the newest whole record is never the one that is written next; with
`num_files` files the newest `num_files - 1` records stay whole whatever happens.
"""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path

import numpy as np

from swapio.aio import OP_WRITE, Engine, File, Request
from swapio.commit import FILE_NAMES, StepRecord, decode_record
from swapio.errors import CorruptionError
from swapio.locking import Deadline, open_locked
from swapio.manifest import sync_folder
from swapio.persistent import PersistentIO

_logger = logging.getLogger("swapio.store")


class CommitLog:
    """The commit records of the store in `folder`.

    Args:
        engine: Writes the records.
        folder: The store's folder on its first path.
        lock_timeout: Seconds to wait for files that a dying run still writes.
        num_files: How many files take turns: 2, or 3 where ranks may be a commit apart.
    """

    def __init__(
        self, engine: Engine, folder: Path, lock_timeout: float, num_files: int = 2
    ) -> None:
        self._engine = engine
        self._num_files = num_files
        self._folder = folder
        self._lock_timeout = lock_timeout
        self._files: dict[int, File] = {}
        self._next = 0
        self.sequence = 0

    def write(self, data: bytes, *, is_synced: bool) -> None:
        """Write the next record whole; blocks.

        Args:
            data: From `commit.encode_record`, with `sequence + 1`.
            is_synced: Also wait until it is on storage.

        Raises:
            AioError: If it could not be written; the record before it is whole.
        """
        file = self._files.get(self._next)
        is_new = file is None
        if file is None:
            file = self._open(self._next)
        memory = np.frombuffer(data, dtype=np.uint8)
        address = memory.__array_interface__["data"][0]
        request = Request(OP_WRITE, file, address, memory.nbytes, 0)
        PersistentIO(self._engine, [request], memory).result()
        if is_synced:
            self._engine.fsync(file, data_only=True).result()
            if is_new:
                sync_folder(self._folder)
        self._next = (self._next + 1) % self._num_files
        self.sequence += 1

    def read(self) -> list[StepRecord]:
        """Return the whole records, newest first; log the ones that are not."""
        found = []
        for index, name in enumerate(FILE_NAMES):
            path = self._folder / name
            if not path.exists():
                continue
            if index not in self._files:
                self._open(index)
            record = _read_record(path)
            if record is not None:
                found.append((record.sequence, index, record))
        found.sort(key=lambda entry: entry[0], reverse=True)
        return [record for _, _, record in found]

    def resume_after(self, record: StepRecord) -> None:
        """Let the next record go to the file that can be spared best, never to `record`'s."""
        found: dict[int, int] = {}
        for index, name in enumerate(FILE_NAMES):
            path = self._folder / name
            other = _read_record(path) if path.exists() else None
            if other is not None and other.sequence > record.sequence:
                # It was passed over: a later recovery must not prefer it.
                self._open_file(index).truncate(0)
            elif other is not None:
                found[index] = other.sequence
        self._next = min(range(self._num_files), key=lambda index: found.get(index, -1))
        self.sequence = record.sequence

    def close(self, *, remove: bool) -> None:
        """Unlock and close the files; remove them if asked."""
        for file in self._files.values():
            if self._engine.closed:
                break
            fcntl.flock(file.fd, fcntl.LOCK_UN)
            file.close()
        self._files.clear()
        if remove:
            for name in FILE_NAMES:
                (self._folder / name).unlink(missing_ok=True)

    def _open_file(self, index: int) -> File:
        return self._files.get(index) or self._open(index)

    def _open(self, index: int) -> File:
        # Buffered: a record has any length, and what a killed process wrote is kept all the same.
        path = self._folder / FILE_NAMES[index]
        deadline = Deadline(self._lock_timeout)
        file = open_locked(self._engine, path, deadline, create=True, direct="off")
        self._files[index] = file
        return file


def _read_record(path: Path) -> StepRecord | None:
    try:
        return decode_record(path.read_bytes(), str(path))
    except CorruptionError as error:
        _logger.warning("%s; the other commit record is used if it is whole", error)
        return None


def peek_steps(folder: Path) -> tuple[int, ...]:
    """Return the steps with a whole record in `folder`, newest first, without locking."""
    records = []
    for name in FILE_NAMES:
        path = folder / name
        if path.is_file():
            record = _read_record(path)
            if record is not None:
                records.append(record)
    records.sort(key=lambda record: record.sequence, reverse=True)
    return tuple(record.step for record in records)
