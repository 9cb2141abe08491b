# SPDX-License-Identifier: Apache-2.0
"""The time line of a run, as Chrome and Perfetto read it: reads, updates, writes, waits, seals.

Transfers end in the kernel, not in Python: a thread looks every few milliseconds whether those in
flight are done. It runs only while there are any.

Invariants: without a trace nothing of this runs; an event costs about a microsecond and no I/O;
the newest `EVENTS_MAX` events are kept; the file is written once, at the end.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from swapio.host_limits import rank_name
from swapio.store import Piece, SwapStore, TransferFuture, WriteTransaction

EVENTS_MAX = 200_000
POLL_SECONDS = 0.005
WAIT_SECONDS_MIN = 20e-6  # shorter waits are the cost of asking
_MISSES_MAX = 4
LANES = (
    "backward",
    "reduce",
    "step",
    "update",
    "wait",
    "checksum",
    "read",
    "write",
    "seal",
    "commit",
)

_Item = TypeVar("_Item")


class Event(NamedTuple):
    """Something that took time: lane, name, perf_counter at both ends, bytes moved."""

    lane: str
    name: str
    begin: float
    end: float
    nbytes: int = 0


class Tracer:
    """Collects events of one run; all methods may be called from any thread.

    Args:
        path: The JSON file that `close` writes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_events = 0
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._in_flight: deque[tuple[str, str, float, TransferFuture]] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._began = time.perf_counter()
        self._began_unix = time.time()

    def add(self, lane: str, name: str, begin: float, end: float, nbytes: int = 0) -> None:
        """Note an event that is over."""
        self.num_events += 1
        self._events.append(Event(lane, name, begin, end, nbytes))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Note what the block takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, begin, time.perf_counter())

    def items(self, lane: str, name: str, source: Iterator[_Item]) -> Iterator[_Item]:
        """Yield from `source`; what the consumer does with each item is an event."""
        for item in source:
            begin = time.perf_counter()
            yield item
            self.add(lane, name, begin, time.perf_counter())

    def watch(self, lane: str, name: str, future: TransferFuture) -> None:
        """Note a transfer when it is done."""
        with self._condition:
            self._in_flight.append((lane, name, time.perf_counter(), future))
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._poll, name="swapio-trace", daemon=True)
                self._thread.start()
            self._condition.notify()

    def trace(self, store: SwapStore) -> SwapStore:
        """Return the store with its transfers noted."""
        return TracedStore(store, self)  # type: ignore[return-value]

    def close(self, about: dict[str, Any]) -> None:
        """Write the file.

        Args:
            about: What else is known of the run, for `swapio report`; JSON values.

        Raises:
            OSError: The file cannot be written.
        """
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
        self._reap()
        about = about | {
            "events": self.num_events,
            "events_lost": self.num_events - len(self._events),
        }
        document = {
            "displayTimeUnit": "ms",
            "otherData": {"swapio": about, "began": self._began_unix},
            "traceEvents": list(self._rendered()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document), encoding="utf-8")

    def _poll(self) -> None:
        while True:
            with self._condition:
                while not self._in_flight and not self._is_closed:
                    self._condition.wait()
                if self._is_closed:
                    return
            self._reap()
            time.sleep(POLL_SECONDS)

    def _reap(self) -> None:
        """Note what is over. Transfers end about in order, so a few that are not end the search."""
        waiting: list[tuple[str, str, float, TransferFuture]] = []
        while self._in_flight and len(waiting) < _MISSES_MAX:
            entry = self._in_flight.popleft()
            lane, name, begin, future = entry
            if self._is_over(future):
                self.add(lane, name, begin, time.perf_counter(), future.nbytes)
            else:
                waiting.append(entry)
        self._in_flight.extendleft(reversed(waiting))

    @staticmethod
    def _is_over(future: TransferFuture) -> bool:
        try:
            return future.done()
        except Exception:  # the engine is gone; whoever owns the future hears of it
            return True

    def _rendered(self) -> Iterator[dict[str, Any]]:
        """Yield the events in Chrome's format; what overlaps in a lane goes to further rows."""
        pid = os.getpid()
        ends: dict[str, list[float]] = {lane: [] for lane in LANES}
        for event in sorted(self._events, key=lambda event: event.begin):
            rows = ends.setdefault(event.lane, [])
            row = next((i for i, end in enumerate(rows) if end <= event.begin), len(rows))
            rows[row : row + 1] = [event.end]
            yield {
                "ph": "X",
                "cat": event.lane,
                "name": event.name,
                "pid": pid,
                "tid": _tid(list(ends), event.lane, row),
                "ts": round((event.begin - self._began) * 1e6, 1),
                "dur": round((event.end - event.begin) * 1e6, 1),
                "args": {"bytes": event.nbytes} if event.nbytes else {},
            }
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "swapio"}}
        for lane, rows in ends.items():
            for row in range(len(rows)):
                tid = _tid(list(ends), lane, row)
                name = lane if row == 0 else f"{lane} {row + 1}"
                about = {"ph": "M", "pid": pid, "tid": tid}
                yield about | {"name": "thread_name", "args": {"name": name}}
                yield about | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def trace_path(path: str) -> Path:
    """Return the file of this process: each rank writes its own."""
    found, rank = Path(path), rank_name()
    return found.with_name(f"{found.stem}.{rank}{found.suffix}") if rank else found


def _tid(lanes: Sequence[str], lane: str, row: int) -> int:
    return 1000 * (lanes.index(lane) + 1) + row


class TracedFuture(TransferFuture):
    """A transfer whose waits, and whose verification by the waiter, are events."""

    def __init__(self, inner: TransferFuture, tracer: Tracer, what: str) -> None:
        self.nbytes = inner.nbytes
        self._inner = inner
        self._tracer = tracer
        self._what = what

    def result(self, timeout: float | None = None) -> int:
        """Wait; see `TransferFuture.result`."""
        inner = self._inner
        waited = inner.wait_seconds
        begin = time.perf_counter()
        try:
            return inner.result(timeout)
        finally:
            end = time.perf_counter()
            self.wait_seconds = inner.wait_seconds
            ready = min(end, begin + inner.wait_seconds - waited)
            if ready - begin > WAIT_SECONDS_MIN:
                self._tracer.add("wait", f"wait for {self._what}", begin, ready)
            if end - ready > WAIT_SECONDS_MIN:
                self._tracer.add("checksum", f"verify {self._what}", ready, end)

    def done(self) -> bool:
        """Return whether it is over; see `TransferFuture.done`."""
        return self._inner.done()


class TracedStore:
    """A `SwapStore` that notes reads, writes, seals and commits, and is else the one inside."""

    def __init__(self, inner: SwapStore, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner store's."""
        return getattr(self._inner, name)

    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Start to read; see `SwapStore.read`."""
        return self._watched("read", key, self._inner.read(key, pieces, owner=owner))

    def begin_write(self, key: str, generation: int) -> WriteTransaction:
        """Open a transaction; see `SwapStore.begin_write`."""
        return TracedTransaction(self._inner.begin_write(key, generation), self)

    def commit(self, step: int, *args: Any, **kwargs: Any) -> TransferFuture:
        """Commit; see `SwapStore.commit`."""
        future = self._inner.commit(step, *args, **kwargs)
        return self._watched("commit", f"step {step}", future)

    def drain(self) -> None:
        """Wait for seals and commits; see `SwapStore.drain`."""
        self._timed("wait", "drain", self._inner.drain)

    def _timed(self, lane: str, name: str, work: Callable[[], _Item]) -> _Item:
        begin = time.perf_counter()
        found = work()
        end = time.perf_counter()
        if end - begin > WAIT_SECONDS_MIN:
            self._tracer.add(lane, name, begin, end)
        return found

    def _watched(self, lane: str, name: str, future: TransferFuture) -> TransferFuture:
        self._tracer.watch(lane, name, future)
        return TracedFuture(future, self._tracer, f"{lane} {name}")


class TracedTransaction(WriteTransaction):
    """A transaction whose writes and seal are events; hashing before a write is a checksum."""

    def __init__(self, inner: WriteTransaction, store: TracedStore) -> None:
        self._inner = inner
        self._store = store
        self.key = inner.key
        self.generation = inner.generation
        self.slot_index = inner.slot_index
        self.is_in_place = inner.is_in_place

    def write(self, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Hash and start to write; see `WriteTransaction.write`."""
        future = self._store._timed(
            "checksum", f"hash {self.key}", lambda: self._inner.write(pieces, owner=owner)
        )
        return self._store._watched("write", self.key, future)

    def leave_out(self, pieces: Sequence[Piece]) -> None:
        """Leave blocks for later; see `WriteTransaction.leave_out`."""
        self._inner.leave_out(pieces)

    def seal(self, meta: bytes = b"") -> TransferFuture:
        """Seal; see `WriteTransaction.seal`."""
        return self._store._watched("seal", self.key, self._inner.seal(meta))

    def abort(self) -> None:
        """Drop it; see `WriteTransaction.abort`."""
        self._inner.abort()
