# SPDX-License-Identifier: Apache-2.0
"""Kept gradients of a device's parameters: they stay there until their sub-group is stepped.

    sub-group k is stepped | the gradients of k+1 come down to page-locked memory

So gradients="keep" takes memory on the host for a few sub-groups, whatever the model's size, and
the copies hide behind the update.

Invariant: a piece of the ring is used again only after the update that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool, Lease
from swapio.errors import PoolExhaustedError
from swapio.optim.cuda_copies import CopyQueue
from swapio.optim.cuda_weights import runs
from swapio.optim.gradients import Gradients
from swapio.optim.layout import PackedGroup

_RING_GROUPS = 2
_ALIGNMENT = 64


class KeptGradients:
    """Brings the gradients of one sub-group after the other to the host.

    Args:
        device: The CUDA device.
        pool: Page-locked memory of `kept_bytes`; owned.
        cuda: As in CopyQueue.
    """

    def __init__(self, device: torch.device, pool: BufferPool, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._pool = pool
        self._queue = CopyQueue(device, cuda)
        self._sources: dict[int, torch.Tensor] = {}
        self._fetched: dict[str, tuple[Lease, dict[int, int], Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self._pool.nbytes

    def grow(self, pool: BufferPool) -> None:
        """Use a larger pool from now on; what was fetched is void. Blocks on copies under way."""
        self.close()
        self._pool = pool

    def begin(self) -> None:
        """New gradients: what was fetched is void. Later copies wait for the device's work."""
        self.release()
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(self._device))
        self._queue.wait_for(ready)

    def note(self, index: int, source: torch.Tensor) -> None:
        """A parameter's gradient (1-D, on the device) for the step to come."""
        self._sources[index] = source

    def prefetch(self, packed: PackedGroup) -> None:
        """Start to copy a sub-group's gradients down, if there is room; does not block."""
        if packed.key in self._fetched:
            return
        try:
            self._fetched[packed.key] = self._start(packed)
        except PoolExhaustedError:
            return

    @contextmanager
    def loaded(self, packed: PackedGroup, gradients: Gradients) -> Iterator[None]:
        """Have a sub-group's gradients on the host, under the addresses in `gradients`; blocks."""
        if packed.key not in self._fetched:
            self._fetched[packed.key] = self._start(packed)
        lease, offsets, event = self._fetched.pop(packed.key)
        try:
            if event is not None:
                event.synchronize()
            for index, offset in offsets.items():
                gradients.address[index] = np.uint64((lease.address + offset) % (1 << 64))
            yield
        finally:
            lease.release()

    def release(self) -> None:
        """Forget all gradients."""
        for lease, _, event in self._fetched.values():
            if event is not None:
                event.synchronize()
            lease.release()
        self._fetched.clear()
        self._sources.clear()

    def close(self) -> None:
        """Wait for what is in flight, and give the memory back."""
        self._queue.synchronize()
        self.release()
        self._pool.close(force=True)

    def _start(self, packed: PackedGroup) -> tuple[Lease, dict[int, int], Any]:
        """Queue the copies; return where each parameter's element 0 would be in the lease."""
        parts = [
            part
            for part in runs(packed.units, np.arange(len(packed.units.param)))
            if part.index in self._sources
        ]
        sizes = [
            round_up(part.numel * self._sources[part.index].element_size(), _ALIGNMENT)
            for part in parts
        ]
        lease = self._pool.lease(max(PAGE_BYTES, sum(sizes)))
        offsets: dict[int, int] = {}
        event: Any = None
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            source = self._sources[part.index]
            offsets[part.index] = at - part.offset * source.element_size()
            target = lease.tensor(source.dtype, part.numel, at)
            event = self._queue.copy(source[part.offset : part.offset + part.numel], target)
            at += size
        return lease, offsets, event


def kept_bytes(groups: Sequence[PackedGroup]) -> int:
    """Bytes of page-locked memory for the gradients of a few sub-groups."""
    sizes = [
        packed.numel * packed.bucket.dtype.itemsize + len(packed.units.param) * _ALIGNMENT
        for packed in groups
    ]
    return _RING_GROUPS * round_up(max(sizes, default=0), PAGE_BYTES)
