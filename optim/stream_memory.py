# SPDX-License-Identifier: Apache-2.0
"""Where streamed gradients lie until the step: one region of memory for each parameter.

    first gradient, narrower than the sums:   |........|gggggggg|     at the end of the region
    sum of several, in the accumulation dtype: |ssssssss|ssssssss|    written from the front

A gradient is kept in its own dtype. A second one for the same step is added in the accumulation
dtype; because the first lies at the end, the sum can take the whole region without a copy: it is
written in ascending order, and never overtakes what it has still to read.

Invariant: the address and the size of a region are fixed from construction, elements lie in the
memory order of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool
from swapio.optim.layout import ParameterInfo, flat

REGION_ALIGNMENT = 64


def sum_dtype(grad: torch.dtype, accumulation: torch.dtype) -> torch.dtype:
    """The dtype in which several gradients are added."""
    return torch.promote_types(grad, accumulation)


def region_bytes(info: ParameterInfo, accumulation: torch.dtype) -> int:
    """Bytes of a parameter's region, which hold its gradient and the sum of several."""
    widest = sum_dtype(info.param.dtype, accumulation).itemsize
    return round_up(info.param.numel() * widest, REGION_ALIGNMENT)


def streamed_bytes(infos: Sequence[ParameterInfo], accumulation: torch.dtype) -> int:
    """Bytes of the regions of some parameters, in whole pages."""
    return round_up(sum(region_bytes(info, accumulation) for info in infos), PAGE_BYTES)


class GradientMemory:
    """The regions of all parameters, in one pool for each time that parameters were added.

    Args:
        accumulation: The dtype in which gradients of one step are added, or a wider one.
        open_pool: Opens a pool of so many bytes; page-locked where a device copies into it.
    """

    def __init__(self, accumulation: torch.dtype, open_pool: Callable[[int], BufferPool]) -> None:
        self._accumulation = accumulation
        self._open_pool = open_pool
        self._pools: list[BufferPool] = []
        self._slabs: list[torch.Tensor] = []
        self._slab_of: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._start: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._nbytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of regions."""
        return len(self._start)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self._pools)

    def add(self, infos: Sequence[ParameterInfo]) -> None:
        """Reserve regions for further parameters, in their order."""
        sizes = np.array([region_bytes(info, self._accumulation) for info in infos], np.int64)
        if not len(sizes):
            return
        pool = self._open_pool(max(PAGE_BYTES, round_up(int(sizes.sum()), PAGE_BYTES)))
        self._pools.append(pool)
        self._slabs.append(pool.lease(pool.nbytes).tensor(torch.uint8, pool.nbytes))
        slab = np.full(len(sizes), len(self._slabs) - 1, np.int32)
        self._slab_of = np.concatenate([self._slab_of, slab])
        self._start = np.concatenate([self._start, np.cumsum(sizes) - sizes])
        self._nbytes = np.concatenate([self._nbytes, sizes])

    def place(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The 1-D tensor in which a gradient of `dtype` lies: at the end of the region."""
        stop = int(self._start[index] + self._nbytes[index])
        return self._tensor(index, stop - numel * dtype.itemsize, numel, dtype)

    def place_sum(self, index: int, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The 1-D tensor in which the sum of what is kept and `new` lies; may be `kept`."""
        dtype = sum_dtype(kept.dtype, sum_dtype(new.dtype, self._accumulation))
        return kept if dtype is kept.dtype else self.place(index, kept.numel(), dtype)

    def close(self) -> None:
        """Give the memory back."""
        self._slabs.clear()
        for pool in self._pools:
            pool.close(force=True)
        self._pools.clear()

    def _tensor(self, index: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        slab = self._slabs[self._slab_of[index]]
        part: torch.Tensor = slab[start : start + numel * dtype.itemsize].view(dtype)
        return part


def in_memory_order(info: ParameterInfo, grad: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient as a 1-D tensor, in the order in which its parameter lies."""
    param = info.param
    if grad.stride() == param.stride() or grad.numel() == 0:
        return flat(grad.resolve_neg())  # the negative bit is not in memory
    copy = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device)
    copy.copy_(grad)
    return flat(copy)
