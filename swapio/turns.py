# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a device take turns, so that together they are as fast as one.

Facts: several ranks that read and write at once make a drive mix directions and scatter what is in
flight; `flock` is let go by the kernel when its holder dies, but it belongs to the open file, which
a forked child shares.
Consequence: one lock file for each device. A thread of the engine takes the lock, submits what is
queued, and hands the lock on after `QUANTUM_BYTES` if another rank waits; nobody who submits ever
waits for a turn. A child closes its copies of the lock's descriptors.

Invariants: submissions reach the device in the order in which they were made; a rank that dies, by
whatever cause, loses its turn; a lock is held only while something is in flight.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from swapio.aio import Engine, IOFuture, Request
from swapio.errors import ConfigError

QUANTUM_BYTES = 64 << 20
"""As large as a batch of the pipelined swapper: in one turn a drive moves mostly one direction."""


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

    def is_wanted(self) -> bool:
        """Whether another process waits."""
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


class TurnFuture:
    """An IOFuture of a submission that may still wait for its turn."""

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self._is_submitted = threading.Event()
        self._inner: IOFuture | None = None
        self._error: Exception | None = None

    def settle(self, inner: IOFuture | None, error: Exception | None = None) -> None:
        """Take the future of the submission, or the error that it raised."""
        self._inner, self._error = inner, error
        self._is_submitted.set()

    def done(self) -> bool:
        """Return whether the submission has completed."""
        if not self._is_submitted.is_set():
            return False
        return self._inner is None or self._inner.done()

    def result(self, timeout: float | None = None) -> int:
        """Wait for turn and completion; see `IOFuture.result`."""
        began = time.perf_counter()
        try:
            return self._after_turn(timeout).result(_left(timeout, began))
        finally:
            self.wait_seconds += time.perf_counter() - began

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait as `result` does and return the error."""
        try:
            self.result(timeout)
        except TimeoutError:
            raise
        except Exception as error:
            return error
        return None

    def _after_turn(self, timeout: float | None) -> IOFuture:
        if not self._is_submitted.wait(timeout):
            raise TimeoutError(f"the transfer has not had its turn within {timeout} s")
        if self._inner is None:
            raise self._error or ConfigError("the engine was closed before this transfer")
        return self._inner


def _left(timeout: float | None, began: float) -> float | None:
    return None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))


_Entry = tuple[tuple[Request, ...], object, TurnFuture]


class TurnQueue:
    """Submissions that wait for their turn, and the thread that takes it."""

    def __init__(self, turns: Sequence[DeviceTurn], submit: Callable[[_Entry], Any]) -> None:
        self.wait_seconds = 0.0
        self.num_turns = 0
        self._turns = turns
        self._submit = submit
        self._entries: deque[_Entry] = deque()
        self._condition = threading.Condition()
        self._is_idle = True
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, entry: _Entry) -> None:
        """Queue a submission; returns at once."""
        with self._condition:
            self._entries.append(entry)
            self._is_idle = False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="swapio-turns", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()

    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait until all that is queued has been submitted and has completed.

        Raises:
            TimeoutError: It has not.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._is_idle, timeout):
                raise TimeoutError(f"transfers still wait for their turn after {timeout} s")

    def close(self) -> None:
        """End the thread after what is queued. Does not wait for it."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread and close the locks."""
        if self._thread is not None:
            self._thread.join()
        for turn in self._turns:
            turn.close()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._is_idle = not self._entries
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._entries or self._is_closed)
                if not self._entries:
                    return
            began = time.perf_counter()
            for turn in self._turns:
                turn.acquire()
            self.wait_seconds += time.perf_counter() - began
            self.num_turns += 1
            try:
                self._serve_turn()
            finally:
                for turn in self._turns:
                    turn.release()

    def _serve_turn(self) -> None:
        """Submit what is queued and what is queued meanwhile, until the turn is over."""
        in_flight: deque[Any] = deque()
        moved = 0
        is_over = False
        while True:
            while self._entries and not is_over:
                entry = self._entries.popleft()
                moved += sum(request.nbytes for request in entry[0])
                submitted = self._submit(entry)
                if submitted is not None:
                    in_flight.append(submitted)
                if moved >= QUANTUM_BYTES:
                    moved = 0
                    is_over = any(turn.is_wanted() for turn in self._turns)
            if not in_flight:
                return
            # Not `exception`: a failure nobody has seen must still be raised by drain().
            in_flight.popleft()._wait(None)


class TurnTakingEngine(Engine):
    """An Engine whose submissions wait for their turn at the devices of some paths.

    Args:
        paths: Where the files are.
        kind, options: As for Engine.

    Raises:
        ConfigError: The lock files cannot be opened, or as Engine raises.
    """

    def __init__(self, paths: Iterable[str], kind: Any = "auto", **options: Any) -> None:
        super().__init__(kind, **options)
        # In one order for everybody, or two ranks could wait for each other.
        turns = [DeviceTurn(device) for device in sorted({device_of(path) for path in paths})]
        engine = weakref.ref(self)
        self._queue = TurnQueue(turns, lambda entry: _submit(engine, entry))
        self._stop = weakref.finalize(self, self._queue.close)
        self._stop.atexit = False

    @property
    def turn_wait_seconds(self) -> float:
        """Time that submissions waited for other processes."""
        return self._queue.wait_seconds

    @property
    def num_turns(self) -> int:
        """How often the lock was taken."""
        return self._queue.num_turns

    def submit(self, requests: Sequence[Request], *, owner: object = None) -> IOFuture:
        """Queue a batch until its turn; returns at once. See `Engine.submit`.

        What is malformed raises in the future's `result`.
        """
        self._handle.check_open()
        future = TurnFuture()
        self._queue.put((tuple(requests), owner, future))
        return future  # type: ignore[return-value]

    def drain(self, timeout: float | None = None) -> int:
        """Wait until nothing is queued or in flight; see `Engine.drain`."""
        self._queue.wait_idle(timeout)
        return super().drain(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Finish what is queued, then as `Engine.close`."""
        if not self.closed:
            self._handle.check_open()
            self._queue.wait_idle(timeout)
            self._queue.close()
            self._queue.join()
        super().close(timeout)


def _submit(engine: weakref.ref[TurnTakingEngine], entry: _Entry) -> IOFuture | None:
    requests, owner, future = entry
    found = engine()
    try:
        if found is None:
            raise ConfigError("the engine was dropped before this transfer had its turn")
        inner = Engine.submit(found, requests, owner=owner)
    except Exception as error:
        future.settle(None, error)
        return None
    future.settle(inner)
    return inner
