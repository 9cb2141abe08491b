# SPDX-License-Identifier: Apache-2.0
"""One Muon step of one parameter: runs of elements on either side, whole matrices in between.

    run of gradient, momentum  ->  u  ->  [whole matrices: Newton-Schulz]  ->  run of weights

Invariants:
- momentum and weights are touched as runs of elements in memory order, so a run may be a shard;
- matrices are worked on in blocks of `block_matrices`, which depends on shapes only: the bits of a
  result do not depend on where the state lives;
- elementwise passes give an element the same bits wherever it is cut;
- all memory of a step is the `Scratch` that was reserved beforehand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool
from swapio.optim import kernels
from swapio.optim.layout import MasterForm, ParameterInfo
from swapio.optim.muon_math import MatrixLayout, adjusted_lr, apply_update, momentum_step
from swapio.optim.newton_schulz import (
    compute_dtype,
    newton_schulz,
    newton_schulz_workspace_bytes,
)
from swapio.optim.newton_schulz_plan import make_plan

Ties = npt.NDArray[np.uint32]

NO_TIES: Ties = np.zeros(0, np.uint32)
# Elementwise passes follow each other on so many elements: a dozen cores hold them in their caches.
PIECE_NUMEL = 1 << 21
NUM_STAGED = 2  # blocks that are with the device at a time
MASTER_RECORDS = {MasterForm.SEPARATE: "master", MasterForm.SPLIT: "master_low"}


def joins_master(info: ParameterInfo) -> bool:
    """Whether the fp32 weights must be put together in a buffer."""
    low = info.form is MasterForm.NONE and info.param.dtype is not torch.float32
    return low or info.form is MasterForm.SPLIT


def staged_dtype(ns_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which updates travel to a device and back: that of its products."""
    return ns_dtype or compute_dtype(torch.float32, "cuda")


def block_matrices(layout: MatrixLayout, ns_dtype: torch.dtype | None) -> int:
    """Return how many matrices of a parameter are worked on at a time."""
    dtype = ns_dtype or compute_dtype(torch.float32, "cpu")
    return make_plan(layout.shape, (), dtype, "cpu").group


class ScratchNeed(NamedTuple):
    """Bytes of scratch memory; `|` covers two needs, one after the other."""

    update_bytes: int = 0
    master_bytes: int = 0
    workspace_bytes: int = 0
    staged_bytes: int = 0  # page-locked, for a device

    def __or__(self, other: ScratchNeed) -> ScratchNeed:
        """Return what does for both."""
        return ScratchNeed(*map(max, self, other))

    @property
    def nbytes(self) -> int:
        """All of it, in whole pages."""
        return sum(round_up(nbytes, PAGE_BYTES) for nbytes in self)


def scratch_need(
    layout: MatrixLayout,
    group: dict[str, Any],
    *,
    is_contiguous: bool,
    joins: bool,
    ns_dtype: torch.dtype | None,
    on_device: bool = False,
) -> ScratchNeed:
    """Return what the step of one parameter needs.

    Args:
        layout: Its matrices; at least one element.
        group: Its param group.
        is_contiguous: Whether memory order is logical order; otherwise it is worked on whole.
        joins: Whether its master must be put together in a buffer.
        ns_dtype: Dtype of the products, or None.
        on_device: Whether they are the device's part; its workspace is its own.
    """
    matrices = block_matrices(layout, ns_dtype)
    block = (min(matrices, layout.num_matrices), layout.rows, layout.cols)
    numel = block[0] * block[1] * block[2] if is_contiguous else layout.numel
    piece = min(numel, PIECE_NUMEL) if is_contiguous else numel
    if on_device:
        staged = numel * staged_dtype(ns_dtype).itemsize
        return ScratchNeed(0, 4 * piece, 0, NUM_STAGED * staged)
    workspace = newton_schulz_workspace_bytes(
        block,
        group["ns_coefficients"],
        group["ns_steps"],
        dtype=ns_dtype,
        reuses_out=ns_dtype in (None, torch.float32) and is_contiguous,
    )
    return ScratchNeed(4 * numel, 4 * piece if joins else 0, workspace)


class Scratch:
    """Memory of the steps: u, the joined master, and the Newton-Schulz workspace."""

    def __init__(
        self, need: ScratchNeed, huge_pages: Literal["auto", "off"], *, pin: bool | None = None
    ) -> None:
        self.need = need
        nbytes = max(PAGE_BYTES, need.nbytes)
        self._pool = BufferPool(nbytes, huge_pages=huge_pages, pin=pin, name="muon")
        self._leases = [self._pool.lease(max(1, nbytes)) for nbytes in need if nbytes]
        parts = iter(self._leases)

        def part(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
            if not nbytes:
                return torch.empty(0, dtype=dtype)
            return next(parts).tensor(dtype, (nbytes // dtype.itemsize,))

        self.update = part(need.update_bytes, torch.float32)
        self.master = part(need.master_bytes, torch.float32)
        self.workspace = part(need.workspace_bytes, torch.uint8)
        self.staged = part(need.staged_bytes, torch.uint8)

    def close(self) -> None:
        """Give the memory up."""
        for lease in self._leases:
            lease.release()
        self._leases = []
        self._pool.close()


@dataclass(frozen=True, slots=True)
class Weights:
    """A run of a parameter's elements in memory order, with wherever its master is.

    Attributes:
        form: The master form.
        model: The elements of the parameter itself.
        record: The elements of the record `master` or `master_low`, where there is one.
        position: First element within the sub-group.
    """

    form: MasterForm
    model: torch.Tensor
    record: torch.Tensor | None
    position: int

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return self.model.numel()

    def part(self, start: int, stop: int) -> Weights:
        """Return elements `[start, stop)` of the run."""
        record = None if self.record is None else self.record[start:stop]
        return Weights(self.form, self.model[start:stop], record, self.position + start)

    def load(self, buffer: torch.Tensor, ties: Ties) -> torch.Tensor:
        """Return the fp32 weights to update: in place where they are fp32, else in `buffer`."""
        if self.form is MasterForm.SEPARATE and self.record is not None:
            return self.record
        if self.form is not MasterForm.SPLIT and self.model.dtype is torch.float32:
            return self.model
        out = buffer[: self.model.numel()]
        if self.form is MasterForm.SPLIT and self.record is not None:
            kernels.join_master_spans(
                [self.model.data_ptr()],
                [self.record.data_ptr()],
                [out.data_ptr()],
                [out.numel()],
                [self.position],
                ties=ties,
            )
            return out
        return out.copy_(self.model)

    def store(self, weights: torch.Tensor) -> Ties:
        """Publish what `load` returned after its update; the ties of a split master."""
        if self.form is MasterForm.SPLIT and self.record is not None:
            return kernels.split_master_spans(
                [weights.data_ptr()],
                [self.model.data_ptr()],
                [self.record.data_ptr()],
                [weights.numel()],
                [self.position],
            )
        if weights.data_ptr() != self.model.data_ptr():
            self.model.copy_(weights)
        return NO_TIES


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixStep:
    """One step of a whole parameter, before it is taken.

    Attributes:
        weights: All its elements; like `gradient` and `momentum` in memory order.
        gradient: Of any floating dtype.
        momentum: fp32, advanced in place.
        group: The param group.
        scale: Factor on the gradient.
        layout: Its matrices.
        shaped_as: The parameter, where memory order is not logical order; else None.
        ties: Gives the ties between two positions of the sub-group.
    """

    weights: Weights
    gradient: torch.Tensor
    momentum: torch.Tensor
    group: dict[str, Any]
    scale: float
    layout: MatrixLayout
    shaped_as: torch.Tensor | None
    ties: Callable[[int, int], Ties]

    def blocks(self, ns_dtype: torch.dtype | None) -> Iterator[MatrixBlock]:
        """Cut it into the matrices that are worked on at a time, in order."""
        size = self.layout.numel
        if self.shaped_as is None:
            size = block_matrices(self.layout, ns_dtype) * self.layout.rows * self.layout.cols
        for first in range(0, self.layout.numel, size):
            yield MatrixBlock(self, first, min(self.layout.numel, first + size))


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """Elements `[first, last)` of a parameter: whole matrices. `advance`, then `apply`."""

    step: MatrixStep
    first: int
    last: int

    def matrices(self, update: torch.Tensor) -> torch.Tensor:
        """The elements of the block's update, 1-D and in logical order, as matrices."""
        return update.view(-1, self.step.layout.rows, self.step.layout.cols)

    def orthogonalise(
        self, update: torch.Tensor, workspace: torch.Tensor, ns_dtype: torch.dtype | None
    ) -> None:
        """Newton-Schulz in place; on CUDA it only queues work."""
        matrices, group = self.matrices(update), self.step.group
        newton_schulz(
            matrices,
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
            dtype=ns_dtype,
            out=matrices,
            workspace=workspace,
        )

    def advance(self, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """Advance the momentum, and write u.

        Args:
            out: Receives u, 1-D and in logical order, in any floating dtype.
            buffer: fp32 memory for what `out` cannot hold; unused where `out` is fp32.
        """
        step = self.step
        for piece in self._pieces():
            update = out[piece]
            run = slice(self.first + piece.start, self.first + piece.stop)
            exact = update if update.dtype is torch.float32 else buffer[: update.numel()]
            momentum_step(
                _shaped(step.momentum[run], step.shaped_as),
                _shaped(step.gradient[run], step.shaped_as),
                self._logical(exact),
                beta=step.group["momentum"],
                nesterov=step.group["nesterov"],
                grad_scale=step.scale,
            )
            if exact is not update:
                update.copy_(exact)

    def apply(self, update: torch.Tensor, buffer: torch.Tensor) -> list[Ties]:
        """Step the weights by an orthogonalised update; the new ties of a split master.

        Args:
            update: 1-D, in logical order, of any floating dtype.
            buffer: fp32 memory in which a master is put together.
        """
        step, layout, found = self.step, self.step.layout, []
        lr = float(step.group["lr"])
        update_lr = adjusted_lr(lr, layout.rows, layout.cols, step.group["adjust_lr_fn"])
        for piece in self._pieces():
            part = step.weights.part(self.first + piece.start, self.first + piece.stop)
            loaded = part.load(buffer, step.ties(part.position, part.position + part.numel))
            apply_update(
                _shaped(loaded, step.shaped_as),
                self._logical(update[piece]),
                lr=lr,
                update_lr=update_lr,
                weight_decay=step.group["weight_decay"],
            )
            found.append(part.store(loaded))
        return found

    def _pieces(self) -> Iterator[slice]:
        numel = self.last - self.first
        size = PIECE_NUMEL if self.step.shaped_as is None else numel
        for start in range(0, numel, size):
            yield slice(start, min(numel, start + size))

    def _logical(self, update: torch.Tensor) -> torch.Tensor:
        return update if self.step.shaped_as is None else update.view(self.step.shaped_as.shape)


def step_matrices(step: MatrixStep, scratch: Scratch, ns_dtype: torch.dtype | None) -> Ties:
    """Take one step of a whole parameter, block by block; the new ties of a split master."""
    found = [NO_TIES]
    for block in step.blocks(ns_dtype):
        update = scratch.update[: block.last - block.first]
        block.advance(update, scratch.master)
        block.orthogonalise(update, scratch.workspace, ns_dtype)
        found += block.apply(update, scratch.master)
    return np.concatenate(found)


def _shaped(memory: torch.Tensor, param: torch.Tensor | None) -> torch.Tensor:
    """Elements in the memory order of `param`, seen in its logical shape."""
    return memory if param is None else torch.as_strided(memory, param.shape, param.stride())


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor over memory that somebody else keeps alive."""
    memory = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def spread(fillers: Sequence[str], costs: dict[str, float]) -> list[str]:
    """Order sub-groups so that cheap ones lie evenly between expensive ones.

    The I/O of `fillers` then hides behind the computation of the others, as their own does.

    Args:
        fillers: Sub-groups whose I/O takes longer than their update, in order.
        costs: Seconds (of any unit) of each other sub-group, in order.
    """
    total = sum(costs.values()) or 1.0
    placed = [((at + 0.5) / len(fillers), key) for at, key in enumerate(fillers)]
    done = 0.0
    for key, cost in costs.items():
        placed.append(((done + cost / 2) / total, key))
        done += cost
    return [key for _, key in sorted(placed, key=lambda item: item[0])]
