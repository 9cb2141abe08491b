# SPDX-License-Identifier: Apache-2.0
"""Giving a checkpoint the bytes of held slots: hard links, reflinks, or copies.

    same file system               os.link: no byte moves
    another directory tree of the same (btrfs sub-volume)   reflink
    anything else                  copied, block by block, verified on the way

Invariant: a slot is held until its files have the checkpoint's names, or were copied.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from swapio.buffers import Lease
from swapio.checkpoint.datafile import DataFile
from swapio.checkpoint.manifest import Piece, RecordEntry
from swapio.errors import AioError
from swapio.holds import FileHold
from swapio.store import Piece as StorePiece

_FICLONE = 0x40049409
# What link(2) says where it cannot: other file system, too many links, not supported, not allowed.
_CANNOT = (errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.EACCES)
_NO_CLONE = (*_CANNOT, errno.EINVAL, errno.ENOTTY)


class LinkedFiles:
    """The files of held slots in a checkpoint's folder.

    Args:
        hold: The held slots.
        folder: Where the links go; on the file system of the slots, or not.
        prefix: Begins their names; tells ranks apart.

    Attributes:
        paths: The new names, by the slot files' own.
        is_shared: Whether the slots' own inodes were linked: they must not be written.
    """

    def __init__(self, hold: FileHold, folder: Path, prefix: str) -> None:
        self.paths: dict[Path, Path] = {}
        self.is_shared = True
        files = dict.fromkeys(path for key in hold.keys for path in hold.locate(key).files)
        for number, path in enumerate(files):
            target = folder / f"{prefix}{number:05d}-{path.name}"
            try:
                self._link(path, target)
            except OSError as error:
                raise AioError(error.errno or 0, "link", target) from error
            self.paths[path] = target

    def _link(self, path: Path, target: Path) -> None:
        if self.is_shared:
            try:
                os.link(path, target)
            except OSError as error:
                if error.errno not in _CANNOT or self.paths:
                    raise
                self.is_shared = False
            else:
                return
        _clone(path, target)

    def entries(
        self, hold: FileHold, indices: Mapping[Path, int]
    ) -> dict[tuple[str, str], RecordEntry]:
        """Return an entry, without its dtype, for each record of the held slots."""
        entries = {}
        for key in hold.keys:
            for name, runs in hold.locate(key).records.items():
                pieces = tuple(
                    Piece(indices[self.paths[run.path]], run.offset, run.nbytes) for run in runs
                )
                nbytes = sum(run.nbytes for run in runs)
                entries[key, name] = RecordEntry("", nbytes, pieces, hold.hashes(key, name))
        return entries


def can_link(hold: FileHold, folder: Path, prefix: str) -> LinkedFiles | None:
    """Link or clone the files of held slots; None if they must be copied."""
    try:
        return LinkedFiles(hold, folder, prefix)
    except AioError as error:
        if error.errno not in _NO_CLONE:
            raise
        for path in folder.glob(f"{prefix}*"):
            path.unlink()
        return None


def copy_records(
    hold: FileHold, key: str, names: Sequence[str], data: DataFile
) -> dict[str, RecordEntry]:
    """Copy records of a held slot into a file of the checkpoint; blocks."""
    entries = {}
    for name in names:
        nbytes = sum(run.nbytes for run in hold.locate(key).records[name])

        def fill(start: int, lease: Lease, length: int, name: str = name) -> None:
            piece = StorePiece(name, start, length, lease.address)
            hold.read(key, [piece], owner=lease).result()

        entries[name] = data.append("", nbytes, fill)
    return entries


def _clone(path: Path, target: Path) -> None:
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.ioctl(made, _FICLONE, source)
        finally:
            os.close(made)
    finally:
        os.close(source)
