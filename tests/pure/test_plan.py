# SPDX-License-Identifier: Apache-2.0
"""The planner: its parts add up, it never needs more than it was given, and it says what does."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.align import PAGE_BYTES, round_up
from swapio.config import SwapConfig
from swapio.errors import ConfigError
from swapio.plan import Plan, PlanRequest, make_plan, sweep_order
from swapio.plan_forms import (
    RecordSize,
    SubGroupSize,
    block_numel,
    record_sizes,
    resolve_master,
    sub_group_sizes,
    touched_bytes,
)
from swapio.plan_time import PlanTime, Rates

MI = 1 << 20
# Nothing is kept in buffers from step to step.
BLOCKING = {"pipeline_read": False, "pipeline_write": False}
GIB = 1 << 30
SPLIT = record_sizes("adamw", master="split", param_dtype="bfloat16")
PARAM = record_sizes("adamw", master="param", param_dtype="float32")


def adamw(numel: int, master: str = "split", **more: Any) -> PlanRequest:
    dtype = "bfloat16" if master == "split" else "float32"
    durability = more.get("durability", "checkpoint")
    records = record_sizes("adamw", master=master, param_dtype=dtype, durability=durability)
    touched = touched_bytes(records, master, dtype)
    groups = sub_group_sizes([numel], records, 16 * MI, touched=touched)
    given: dict[str, Any] = {"sub_groups": tuple(groups), "host_memory": GIB}
    return PlanRequest(**(given | more))


def bytes_named(error: Exception) -> int:
    found = re.search(r"(\d+) bytes", str(error))
    assert found is not None
    return int(found[1])


def parts(plan: Plan) -> int:
    return (
        plan.staging_bytes
        + plan.resident_bytes
        + plan.small_bytes
        + plan.workspace_bytes
        + plan.gradient_bytes
        + plan.spare_bytes
    )


@pytest.mark.parametrize(
    ("optimizer", "master", "dtype", "durability", "read", "written"),
    [
        ("adamw", "param", "float32", "checkpoint", 8, 8),
        ("adamw", "param", "float32", "step", 8, 12),
        ("adamw", "split", "bfloat16", "checkpoint", 10, 10),
        ("adam", "split", "bfloat16", "power", 10, 12),
        ("adamw", "separate", "float16", "checkpoint", 12, 12),
        ("adamw", "separate", "float16", "step", 12, 12),
        ("adamw", "none", "bfloat16", "checkpoint", 8, 8),
        ("muon", "separate", "float32", "checkpoint", 8, 8),
        ("muon", "split", "bfloat16", "checkpoint", 6, 6),
    ],
)
def test_bytes_per_parameter(
    optimizer: str, master: str, dtype: str, durability: str, read: int, written: int
) -> None:
    records = record_sizes(optimizer, master=master, param_dtype=dtype, durability=durability)
    groups = sub_group_sizes([64 * MI], records, 16 * MI)
    request = PlanRequest(sub_groups=tuple(groups), host_memory=100 * MI, durability=durability)
    plan = make_plan(dataclasses.replace(request, **BLOCKING))
    assert plan.resident == ()
    assert (plan.read_bytes_per_param, plan.write_bytes_per_param) == (read, written)


def test_muon_with_resident_momentum() -> None:
    records = record_sizes(
        "muon", master="split", param_dtype="bfloat16", resident=("momentum_buffer",)
    )
    groups = sub_group_sizes([64 * MI], records, 16 * MI)
    plan = make_plan(PlanRequest(sub_groups=tuple(groups), host_memory=280 * MI, **BLOCKING))
    assert (plan.read_bytes_per_param, plan.write_bytes_per_param) == (2, 2)
    assert plan.resident_bytes == 4 * 64 * MI


def test_auto_masters() -> None:
    assert resolve_master("auto", "float32") == "param"
    assert resolve_master("auto", "float32", on_cpu=False) == "separate"
    assert resolve_master("auto", "bfloat16", on_cpu=False) == "split"
    assert resolve_master("auto", "float16") == "separate"
    assert resolve_master("none", "bfloat16") == "none"
    with pytest.raises(ConfigError, match="needs bfloat16 parameters"):
        resolve_master("split", "float16")
    with pytest.raises(ConfigError, match="on a GPU"):
        resolve_master("param", "float32", on_cpu=False)
    with pytest.raises(ConfigError, match="parameters are int8"):
        resolve_master("auto", "int8")
    with pytest.raises(ConfigError, match="optimizer is 'sgd'"):
        record_sizes("sgd", master="param", param_dtype="float32")


@pytest.mark.parametrize(
    ("budget", "least"), [(256 * MI, 8 * MI), (GIB, 16 * MI), (2 * GIB, 32 * MI)]
)
def test_chunks_are_whole_blocks_and_larger_with_more_memory(budget: int, least: int) -> None:
    assert (block_numel(PARAM), block_numel(SPLIT)) == (1 << 18, 1 << 19)
    for master in ("param", "split", "separate"):
        plan = make_plan(adamw(2 << 30, master, host_memory=budget))
        unit = 1 << (19 if master == "split" else 18)
        assert plan.chunk_numel % unit == 0
        assert least <= plan.buffer_bytes <= 2 * least + MI


def test_a_given_chunk_is_rounded_up_to_whole_blocks() -> None:
    assert make_plan(adamw(400 * MI, chunk_numel=1 << 18)).chunk_numel == 1 << 19
    assert make_plan(adamw(400 * MI, "param", chunk_numel=1 << 18)).chunk_numel == 1 << 18


def test_state_that_fits_is_neither_read_nor_written_under_checkpoint() -> None:
    plan = make_plan(adamw(50 * MI))
    assert plan.resident == tuple(range(plan.num_sub_groups))
    assert (plan.read_bytes, plan.write_bytes, plan.staging_bytes, plan.disk_bytes) == (0, 0, 0, 0)


def test_state_that_fits_is_written_through_and_never_read_under_step() -> None:
    plan = make_plan(adamw(50 * MI, durability="step"))
    assert plan.resident == ()
    assert plan.kept_bytes >= 50 * MI * 12
    assert plan.read_bytes == 0
    assert make_plan(adamw(50 * MI, durability="step", **BLOCKING)).resident == (0, 1, 2, 3)
    assert plan.write_bytes == 50 * MI * 12
    assert plan.staging_bytes > 0
    assert plan.num_slots == 3


def test_the_end_of_a_sweep_stays_in_the_buffers() -> None:
    plan = make_plan(adamw(400 * MI, host_memory=100 * MI))
    whole = 400 * MI * 10
    chunk = plan.chunk_numel * 10
    assert abs(plan.staging_bytes - 2 * plan.buffer_bytes - plan.kept_bytes) <= plan.buffer_bytes
    assert whole - plan.read_bytes == whole - plan.write_bytes
    assert abs(whole - plan.read_bytes - plan.kept_bytes) < chunk
    step = make_plan(adamw(400 * MI, host_memory=100 * MI, durability="step"))
    assert step.read_bytes < whole
    assert step.write_bytes == 400 * MI * 12


def test_resident_sub_groups_are_spread_over_the_sweep() -> None:
    plan = make_plan(adamw(24 * 16 * MI))
    assert len(plan.resident) > 3
    gaps = [b - a for a, b in zip(plan.resident, plan.resident[1:], strict=False)]
    assert max(gaps) <= 8


def test_small_sub_groups_stay_in_ram() -> None:
    groups = (SubGroupSize(1000, SPLIT), SubGroupSize(64 * MI, SPLIT))
    plan = make_plan(PlanRequest(sub_groups=groups, host_memory=100 * MI))
    assert plan.resident == (0,)


def test_the_most_saved_per_byte_stays() -> None:
    cheap = SubGroupSize(16 * MI, (RecordSize("a", 4), RecordSize("b", 4, is_resident=True)))
    groups = (cheap, SubGroupSize(16 * MI, SPLIT), cheap)
    plan = make_plan(
        PlanRequest(sub_groups=groups, host_memory=500 * MI, durability="step", spare_slots=0)
    )
    assert parts(plan) == plan.host_memory
    assert plan.num_slots == 2


def test_whole_sub_groups_are_staged_whole() -> None:
    records = record_sizes("muon", master="split", param_dtype="bfloat16")
    groups = sub_group_sizes([4 * MI] * 16, records, 4 * MI, is_whole=True)
    plan = make_plan(PlanRequest(sub_groups=tuple(groups), host_memory=200 * MI))
    assert 24 * MI < plan.buffer_bytes < 25 * MI
    with pytest.raises(ConfigError, match="3 buffers of 24"):
        make_plan(PlanRequest(sub_groups=tuple(groups), host_memory=30 * MI))


def test_fewer_buffers_and_smaller_chunks_as_the_budget_shrinks() -> None:
    generous = make_plan(adamw(400 * MI))
    least = make_plan(adamw(400 * MI, host_memory=generous.minimum_host_memory))
    assert least.num_buffers == 3
    assert least.chunk_numel == 1 << 19
    assert least.chunk_numel < generous.chunk_numel
    blocking = adamw(400 * MI, pipeline_read=False, pipeline_write=False)
    assert make_plan(blocking).num_buffers == 1
    assert make_plan(blocking).minimum_host_memory < generous.minimum_host_memory


def test_too_small_names_the_least_that_does() -> None:
    with pytest.raises(ConfigError, match="host_memory is 1MiB, which is too small") as caught:
        make_plan(adamw(400 * MI, host_memory=MI))
    least = bytes_named(caught.value)
    assert make_plan(adamw(400 * MI, host_memory=least)).spare_bytes >= 0
    with pytest.raises(ConfigError, match="too small"):
        make_plan(adamw(400 * MI, host_memory=least - 1))


def test_without_storage_everything_must_fit() -> None:
    plan = make_plan(adamw(50 * MI, has_storage=False))
    assert (plan.read_bytes, plan.disk_bytes, plan.num_slots) == (0, 0, 0)
    with pytest.raises(ConfigError, match="or name a path"):
        make_plan(adamw(500 * MI, has_storage=False))


def test_nothing_to_plan() -> None:
    plan = make_plan(PlanRequest(sub_groups=(), host_memory=0))
    assert (plan.read_bytes_per_param, plan.time.step, plan.minimum_host_memory) == (0, 0, 0)


numels = st.integers(1, 40 * MI)
forms = st.sampled_from([SPLIT, PARAM, (RecordSize("x", 2, is_resident=True), RecordSize("y", 4))])
requests = st.builds(
    PlanRequest,
    sub_groups=st.lists(
        st.builds(SubGroupSize, numels, forms, is_whole=st.booleans()), max_size=12
    ).map(tuple),
    host_memory=st.integers(0, 2 * GIB),
    pipeline_read=st.booleans(),
    pipeline_write=st.booleans(),
    durability=st.sampled_from(["checkpoint", "step"]),
    min_swap_bytes=st.sampled_from([0, MI, 64 * MI]),
    has_storage=st.booleans(),
    workspace_bytes=st.integers(0, 8 * MI),
    gradient_bytes=st.integers(0, 8 * MI),
    chunk_numel=st.sampled_from(["auto", 1 << 18, 1 << 20]),
    in_flight_bytes=st.sampled_from([MI, 16 * MI, 64 * MI]),
)


@given(requests)
def test_a_plan_adds_up_and_its_minimum_is_one(request: PlanRequest) -> None:
    try:
        plan = make_plan(request)
    except ConfigError as error:
        least = bytes_named(error)
        assert least > request.host_memory
        plan = make_plan(dataclasses.replace(request, host_memory=least))
        assert plan.minimum_host_memory == least
    assert parts(plan) == plan.host_memory >= plan.minimum_host_memory
    assert plan.spare_bytes >= 0
    kept = set(plan.resident)
    swapped = [g for i, g in enumerate(request.sub_groups) if i not in kept]
    if swapped:
        assert request.has_storage
        assert plan.num_buffers >= 1 + request.pipeline_read + request.pipeline_write
        for group in swapped:
            cut = group.numel if group.is_whole else min(group.numel, plan.chunk_numel)
            records = [r for r in group.records if not r.is_resident]
            need = sum(round_up(cut * r.item_bytes, PAGE_BYTES) for r in records)
            assert need <= plan.buffer_bytes
            assert group.is_whole or plan.chunk_numel % block_numel(records) == 0
    json.dumps(plan.to_dict())
    assert plan.table(100)


RATES = Rates(
    read=3_380_000_000,
    write=4_340_000_000,
    mixed=3_560_000_000,
    compute=50_000_000_000,
    checksum=20_000_000_000,
)


def test_prediction_takes_the_better_of_turns_and_mixing() -> None:
    plan = make_plan(adamw(400 * MI, host_memory=100 * MI, rates=RATES))
    moved = plan.read_bytes
    assert moved == plan.write_bytes
    assert 400 * MI * 10 - 100 * MI < moved < 400 * MI * 10
    turns = moved / 3.38e9 + moved / 4.34e9
    mixed = 2 * moved / 3.56e9
    assert plan.time.device == pytest.approx(min(turns, mixed))
    assert plan.time.step == plan.time.device
    assert plan.time.bound == "mixed"
    exposed = plan.exposed_seconds()
    assert exposed is not None
    assert exposed < min(turns, mixed) * 1.1


def test_prediction_names_compute_and_checksum_bounds() -> None:
    def bound(**rates: int) -> Plan:
        return make_plan(
            adamw(400 * MI, host_memory=100 * MI, rates=Rates(read=10**11, write=10**11, **rates))
        )

    assert bound(compute=10**10).time.bound == "compute"
    slow_hash = bound(checksum=10**9)
    assert slow_hash.time.bound == "checksum"
    assert any("faster than the checksums" in note for note in slow_hash.notes)
    assert bound().time.bound == "mixed"


def test_prediction_without_overlap_is_the_sum() -> None:
    def step(read: bool, write: bool) -> PlanTime:
        request = adamw(
            400 * MI,
            host_memory=100 * MI,
            rates=RATES,
            pipeline_read=read,
            pipeline_write=write,
        )
        return make_plan(request).time

    blocking = step(False, False)
    cpu = (blocking.compute or 0) + (blocking.checksum or 0)
    moved = (blocking.read or 0) + (blocking.write or 0)
    assert cpu
    assert blocking.step == pytest.approx(moved + cpu)
    for switches in ((True, False), (False, True)):
        half = step(*switches)
        assert half.step == pytest.approx((half.read or 0) + (half.write or 0))


def test_products_of_matrices_are_part_of_the_prediction() -> None:
    sizes = [SubGroupSize(100 * MI, PARAM, touched_bytes=28, flops=5 * 10**12)] * 2

    def time(**rates: int) -> PlanTime:
        known = dataclasses.replace(RATES, **rates)
        return make_plan(PlanRequest(sub_groups=tuple(sizes), host_memory=GIB, rates=known)).time

    slow = time(products=10**11)
    assert slow.products == pytest.approx(100)
    assert slow.bound == "products"
    assert slow.step == pytest.approx((slow.compute or 0) + 100 + (slow.checksum or 0))
    assert time(products=10**16).bound != "products"
    assert time().products is None
    assert make_plan(adamw(400 * MI, rates=RATES)).time.products == 0


def test_prediction_without_rates_is_not_known() -> None:
    time = make_plan(adamw(400 * MI, host_memory=100 * MI)).time
    assert (time.device, time.step, time.bound) == (None, None, None)


def test_only_writes() -> None:
    plan = make_plan(adamw(50 * MI, durability="step", rates=RATES))
    assert plan.time.bound == "write"


def test_disk_space_and_wear() -> None:
    plan = make_plan(adamw(400 * MI, host_memory=100 * MI, disk_free_bytes=GIB))
    assert plan.disk_bytes == pytest.approx(2 * 400 * MI * 10, rel=1e-3)
    assert not plan.disk_fits
    assert "only 1GiB are free" in plan.notes[0]
    assert plan.write_bytes_per_day(1000) == 1000 * plan.write_bytes
    assert "wear" in plan.table(1000)


def test_requests_from_a_configuration() -> None:
    config = SwapConfig(
        path="/a", host_memory="1GiB", queue_depth=8, durability="step", read_bandwidth=3 * 10**9
    )
    request = PlanRequest.from_config(config, [SubGroupSize(MI, PARAM)], workspace_bytes=5)
    assert request.host_memory == GIB
    assert request.in_flight_bytes == 4 * MI
    assert request.rates.read == 3 * 10**9
    assert request.writes_through
    assert request.workspace_bytes == 5
    assert not PlanRequest.from_config(SwapConfig(durability="step"), []).writes_through
    blocking = config.replace(pipeline_read=False, pipeline_write=False)
    assert PlanRequest.from_config(blocking, [SubGroupSize(MI, PARAM)]).sub_groups[0].is_whole


def test_sweeps_alternate() -> None:
    assert list(sweep_order(3, 0)) == [0, 1, 2]
    assert list(sweep_order(3, 1)) == [2, 1, 0]
    assert list(sweep_order(0, 1)) == []
