# SPDX-License-Identifier: Apache-2.0
"""Copies between a device and page-locked memory that others can slip in between.

    piece 0     piece 1     piece 2     piece 3
    stream a    stream b    stream a    stream b        each waits for the event of the one before

A copy engine serves what is queued in order. So that somebody else's copy (`.item()`, nonzero)
does not wait for all of a gradient, copies are cut in pieces of 16 MiB, and a piece is handed to
the engine only when the one before is done: that is what the chain of events does. Two streams
alternate, so that the next piece is ready when the engine is.

Invariants:
- nothing here blocks the host, except `settle` and `close`;
- a source is not reused by its allocator before its copy is complete (`record_stream`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool
from swapio.optim.stream import HostCopier

PIECE_BYTES = 16 << 20


def norm_bytes(num_params: int) -> int:
    """Bytes of page-locked memory for the sums of squares of so many parameters."""
    return round_up(max(1, num_params) * torch.float64.itemsize, PAGE_BYTES)


def pieces(numel: int, item_bytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[slice]:
    """Cut a copy of `numel` elements into pieces of at most `piece_bytes`, about equal."""
    if numel <= 0:
        return
    count = -(-numel * item_bytes // piece_bytes)
    size = -(-numel // count)
    for start in range(0, numel, size):
        yield slice(start, min(numel, start + size))


class CopyQueue:
    """Copies of one direction, chained piece by piece over two streams.

    Args:
        device: The CUDA device.
        cuda: The module with `Stream`, `Event` and `stream`; torch.cuda.
        whole: Do not cut or chain anything: copies to a device keep nobody waiting.
    """

    def __init__(
        self, device: torch.device, cuda: Any = torch.cuda, *, whole: bool = False
    ) -> None:
        self._cuda = cuda
        self._streams = [cuda.Stream(device=device) for _ in range(1 if whole else 2)]
        self._piece_bytes = sys.maxsize if whole else PIECE_BYTES
        self._turn = 0
        self._last: Any = None
        self.num_pieces = 0

    def wait_for(self, event: Any) -> None:
        """Let every later piece wait for an event of another stream."""
        for stream in self._streams:
            stream.wait_event(event)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Queue a copy between 1-D tensors of one dtype; return the event of its end.

        Does not block. One of them is on the device, the other in page-locked memory.
        """
        for piece in pieces(source.numel(), source.element_size(), self._piece_bytes):
            stream = self._streams[self._turn]
            self._turn = (self._turn + 1) % len(self._streams)
            if self._last is not None and len(self._streams) > 1:
                stream.wait_event(self._last)
            with self._cuda.stream(stream):
                target[piece].copy_(source[piece], non_blocking=True)
            self._last = self._cuda.Event()
            self._last.record(stream)
            self.num_pieces += 1
        for tensor in (source, target):
            if tensor.is_cuda:
                for stream in self._streams:
                    tensor.record_stream(stream)
        return self._last

    @property
    def last(self) -> Any:
        """The event of the last piece, or None."""
        return self._last

    def synchronize(self) -> None:
        """Block until everything queued is done."""
        for stream in self._streams:
            stream.synchronize()


class DeviceCopier(HostCopier):
    """Moves gradients of CUDA parameters to the host, and works out their sums of squares there.

    The sum of squares is worked out in float64 by the device beside the copy: it says whether the
    gradient is finite, and the norm needs no pass over the gradients on the host.

    Args:
        device: The CUDA device; gradients on the CPU are copied at once.
        open_pool: Opens a pool of so many bytes, page-locked; for the sums of squares.
        cuda: As in CopyQueue.
    """

    def __init__(
        self, device: torch.device, open_pool: Callable[[int], BufferPool], cuda: Any = torch.cuda
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._queue = CopyQueue(device, cuda)
        self._up = CopyQueue(device, cuda, whole=True)
        self._sums = cuda.Stream(device=device)
        self._open_pool = open_pool
        self._pool: BufferPool | None = None
        self._host_norms = torch.zeros(0, dtype=torch.float64)
        self._norms = torch.zeros(0, dtype=torch.float64, device=device)
        self._norms_known: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        # In the order in which they were queued: who has waited for one need not for those before.
        self._events: dict[int, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def reserve(self, num_params: int) -> None:
        """Make room for the sums of so many parameters; blocks on sums under way if it must."""
        known = len(self._norms_known)
        if num_params <= known:
            return
        self._sums.synchronize()
        pool = self._open_pool(norm_bytes(num_params))
        count = pool.nbytes // torch.float64.itemsize
        host = pool.lease(pool.nbytes).tensor(torch.float64, count)
        host[:known] = self._host_norms
        self._norms = torch.zeros(count, dtype=torch.float64, device=self._device)
        self._host_norms = host
        self._norms_known = np.pad(self._norms_known, (0, count - known))
        self._close_pool()
        self._pool = pool

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close(force=True)
            self._pool = None

    @property
    def num_pieces(self) -> int:
        """Pieces copied so far."""
        return self._queue.num_pieces

    def fetch(self, index: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy of a gradient, behind what its stream has done so far; see Copier."""
        if not self._is_mine(source):
            target.copy_(source)
            return
        ready = self._ready()
        self._queue.wait_for(ready)
        copied = self._queue.copy(source, target)
        self._sums.wait_event(ready)
        self._note(index, copied, self._sum_squares(index, source))

    def watch(self, index: int, source: torch.Tensor) -> None:
        """Work out the sum of squares of a gradient that stays where it is; does not block."""
        self._sums.wait_event(self._ready())
        self._note(index, None, self._sum_squares(index, source))

    def add(
        self, index: int, source: torch.Tensor, kept: torch.Tensor, total: torch.Tensor
    ) -> bool:
        """Queue the addition on the device: what is kept goes up, the sum comes down.

        Neither the host nor its cores take part. Blocks never.
        """
        if not self._is_mine(source):
            return False
        for event in self._events.get(index, ()):
            if event is not None:
                self._up.wait_for(event)
        ready = self._ready()
        # Its memory may have been another tensor's, which the current stream has still to read.
        before = torch.empty(kept.numel(), dtype=kept.dtype, device=self._device)
        self._up.wait_for(ready)
        uploaded = self._up.copy(kept, before)
        self._sums.wait_event(ready)
        if uploaded is not None:
            self._sums.wait_event(uploaded)
        with self._cuda.stream(self._sums):
            sums = before.to(total.dtype).add_(source.to(total.dtype))
        for tensor in (before, source):
            if tensor.is_cuda:
                tensor.record_stream(self._sums)
        added = self._cuda.Event()
        added.record(self._sums)
        self._queue.wait_for(added)
        copied = self._queue.copy(sums, total)
        self._note(index, copied, self._sum_squares(index, sums))
        return True

    def _note(self, index: int, copied: Any, summed: Any) -> None:
        with self._lock:
            self._events.pop(index, None)
            self._events[index] = copied, summed
            self._norms_known[index] = False

    def _ready(self) -> Any:
        """An event of what the current stream has done so far."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def _sum_squares(self, index: int, values: torch.Tensor) -> Any:
        """Queue the sum of squares of a gradient; return the event of its arrival on the host."""
        with self._cuda.stream(self._sums):
            torch.linalg.vector_norm(values, dtype=torch.float64, out=self._norms[index])
            self._host_norms[index].copy_(self._norms[index], non_blocking=True)
        if values.is_cuda:
            values.record_stream(self._sums)
        summed = self._cuda.Event()
        summed.record(self._sums)
        return summed

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in ordinary memory; blocks until the device has made the gradient."""
        return source.cpu()

    def settle(self, indices: Sequence[int]) -> None:
        """Block until gradients and their sums are on the host.

        Copies are chained, and sums are made on one stream: the last of each is waited for, with
        few calls that let go of the interpreter.
        """
        wanted = set(indices)
        with self._lock:
            waiting = {i: events for i, events in self._events.items() if i in wanted}
        copied = summed = None
        for events in waiting.values():
            copied, summed = events[0] or copied, events[1]
        for event in (copied, summed):
            if event is not None:
                event.synchronize()
        # Taken out only afterwards: another thread must wait too.
        with self._lock:
            for index, events in waiting.items():
                if self._events.get(index) is events:
                    del self._events[index]
                    self._norms_known[index] = True

    def square_sums(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The sums of squares of settled gradients, in float64; nan for others."""
        norms = self._host_norms.numpy()[indices]
        return np.where(self._norms_known[indices], norms**2, np.nan)

    def forget(self, index: int) -> None:
        """The sum is void."""
        self._norms_known[index] = False

    def close(self) -> None:
        """Block until every copy is complete."""
        self._queue.synchronize()
        self._up.synchronize()
        self._sums.synchronize()
        self._events.clear()
        self._close_pool()

    def _is_mine(self, source: torch.Tensor) -> bool:
        return source.device == self._device
