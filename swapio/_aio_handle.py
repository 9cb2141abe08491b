# SPDX-License-Identifier: Apache-2.0
"""The native engine's life in this process: futures, owners, interrupts, fork and exit.

Facts, and what follows:

- The kernel writes into a buffer until its completion, whatever Python does. So a future is
  registered in `Handle.pending`, with the owner of the memory, before the native submit, and
  leaves it only when the completion was read. Dropping the future, or a KeyboardInterrupt at any
  byte code, changes nothing about that.
- A signal handler runs between byte codes of the main thread only, so nothing native may block
  for long: waits are slices of at most 100 ms.
- A forked child has the memory but not the threads. It never calls the native engine of its
  parent; its copies of the descriptors are closed at once, so that a lock does not outlive the
  parent in it.
- At exit, threads that still wait would hold the process; an engine gets a few seconds to finish,
  and is then left to the kernel, with its buffers kept alive.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swapio._aio import ffi, lib
from swapio._aio_probe import hint_for, log_once
from swapio.errors import AioError, ClosedError

if TYPE_CHECKING:
    from swapio.aio import Request

WAIT_SLICE_MS = 100
EXIT_SECONDS_MAX = 5.0
_NUM_PEEKED = 16
_NUM_UNSEEN_ERRORS_MAX = 64
_COMPLETIONS = ffi.typeof("swapio_completion[]")
_REQUESTS = ffi.typeof("swapio_request[]")
_OP_NAMES = ("pread", "pwrite", "fsync", "fdatasync")

_handles: set[Handle] = set()
_orphans: set[Handle] = set()


class Handle:
    """Owns one native engine. Thread safe."""

    def __init__(self, pointer: Any, *, direct_remedy: str) -> None:
        self.pointer = ffi.gc(pointer, lib.swapio_engine_free)
        self.pid = os.getpid()
        self.closed = False
        self.pending: dict[int, IOFuture] = {}
        self.unseen: dict[int, IOFuture] = {}  # failed, and nobody has asked for the result
        self.next_id = itertools.count(1).__next__
        self._direct_remedy = direct_remedy
        # Reentrant: a signal handler of the user may use the engine while this thread reaps.
        self._lock = threading.RLock()
        self._stopping = threading.RLock()  # the native stop takes one caller at a time
        self._is_shut_down = False
        _handles.add(self)

    def check_open(self) -> None:
        """Raise ClosedError when closed, or when this process is a fork of the owner."""
        if self.pid != os.getpid():
            raise ClosedError(
                f"this engine belongs to the parent process {self.pid}; create a new one after fork"
            )
        if self.closed:
            raise ClosedError("the engine is closed")

    def submit(self, future: IOFuture, packed: bytes, num_requests: int) -> None:
        """Queue the packed requests under the future's id; returns without waiting."""
        number = future.id
        self.pending[number] = future
        try:
            requests = ffi.from_buffer(_REQUESTS, packed)
            code = lib.swapio_engine_submit(self.pointer, number, requests, num_requests)
        except BaseException:
            if not lib.swapio_engine_knows(self.pointer, number):
                self.pending.pop(number, None)
            raise
        if code < 0:
            self.pending.pop(number, None)
            self._raise_refused(-code, future)
        if code > 0:
            self.reap()

    def _raise_refused(self, code: int, future: IOFuture) -> None:
        self.check_open()
        if self._is_shut_down:
            raise ClosedError("the engine is being closed")
        request = future.requests[0]
        if request.file.closed:
            raise ClosedError(f"the file {request.file.path} is closed")
        raise AioError(
            code,
            _OP_NAMES[request.op],
            request.file.path,
            offset=request.offset,
            length=request.nbytes,
            hint="The request was refused before any transfer: its range or address is invalid",
        )

    def reap(self) -> None:
        """Settle the futures of all completions that are there; never waits for a transfer."""
        with self._lock:
            # Completions are released after they were settled: an interrupt in between only means
            # that they are seen a second time.
            while True:
                completions = ffi.new(_COMPLETIONS, _NUM_PEEKED)
                count = lib.swapio_engine_peek(self.pointer, completions, _NUM_PEEKED)
                for index in range(count):
                    self._settle(completions[index])
                if count > 0:
                    lib.swapio_engine_release(self.pointer, completions[count - 1].id)
                if count < _NUM_PEEKED:
                    return

    def _settle(self, completion: Any) -> None:
        future = self.pending.get(completion.id)
        if future is None:
            return
        if completion.flags & lib.SWAPIO_FLAG_FELL_BACK:
            self._log_late_fallback(future)
        if completion.failed_index >= 0:
            if len(self.unseen) < _NUM_UNSEEN_ERRORS_MAX:
                self.unseen[future.id] = future
            future.fail(completion.failed_index, completion.error, completion.failed_transferred)
        else:
            future.succeed(completion.transferred)
        self.pending.pop(completion.id, None)

    def _log_late_fallback(self, future: IOFuture) -> None:
        paths = {request.file.path for request in future.requests if not request.file.is_direct}
        log_once(
            "direct",
            f"direct I/O on {', '.join(sorted(paths))} was accepted at open and refused at its "
            f"first use (EINVAL); continuing with buffered I/O. {self._direct_remedy}",
        )

    def wait_until(self, ready: Callable[[int], int], timeout: float | None) -> bool:
        """Call `ready(slice_ms)` until it returns 1; False when the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            slice_ms = WAIT_SLICE_MS
            if deadline is not None:
                # The minimum first: an infinite time has no integer.
                left_ms = min(slice_ms, (deadline - time.monotonic()) * 1000 + 1)
                slice_ms = max(0, int(left_ms))
            if ready(slice_ms) == 1:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def drain(self, timeout: float | None) -> int:
        """Wait until nothing is in flight; see Engine.drain."""
        self.check_open()
        stats = ffi.new("swapio_stats *")
        lib.swapio_engine_stats(self.pointer, stats)
        count = int(stats.num_batches_in_flight)
        pointer = self.pointer
        if not self.wait_until(lambda ms: lib.swapio_engine_wait_idle(pointer, ms), timeout):
            raise TimeoutError(f"{count} submissions are still in flight after {timeout} s")
        self.reap()
        failed = list(self.unseen.values())
        self.unseen.clear()
        if failed:
            failed[0].result()
        return count

    def stop(self, timeout: float | None) -> bool:
        """End the native threads; False when transfers are still in flight after `timeout`."""
        if self.pid != os.getpid() or self.closed:
            return True
        pointer = self.pointer
        self._is_shut_down = True
        lib.swapio_engine_shut_down(pointer)
        limit = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if not self._stopping.acquire(timeout=limit):
            return self.closed
        try:
            if not self.wait_until(lambda ms: lib.swapio_engine_stop(pointer, ms) == 0, timeout):
                return False
            self.closed = True
            self.reap()
        finally:
            self._stopping.release()
        _handles.discard(self)
        _orphans.discard(self)
        return True

    def orphan(self) -> None:
        """Take note that the Engine was dropped without close(). Never blocks."""
        if self.pid == os.getpid() and not self.closed:
            lib.swapio_engine_shut_down(self.pointer)
            _orphans.add(self)


class IOFuture:
    """The result of one submission, as in concurrent.futures. Thread safe.

    The engine keeps the buffers of the submission alive until it has completed, also when this
    object is dropped.

    Attributes:
        wait_seconds: Time that calls of result() and exception() have waited.
    """

    __slots__ = ("_done", "_failure", "_handle", "_owner", "_transferred", "id", "requests",
                 "wait_seconds")  # fmt: skip

    def __init__(self, handle: Handle, requests: tuple[Request, ...], owner: object) -> None:
        self.id = handle.next_id()
        self.requests = requests
        self.wait_seconds = 0.0
        self._handle = handle
        self._owner = owner
        self._done = False
        self._transferred = 0
        self._failure: tuple[int, int, int] | None = None

    def done(self) -> bool:
        """Return whether the submission has completed; never blocks."""
        if not self._done:
            self._handle.check_open()
            self._handle.reap()
        return self._done

    def result(self, timeout: float | None = None) -> int:
        """Wait for the completion and return the bytes transferred. Releases the GIL.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            AioError: A transfer failed or ended early.
            TimeoutError: It has not completed in time; it goes on, and the buffer stays in use.
            ClosedError: In a forked child.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._transferred

    def exception(self, timeout: float | None = None) -> AioError | None:
        """Wait as result() does, and return the error instead of raising it; None: success."""
        if not self._done:
            self._wait(timeout)
        if self._failure is None:
            return None
        self._handle.unseen.pop(self.id, None)
        return self._make_error(*self._failure)

    def _wait(self, timeout: float | None) -> None:
        handle = self._handle
        start = time.perf_counter()
        try:
            if not self._done:
                handle.check_open()
            pointer, number = handle.pointer, self.id
            if timeout is None:
                while lib.swapio_engine_wait(pointer, number, WAIT_SLICE_MS) == 0:
                    pass
            elif not handle.wait_until(
                lambda ms: lib.swapio_engine_wait(pointer, number, ms), timeout
            ):
                raise TimeoutError(f"the transfer has not completed within {timeout} s")
            handle.reap()
        finally:
            self.wait_seconds += time.perf_counter() - start

    def succeed(self, transferred: int) -> None:
        """Settle with a result; called by the handle."""
        self._transferred = transferred
        self._done = True
        self._owner = None
        self.requests = ()

    def fail(self, index: int, code: int, transferred: int) -> None:
        """Settle with the failure of one request; called by the handle."""
        self._failure = (index, code, transferred)
        self._done = True
        self._owner = None

    def _make_error(self, index: int, code: int, transferred: int) -> AioError:
        request = self.requests[index]
        op = _OP_NAMES[request.op]
        sync = op.startswith("f")
        return AioError(
            code,
            op,
            request.file.path,
            offset=0 if sync else request.offset,
            length=0 if sync else request.nbytes,
            transferred=transferred,
            hint=hint_for(code, op, request.file.path),
        )


def sweep_orphans() -> None:
    """End the engines that were dropped without close() and have nothing in flight any more.

    A submission that nobody waited for keeps its file, and so its engine, until it is reaped.
    """
    for handle in list(_handles):
        handle.reap()
    for handle in list(_orphans):
        handle.stop(0)


def _close_all_at_exit() -> None:
    deadline = time.monotonic() + EXIT_SECONDS_MAX
    for handle in list(_handles):
        if not handle.stop(max(0.0, deadline - time.monotonic())):
            # The kernel may still write into the buffers: they must outlive the interpreter.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle.pending))


def _abandon_all_in_child() -> None:
    for handle in list(_handles):
        lib.swapio_engine_abandon(handle.pointer)
    _handles.clear()
    _orphans.clear()


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=_abandon_all_in_child)
