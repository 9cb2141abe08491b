# SPDX-License-Identifier: Apache-2.0
"""Every element is covered once, in order, whatever the sizes, ranks and limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.errors import ConfigError
from swapio.partition import (
    CUT_NUMEL,
    Fragment,
    SubGroupPlan,
    assign_owners,
    cut_pieces,
    pack,
    pack_whole,
    partition_flat,
    plan_buckets,
    shard_bounds,
)

numel_lists = st.lists(st.integers(0, 300), max_size=12)
world_sizes = st.integers(1, 9)


def covered(plans: list[SubGroupPlan]) -> list[tuple[int, int]]:
    return [
        (piece.param_index, element)
        for plan in plans
        for piece in plan.fragments
        for element in range(piece.param_offset, piece.param_end)
    ]


def elements(numels: list[int]) -> list[tuple[int, int]]:
    return [(index, element) for index, numel in enumerate(numels) for element in range(numel)]


def check_contiguous(plans: list[SubGroupPlan]) -> None:
    for index, plan in enumerate(plans):
        assert plan.index == index
        assert plan.fragments
        position = 0
        for piece in plan.fragments:
            assert piece.numel >= 1
            assert piece.sub_group_offset == position
            position = piece.sub_group_end
        assert plan.numel == position


@given(numel_lists, st.integers(1, 200))
def test_pack_covers_every_element_once_in_order(numels: list[int], limit: int) -> None:
    plans = pack(numels, limit)
    check_contiguous(plans)
    assert covered(plans) == elements(numels)
    assert all(plan.numel <= limit for plan in plans)


@given(numel_lists, st.integers(CUT_NUMEL, 200))
def test_pack_cuts_at_multiples_of_a_vector(numels: list[int], limit: int) -> None:
    cuts = [piece for plan in pack(numels, limit) for piece in plan.fragments]
    assert all(piece.param_offset % CUT_NUMEL == 0 for piece in cuts)


@given(numel_lists, st.integers(CUT_NUMEL, 200))
def test_pack_wastes_less_than_a_vector_per_sub_group(numels: list[int], limit: int) -> None:
    plans = pack(numels, limit)
    assert all(plan.numel > limit - CUT_NUMEL for plan in plans[:-1])


def test_pack_one_large_parameter_into_equal_sub_groups() -> None:
    plans = pack([5 << 20], 2 << 20)
    assert [plan.numel for plan in plans] == [2 << 20, 2 << 20, 1 << 20]
    assert plans[1].fragments == (Fragment(0, 2 << 20, 0, 2 << 20),)


def test_pack_nothing() -> None:
    assert pack([], 16) == []
    assert pack([0, 0], 16) == []
    assert pack_whole([0], 16) == []


def test_pack_many_small_parameters_share_sub_groups() -> None:
    plans = pack([1024] * 100_000, 16 << 20)
    assert len(plans) == 7
    assert sum(len(plan.fragments) for plan in plans) == 100_000


@given(numel_lists, st.integers(1, 200))
def test_pack_whole_never_cuts(numels: list[int], limit: int) -> None:
    plans = pack_whole(numels, limit)
    check_contiguous(plans)
    assert covered(plans) == elements(numels)
    for plan in plans:
        assert all(piece.numel == numels[piece.param_index] for piece in plan.fragments)
        assert plan.numel <= limit or len(plan.fragments) == 1


@pytest.mark.parametrize("function", [pack, pack_whole])
def test_pack_refuses_bad_counts(function: Any) -> None:
    with pytest.raises(ConfigError, match="sub_group_numel is 0"):
        function([1], 0)
    with pytest.raises(ConfigError, match="parameter 1 has -2 elements"):
        function([1, -2], 4)


@given(st.integers(0, 1000), world_sizes, st.integers(1, 20))
def test_shards_tile_the_buffer(numel: int, world_size: int, alignment: int) -> None:
    shards = [shard_bounds(numel, world_size, r, alignment=alignment) for r in range(world_size)]
    position = 0
    for shard in shards:
        assert shard.start == position
        assert 0 <= shard.numel <= shard.padded_shard_numel
        position = shard.stop
    assert position == numel
    padded = {shard.padded_shard_numel for shard in shards}
    assert len(padded) == 1
    assert padded.pop() % alignment == 0


def test_shards_of_fewer_elements_than_ranks_are_empty_at_the_end() -> None:
    assert [shard_bounds(2, 4, rank).numel for rank in range(4)] == [1, 1, 0, 0]
    assert [shard_bounds(0, 3, rank).numel for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_shard_bounds_refuses_a_rank_outside_the_world(world_size: int, rank: int) -> None:
    with pytest.raises(ConfigError, match="is not a rank"):
        shard_bounds(4, world_size, rank)


@given(numel_lists, world_sizes, st.integers(1, 20))
def test_flat_partition_covers_every_element_once(
    numels: list[int], world_size: int, alignment: int
) -> None:
    flat = partition_flat(numels, world_size, alignment=alignment)
    found = []
    for rank in range(world_size):
        position = 0
        for piece in flat.fragments(rank):
            assert piece.sub_group_offset == position
            position = piece.sub_group_end
            span = range(piece.param_offset, piece.param_end)
            found += [(piece.param_index, element) for element in span]
        assert position == flat.bounds(rank).numel <= flat.shard_numel
    assert found == elements(numels)
    assert flat.shard_numel * world_size == flat.numel + flat.padding_numel


@given(numel_lists, world_sizes)
def test_owners_are_the_fragments_seen_from_the_parameter(
    numels: list[int], world_size: int
) -> None:
    flat = partition_flat(numels, world_size)
    from_ranks = [(rank, piece) for rank in range(world_size) for piece in flat.fragments(rank)]
    from_params = [pair for index in range(len(numels)) for pair in flat.owners(index)]
    assert sorted(from_params) == sorted(from_ranks)


def test_an_odd_matrix_straddles_a_boundary_and_pads_the_last_shard() -> None:
    flat = partition_flat([10, 17 * 33, 5], 4)
    assert flat.shard_numel == 144
    assert flat.padding_numel == 0
    assert [rank for rank, _ in flat.owners(1)] == [0, 1, 2, 3]
    odd = partition_flat([17 * 33], 2)
    assert odd.padding_numel == 1
    assert odd.fragments(1) == (Fragment(0, 281, 0, 280),)


def test_partition_flat_refuses_bad_counts() -> None:
    with pytest.raises(ConfigError, match="world_size is 0"):
        partition_flat([1], 0)
    with pytest.raises(ConfigError, match="alignment is 0"):
        partition_flat([1], 1, alignment=0)


@given(numel_lists, world_sizes, st.integers(1, 500))
def test_buckets_cover_every_gradient_once_and_pad_the_rest(
    numels: list[int], world_size: int, limit: int
) -> None:
    buckets = plan_buckets(numels, world_size, limit)
    found = []
    for bucket in buckets:
        assert bucket.bucket_numel <= max(limit, world_size)
        cells = [0] * bucket.bucket_numel
        for copy in bucket.copies():
            found += [(copy.param_index, copy.param_offset + k) for k in range(copy.numel)]
            for cell in range(copy.bucket_offset, copy.bucket_offset + copy.numel):
                cells[cell] += 1
        for offset, numel in bucket.padding():
            for cell in range(offset, offset + numel):
                cells[cell] += 1
        assert cells == [1] * bucket.bucket_numel
    assert sorted(found) == elements(numels)


@given(numel_lists, world_sizes, st.integers(1, 500))
def test_each_rank_receives_its_own_row(numels: list[int], world_size: int, limit: int) -> None:
    for bucket in plan_buckets(numels, world_size, limit):
        for rank in range(world_size):
            row = range(rank * bucket.shard_numel, (rank + 1) * bucket.shard_numel)
            for copy in bucket.copies(rank):
                assert copy.bucket_offset in row
                bounds = shard_bounds(numels[copy.param_index], world_size, rank)
                assert bounds.start <= copy.param_offset
                assert copy.param_offset + copy.numel <= bounds.stop


def test_buckets_follow_the_order_of_backward() -> None:
    assert [b.param_indices for b in plan_buckets([4, 4, 4], 2, 8)] == [(2, 1), (0,)]
    ordered = plan_buckets([4, 4, 4], 2, 8, order=[1, 0, 2])
    assert [b.param_indices for b in ordered] == [(1, 0), (2,)]


def test_a_parameter_larger_than_a_bucket_is_cut() -> None:
    buckets = plan_buckets([2, 21, 2], 2, 8)
    assert [b.param_indices for b in buckets] == [(2,), (1,), (1,), (1, 0)]
    assert [b.firsts for b in buckets] == [(0,), (0,), (4,), (8, 0)]
    assert [tuple(c) for c in buckets[3].copies()] == [
        (1, 8, 0, 3),
        (0, 0, 3, 1),
        (1, 19, 4, 2),
        (0, 1, 7, 1),
    ]


def test_buckets_refuse_an_order_that_is_no_permutation() -> None:
    with pytest.raises(ConfigError, match="order must name each of the 2"):
        plan_buckets([1, 1], 1, 4, order=[0, 0])
    with pytest.raises(ConfigError, match="bucket_numel is 0"):
        plan_buckets([1], 1, 0)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_owners_are_balanced_by_cost(costs: list[int], num_owners: int) -> None:
    owners = assign_owners(costs, num_owners)
    assert owners == assign_owners(costs, num_owners)
    loads = [0] * num_owners
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_assign_owners_needs_an_owner() -> None:
    with pytest.raises(ConfigError, match="num_owners is 0"):
        assign_owners([1.0], 0)


@given(st.integers(0, 1000), st.integers(1, 99))
def test_cut_pieces_tile(numel: int, piece: int) -> None:
    pieces = cut_pieces(numel, piece)
    assert [e for start, n in pieces for e in range(start, start + n)] == list(range(numel))
    assert all(n <= piece for _, n in pieces)
