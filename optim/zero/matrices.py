# SPDX-License-Identifier: Apache-2.0
"""Muon over ranks: momentum and weights on the shards, whole matrices on one owner each.

    round: as many items (matrices, or blocks of small ones) as there are ranks, one owner each
        every rank   its pieces of momentum -> u, sent to the owners, window by window
        owner        the whole u -> Newton-Schulz -> X
        every rank   its pieces of X come back, window by window -> weights

Sub-groups have the same parameters on every rank, so all ranks meet in the same rounds, also one
whose shards are empty. A round begins with an exchange in which a failed rank is heard.

Invariants:
- Newton-Schulz runs once for each matrix and step, over all ranks;
- staging is `STAGING_BYTES` at most; an owner has one item at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.align import round_down
from swapio.optim.muon_math import MatrixLayout, adjusted_lr, apply_update, momentum_step
from swapio.optim.muon_update import PIECE_NUMEL, Scratch, Weights
from swapio.optim.newton_schulz import newton_schulz

if TYPE_CHECKING:
    from swapio.optim.zero.comm import Comm

STAGING_BYTES = 64 << 20

Bounds = tuple[tuple[int, int], ...]


class Member(NamedTuple):
    """A parameter of a sub-group.

    Attributes:
        param: The parameter's index.
        layout: Its matrices.
        bounds: First and last element of each rank's shard.
        block: Matrices that are orthogonalised at a time.
        flops: Of one matrix.
    """

    param: int
    layout: MatrixLayout
    bounds: Bounds
    block: int
    flops: float


class Item(NamedTuple):
    """Elements `[start, stop)` of a parameter: whole matrices, for one owner.

    Attributes:
        member: The parameter.
        start: First element.
        stop: One past the last element.
        owner: The rank that orthogonalises them.
    """

    member: Member
    start: int
    stop: int
    owner: int

    def piece(self, rank: int) -> tuple[int, int]:
        """The elements that a rank's shard has of it; empty where both are equal."""
        low, high = self.member.bounds[rank]
        first = min(max(low, self.start), self.stop)
        return first, max(first, min(high, self.stop))


class Shard(NamedTuple):
    """What a rank has of a parameter, while its sub-group is in RAM.

    Attributes:
        weights: Its elements of the weights.
        gradient: Of the gradient.
        momentum: Of the momentum.
        ties: Gives the ties between two positions of the sub-group.
    """

    weights: Weights
    gradient: torch.Tensor
    momentum: torch.Tensor
    ties: Callable[[int, int], npt.NDArray[np.uint32]]


def make_rounds(members: Sequence[Member], world_size: int) -> list[list[Item]]:
    """Cut the matrices of a sub-group into rounds of items; the same on every rank.

    Items of like cost meet in one round. In each round the dearest goes to the rank that has had
    the least so far.
    """
    cut: list[tuple[float, Member, int, int]] = []
    for member in members:
        matrix = member.layout.rows * member.layout.cols
        for first in range(0, member.layout.num_matrices, member.block):
            last = min(member.layout.num_matrices, first + member.block)
            cut.append(((last - first) * member.flops, member, first * matrix, last * matrix))
    cut.sort(key=lambda item: -item[0])
    loads = [0.0] * world_size
    rounds = []
    for at in range(0, len(cut), world_size):
        free = list(range(world_size))
        items = []
        for cost, member, start, stop in cut[at : at + world_size]:
            owner = min(free, key=lambda rank: (loads[rank], rank))
            free.remove(owner)
            loads[owner] += cost
            items.append(Item(member, start, stop, owner))
        rounds.append(items)
    return rounds


def num_windows(items: Sequence[Item], world_size: int, window: int) -> int:
    """Windows of a round: as many as the longest piece of any rank needs."""
    pieces = (item.piece(rank) for item in items for rank in range(world_size))
    return -(-max((b - a for a, b in pieces), default=0) // window)


class MatrixExchange:
    """Takes the Muon steps of one sub-group after the other, with all ranks.

    Args:
        comm: The ranks that have shards of one copy of the parameters.
        staging_bytes: Most memory for what is sent and received.

    Attributes:
        num_matrices: Orthogonalised here so far.
        peak_bytes: Most staging that was in use.
    """

    def __init__(self, comm: Comm, staging_bytes: int = STAGING_BYTES) -> None:
        self._comm = comm
        window = round_down(staging_bytes // 8 // comm.world_size, 16)
        self._window = max(16, min(window, PIECE_NUMEL))
        self._rounds: dict[tuple[int, ...], list[list[Item]]] = {}
        self._staging = torch.empty(0)
        self.num_matrices = 0
        self.peak_bytes = 0

    def window_numel(self, members: Sequence[Member]) -> int:
        """Most elements that a rank updates at a time."""
        largest = max((max(b - a for a, b in member.bounds) for member in members), default=0)
        return min(self._window, largest)

    def staging_bytes(self, members: Sequence[Member]) -> int:
        """Memory that the exchange of these parameters needs."""
        return 8 * self._comm.world_size * self.window_numel(members)

    def num_collectives(self, members: Sequence[Member]) -> int:
        """Exchanges of tensors in a step of all these parameters."""
        size = self._comm.world_size
        return sum(2 * num_windows(i, size, self._window) for i in make_rounds(members, size))

    def reserve(self, members: Sequence[Member]) -> None:
        """Have the staging memory for these parameters."""
        numel = self.staging_bytes(members) // 4
        if self._staging.numel() < numel:
            self._staging = torch.empty(numel)

    def close(self) -> None:
        """Give the memory up."""
        self._staging = torch.empty(0)
        self._rounds.clear()

    def step(
        self,
        members: Sequence[Member],
        shard_of: Callable[[int], Shard | None],
        group_of: Callable[[int], dict[str, Any]],
        *,
        scale: float,
        scratch: Scratch,
        ns_dtype: torch.dtype | None,
        device: torch.device | None = None,
    ) -> dict[int, npt.NDArray[np.uint32]]:
        """Take one step of the members, all of which have gradients. Collective.

        Args:
            members: The same on every rank.
            shard_of: Gives what this rank has of a parameter; None if its shard is empty.
            group_of: Gives a parameter's param group.
            scale: Factor on the gradients.
            scratch: Reserved memory of the owner.
            ns_dtype: Dtype of the products, or None.
            device: Where an owner orthogonalises; None is the CPU.

        Returns:
            The ties of split masters after the step, by parameter.
        """
        key = tuple(member.param for member in members)
        if key not in self._rounds:
            self._rounds[key] = make_rounds(members, self._comm.world_size)
        found: dict[int, list[tuple[int, npt.NDArray[np.uint32]]]] = {}
        for items in self._rounds[key]:
            self._comm.exchange()
            try:
                turn = _Round(self._comm, items, self._staging, self._window, shard_of, group_of)
                turn.send_updates(scratch.update, scale)
                self.num_matrices += turn.orthogonalize(scratch, ns_dtype, device)
                turn.return_updates(scratch.update, scratch.master, found)
                self.peak_bytes = max(self.peak_bytes, turn.peak_bytes)
            except BaseException as error:
                # The peers are in the middle of the round: closing the connections wakes them.
                if self._comm.failure is None:
                    self._comm.fail("a round of Muon", error)
                raise
        ordered = {index: sorted(parts, key=lambda part: part[0]) for index, parts in found.items()}
        return {index: np.concatenate([t for _, t in parts]) for index, parts in ordered.items()}


class _Round:
    """One round on one rank."""

    def __init__(
        self,
        comm: Comm,
        items: Sequence[Item],
        staging: torch.Tensor,
        window: int,
        shard_of: Callable[[int], Shard | None],
        group_of: Callable[[int], dict[str, Any]],
    ) -> None:
        self._comm = comm
        self._staging = staging
        self._window = window
        self._shard_of = shard_of
        self._group_of = group_of
        self.peak_bytes = 0
        by_owner = {item.owner: item for item in items}
        self._items = [by_owner.get(rank) for rank in range(comm.world_size)]
        self._mine = self._items[comm.rank]
        self._num_windows = num_windows(items, comm.world_size, window)

    def _cut(self, item: Item | None, rank: int, number: int) -> tuple[int, int]:
        """The elements of an item that a rank sends or receives in one window."""
        if item is None:
            return 0, 0
        first, last = item.piece(rank)
        low = min(last, first + number * self._window)
        return low, min(last, low + self._window)

    def _sizes(self, number: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Elements to each owner, from each rank, and the runs of this rank by owner."""
        runs = [self._cut(item, self._comm.rank, number) for item in self._items]
        incoming = [self._cut(self._mine, rank, number) for rank in range(self._comm.world_size)]
        return [b - a for a, b in runs], [b - a for a, b in incoming], runs

    def _buffers(self, outer: Sequence[int], inner: Sequence[int]) -> tuple[Any, Any]:
        """Staging for what goes to owners (or comes from them), and for what the owner has."""
        total = sum(outer)
        self.peak_bytes = max(self.peak_bytes, 4 * (total + sum(inner)))
        return self._staging[:total], self._staging[total : total + sum(inner)]

    def send_updates(self, whole: torch.Tensor, scale: float) -> None:
        """Advance the momentum and bring u to the owners."""
        for number in range(self._num_windows):
            sizes, incoming, runs = self._sizes(number)
            out, received = self._buffers(sizes, incoming)
            at = 0
            for item, (first, last) in zip(self._items, runs, strict=True):
                if item is None or first == last:
                    continue
                shard, group = self._shard(item), self._group_of(item.member.param)
                low = item.member.bounds[self._comm.rank][0]
                run = slice(first - low, last - low)
                momentum_step(
                    shard.momentum[run],
                    shard.gradient[run],
                    out[at : at + last - first],
                    beta=group["momentum"],
                    nesterov=group["nesterov"],
                    grad_scale=scale,
                )
                at += last - first
            self._comm.all_to_all(received, out, incoming, sizes).wait()
            self._place(received, whole, number, inward=True)

    def _place(
        self, staged: torch.Tensor, whole: torch.Tensor, number: int, *, inward: bool
    ) -> None:
        """Copy between the owner's whole item and what travels in one window."""
        item, at = self._mine, 0
        if item is None:
            return
        for rank in range(self._comm.world_size):
            first, last = self._cut(item, rank, number)
            inner = whole[first - item.start : last - item.start]
            outer = staged[at : at + last - first]
            if inward:
                inner.copy_(outer)
            else:
                outer.copy_(inner)
            at += last - first

    def orthogonalize(
        self, scratch: Scratch, ns_dtype: torch.dtype | None, device: torch.device | None
    ) -> int:
        """Run Newton-Schulz on this rank's item; return the number of matrices."""
        item = self._mine
        if item is None:
            return 0
        layout, group = item.member.layout, self._group_of(item.member.param)
        matrices = scratch.update[: item.stop - item.start].view(-1, layout.rows, layout.cols)
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        if device is not None:
            matrices.copy_(newton_schulz(matrices.to(device), *settings, dtype=ns_dtype))
            return len(matrices)
        workspace = scratch.workspace
        newton_schulz(matrices, *settings, dtype=ns_dtype, out=matrices, workspace=workspace)
        return len(matrices)

    def return_updates(
        self,
        whole: torch.Tensor,
        buffer: torch.Tensor,
        found: dict[int, list[tuple[int, npt.NDArray[np.uint32]]]],
    ) -> None:
        """Bring X back and update the weights with it."""
        for number in range(self._num_windows):
            sizes, incoming, runs = self._sizes(number)
            received, out = self._buffers(sizes, incoming)
            self._place(out, whole, number, inward=False)
            self._comm.all_to_all(received, out, sizes, incoming).wait()
            at = 0
            for item, (first, last) in zip(self._items, runs, strict=True):
                if item is None or first == last:
                    continue
                update = received[at : at + last - first]
                found.setdefault(item.member.param, []).append(
                    self._apply(item, first, last, update, buffer)
                )
                at += last - first

    def _apply(
        self, item: Item, first: int, last: int, update: torch.Tensor, buffer: torch.Tensor
    ) -> tuple[int, npt.NDArray[np.uint32]]:
        shard, group = self._shard(item), self._group_of(item.member.param)
        layout, low = item.member.layout, item.member.bounds[self._comm.rank][0]
        part = shard.weights.part(first - low, last - low)
        loaded = part.load(buffer, shard.ties(part.position, part.position + part.numel))
        lr = float(group["lr"])
        apply_update(
            loaded,
            update,
            lr=lr,
            update_lr=adjusted_lr(lr, layout.rows, layout.cols, group["adjust_lr_fn"]),
            weight_decay=group["weight_decay"],
        )
        return part.position, part.store(loaded)

    def _shard(self, item: Item) -> Shard:
        shard = self._shard_of(item.member.param)
        if shard is None:
            raise IndexError(f"parameter {item.member.param} has no elements on this rank")
        return shard
