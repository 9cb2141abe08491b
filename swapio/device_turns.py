# SPDX-License-Identifier: Apache-2.0
"""The turn at a drive among processes: who has it moves bytes, the others wait.

Facts: `flock` is let go by the kernel when its holder dies, but it belongs to the open file, which
a forked child shares; it cannot be waited for with a time limit, and a process that is stopped
(SIGSTOP, a debugger) keeps it.
Consequence: one lock for each device. A child closes its copies of the lock's descriptors. Whoever
has to wait does so on a thread of its own, which can be left waiting.

Invariants: a process that dies, by whatever cause, loses its turn; nobody waits for longer than
`PATIENCE_SECONDS` for a turn, since turns are about speed and never about correctness.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from swapio._aio_probe import log_once
from swapio.errors import ConfigError

PATIENCE_SECONDS = 10.0
"""Many times a turn (64 MiB and what is in flight) of each rank of a host with a slow drive."""


def device_of(path: str | os.PathLike[str]) -> int:
    """Return the device number of a path, or of the nearest folder above it that exists."""
    folder = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    return folder.stat().st_dev


def lock_folder() -> Path:
    """Return where lock files are: $XDG_RUNTIME_DIR, else the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())


class DeviceTurn:
    """The lock of one device among the processes of one user; used by one thread at a time.

    Two files: who wants the turn holds `next` until it has `turn`, so that the holder sees that
    somebody waits and the others line up.

    Raises:
        ConfigError: The lock files cannot be opened.
    """

    def __init__(self, device: int) -> None:
        stem = f"swapio-turn-{os.getuid()}-{os.major(device)}-{os.minor(device)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fds: list[int] = []
        for name in ("turn", "next"):
            path = lock_folder() / f"{stem}.{name}"
            try:
                self._fds.append(os.open(path, flags, 0o600))
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"cannot open {path}, with which ranks take turns: {error.strerror}; set "
                    "take_turns='off', or XDG_RUNTIME_DIR to a folder of yours"
                ) from error
        _turns.add(self)

    def acquire(self) -> None:
        """Wait for the turn. A process that dies gives it up."""
        turn, following = self._fds
        fcntl.flock(following, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(following, fcntl.LOCK_UN)

    def try_acquire(self) -> bool:
        """Take the turn if nobody has it or waits for it; never blocks."""
        turn, following = self._fds
        for fd in (following, turn):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if fd == turn:
                    fcntl.flock(following, fcntl.LOCK_UN)
                return False
        fcntl.flock(following, fcntl.LOCK_UN)
        return True

    def is_wanted(self) -> bool:
        """Whether another process waits; for who has the turn."""
        try:
            fcntl.flock(self._fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fds[1], fcntl.LOCK_UN)
        return False

    def release(self) -> None:
        """Give the turn to who is next."""
        fcntl.flock(self._fds[0], fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


_turns: weakref.WeakSet[DeviceTurn] = weakref.WeakSet()


def _close_in_child() -> None:
    for turn in list(_turns):
        turn.close()


os.register_at_fork(after_in_child=_close_in_child)


class TurnTaker:
    """Takes the turns of some devices, all or none, and waits for them with a limit.

    Used by one thread at a time.
    """

    def __init__(self, turns: Sequence[DeviceTurn], patience_seconds: float) -> None:
        self._turns = turns
        self._patience_seconds = patience_seconds
        self._condition = threading.Condition()
        self._state: Literal["idle", "asked", "held"] = "idle"
        self._is_closed = False
        self._is_waiting = False  # the thread is on its way to the locks, or has them
        self._is_overdue = False
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        """Take the turns; False if others keep one for too long: then go on without.

        They are still asked for, and had when they come.
        """
        with self._condition:
            if not self._is_waiting and self._try_all():
                self._state, self._is_overdue = "held", False
                return True
            self._state = "asked"
            if not self._is_waiting:
                self._is_waiting = True
                self._wake()
            limit = 0.0 if self._is_overdue else self._patience_seconds
            self._is_overdue = not self._condition.wait_for(lambda: self._state == "held", limit)
            if self._is_overdue:
                log_once(
                    "turns",
                    f"another process has kept its turn at the drive for {limit:g} s (it may be "
                    "stopped); transfers go on without turns until it gives the turn up. End that "
                    "process, or set take_turns='off'",
                )
            return not self._is_overdue

    @property
    def is_held(self) -> bool:
        """Whether the turns are here."""
        return self._state == "held"

    def is_wanted(self) -> bool:
        """Whether somebody waits for one that is here."""
        return self.is_held and any(turn.is_wanted() for turn in self._turns)

    def give(self) -> None:
        """Hand the turns on, or ask for them no longer."""
        with self._condition:
            if self._state == "held":
                self._release_all()
            self._state = "idle"
            self._condition.notify_all()

    def close(self) -> None:
        """Close the locks. A thread that still waits for one ends when it has it."""
        with self._condition:
            self._state, self._is_closed = "idle", True
            self._condition.notify_all()
            if not self._is_waiting:
                self._close_all()

    def _try_all(self) -> bool:
        taken: list[DeviceTurn] = []
        for turn in self._turns:
            if not turn.try_acquire():
                for other in taken:
                    other.release()
                return False
            taken.append(turn)
        return True

    def _release_all(self) -> None:
        for turn in self._turns:
            turn.release()

    def _close_all(self) -> None:
        for turn in self._turns:
            turn.close()

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="swapio-turn", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _serve(self) -> None:
        while True:
            for turn in self._turns:
                turn.acquire()
            with self._condition:
                if self._state == "asked":
                    self._state = "held"
                else:
                    self._release_all()
                self._is_waiting = self._is_overdue = False
                self._condition.notify_all()
                if self._is_closed:
                    self._close_all()
                    return
                self._condition.wait_for(lambda: self._is_waiting or self._is_closed)
                if self._is_closed:
                    return
