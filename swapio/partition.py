# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of shards, sub-groups, fragments and buckets. Pure; standard library only.

Two cuts are described here, one after the other. ZeRO cuts a flat buffer into one shard a rank;
packing cuts what a rank holds into sub-groups that are swapped and stepped as a unit.

Invariants:
    Every element is covered exactly once, in the order in which the parameters were given.
    A parameter without elements has no fragment, and no plan has an empty sub-group.
    Padding follows the last element and belongs to no parameter.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from swapio.align import round_down, round_up
from swapio.errors import ConfigError

CUT_NUMEL = 16
"""Elements that cuts within a parameter are multiples of: one AVX-512 vector of fp32."""


class Fragment(NamedTuple):
    """The piece of one parameter that lies in one sub-group (or shard), in elements.

    Attributes:
        param_index: Position of the parameter in the list that was cut.
        param_offset: First element within the flattened parameter.
        sub_group_offset: First element within the sub-group (or shard).
        numel: Elements; at least 1.
    """

    param_index: int
    param_offset: int
    sub_group_offset: int
    numel: int

    @property
    def param_end(self) -> int:
        """First element of the parameter after the fragment."""
        return self.param_offset + self.numel

    @property
    def sub_group_end(self) -> int:
        """First element of the sub-group (or shard) after the fragment."""
        return self.sub_group_offset + self.numel


@dataclass(frozen=True, slots=True)
class SubGroupPlan:
    """One sub-group: its elements are its fragments', end to end.

    Attributes:
        index: Position among the sub-groups of its plan.
        numel: Elements, the sum over its fragments.
        fragments: In ascending order of `sub_group_offset`, without gaps.
    """

    index: int
    numel: int
    fragments: tuple[Fragment, ...]


def pack(
    numels: Sequence[int], sub_group_numel: int, *, cut_numel: int = CUT_NUMEL
) -> list[SubGroupPlan]:
    """Pack parameters into sub-groups of at most `sub_group_numel` elements, cutting where needed.

    Args:
        numels: Elements of each parameter; 0 is allowed and gets no fragment.
        sub_group_numel: Most elements of a sub-group.
        cut_numel: Cuts within a parameter fall on multiples of it, which leaves the tail of a
            sub-group empty rather than start a parameter with a few elements. Ignored where a
            sub-group is too small for it.

    Returns:
        The sub-groups in order; empty when there is no element.

    Raises:
        ConfigError: A count is negative, or `sub_group_numel` is below 1.
    """
    return list(iter_pack(numels, sub_group_numel, cut_numel=cut_numel))


def iter_pack(
    numels: Sequence[int], sub_group_numel: int, *, cut_numel: int = CUT_NUMEL
) -> Iterator[SubGroupPlan]:
    """Yield what `pack` returns, one by one: not all fragments need exist at once."""
    _check_numels(numels, "sub_group_numel", sub_group_numel)
    builder = _Builder()
    for param_index, numel in enumerate(numels):
        offset = 0
        while offset < numel:
            room = sub_group_numel - builder.numel
            take = min(room, numel - offset)
            if offset + take < numel:
                aligned = round_down(offset + take, cut_numel) - offset
                if aligned > 0:
                    take = aligned
                elif builder.numel:
                    take = 0
            builder.add(param_index, offset, take)
            offset += take
            if offset < numel:
                builder.close()
                yield from builder.take()
    builder.close()
    yield from builder.take()


def pack_whole(numels: Sequence[int], sub_group_numel: int) -> list[SubGroupPlan]:
    """Pack parameters into sub-groups without cutting any, as matrices of Muon need it.

    Args:
        numels: Elements of each parameter; 0 is allowed and gets no fragment.
        sub_group_numel: Elements after which a new sub-group is begun. A larger parameter is a
            sub-group by itself.

    Returns:
        The sub-groups, parameters in the given order.

    Raises:
        ConfigError: A count is negative, or `sub_group_numel` is below 1.
    """
    _check_numels(numels, "sub_group_numel", sub_group_numel)
    builder = _Builder()
    for param_index, numel in enumerate(numels):
        if builder.numel + numel > sub_group_numel:
            builder.close()
        builder.add(param_index, 0, numel)
    builder.close()
    return builder.sub_groups


class _Builder:
    """Collects fragments; `close` ends the sub-group being filled, if it has any."""

    def __init__(self) -> None:
        self.sub_groups: list[SubGroupPlan] = []
        self.numel = 0
        self._num_taken = 0
        self._fragments: list[Fragment] = []

    def add(self, param_index: int, param_offset: int, numel: int) -> None:
        if numel:
            self._fragments.append(Fragment(param_index, param_offset, self.numel, numel))
            self.numel += numel

    def close(self) -> None:
        if self._fragments:
            index = self._num_taken + len(self.sub_groups)
            plan = SubGroupPlan(index, self.numel, tuple(self._fragments))
            self.sub_groups.append(plan)
        self._fragments, self.numel = [], 0

    def take(self) -> list[SubGroupPlan]:
        taken, self.sub_groups = self.sub_groups, []
        self._num_taken += len(taken)
        return taken


class ShardBounds(NamedTuple):
    """What one rank owns of a flat buffer: `[start, stop)` and the length with padding."""

    start: int
    stop: int
    padded_shard_numel: int

    @property
    def numel(self) -> int:
        """Elements without padding; 0 for an empty shard."""
        return self.stop - self.start


def shard_bounds(numel: int, world_size: int, rank: int, *, alignment: int = 1) -> ShardBounds:
    """Return the elements of a flat buffer that `rank` owns.

    Every rank's shard has the same padded length; the ones at the end may be short or empty.

    Args:
        numel: Elements of the buffer.
        world_size: Number of ranks.
        rank: The rank asked for.
        alignment: Elements that the padded length is a multiple of.

    Raises:
        ConfigError: The rank is not below the world size, or a count is negative.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not a rank of world size {world_size}")
    if numel < 0 or alignment < 1:
        raise ConfigError(f"numel is {numel} and alignment {alignment}; want at least 0 and 1")
    padded = round_up(-(-numel // world_size), alignment)
    start = min(rank * padded, numel)
    return ShardBounds(start, min(start + padded, numel), padded)


@dataclass(frozen=True)
class FlatPartition:
    """Parameters joined end to end in one flat buffer and cut into one shard a rank.

    Attributes:
        numels: Elements of each parameter.
        world_size: Number of ranks.
        alignment: Elements that the padded shard length is a multiple of.
    """

    numels: tuple[int, ...]
    world_size: int
    alignment: int = 1

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.numels)

    @property
    def shard_numel(self) -> int:
        """Elements of each shard, padding included."""
        return self.bounds(0).padded_shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the padded buffer that belong to no parameter."""
        return self.shard_numel * self.world_size - self.numel

    @property
    def param_offsets(self) -> tuple[int, ...]:
        """First element of each parameter in the flat buffer."""
        return tuple(accumulate(self.numels, initial=0))[:-1]

    def bounds(self, rank: int) -> ShardBounds:
        """Return the elements of the flat buffer that `rank` owns."""
        return shard_bounds(self.numel, self.world_size, rank, alignment=self.alignment)

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return the pieces of parameters in the shard of `rank`, offsets within the shard."""
        start, stop, _ = self.bounds(rank)
        found = []
        for index, (offset, numel) in enumerate(zip(self.param_offsets, self.numels, strict=True)):
            low, high = max(offset, start), min(offset + numel, stop)
            if low < high:
                found.append(Fragment(index, low - offset, low - start, high - low))
        return tuple(found)

    def owners(self, param_index: int) -> tuple[tuple[int, Fragment], ...]:
        """Return (rank, fragment) for each rank that owns a piece of the parameter, in order."""
        offset, numel = self.param_offsets[param_index], self.numels[param_index]
        found = []
        for rank in self._ranks_of(offset, numel):
            start, stop, _ = self.bounds(rank)
            low, high = max(offset, start), min(offset + numel, stop)
            piece = Fragment(param_index, low - offset, low - start, high - low)
            found.append((rank, piece))
        return tuple(found)

    def _ranks_of(self, offset: int, numel: int) -> range:
        if not numel:
            return range(0)
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1)


def partition_flat(numels: Sequence[int], world_size: int, *, alignment: int = 1) -> FlatPartition:
    """Cut parameters, joined end to end, into one padded shard a rank.

    Raises:
        ConfigError: A count is negative, or `world_size` or `alignment` is below 1.
    """
    _check_numels(numels, "world_size", world_size)
    if alignment < 1:
        raise ConfigError(f"alignment is {alignment}; want at least 1")
    return FlatPartition(tuple(numels), world_size, alignment)


class BucketCopy(NamedTuple):
    """One copy between a gradient and a bucket's send buffer, in elements."""

    param_index: int
    param_offset: int
    bucket_offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Gradients joined for one reduce-scatter, each parameter cut into one shard a rank.

    The send buffer is rank-major: `world_size` rows of `shard_numel` elements. Row r holds a piece
    of rank r's shard of every parameter of the bucket, each padded to the same length on every
    rank, so that what reduce-scatter returns to r is its row. An all-gather of rows is the same in
    reverse. A piece is the whole shard, unless the parameter is larger than a bucket.

    Attributes:
        param_indices: The parameters in it, in the order of their pieces.
        numels: Elements of each of them.
        world_size: Number of ranks.
        firsts: First element of each piece, within its shard.
        piece_numels: Padded elements of each piece, the same on every rank.
    """

    param_indices: tuple[int, ...]
    numels: tuple[int, ...]
    world_size: int
    firsts: tuple[int, ...]
    piece_numels: tuple[int, ...]

    @property
    def piece_offsets(self) -> tuple[int, ...]:
        """First element of each parameter's piece within a row."""
        return tuple(accumulate(self.piece_numels, initial=0))[:-1]

    @property
    def shard_numel(self) -> int:
        """Elements of a row, which is what each rank receives."""
        return sum(self.piece_numels)

    @property
    def bucket_numel(self) -> int:
        """Elements of the send buffer, padding included."""
        return self.shard_numel * self.world_size

    def copies(self, rank: int | None = None) -> Iterator[BucketCopy]:
        """Yield the copies into (or out of) the send buffer.

        Args:
            rank: Only the pieces that this rank owns; None for all of them.
        """
        for row, at, start, stop, index in self._places(rank):
            if start < stop:
                yield BucketCopy(index, start, row * self.shard_numel + at, stop - start)

    def padding(self) -> Iterator[tuple[int, int]]:
        """Yield (bucket offset, elements) of each run that belongs to no parameter."""
        places = zip(self._places(None), self.piece_numels * self.world_size, strict=True)
        for (row, at, start, stop, _), piece in places:
            if stop - start < piece:
                yield row * self.shard_numel + at + stop - start, piece - (stop - start)

    def _places(self, rank: int | None) -> Iterator[tuple[int, int, int, int, int]]:
        """(row, offset in it, first and last element of the parameter, its index) of each piece."""
        ranks = range(self.world_size) if rank is None else (rank,)
        columns = (
            self.param_indices,
            self.numels,
            self.piece_offsets,
            self.firsts,
            self.piece_numels,
        )
        for row in ranks:
            for index, numel, at, first, piece in zip(*columns, strict=True):
                start, stop, _ = shard_bounds(numel, self.world_size, row)
                low, high = min(start + first, stop), min(start + first + piece, stop)
                yield row, at, low, high, index


def plan_buckets(
    numels: Sequence[int],
    world_size: int,
    bucket_numel: int,
    *,
    order: Sequence[int] | None = None,
) -> list[Bucket]:
    """Join parameters into buckets of at most `bucket_numel` elements of send buffer.

    Args:
        numels: Elements of each parameter; those with none are in no bucket.
        world_size: Number of ranks.
        bucket_numel: Most elements of a send buffer, padding included; but a row has at least one
            element. A larger parameter is cut into pieces with buckets of their own.
        order: Indices in the order in which gradients arrive; reverse order when None, as backward
            reaches the last parameters first. Must be the same on every rank.

    Raises:
        ConfigError: A count is negative or below 1, or `order` is not a permutation.
    """
    _check_numels(numels, "world_size", world_size)
    _check_numels(numels, "bucket_numel", bucket_numel)
    sequence = list(reversed(range(len(numels)))) if order is None else list(order)
    if sorted(sequence) != list(range(len(numels))):
        raise ConfigError(f"order must name each of the {len(numels)} parameters once")
    row_numel = max(1, bucket_numel // world_size)
    buckets: list[Bucket] = []
    members: list[tuple[int, int, int]] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if members:
            indices, firsts, pieces = (tuple(column) for column in zip(*members, strict=True))
            of_each = tuple(numels[index] for index in indices)
            buckets.append(Bucket(indices, of_each, world_size, firsts, pieces))
        members.clear()
        filled = 0

    for index in sequence:
        need = -(-numels[index] // world_size)
        if filled + need > row_numel:
            close()
        for first, piece in cut_pieces(need, row_numel):
            members.append((index, first, piece))
            filled += piece
            if piece < need and first + piece < need:
                close()
    close()
    return buckets


def assign_owners(costs: Sequence[float], num_owners: int) -> list[int]:
    """Give each item to one of `num_owners`, the dearest first, each to the least loaded.

    Equal on every rank that gives the same costs: ties go to the lower index and the lower owner.

    Raises:
        ConfigError: `num_owners` is below 1.
    """
    if num_owners < 1:
        raise ConfigError(f"num_owners is {num_owners}; want at least 1")
    owners = [0] * len(costs)
    loads = [(0.0, owner) for owner in range(num_owners)]
    for index in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, owner = heapq.heappop(loads)
        owners[index] = owner
        heapq.heappush(loads, (load + costs[index], owner))
    return owners


def cut_pieces(numel: int, piece_numel: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into (offset, elements) of at most `piece_numel`, for bounded staging.

    Raises:
        ConfigError: `numel` is negative or `piece_numel` below 1.
    """
    _check_numels((numel,), "piece_numel", piece_numel)
    return [(start, min(piece_numel, numel - start)) for start in range(0, numel, piece_numel)]


def _check_numels(numels: Sequence[int], name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; want at least 1")
    for index, numel in enumerate(numels):
        if numel < 0:
            raise ConfigError(f"parameter {index} has {numel} elements; want at least 0")
