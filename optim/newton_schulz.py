# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz orthogonalisation of matrices, the expensive part of Muon.

    X <- u / max(||u||_F, eps)
    for each step (a, b, c):   A = X X^T,   B = b A + c A A,   X <- a X + B X      (wide X)

Invariants:

- The norm is taken in float64 before any cast down, so gradients of 1e-30 to 1e25 are alike.
- A zero matrix gives zero; nan and inf propagate; `u` is read only, unless `out` is `u`.
- One matrix (or one group of small ones) is worked on at a time, in a workspace whose size
  `newton_schulz_workspace_bytes` states beforehand. Given a workspace and an `out` that is
  contiguous, 64-byte aligned and of the compute dtype, nothing larger than 4 MiB is allocated.

Facts -> consequences:

- A and A A are symmetric -> only what lies on and above the diagonal is multiplied, the rest is
  copied (`newton_schulz_products`). That is 4 n^3 instead of 6 n^3 operations for a square matrix;
  small matrices lose more to small products than they save.
- A tall matrix is not transposed: A = X^T X and X <- a X + X B are the same products.
- For cols >= 2 rows it is cheaper to iterate on the small Gram matrix (A <- A P P and Q <- Q P
  with P = a I + b A + c A A, all symmetric) and to multiply X by Q at the end. A carries the
  squares of the singular values, so directions small in X have lost digits in A that later steps
  do not bring back: with one segment of five steps the error against float64 was up to 112 times
  that of the plain loop (singular values falling as 1/i). With restarts from X it is at most 3
  times, over eleven spectra (`restart_segments`). Half precision never uses the Gram form.
- Leading dimensions that are powers of two map rows to the same cache sets -> Gram matrices have
  padded rows (the mirror copy of 4096 x 4096 took 7 ms instead of 120).
- Products of matrices that begin on differently aligned addresses may differ in the last bit ->
  matrices are multiplied only at 64-byte aligned addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from swapio.errors import ConfigError
from swapio.optim import kernels
from swapio.optim.newton_schulz_plan import (
    DEFAULT_COEFFICIENTS,
    DEFAULT_EPS,
    DEFAULT_STEPS,
    Arena,
    Coefficients,
    Plan,
    compute_dtype,
    make_plan,
    newton_schulz_flops,
    newton_schulz_workspace_bytes,
    resolve_coefficients,
)
from swapio.optim.newton_schulz_products import Spare, multiply, symmetric

__all__ = [
    "DEFAULT_COEFFICIENTS",
    "DEFAULT_EPS",
    "DEFAULT_STEPS",
    "Coefficients",
    "compute_dtype",
    "newton_schulz",
    "newton_schulz_flops",
    "newton_schulz_workspace_bytes",
    "resolve_coefficients",
]

_CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}  # float64 pieces in which norms are summed
_FP32_NORM_MIN, _FP32_NORM_MAX = 1e-30, 1e30
_CONTIGUOUS = torch.contiguous_format
_SUMMED_BY_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


def newton_schulz(
    u: Tensor,
    coefficients: Coefficients | Sequence[Coefficients] = DEFAULT_COEFFICIENTS,
    steps: int | None = None,
    eps: float = DEFAULT_EPS,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Orthogonalise each matrix of `u` (blocks; on CUDA it only queues work).

    Args:
        u: [..., rows, cols]; each matrix is orthogonalised alone with its own norm. Any strides.
        coefficients: The polynomial: a triple for all steps, or a list with one triple per step.
        steps: Number of steps, see `resolve_coefficients`; 0 only divides by the norm.
        eps: Floor of the norm, as in torch: below it the result shrinks with `u`. 0 makes the
            result independent of the scale, and a zero matrix still gives zero.
        dtype: Dtype of the products; default `compute_dtype`.
        out: Tensor of u's shape for the result, of any floating dtype; may be `u` itself, but
            must not overlap it otherwise. Default: a new tensor of the compute dtype.
        workspace: One-dimensional contiguous uint8 tensor on u's device of at least
            `newton_schulz_workspace_bytes` bytes, owned by the call until it returns.

    Returns:
        `out`, or the new tensor.

    Raises:
        ConfigError: for shapes, dtypes, coefficients or a workspace that do not fit.
    """
    triples = resolve_coefficients(coefficients, steps)
    if u.ndim < 2 or not u.dtype.is_floating_point:
        raise ConfigError(
            "Newton-Schulz needs a floating point tensor of at least two dimensions, "
            f"but got {u.dtype} of shape {tuple(u.shape)}"
        )
    if eps < 0:
        raise ConfigError(f"eps must be at least 0, but is {eps}")
    dtype = dtype or compute_dtype(u.dtype, u.device.type)
    if out is None:
        out = torch.empty(u.shape, dtype=dtype, device=u.device)
    elif out.shape != u.shape or out.device != u.device or not out.dtype.is_floating_point:
        raise ConfigError(
            f"out must be a floating point tensor of shape {tuple(u.shape)} on {u.device}, "
            f"but is {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    if u.numel() == 0:
        return out
    plan = make_plan(u.shape, triples, dtype, u.device.type)
    arena = Arena(workspace, plan.workspace_bytes(reuses_out=plan.can_reuse(out)), u.device)
    with torch.no_grad():
        matrices, results = (_as_batch(tensor) for tensor in (u, out))
        for first in range(0, plan.num_matrices, plan.group):
            piece = slice(first, first + plan.group)
            _orthogonalise(matrices[piece], results[piece], plan, arena, eps)
    return out


def _as_batch(tensor: Tensor) -> Tensor:
    """View [..., rows, cols] as [matrices, rows, cols]; odd leading strides are refused."""
    if tensor.ndim == 2:
        return tensor.unsqueeze(0)
    return tensor if tensor.ndim == 3 else tensor.view(-1, *tensor.shape[-2:])


def _orthogonalise(u: Tensor, out: Tensor, plan: Plan, arena: Arena, eps: float) -> None:
    """Work on one group: [group, rows, cols] of `u` into `out`."""
    arena.reset()
    count = u.shape[0]
    shape = (plan.rows, plan.cols, plan.cols)
    flat_out = out[0] if plan.group == 1 else out
    last = flat_out if plan.can_reuse(out) else arena.matrices(plan, count, *shape)
    other = arena.matrices(plan, count, *shape) if plan.triples else last
    square = (plan.order, plan.order, plan.row_stride)
    grams = [arena.matrices(plan, count, *square) for _ in range(plan.num_grams)]
    num_products = len(plan.segments or plan.triples)  # X moves to the other buffer in each
    x, y = (last, other) if num_products % 2 == 0 else (other, last)
    _normalise(u, x.view(u.shape), eps)
    tail = arena.elements(plan.tail_numel, plan.dtype)
    if plan.segments:
        _iterate_gram(plan, x, y, grams, tail)
    else:
        _iterate_direct(plan, x, y, grams, tail)
    if last is not flat_out:
        flat_out.copy_(last)


def _normalise(u: Tensor, x: Tensor, eps: float) -> None:
    """Write u / max(norm, eps) of each matrix to `x`."""
    limit = _CHUNK_NUMEL.get(u.device.type, 1 << 18)
    step = max(1, limit // (u.shape[0] * u.shape[2]))
    chunks = [slice(first, first + step) for first in range(0, u.shape[1], step)]
    norms = _norms(u, chunks).clamp_(min=eps)
    norms.masked_fill_(norms == 0, 1.0)  # eps = 0: a zero matrix gives zero, not nan
    # One pass in fp32 is as exact, where the norm is a normal fp32 number. Asking costs nothing on
    # the CPU; on CUDA it would wait for the stream.
    single = u.dtype == x.dtype == torch.float32 and u.device.type == "cpu"
    if single and float(norms.min()) > _FP32_NORM_MIN and float(norms.max()) < _FP32_NORM_MAX:
        torch.div(u, norms.to(torch.float32), out=x)
        return
    for rows in chunks:
        x[:, rows] = u[:, rows].to(torch.float64, copy=True).div_(norms)


def _norms(u: Tensor, chunks: list[slice]) -> Tensor:
    """Return the Frobenius norms, [matrices, 1, 1] in float64; summed chunk by chunk."""
    if u.device.type == "cpu" and u.is_contiguous() and u.dtype in _SUMMED_BY_KERNEL:
        numel = u[0].numel()
        first, nbytes = u.data_ptr(), numel * u.dtype.itemsize
        addresses = range(first, first + len(u) * nbytes, nbytes)
        sums = kernels.square_sum_spans(addresses, [numel] * len(u), u.dtype)
        return torch.from_numpy(sums).sqrt_().view(-1, 1, 1)
    squares = torch.zeros(u.shape[0], 1, 1, dtype=torch.float64, device=u.device)
    values = torch.empty_like(u[:, chunks[0]], dtype=torch.float64, memory_format=_CONTIGUOUS)
    for rows in chunks:
        source = u[:, rows]
        piece = values[:, : source.shape[1]]
        piece.copy_(source)
        if u.shape[0] == 1:
            flat = piece.view(-1)
            squares += torch.dot(flat, flat)
        else:
            squares += piece.square_().sum((1, 2), keepdim=True)
    return squares.sqrt_()


def _iterate_direct(plan: Plan, x: Tensor, y: Tensor, grams: list[Tensor], tail: Tensor) -> None:
    """X <- a X + (b A + c A A) X per step, between the buffers `x` and `y`."""
    for a, b, c in plan.triples:
        gram, update = grams
        spare = Spare(y, tail)  # y is free until the last product of the step
        _gram(plan, x, gram, spare)
        symmetric(plan, gram.mT, gram, update, spare, add=gram, beta=b, alpha=c)
        left, right = (x, update) if plan.tall else (update, x)
        multiply(left, right, y, add=x, beta=a)
        x, y = y, x


def _iterate_gram(plan: Plan, x: Tensor, y: Tensor, grams: list[Tensor], tail: Tensor) -> None:
    """Iterate on A = X X^T within a segment, then X <- Q X with the product Q of its P.

    Every matrix but X is symmetric, so each is its own transpose, and the left factor is given as
    that: rows side by side are what products pack fastest.
    """
    first = 0
    for length in plan.segments:
        gram, poly, total, other = grams
        spare = Spare(y, tail)
        _gram(plan, x, gram, spare)
        for index in range(length):
            a, b, c = plan.triples[first + index]
            symmetric(plan, gram.mT, gram, poly, spare, add=gram, beta=b, alpha=c)
            poly.diagonal(dim1=-2, dim2=-1).add_(a)
            goes_on = index < length - 1
            if goes_on:
                symmetric(plan, gram.mT, poly, other, spare, packed="left")
                symmetric(plan, other.mT, poly, gram, spare, packed="right")
            if index == 0:
                poly, total = total, poly
            else:
                held: Literal["right", None] = "right" if goes_on else None
                symmetric(plan, total.mT, poly, other, spare, packed=held)
                total, other = other, total
        left, right = (x, total) if plan.tall else (total, x)
        multiply(left, right, y)
        x, y = y, x
        first += length


def _gram(plan: Plan, x: Tensor, out: Tensor, spare: Spare) -> None:
    """out = X X^T on the short side."""
    left, right = (x.mT, x) if plan.tall else (x, x.mT)
    symmetric(plan, left, right, out, spare)
