# SPDX-License-Identifier: Apache-2.0
"""Work that goes on in the background or in whoever waits for it, whichever comes first.

A seal has to wait for transfers and then write a table. One thread per store does that, so that
durability does not depend on somebody asking; a caller that asks does it itself at once, without
a switch of threads.

Invariants: a task's work runs to completion once; an interrupt leaves it to be run again, so work
must be repeatable; tasks of one queue are started in order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from swapio.store import TransferFuture


class Task(TransferFuture):
    """A `TransferFuture` whose work is a function that returns the number of bytes."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._work: Callable[[], int] | None = work
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        self.was_seen = False

    def run(self) -> None:
        """Do the work unless it is done; waits while another thread does it."""
        with self._lock:
            if self._work is None:
                return
            try:
                self.nbytes = self._work()
            except Exception as error:
                self._error = error
            self._work = None
            self._done.set()

    def result(self, timeout: float | None = None) -> int:
        """Wait for the work and return its bytes; see `TransferFuture.result`."""
        if not self._done.is_set():
            started = time.perf_counter()
            try:
                if timeout is None:
                    self.run()
                elif not self._done.wait(timeout):
                    raise TimeoutError(f"not done after {timeout} s")
            finally:
                self.wait_seconds += time.perf_counter() - started
        if self._error is not None:
            self.was_seen = True
            raise self._error
        return self.nbytes

    def done(self) -> bool:
        """Return whether the work was done or has failed."""
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the work is over and raised."""
        return self._error is not None


class TaskQueue:
    """Runs tasks in order on a thread of its own, which is started with the first task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._unseen: list[Task] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, task: Task) -> None:
        """Queue a task; returns at once."""
        with self._condition:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()

    def drain(self) -> None:
        """Run what is queued and raise the first error that nobody has seen."""
        while True:
            with self._condition:
                task = self._tasks[0] if self._tasks else None
            if task is None:
                break
            task.run()
            self._retire(task)
        with self._condition:
            unseen, self._unseen = self._unseen, []
        for task in unseen:
            if not task.was_seen:
                task.result()

    def close(self) -> None:
        """End the thread after what it is doing; queued tasks are left undone."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _retire(self, task: Task) -> None:
        with self._condition:
            if self._tasks and self._tasks[0] is task:
                self._tasks.popleft()
                if task.has_failed:
                    self._unseen.append(task)

    def _serve(self) -> None:
        while True:
            with self._condition:
                while not self._tasks and not self._is_closed:
                    self._condition.wait()
                if self._is_closed:
                    return
                task = self._tasks[0]
            task.run()
            self._retire(task)
