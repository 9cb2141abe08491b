# SPDX-License-Identifier: Apache-2.0
"""Who may use a folder: a lock file for setting up, and locks on the data files themselves.

Facts about a killed run -> consequence:
- Its lock file is free at once, while the kernel may still write what was in flight -> the data
  files are locked too, through the open descriptions that the transfers use: those stay locked
  until the last write has landed.
- A lock file may be removed between open and lock -> after locking, the name must still lead to
  the file that was locked.
- flock does not tell the process that holds it -> the lock file says who locked it last.

Invariant: nothing in a folder is read, reused or removed without its lock file's lock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Literal

from swapio.aio import Engine, File
from swapio.errors import StoreLockedError

_logger = logging.getLogger("swapio.store")

LOCK_NAME = "lock"
POLL_SECONDS = 0.02
QUIET_SECONDS = 0.2


class Deadline:
    """A point in time to wait for a lock until, and one log line about the wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()
        self._has_logged = False

    def wait(self, reason: str, *, quiet_seconds: float = 0.0) -> None:
        """Sleep a little, and log why after `quiet_seconds`.

        Raises:
            StoreLockedError: If the time is over; `reason` says what is in the way.
        """
        waited = time.monotonic() - self._start
        if waited >= self.seconds:
            raise StoreLockedError(
                f"{reason}; gave up after {self.seconds:g} s. Use another path or namespace, end "
                "the other run, or raise lock_timeout"
            )
        if waited >= quiet_seconds and not self._has_logged:
            self._has_logged = True
            _logger.warning("waiting up to %g s: %s", self.seconds, reason)
        time.sleep(POLL_SECONDS)


class FolderLock:
    """The lock of one store folder, which it creates; kept until `release`."""

    def __init__(self, folder: Path, deadline: Deadline) -> None:
        self.folder = folder
        self._descriptor = -1
        while (descriptor := _try_lock(folder)) is None:
            # Another rank that looks for leftovers has the lock for a moment: not worth a line.
            reason = f"{folder} is in use by {_owner(folder)}"
            deadline.wait(reason, quiet_seconds=QUIET_SECONDS)
        self._descriptor = descriptor
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)

    def release(self, *, remove: bool = False) -> None:
        """Unlock, and remove the lock file and the folder if nothing else is in it."""
        if self._descriptor < 0:
            return
        if remove:
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
            try:
                self.folder.rmdir()
            except OSError as error:
                _logger.warning("%s stays: %s", self.folder, error.strerror)
        # Explicitly: a forked child may share the open description and outlive this process.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


def try_lock_folder(folder: Path) -> FolderLock | None:
    """Return the lock of an existing folder, or None if it is in use or gone."""
    if not folder.is_dir():
        return None
    try:
        return FolderLock(folder, Deadline(0.0))
    except (StoreLockedError, OSError):
        return None


def _try_lock(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None  # another run removed the folder just now
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / LOCK_NAME).read_bytes())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def open_locked(
    engine: Engine,
    path: Path,
    deadline: Deadline,
    *,
    create: bool = False,
    direct: Literal["auto", "required", "off"] | None = None,
) -> File:
    """Open a data file with its lock, waiting while a dying run's writes still land.

    Raises:
        StoreLockedError: If it stays locked until the deadline.
        AioError: If it cannot be opened.
    """
    while True:
        try:
            return engine.open(path, create=create, lock=True, direct=direct)
        except StoreLockedError:
            deadline.wait(
                f"{path} is locked: the last writes of a killed run are still landing, or a child "
                "process that it forked is alive"
            )


_in_use_lock = threading.Lock()
_in_use: set[tuple[int, Path]] = set()


def claim_name(parents: list[Path], base: str) -> str:
    """Return `base`, or `base-1`, ... : the first that this process does not use in `parents`."""
    with _in_use_lock:
        index = 0
        while True:
            name = base if index == 0 else f"{base}-{index}"
            claims = {(os.getpid(), parent / name) for parent in parents}
            if not claims & _in_use:
                _in_use.update(claims)
                return name
            index += 1


def is_claimed(folder: Path) -> bool:
    """Return whether a store of this process uses `folder`."""
    with _in_use_lock:
        return (os.getpid(), folder) in _in_use


def disclaim(folders: list[Path]) -> None:
    """Give claimed folders back."""
    with _in_use_lock:
        _in_use.difference_update((os.getpid(), folder) for folder in folders)
