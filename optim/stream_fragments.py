# SPDX-License-Identifier: Apache-2.0
"""Streamed gradients that the swapper keeps, as one fragment for each sub-group they fall in.

Under `swap_gradients=True` the fragments of a parameter are handed to `put_gradient`: those of at
least `min_swap_bytes` go to storage, the others stay in RAM with their sub-group, until its update
has consumed them.

Invariant: the sum of squares is that of what was put last, so nothing is read back for the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.gradients import Gradients
from swapio.optim.layout import Layout, PackedGroup, Span
from swapio.optim.stream_memory import sum_dtype
from swapio.swapper import PartitionedSwapper


def resident_fragment_bytes(
    groups: Iterable[PackedGroup], accumulation: torch.dtype, min_swap_bytes: int, stored: bool
) -> int:
    """RAM for fragments: the small ones, the large ones of one sub-group, and their buffer."""
    small = largest = buffer = 0
    for packed in groups:
        units, widest = packed.units, sum_dtype(packed.bucket.dtype, accumulation).itemsize
        sizes = np.bincount(units.param - units.param.min(initial=0), units.numel) * widest
        kept = sizes[sizes < min_swap_bytes] if stored else sizes
        small += int(kept.sum())
        largest = max(largest, int(sizes.sum() - kept.sum()))
        buffer = max(buffer, 4 * packed.numel)
    return small + largest + (buffer if stored else 0)


class SwappedFragments:
    """The fragments of all parameters, in a swapper. Blocks on storage; one caller at a time."""

    def __init__(
        self,
        layout: Layout,
        swapper: Callable[[], PartitionedSwapper],
        accumulation: torch.dtype,
    ) -> None:
        self._layout = layout
        self._swapper_now = swapper
        self._accumulation = accumulation

    @property
    def _swapper(self) -> PartitionedSwapper:
        return self._swapper_now()

    def put(self, index: int, grad: torch.Tensor, *, add: bool) -> tuple[torch.dtype, float]:
        """Hand over a gradient (1-D, memory order, on the CPU); return its dtype and square sum.

        Args:
            index: The parameter.
            grad: All of its elements.
            add: Add it to what is there.
        """
        dtype, total = grad.dtype, 0.0
        for span in self._layout.spans(index):
            part = grad[span.offset : span.offset + span.numel]
            if add:
                part = self._sum(span, index, part)
            self._swapper.put_gradient(span.key, _name(index), span.position, part)
            dtype = part.dtype
            total += kernels.grad_stats_spans([part.data_ptr()], [part.numel()], dtype)[0]
        return dtype, total

    def _sum(self, span: Span, index: int, part: torch.Tensor) -> torch.Tensor:
        kept = self._swapper.gradient(span.key, _name(index))
        dtype = sum_dtype(kept.dtype, sum_dtype(part.dtype, self._accumulation))
        return kept.to(dtype).add_(part)

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
