# SPDX-License-Identifier: Apache-2.0
"""The matrix products of Newton-Schulz: whole ones by torch, symmetric ones at half the cost.

Facts -> consequences:

- torch has no product that is known to be symmetric -> in fp32, on processors with fused
  multiply-adds, swapio's own kernel takes these; it writes both halves, adds the other matrix in
  the same pass, and gives the same bits for any number of threads. It packs its operands into
  memory that is free at that moment (`Spare`), so it needs hardly any of its own.
- Elsewhere panels of rows, from the diagonal to the right, are multiplied by torch and mirrored.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from swapio.optim import kernels
from swapio.optim.newton_schulz_plan import Plan

_MIRROR_ROWS = 128


class Spare(NamedTuple):
    """Memory that a product may use: fp32, contiguous, overlapping none of its matrices.

    Attributes:
        packed: At least order x depth elements, for two different operands twice that.
        tail: `PACKED_GROUP` x depth elements, for two different operands twice that.
    """

    packed: Tensor
    tail: Tensor


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    add: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> None:
    """out = alpha left right + beta add, for one matrix or a batch, without temporaries."""
    if left.ndim == 2:
        if add is None:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)
    elif add is None:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


def symmetric(
    plan: Plan,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    spare: Spare,
    *,
    add: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
    packed: Literal["left", "right", None] = None,
) -> None:
    """out = alpha left right + beta add where that, and add, are known to be symmetric.

    `packed` names an operand that `spare` still holds: the last product's right one, or as the left
    one what was both operands of the last product.
    """
    if plan.fused:
        _fused(left, right, out, spare, add, beta, alpha, packed)
    elif plan.symmetric:
        _by_panels(plan, left, right, out, add, beta, alpha)
    else:
        multiply(left, right, out, add=add, beta=beta, alpha=alpha)


def _fused(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    spare: Spare,
    add: Tensor | None,
    beta: float,
    alpha: float,
    packed: Literal["left", "right", None],
) -> None:
    order, depth = left.shape
    group_rows = kernels.symmetric_group_rows()
    whole = order // group_rows * group_rows * depth
    tail = kernels.PACKED_GROUP * depth
    first = (left.data_ptr(), left.stride(0), left.stride(1))
    second = (right.data_ptr(), right.stride(1), right.stride(0))
    place = (spare.packed.data_ptr(), spare.tail.data_ptr())
    itemsize = left.dtype.itemsize
    other = (place[0] + whole * itemsize, place[1] + tail * itemsize)
    kernels.symmetric_product(
        (*first, *place, packed == "left"),
        (*second, *(place if second == first else other), packed == "right"),
        out.data_ptr(),
        out.stride(0),
        order,
        depth,
        add=0 if add is None else add.data_ptr(),
        add_stride=0 if add is None else add.stride(0),
        beta=beta,
        alpha=alpha,
        threads=torch.get_num_threads(),
    )


def _by_panels(
    plan: Plan,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    add: Tensor | None,
    beta: float,
    alpha: float,
) -> None:
    for start in range(0, plan.order, plan.block_rows):
        rows, cols = slice(start, start + plan.block_rows), slice(start, None)
        addend = None if add is None else add[rows, cols]
        multiply(left[rows], right[:, cols], out[rows, cols], add=addend, beta=beta, alpha=alpha)
        beyond = slice(start + plan.block_rows, None)
        _mirror(out[rows, beyond], out[beyond, rows])


def _mirror(block: Tensor, target: Tensor) -> None:
    """target = block^T, in tiles that stay in the cache."""
    for row in range(0, block.shape[0], _MIRROR_ROWS):
        for col in range(0, block.shape[1], _MIRROR_ROWS):
            tile = block[row : row + _MIRROR_ROWS, col : col + _MIRROR_ROWS]
            target[col : col + _MIRROR_ROWS, row : row + _MIRROR_ROWS].copy_(tile.T)
