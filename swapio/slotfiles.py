# SPDX-License-Identifier: Apache-2.0
"""The slot files of one store: created, written once, opened again, removed.

Facts about file systems -> consequence:
- A file that is extended, or was only reserved, is slower to write -> reserve, then write once.
- A checkpoint may be a hard link to a slot file -> a file with other links is never reused.

Invariant: every open slot file is locked through the description that its transfers use.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from swapio.aio import OP_WRITE, Engine, File, IOFuture, Request
from swapio.buffers import BufferPool
from swapio.errors import CorruptionError
from swapio.locking import Deadline, open_locked
from swapio.store import Progress
from swapio.striping import FileGroup

_logger = logging.getLogger("swapio.store")

FOLDER_NAME = "slots"
ZERO_BYTES = 4 << 20
WINDOW_BYTES = 32 << 20  # written once per submission; two are in flight

SlotFileSet = tuple[File | None, ...]


def file_name(group: FileGroup, slot_index: int) -> str:
    """Return the name of the file of one slot, the same on every path."""
    return f"{group.name}.slot{slot_index}.bin"


class SlotFiles:
    """The open slot files of a store.

    Args:
        engine: Opens the files and moves the bytes.
        folders: The store's folder on each path.
        lock_timeout: Seconds to wait for files that a dying run still writes.
    """

    def __init__(self, engine: Engine, folders: Sequence[Path], lock_timeout: float) -> None:
        self._engine = engine
        self._folders = [folder / FOLDER_NAME for folder in folders]
        self._lock_timeout = lock_timeout
        self.open_files: list[File] = []
        for folder in self._folders:
            folder.mkdir(exist_ok=True)

    @property
    def folders(self) -> list[Path]:
        """The folder of the files on each path."""
        return self._folders

    def leftovers(self) -> dict[Path, int]:
        """Return the files that are there and not open, with their sizes."""
        known = {Path(file.path) for file in self.open_files}
        return {
            path: path.stat().st_size
            for folder in self._folders
            for path in folder.iterdir()
            if path not in known
        }

    def paths(self, group: FileGroup, slot_index: int) -> list[tuple[Path, int]]:
        """Return the `(path, size)` of each file that a slot has."""
        name = file_name(group, slot_index)
        return [
            (folder / name, size)
            for folder, size in zip(self._folders, group.file_bytes, strict=True)
            if size
        ]

    def create(self, group: FileGroup, slot_index: int) -> SlotFileSet:
        """Open a slot's files and reserve their space; what is there already is reused.

        Raises:
            AioError: If the space cannot be had.
        """
        return self._open(group, slot_index, create=True)

    def open_existing(self, group: FileGroup, slot_index: int) -> SlotFileSet:
        """Open a slot's files and check their sizes.

        Raises:
            CorruptionError: If one is missing, or shorter than recorded.
        """
        for path, size in self.paths(group, slot_index):
            found = path.stat().st_size if path.exists() else None
            if found is None or found < size:
                raise CorruptionError(
                    f"{path} is shorter than recorded: {found} of {size} bytes"
                    if found is not None
                    else f"{path} of {size} bytes is missing"
                )
        return self._open(group, slot_index, create=False)

    def write_once(
        self, files: Iterable[tuple[File, int]], progress: Progress | None = None
    ) -> int:
        """Write zeros over `(file, nbytes)`; blocks; returns the bytes written.

        Raises:
            AioError: If a transfer failed.
        """
        work = list(files)
        total = sum(nbytes for _, nbytes in work)
        done = 0
        with (
            BufferPool(ZERO_BYTES, name="zeros", pin=False) as pool,
            pool.lease(ZERO_BYTES) as zero,
        ):
            waiting: list[tuple[IOFuture, int]] = []
            for file, nbytes in work:
                for start in range(0, nbytes, WINDOW_BYTES):
                    length = min(WINDOW_BYTES, nbytes - start)
                    requests = _zero_requests(file, zero.address, start, length)
                    waiting.append((self._engine.submit(requests, owner=zero), length))
                    while len(waiting) > 1:
                        done += _finish(waiting)
                        if progress is not None:
                            progress(done, total)
            while waiting:
                done += _finish(waiting)
            if progress is not None:
                progress(done, total)
        return total

    def remove_leftovers(self, paths: Iterable[Path]) -> None:
        """Remove files of a dead run as soon as their last writes have landed."""
        for path in paths:
            if not path.is_file():
                continue
            file = open_locked(self._engine, path, Deadline(self._lock_timeout))
            path.unlink()
            file.close()

    def discard(self, file_set: SlotFileSet) -> None:
        """Close and remove the files of one slot."""
        for file in file_set:
            if file is not None:
                self.open_files.remove(file)
                Path(file.path).unlink(missing_ok=True)
                _close(file)

    def close(self, *, remove: bool) -> None:
        """Unlock and close all files; remove them and their folder if asked."""
        for file in self.open_files:
            if remove:
                Path(file.path).unlink(missing_ok=True)
            if not self._engine.closed:
                _close(file)
        self.open_files.clear()
        if remove:
            for folder in self._folders:
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()

    def _open(self, group: FileGroup, slot_index: int, *, create: bool) -> SlotFileSet:
        deadline = Deadline(self._lock_timeout)
        name = file_name(group, slot_index)
        opened: list[File | None] = []
        try:
            for folder, size in zip(self._folders, group.file_bytes, strict=True):
                if not size:
                    opened.append(None)
                    continue
                path = folder / name
                file = open_locked(self._engine, path, deadline, create=create)
                self.open_files.append(file)
                opened.append(file)
                if create:
                    file.allocate(size)
        except BaseException:
            if create:
                self.discard(tuple(opened))
            raise
        return tuple(opened)


def is_reusable(path: Path, nbytes: int) -> bool:
    """Return whether a leftover file has the size and no other link."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return facts.st_size == nbytes and facts.st_nlink == 1


def _zero_requests(file: File, address: int, start: int, nbytes: int) -> list[Request]:
    return [
        Request(OP_WRITE, file, address, min(ZERO_BYTES, start + nbytes - offset), offset)
        for offset in range(start, start + nbytes, ZERO_BYTES)
    ]


def _finish(waiting: list[tuple[IOFuture, int]]) -> int:
    future, nbytes = waiting.pop(0)
    future.result()
    return nbytes


def _close(file: File) -> None:
    # Explicitly: a forked child may share the open description and outlive this process.
    fcntl.flock(file.fd, fcntl.LOCK_UN)
    file.close()


def num_links(file_set: SlotFileSet) -> int:
    """Return the largest number of hard links of a slot's files."""
    return max((os.fstat(file.fd).st_nlink for file in file_set if file is not None), default=1)
