# SPDX-License-Identifier: Apache-2.0
"""Streamed gradients that the swapper keeps, as one fragment for each sub-group they fall in.

Under `swap_gradients=True` the fragments of a parameter are handed to `put_gradient`: those of at
least `min_swap_bytes` go to storage, the others stay in RAM with their sub-group, until its update
has consumed them.

Invariants:
- the sum of squares is that of what was put last, so nothing is read back for the norm;
- memory for all fragments is taken when their parameters are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from swapio.buffers import BufferPool
from swapio.gradients import FragmentSize, reserved_bytes
from swapio.optim import kernels
from swapio.optim.gradients import Gradients
from swapio.optim.layout import Layout, PackedGroup
from swapio.optim.stream_memory import sum_dtype
from swapio.swapper import PartitionedSwapper


def fragment_sizes(
    groups: Iterable[PackedGroup], accumulation: torch.dtype
) -> dict[str, dict[str, FragmentSize]]:
    """How large the fragments of some sub-groups are, if gradients have their parameters' dtype."""
    found: dict[str, dict[str, FragmentSize]] = {}
    for packed in groups:
        dtype = packed.bucket.dtype
        widest = sum_dtype(dtype, accumulation).itemsize
        params, at = np.unique(packed.units.param, return_inverse=True)
        numels = np.bincount(at, packed.units.numel).astype(np.int64).tolist()
        found[packed.key] = {
            _name(index): FragmentSize(numel * dtype.itemsize, numel * widest, dtype.itemsize)
            for index, numel in zip(params.tolist(), numels, strict=True)
        }
    return found


def resident_fragment_bytes(
    groups: Sequence[PackedGroup], accumulation: torch.dtype, min_swap_bytes: int, stored: bool
) -> int:
    """RAM for fragments: the small ones, the large ones of one sub-group, and their buffer."""
    sizes = fragment_sizes(groups, accumulation)
    buffer = max((4 * packed.numel for packed in groups), default=0) if stored else 0
    return sum(reserved_bytes(sizes, min_swap_bytes if stored else None)) + buffer


class SwappedFragments:
    """The fragments of all parameters, in a swapper. Blocks on storage; one caller at a time.

    Args:
        layout: The optimizer's sub-groups.
        swapper: Gives its swapper, which recovery replaces.
        accumulation: The dtype in which gradients of one step are added.
        open_pool: Opens a pool of so many bytes.
    """

    def __init__(
        self,
        layout: Layout,
        swapper: Callable[[], PartitionedSwapper],
        accumulation: torch.dtype,
        open_pool: Callable[[int], BufferPool],
    ) -> None:
        self._layout = layout
        self._swapper_now = swapper
        self._accumulation = accumulation
        self._open_pool = open_pool
        self._reserved: tuple[PartitionedSwapper | None, set[str]] = (None, set())

    def reserve(self) -> None:
        """Take memory for what has none yet: new sub-groups, or all after recovery."""
        swapper = self._swapper_now()
        if swapper is not self._reserved[0]:
            self._reserved = (swapper, set())
        known = self._reserved[1]
        new = [packed for key, packed in self._layout.groups.items() if key not in known]
        if new:
            swapper.reserve_gradients(fragment_sizes(new, self._accumulation), self._open_pool)
            known.update(packed.key for packed in new)

    @property
    def _swapper(self) -> PartitionedSwapper:
        swapper = self._swapper_now()
        if swapper is not self._reserved[0]:
            self.reserve()
        return swapper

    def put(self, index: int, grad: torch.Tensor, *, add: bool) -> tuple[torch.dtype, float]:
        """Hand over a gradient (1-D, memory order, on the CPU); return its dtype and square sum.

        Args:
            index: The parameter.
            grad: All of its elements.
            add: Add it to what is there.
        """
        swapper, name, dtypes, sums = self._swapper, _name(index), [grad.dtype], [0.0]

        def look(part: torch.Tensor) -> None:
            dtypes[0] = part.dtype
            sums.append(kernels.grad_stats_spans([part.data_ptr()], [part.numel()], part.dtype)[0])

        for span in self._layout.spans(index):
            part = grad[span.offset : span.offset + span.numel]
            if add:
                swapper.add_gradient(span.key, name, part, self._accumulation, look)
            else:
                swapper.put_gradient(span.key, name, span.position, part, look)
        return dtypes[0], sum(sums)

    @contextmanager
    def loaded(self, packed: PackedGroup, gradients: Gradients) -> Iterator[None]:
        """Have the fragments of a sub-group in RAM, under the addresses in `gradients`."""
        kept: list[torch.Tensor] = []
        for index, row in self._first_rows(packed, gradients):
            fragment = self._swapper.gradient(packed.key, _name(index))
            kept.append(fragment)
            # The address that element 0 of the parameter would have.
            before = int(packed.units.offset[row]) * fragment.itemsize
            gradients.address[index] = np.uint64((fragment.data_ptr() - before) % (1 << 64))
        yield
        self._swapper.drop_gradients(packed.key)

    def drop(self) -> None:
        """Forget all fragments."""
        for key in self._layout.groups:
            self._swapper.drop_gradients(key)

    @staticmethod
    def _first_rows(
        packed: PackedGroup, gradients: Gradients
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        params, rows = np.unique(packed.units.param, return_index=True)
        for index, row in zip(params.tolist(), rows, strict=True):
            if gradients.present[index]:
                yield index, row


def _name(index: int) -> str:
    return str(index)
