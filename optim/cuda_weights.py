# SPDX-License-Identifier: Apache-2.0
"""New weights on their way from the kernels to parameters on a device.

    kernel -> page-locked staging, a ring of a few chunks -> copy up -> parameter

The kernels know host addresses only. While a chunk of a device's sub-group is stepped, the
parameters' addresses are those that they would have if the chunk's staging were a part of them.

Invariants:
- a piece of the ring is used again only when the copy that reads it is complete;
- a parameter is written after everything that its device was told to do before step(), and before
  everything that it is told afterwards: the host waits for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool, Lease
from swapio.errors import PoolExhaustedError
from swapio.optim.cuda_copies import CopyQueue
from swapio.optim.layout import MasterForm, PackedGroup, ParameterInfo, UnitTable, flat

RING_CHUNKS = 4


@dataclass(slots=True)
class Run:
    """A run of one parameter's elements within a chunk."""

    index: int
    offset: int
    position: int
    numel: int


def runs(units: UnitTable, rows: npt.NDArray[np.int64]) -> list[Run]:
    """Join the units in `rows` (ascending) that follow each other in one parameter."""
    found: list[Run] = []
    for row in rows.tolist():
        index, offset = int(units.param[row]), int(units.offset[row])
        position, numel = int(units.position[row]), int(units.numel[row])
        if found:
            last = found[-1]
            follows = (last.index, last.offset + last.numel, last.position + last.numel)
            if follows == (index, offset, position):
                last.numel += numel
                continue
        found.append(Run(index, offset, position, numel))
    return found


def virtual_addresses(
    parts: Sequence[Run], base: int, start: int, item_bytes: int
) -> npt.NDArray[np.uint64]:
    """Where element 0 of each run's parameter would be, if its elements lay in the staging.

    Args:
        parts: The runs.
        base: Address of the staging, which holds the elements from `start` of the sub-group on.
        start: First element of the sub-group in the staging.
        item_bytes: Bytes of an element.
    """
    numbers = [base + (run.position - start - run.offset) * item_bytes for run in parts]
    return np.array([number % (1 << 64) for number in numbers], np.uint64)


class ChunkRuns:
    """The runs of one chunk, and where their parameters would be if it lay somewhere else.

    Attributes:
        parts: The runs.
        indices: Their parameters.
    """

    def __init__(self, parts: Sequence[Run], start: int, item_bytes: int) -> None:
        self.parts = parts
        self.indices = np.array([part.index for part in parts], np.int64)
        self._shifts = virtual_addresses(parts, 0, start, item_bytes)

    def addresses(self, base: int) -> npt.NDArray[np.uint64]:
        """As `virtual_addresses`, for staging at `base`."""
        return self._shifts + np.uint64(base)


class RunCache:
    """ChunkRuns of whole chunks, worked out once: the same in every step."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], ChunkRuns] = {}

    def of(
        self, packed: PackedGroup, start: int, stop: int, rows: npt.NDArray[np.int64] | None = None
    ) -> ChunkRuns:
        """The runs of the units in `rows`, or of all units, of a chunk."""
        units, width = packed.units, packed.bucket.dtype.itemsize
        span = units.slice_of(start, stop)
        if rows is not None and len(rows) < span.stop - span.start:
            return ChunkRuns(runs(units, rows), start, width)
        key = (packed.key, start, stop)
        if key not in self._known:
            parts = runs(units, np.arange(span.start, span.stop))
            self._known[key] = ChunkRuns(parts, start, width)
        return self._known[key]


def host_addresses(
    infos: Sequence[ParameterInfo], packed: PackedGroup
) -> tuple[npt.NDArray[np.uint64], torch.Tensor | None]:
    """Address of every parameter, good for a sub-group's elements of them; blocks.

    Returns:
        The addresses, and the copy in RAM of what is on a device, which must outlive their use.
    """
    address = np.fromiter((info.param.data_ptr() for info in infos), np.uint64, len(infos))
    dtype = packed.bucket.dtype
    if packed.bucket.device == "cpu":
        return address, None
    memory = torch.empty(packed.numel, dtype=dtype)
    parts = runs(packed.units, np.arange(len(packed.units.param)))
    for part in parts:
        source = flat(infos[part.index].param)[part.offset : part.offset + part.numel]
        memory[part.position : part.position + part.numel].copy_(source)
    address[[part.index for part in parts]] = virtual_addresses(
        parts, memory.data_ptr(), 0, dtype.itemsize
    )
    return address, memory


class WeightRing:
    """Page-locked staging for weights; pieces are given back when their event is over.

    Args:
        pool: The memory; owned.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._used: deque[tuple[Lease, Any]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self._pool.nbytes

    def take(self, nbytes: int) -> Lease:
        """Borrow staging; blocks on the oldest copy if all of it is in use."""
        while True:
            try:
                return self._pool.lease(nbytes)
            except PoolExhaustedError:
                if not self._used:
                    raise
                self._retire()

    def give_back(self, lease: Lease, event: Any) -> None:
        """The lease is free once `event` is over (None: now)."""
        if event is None:
            lease.release()
        else:
            self._used.append((lease, event))

    def close(self) -> None:
        """Wait for all copies and give the memory back."""
        while self._used:
            self._retire()
        self._pool.close(force=True)

    def _retire(self) -> None:
        lease, event = self._used.popleft()
        event.synchronize()
        lease.release()


class DeviceWeights:
    """Carries the weights of one device's parameters through the step.

    Args:
        device: The CUDA device.
        infos: The optimizer's parameters, by index; follows its list.
        pool: Page-locked memory of `ring_bytes`; owned.
        cuda: As in CopyQueue.
    """

    def __init__(
        self,
        device: torch.device,
        infos: Sequence[ParameterInfo],
        pool: BufferPool,
        cuda: Any = torch.cuda,
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._infos = infos
        self._ring = WeightRing(pool)
        self._up = CopyQueue(device, cuda, whole=True)
        self._down = CopyQueue(device, cuda)
        self._runs = RunCache()

    @property
    def nbytes(self) -> int:
        """Bytes of staging."""
        return self._ring.nbytes

    def grow(self, pool: BufferPool) -> None:
        """Use larger staging from now on. Blocks on copies under way."""
        self._ring.close()
        self._ring = WeightRing(pool)

    def begin(self) -> None:
        """Let the step's copies wait for what the device was told so far; does not block."""
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(self._device))
        self._up.wait_for(ready)
        self._down.wait_for(ready)

    def end(self) -> None:
        """Let the device wait for the step's copies before whatever comes; does not block."""
        if self._up.last is not None:
            self._cuda.current_stream(self._device).wait_event(self._up.last)

    @contextmanager
    def staged(
        self,
        packed: PackedGroup,
        start: int,
        stop: int,
        rows: npt.NDArray[np.int64],
        address: npt.NDArray[np.uint64],
    ) -> Iterator[tuple[npt.NDArray[np.uint64], Callable[[], None]]]:
        """Give the parameters of a chunk host addresses while it is stepped.

        Args:
            packed: The sub-group.
            start: First element of the chunk.
            stop: Element after its last.
            rows: Its units that are stepped.
            address: Address of each parameter.

        Yields:
            The addresses with those of the chunk's parameters on the host (an array of its own:
            whoever keeps what follows from an array keeps it by that array), and a function to be
            called when the new weights are in the staging: it starts the copies.
        """
        dtype = packed.bucket.dtype
        found = self._runs.of(packed, start, stop, rows)
        parts, indices = found.parts, found.indices
        lease = self._ring.take((stop - start) * dtype.itemsize)
        event: Any = None

        def upload() -> None:
            nonlocal event
            staging = lease.tensor(dtype, stop - start)
            for run in parts:
                target = flat(self._infos[run.index].param)[run.offset : run.offset + run.numel]
                first = run.position - start
                event = self._up.copy(staging[first : first + run.numel], target)

        try:
            if packed.bucket.form is MasterForm.SPLIT:  # the parameter is a half of its master
                self._download(parts, lease.tensor(dtype, stop - start), start)
            staged = address.copy()
            staged[indices] = found.addresses(lease.address)
            yield staged, upload
        finally:
            self._ring.give_back(lease, event)

    def _download(self, parts: Sequence[Run], staging: torch.Tensor, start: int) -> None:
        event: Any = None
        for run in parts:
            source = flat(self._infos[run.index].param)[run.offset : run.offset + run.numel]
            first = run.position - start
            event = self._down.copy(source, staging[first : first + run.numel])
        if event is not None:
            event.synchronize()

    @contextmanager
    def aside(
        self, packed: PackedGroup, start: int, stop: int, parts: Sequence[Run], target: torch.Tensor
    ) -> Iterator[int]:
        """Lend staging for a chunk's new weights, and copy them up to a waiting place after.

        The upper halves of split masters are in it to begin with.

        Args:
            packed: The sub-group.
            start: First element of the chunk.
            stop: Element after its last.
            parts: All runs of the chunk.
            target: The sub-group's waiting weights on the device, by position.

        Yields:
            The address of the staging.
        """
        numel = stop - start
        lease = self._ring.take(numel * target.element_size())
        event: Any = None
        staging = lease.tensor(target.dtype, numel)
        try:
            if packed.bucket.form is MasterForm.SPLIT:
                self._download(parts, staging, start)
            yield lease.address
            event = self._up.copy(staging, target[start:stop])
        finally:
            self._ring.give_back(lease, event)

    def publish(self, waiting: torch.Tensor, parts: Sequence[Run]) -> None:
        """Copy waiting weights into their parameters, on the device; does not block.

        `end` must have come before, and `begin` must come before waiting weights change again.
        """
        targets = [flat(self._infos[p.index].param)[p.offset : p.offset + p.numel] for p in parts]
        sources = [waiting[p.position : p.position + p.numel] for p in parts]
        torch._foreach_copy_(targets, sources)

    def close(self) -> None:
        """Block until every copy is complete, and give the staging back."""
        self._up.synchronize()
        self._down.synchronize()
        self._ring.close()


def ring_bytes(groups: Sequence[PackedGroup]) -> int:
    """Bytes of staging for the sub-groups on a device: a few of the largest."""
    sizes = [packed.numel * packed.bucket.dtype.itemsize for packed in groups]
    return RING_CHUNKS * round_up(max(sizes, default=0), PAGE_BYTES)
