# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a device take turns, so that together they are as fast as one.

Fact: several ranks that read and write at once make a drive mix directions and scatter what is in
flight.
Consequence: a thread of the engine takes the device's turn, submits what is queued, and hands the
turn on after `QUANTUM_BYTES` if another rank waits; nobody who submits ever waits for a turn.

Invariants: submissions of a rank reach the device in the order in which they were made; a turn is
held only while something is in flight; what is in flight when it is handed on is bounded.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swapio.aio import Engine, IOFuture, Request
from swapio.device_turns import PATIENCE_SECONDS, DeviceTurn, TurnTaker, device_of
from swapio.errors import ConfigError

QUANTUM_BYTES = 64 << 20
"""As large as a batch of the pipelined swapper: in one turn a drive moves mostly one direction."""

TAIL_BYTES = 16 << 20
"""What may be in flight when a turn is handed on: a drive's queue must not run empty meanwhile."""


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

    def __init__(self, taker: TurnTaker, submit: Callable[[_Entry], Any]) -> None:
        self.wait_seconds = 0.0
        self.num_turns = 0
        self._taker = taker
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
        """Wait until all that was queued has been submitted.

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
        self._taker.close()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._is_idle = not self._entries
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._entries or self._is_closed)
                if not self._entries:
                    return
            began = time.perf_counter()
            self.num_turns += self._taker.take()
            self.wait_seconds += time.perf_counter() - began
            try:
                self._serve_turn()
            finally:
                self._taker.give()

    def _serve_turn(self) -> None:
        """Submit what is queued and what is queued meanwhile, until the turn is over."""
        in_flight: deque[tuple[Any, int]] = deque()
        moved = left = 0
        is_over = False
        while True:
            while self._entries and not is_over:
                entry = self._entries.popleft()
                nbytes = sum(request.nbytes for request in entry[0])
                moved += nbytes
                submitted = self._submit(entry)
                if submitted is not None:
                    in_flight.append((submitted, nbytes))
                    left += nbytes
                if moved >= QUANTUM_BYTES:
                    moved = 0
                    is_over = self._taker.is_wanted()
            # The next rank fills the drive's queue while the end of this turn is still in it.
            if left <= (TAIL_BYTES if is_over else 0):
                return
            future, nbytes = in_flight.popleft()
            # Not `exception`: a failure nobody has seen must still be raised by drain().
            future._wait(None)
            left -= nbytes


class TurnTakingEngine(Engine):
    """An Engine whose submissions wait for their turn at the devices of some paths.

    Args:
        paths: Where the files are.
        kind, options: As for Engine.
        patience_seconds: After so long without a turn transfers go on all the same.

    Raises:
        ConfigError: The lock files cannot be opened, or as Engine raises.
    """

    def __init__(
        self,
        paths: Iterable[str],
        kind: Any = "auto",
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        **options: Any,
    ) -> None:
        super().__init__(kind, **options)
        # In one order for everybody, or two ranks could wait for each other.
        turns = [DeviceTurn(device) for device in sorted({device_of(path) for path in paths})]
        engine = weakref.ref(self)
        taker = TurnTaker(turns, patience_seconds)
        self._queue = TurnQueue(taker, lambda entry: _submit(engine, entry))
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
