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

from collections.abc import Iterator
from typing import Any

import torch

from swapio.optim.stream import HostCopier

PIECE_BYTES = 16 << 20


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
        priority: Of the streams, as torch has it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, *, priority: int = 0) -> None:
        self._cuda = cuda
        self._streams = [cuda.Stream(device=device, priority=priority) for _ in range(2)]
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
        for piece in pieces(source.numel(), source.element_size()):
            stream = self._streams[self._turn]
            self._turn ^= 1
            if self._last is not None:
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
        num_params: Upper bound of parameter indices; `grow` raises it.
        scalars: Page-locked float64 memory, one element for each parameter.
        cuda: As in CopyQueue.
    """

    def __init__(self, device: torch.device, scalars: torch.Tensor, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._queue = CopyQueue(device, cuda)
        self._sums = cuda.Stream(device=device)
        self._host_norms = scalars
        self._norms = torch.zeros(len(scalars), dtype=torch.float64, device=device)
        self._events: dict[int, tuple[Any, Any]] = {}
        self._settled: set[int] = set()

    @property
    def num_pieces(self) -> int:
        """Pieces copied so far."""
        return self._queue.num_pieces

    def fetch(self, index: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy of a gradient, behind what its stream has done so far; see Copier."""
        if not self._is_mine(source):
            target.copy_(source)
            return
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(self._device))
        self._queue.wait_for(ready)
        copied = self._queue.copy(source, target)
        self._sums.wait_event(ready)
        with self._cuda.stream(self._sums):
            torch.linalg.vector_norm(source, dtype=torch.float64, out=self._norms[index])
            self._host_norms[index].copy_(self._norms[index], non_blocking=True)
        if source.is_cuda:
            source.record_stream(self._sums)
        summed = self._cuda.Event()
        summed.record(self._sums)
        self._events[index] = copied, summed
        self._settled.discard(index)

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in ordinary memory; blocks until the device has made the gradient."""
        return source.cpu()

    def settle(self, index: int) -> None:
        """Block until a gradient and its sum are on the host."""
        # Taken out only afterwards: another thread must wait too.
        events = self._events.get(index)
        if events is None:
            return
        for event in events:
            if event is not None:
                event.synchronize()
        self._settled.add(index)
        self._events.pop(index, None)

    def square_sum(self, index: int) -> float | None:
        """The sum of squares of a settled gradient, in float64."""
        if index not in self._settled:
            return None
        return float(self._host_norms[index]) ** 2

    def forget(self, index: int) -> None:
        """The sum is void."""
        self._settled.discard(index)

    def close(self) -> None:
        """Block until every copy is complete."""
        self._queue.synchronize()
        self._sums.synchronize()
        self._events.clear()

    def _is_mine(self, source: torch.Tensor) -> bool:
        return source.device == self._device
