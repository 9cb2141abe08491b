# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a Muon step around Newton-Schulz: momentum, views, learning rate, update.

    m  <- beta m + (1 - beta) g                    `momentum_step`, elementwise
    u  <- nesterov ? (1 - beta) g + beta m : m     the same call
    X  <- Newton-Schulz of each matrix of u        newton_schulz, on the view of `matrix_layout`
    W  <- W (1 - lr wd) - lr' X                    `apply_update`, elementwise; lr' = `adjusted_lr`

Invariants: momentum and update work on tensors of any shape, so on flat shards that begin and end
anywhere in a matrix, and give every element the same bits wherever it lies. Only `matrix_layout`
knows about matrices, and it sees the logical shape of the parameter. Nothing here keeps state.

Definitions are those of torch.optim.Muon. Others differ: the original Muon accumulates
`m <- beta m + g` in an earlier version, decays by lr' instead of lr in some ports, and has no
`match_rms_adamw`; Moonlight scales by 0.2 sqrt(max(rows, cols)) always; Dion and others scale by
sqrt(rows / cols) without the maximum. torch takes the first two dimensions of the shape for lr',
here it is the matrix that is orthogonalised: [out, rest] of a convolution, one block of a
parameter cut in heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from swapio.errors import ConfigError

AdjustLr: TypeAlias = Literal["original", "match_rms_adamw"] | None
MatrixView: TypeAlias = Literal["auto", "stacked", "flat"]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """How a parameter is seen as matrices that are orthogonalised one by one.

    Attributes:
        num_matrices: Matrices, end to end in the flattened parameter.
        rows: Rows of each.
        cols: Columns of each.
    """

    num_matrices: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape to view a contiguous parameter (or its u) as."""
        return (self.num_matrices, self.rows, self.cols)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.num_matrices * self.rows * self.cols


def matrix_layout(
    shape: Sequence[int],
    *,
    view: MatrixView = "auto",
    num_heads: int = 1,
    name: str = "parameter",
) -> MatrixLayout:
    """Return the matrices of a parameter.

    Args:
        shape: The logical shape: that of the whole parameter, also where a rank holds a shard.
        view: "stacked": all but the last two dimensions count matrices ([experts, out, in]).
            "flat": [out, rest], as for convolutions. "auto": stacked for three dimensions, flat
            for more, so a Conv1d kernel needs "flat" (muon_param_groups sees to it).
        num_heads: Rows of each matrix are cut in so many equal blocks.
        name: Names the parameter in errors.

    Raises:
        ConfigError: if there are fewer than two dimensions, or the rows cannot be cut.
    """
    shape = tuple(shape)
    if view not in get_args(MatrixView):
        raise ConfigError(f"{name}: view must be one of {get_args(MatrixView)}, but is {view!r}")
    if len(shape) < 2:
        raise ConfigError(
            f"{name}: Muon steps matrices, but its logical shape is {shape}: put it into a group "
            "with use_muon=False (muon_param_groups does), or pass the shape it had before sharding"
        )
    stacked = view == "stacked" or (view == "auto" and len(shape) == 3)
    if stacked:
        num_matrices, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
    else:
        num_matrices, rows, cols = 1, shape[0], math.prod(shape[1:])
    if not isinstance(num_heads, int) or num_heads < 1 or rows % num_heads:
        raise ConfigError(
            f"{name}: num_heads={num_heads} must divide its {rows} rows (logical shape {shape})"
        )
    return MatrixLayout(num_matrices * num_heads, rows // num_heads, cols)


def adjusted_lr(lr: float, rows: int, cols: int, adjust_lr_fn: AdjustLr = None) -> float:
    """Return the learning rate of the orthogonalised update of a rows x cols matrix.

    Args:
        lr: The group's learning rate.
        rows: Rows of one matrix, see `matrix_layout`.
        cols: Columns of one matrix.
        adjust_lr_fn: None and "original": lr sqrt(max(1, rows / cols)). "match_rms_adamw":
            0.2 lr sqrt(max(rows, cols)), so that AdamW's lr and weight decay can be kept.

    Raises:
        ConfigError: for any other `adjust_lr_fn`.
    """
    if rows == 0 or cols == 0:
        return float(lr)
    if adjust_lr_fn in (None, "original"):
        return float(lr) * math.sqrt(max(1.0, rows / cols))
    if adjust_lr_fn == "match_rms_adamw":
        return float(lr) * 0.2 * math.sqrt(max(rows, cols))
    raise ConfigError(
        f'adjust_lr_fn must be None, "original" or "match_rms_adamw", but is {adjust_lr_fn!r}'
    )


def momentum_step(
    momentum: Tensor,
    grad: Tensor,
    out: Tensor,
    *,
    beta: float,
    nesterov: bool = True,
    grad_scale: float = 1.0,
) -> Tensor:
    """Advance the momentum in place and write u, the matrix to orthogonalise, to `out`.

    Nothing is allocated where `momentum` has out's dtype. Bits do not depend on how a tensor is
    cut into shards.

    Args:
        momentum: The momentum buffer; updated.
        grad: The accumulated gradient, of any floating dtype; may be `out` itself.
        out: Receives u; fp32, or the dtype of the master.
        beta: The momentum coefficient.
        nesterov: Whether u mixes the gradient in once more.
        grad_scale: Factor on the gradient: unscaling, averaging and clipping in one.

    Returns:
        `out`.
    """
    if out is not grad:
        out.copy_(grad)
    if grad_scale != 1.0:
        out.mul_(grad_scale)
    same = momentum.dtype == out.dtype
    advanced = momentum if same else momentum.to(out.dtype)
    # As torch.optim.Muon, lerp and all, so that momentum agrees with it bit for bit.
    advanced.lerp_(out, 1 - beta)
    if not same:
        momentum.copy_(advanced)
    return out.lerp_(advanced, beta) if nesterov else out.copy_(advanced)


def apply_update(
    param: Tensor, update: Tensor, *, lr: float, update_lr: float, weight_decay: float
) -> None:
    """Decay the parameter and subtract the orthogonalised update, in place.

    Args:
        param: The master, or a piece of it.
        update: The same piece of X.
        lr: The group's learning rate; decay is decoupled and uses this one, as in torch.
        update_lr: `adjusted_lr`.
        weight_decay: The group's weight decay.
    """
    with torch.no_grad():
        param.mul_(1 - lr * weight_decay)
        param.add_(update, alpha=-update_lr)
