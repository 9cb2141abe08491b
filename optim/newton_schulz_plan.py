# SPDX-License-Identifier: Apache-2.0
"""How Newton-Schulz will work on a tensor: form, restarts, grouping, workspace. Arithmetic only.

Invariants: a plan depends on shape, coefficients, dtype and kind of device, never on values, so
every rank and every run makes the same one; the workspace it states is what is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swapio.errors import ConfigError
from swapio.optim import kernels

Coefficients: TypeAlias = tuple[float, float, float]

DEFAULT_COEFFICIENTS: Coefficients = (3.4445, -4.775, 2.0315)
DEFAULT_EPS = 1e-7
DEFAULT_STEPS = 5

ALIGNMENT = 64
_ROW_PADDING_BYTES = 64
_SYMMETRIC_ROWS_MIN = 512  # below, blocks of _BLOCK_ROWS save less than the smaller products cost
_FUSED_ROWS_MIN = 384  # below, a batch of whole products shares the cores better
_LARGE_ORDER = 2048  # from here panels of 256 rows run at full speed and waste little
_BLOCK_ROWS = 192
_LARGE_BLOCK_ROWS = 256
_GROUP_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}  # small matrices are multiplied in batches
_FIRST_GROWTH_MAX = 12.0
_GROWTH_MAX = 3.5
_SYMMETRIC_GRAM_RATIO_MIN = 2
_GRAM_RATIO_MIN = 4  # all products at full cost: two restarts leave no gain below
_GRAM_STEPS_MIN = 3  # with fewer the form saves little, and the plain loop has hardly any error


def resolve_coefficients(
    coefficients: Coefficients | Sequence[Coefficients], steps: int | None
) -> tuple[Coefficients, ...]:
    """Return one triple per step.

    Args:
        coefficients: One triple for every step, or a list with one triple per step.
        steps: Number of steps; None means 5 for one triple, and the length of a list.

    Raises:
        ConfigError: for anything else, such as a list whose length is not `steps`.
    """
    items: tuple[Any, ...] = tuple(coefficients)
    single = len(items) == 3 and all(isinstance(item, int | float) for item in items)
    triples = (items,) if single else items
    for triple in triples:
        if isinstance(triple, int | float | str) or len(triple) != 3:
            raise ConfigError(
                "ns_coefficients must be three numbers, or a list of such triples (one per step), "
                f"but {triple!r} was found in {coefficients!r}"
            )
    if steps is None:
        steps = DEFAULT_STEPS if single else len(triples)
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ConfigError(f"ns_steps must be an int of at least 0 and below 100, but is {steps!r}")
    if single:
        triples = triples * steps
    if len(triples) != steps:
        raise ConfigError(
            f"ns_coefficients lists {len(triples)} triples but ns_steps is {steps}: "
            "give one triple per step, or a single triple"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def compute_dtype(u_dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype used when none is given: bf16 on CUDA, fp32 (or float64 kept) elsewhere."""
    if device_type == "cuda":
        return torch.bfloat16
    return torch.float64 if u_dtype == torch.float64 else torch.float32


def newton_schulz_workspace_bytes(
    shape: Sequence[int],
    coefficients: Coefficients | Sequence[Coefficients] = DEFAULT_COEFFICIENTS,
    steps: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    device_type: str = "cpu",
    reuses_out: bool = False,
) -> int:
    """Return the bytes that `newton_schulz` needs as its workspace for a tensor of `shape`.

    Args:
        shape: Shape of `u`.
        coefficients: As for `newton_schulz`.
        steps: As for `newton_schulz`.
        dtype: Dtype of the products; default fp32 on the CPU and bf16 on CUDA.
        device_type: "cpu" or "cuda".
        reuses_out: Whether `out` will be contiguous, 64-byte aligned and of the compute dtype: it
            then serves as one of the two buffers of the size of the matrix.
    """
    triples = resolve_coefficients(coefficients, steps)
    if math.prod(shape) == 0:
        return 0
    dtype = dtype or compute_dtype(torch.float32, device_type)
    return make_plan(shape, triples, dtype, device_type).workspace_bytes(reuses_out=reuses_out)


def newton_schulz_flops(
    shape: Sequence[int],
    coefficients: Coefficients | Sequence[Coefficients] = DEFAULT_COEFFICIENTS,
    steps: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    device_type: str = "cpu",
) -> int:
    """Return the operations of the matrix products for a tensor of `shape` (2 per multiply-add).

    Args:
        shape: As for `newton_schulz_workspace_bytes`, like all that follow.
        coefficients: The polynomial.
        steps: Number of steps.
        dtype: Dtype of the products.
        device_type: "cpu" or "cuda".
    """
    triples = resolve_coefficients(coefficients, steps)
    if math.prod(shape) == 0:
        return 0
    dtype = dtype or compute_dtype(torch.float32, device_type)
    return make_plan(shape, triples, dtype, device_type).flops()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the matrices of one tensor are worked on."""

    triples: tuple[Coefficients, ...]
    dtype: torch.dtype
    num_matrices: int
    rows: int
    cols: int
    group: int
    symmetric: bool
    fused: bool  # symmetric products by swapio's own kernel
    segments: tuple[int, ...]  # steps between restarts of the Gram form; empty: direct form

    @property
    def tall(self) -> bool:
        """Whether the Gram matrix is X^T X."""
        return self.rows > self.cols

    @property
    def order(self) -> int:
        """Rows of the Gram matrices."""
        return min(self.rows, self.cols)

    @property
    def row_stride(self) -> int:
        """Elements from one row of a Gram matrix to the next."""
        return self.order + (_ROW_PADDING_BYTES // self.dtype.itemsize if self.symmetric else 0)

    @property
    def block_rows(self) -> int:
        """Rows of a panel of a symmetric product."""
        return _LARGE_BLOCK_ROWS if self.order >= _LARGE_ORDER else _BLOCK_ROWS

    @property
    def num_grams(self) -> int:
        """Matrices of the Gram matrix's size in the workspace, for each matrix of a group."""
        return 0 if not self.triples else 4 if self.segments else 2

    @property
    def tail_numel(self) -> int:
        """Elements for the packed rows that do not fill a group, of one operand X or two Grams."""
        return kernels.PACKED_GROUP * max(self.rows, self.cols) if self.fused else 0

    def can_reuse(self, out: Tensor) -> bool:
        """Whether `out` may hold X between steps without changing a bit of the result."""
        group_bytes = self.group * self.rows * self.cols * self.dtype.itemsize
        return (
            out.dtype == self.dtype
            and out.is_contiguous()
            and out.data_ptr() % ALIGNMENT == 0
            and (self.group >= self.num_matrices or group_bytes % ALIGNMENT == 0)
        )

    def flops(self) -> int:
        """Operations of the matrix products, 2 per multiply-add."""
        order, longer = self.order, max(self.rows, self.cols)
        full = order * order
        block_rows = kernels.PACKED_GROUP if self.fused else self.block_rows
        panels = range(0, order, block_rows)
        part = sum(min(block_rows, order - s) * (order - s) for s in panels)
        symmetric = part if self.symmetric else full
        if self.segments:
            small = sum(
                4 * length - 3 for length in self.segments
            )  # S, R, A', Q; fewer at the ends
            passes = len(self.segments)
        else:
            small = passes = len(self.triples)
        per_matrix = small * symmetric * order + passes * longer * (symmetric + full)
        return 2 * self.num_matrices * per_matrix

    def workspace_bytes(self, *, reuses_out: bool) -> int:
        """Bytes of the workspace; `reuses_out` as `can_reuse` says."""

        def aligned(numel: int) -> int:
            return -(-self.group * numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

        num_x = (0 if reuses_out else 1) + (1 if self.triples else 0)
        return (
            num_x * aligned(self.rows * self.cols)
            + self.num_grams * aligned(self.order * self.row_stride)
            + aligned(self.tail_numel)
            + ALIGNMENT  # the given tensor may begin anywhere
        )


def make_plan(
    shape: Sequence[int],
    triples: tuple[Coefficients, ...],
    dtype: torch.dtype,
    device_type: str,
) -> Plan:
    """Return the plan for a tensor of at least two dimensions and one element."""
    rows, cols = shape[-2:]
    order, longer = min(rows, cols), max(rows, cols)
    exact = dtype in (torch.float32, torch.float64)
    fused = dtype == torch.float32 and kernels.symmetric_group_rows() > 0
    order_min = _FUSED_ROWS_MIN if fused else _SYMMETRIC_ROWS_MIN
    symmetric = device_type == "cpu" and exact and order >= order_min
    matrix_bytes = (2 * rows * cols + 2 * order * order) * dtype.itemsize
    num_matrices = math.prod(shape[:-2])
    group = 1 if symmetric else max(1, _GROUP_BYTES.get(device_type, 32 << 20) // matrix_bytes)
    ratio_min = _SYMMETRIC_GRAM_RATIO_MIN if symmetric else _GRAM_RATIO_MIN
    use_gram = exact and longer >= ratio_min * order and len(triples) >= _GRAM_STEPS_MIN
    return Plan(
        triples=triples,
        dtype=dtype,
        num_matrices=num_matrices,
        rows=rows,
        cols=cols,
        group=min(group, num_matrices),
        symmetric=symmetric,
        fused=symmetric and fused,
        segments=restart_segments(triples, symmetric) if use_gram else (),
    )


def restart_segments(triples: Sequence[Coefficients], large: bool) -> tuple[int, ...]:
    """Cut the steps where the Gram form must restart from X.

    Rounding of A is relative to its largest eigenvalue, and grows in the small ones by a^2 per
    step, so the product of a within a segment is limited. The first A is that of a matrix of norm
    1, whose eigenvalues are well below 1 in large matrices unless the rank is very low, and later
    steps wash its error out: there the first segment may be longer if enough steps follow.
    """
    limit = _FIRST_GROWTH_MAX if large and len(triples) >= DEFAULT_STEPS else _GROWTH_MAX
    segments = []
    length, growth = 0, 1.0
    for a, _, _ in triples:
        if length and growth > limit:
            segments.append(length)
            length, growth, limit = 0, 1.0, _GROWTH_MAX
        length += 1
        growth *= max(1.0, abs(a))
    return (*segments, length)


class Arena:
    """Hands out pieces of the workspace, from its beginning for each group."""

    def __init__(self, workspace: Tensor | None, nbytes: int, device: torch.device) -> None:
        if workspace is None:
            workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if workspace.dtype != torch.uint8 or workspace.ndim != 1 or workspace.device != device:
            raise ConfigError(
                f"the Newton-Schulz workspace must be one-dimensional uint8 on {device}, but is "
                f"{workspace.dtype} of shape {tuple(workspace.shape)} on {workspace.device}"
            )
        if workspace.numel() < nbytes or not workspace.is_contiguous():
            raise ConfigError(
                f"the Newton-Schulz workspace must have {nbytes} contiguous bytes, but has "
                f"{workspace.numel()}; newton_schulz_workspace_bytes() gives the size"
            )
        self._bytes = workspace
        self._first = -workspace.data_ptr() % ALIGNMENT
        self._next = self._first

    def reset(self) -> None:
        """Begin again; what was handed out is free."""
        self._next = self._first

    def elements(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel]."""
        nbytes = numel * dtype.itemsize
        flat = self._bytes[self._next : self._next + nbytes].view(dtype)
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return flat

    def matrices(self, plan: Plan, count: int, rows: int, cols: int, row_stride: int) -> Tensor:
        """Return [count, rows, cols], or [rows, cols] where the plan takes one at a time."""
        flat = self.elements(count * rows * row_stride, plan.dtype)
        batch = flat.view(count, rows, row_stride)[..., :cols]
        return batch[0] if plan.group == 1 else batch
