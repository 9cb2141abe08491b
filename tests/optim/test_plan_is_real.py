# SPDX-License-Identifier: Apache-2.0
"""The plan against what happens: bytes of a step, least budgets, residency, added groups."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swapio.errors import ConfigError
from swapio.optim import AdamW

MI = 1 << 20


def parameters(*sizes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def step(opt, params, times=1):
    for _ in range(times):
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
    opt.synchronize()


def moved(opt, params, times):
    before = opt.stats()
    step(opt, params, times)
    after = opt.stats()
    return [after[name] - before[name] for name in ("read_bytes", "write_bytes")]


def least_named(error):
    return int(re.search(r"(\d+) bytes \(", str(error))[1])


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
@pytest.mark.parametrize("memory", ["12MiB", "45MiB", "110MiB"])
def test_a_steady_step_moves_the_bytes_that_were_planned(tmp_path, memory, durability):
    params = parameters(5 * MI, 700_000, 1000)
    swap = {"path": tmp_path, "host_memory": memory, "sub_group_numel": 2 * MI,
            "durability": durability}  # fmt: skip
    with AdamW(params, swap=swap) as opt:
        step(opt, params, 3)
        read, written = moved(opt, params, 2)
        # Chunks at the ends of sub-groups are smaller than others, which moves what is kept.
        slack = 2 * opt.plan.buffer_bytes
        assert read == pytest.approx(2 * opt.plan.read_bytes, abs=slack)
        assert written == pytest.approx(2 * opt.plan.write_bytes, abs=slack)
        if memory == "110MiB":
            assert read == 0
            assert written == (0 if durability == "checkpoint" else 2 * opt.plan.numel * 12)


def test_state_that_fits_makes_no_slot_files(tmp_path):
    params = parameters(3 * MI)
    with AdamW(params, swap={"path": tmp_path, "host_memory": "64MiB"}) as opt:
        step(opt, params, 2)
        stats = opt.stats()
        assert opt.plan.disk_bytes == stats["bytes_allocated"] == stats["total_written_bytes"] == 0
        assert stats["resident_bytes"] == opt.plan.resident_bytes >= 24 * MI


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 3 * MI), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    switches=st.tuples(st.booleans(), st.booleans()),
    resident=st.sampled_from([(), ("exp_avg",), ("exp_avg", "exp_avg_sq")]),
    durability=st.sampled_from(["checkpoint", "step"]),
)
def test_the_budget_that_an_error_names_works(
    tmp_path_factory, sizes, dtype, switches, resident, durability
):
    params = parameters(*sizes, dtype=dtype)
    swap = {"path": tmp_path_factory.mktemp("least"), "sub_group_numel": MI,
            "min_swap_bytes": 1 << 16, "pipeline_read": switches[0], "pipeline_write": switches[1],
            "resident": resident, "durability": durability, "host_memory": MI}  # fmt: skip
    try:
        AdamW(params, swap=swap).close()
    except ConfigError as error:
        swap["host_memory"] = least_named(error)
        assert swap["host_memory"] > MI
    with AdamW(params, swap=swap) as opt:
        step(opt, params, 3)
        assert opt.plan.minimum_host_memory <= swap["host_memory"]
        for param in params:
            assert all(torch.isfinite(value).all() for value in opt.state_of(param).values())


def test_added_parameters_stay_in_ram_while_they_fit(tmp_path):
    params = parameters(MI)
    with AdamW(params, swap={"path": tmp_path, "host_memory": "40MiB"}) as opt:
        more = parameters(2 * MI)
        opt.add_param_group({"params": more})
        assert opt.plan.resident == (0, 1)
        step(opt, params + more)
        assert opt.stats()["write_bytes"] == 0
        large = parameters(4 * MI)
        with pytest.raises(ConfigError, match="hold their state in RAM") as caught:
            opt.add_param_group({"params": large})
        assert len(opt.param_groups) == 2
        step(opt, params + more)
    swap = {"path": tmp_path, "host_memory": least_named(caught.value)}
    with AdamW(params, swap=swap) as opt:
        for group in (more, large):
            opt.add_param_group({"params": group})
        step(opt, params + more + large, 2)
        assert opt.stats()["read_bytes"] == 0


def test_added_parameters_are_streamed_when_they_do_not_fit(tmp_path):
    params = parameters(4 * MI)
    swap = {"path": tmp_path, "host_memory": "24MiB", "sub_group_numel": 2 * MI}
    with AdamW(params, swap=swap) as opt:
        more = parameters(3 * MI)
        opt.add_param_group({"params": more})
        step(opt, params + more, 3)
        read, written = moved(opt, params + more, 2)
        assert read > 0
        assert read == pytest.approx(2 * opt.plan.read_bytes, abs=2 * opt.plan.buffer_bytes)
        assert written == pytest.approx(2 * opt.plan.write_bytes, abs=2 * opt.plan.buffer_bytes)


def test_describe_and_stats(tmp_path):
    params = parameters(3 * MI, dtype=torch.bfloat16) + parameters(MI)
    swap = {"path": tmp_path, "host_memory": "24MiB", "read_bandwidth": "1GB/s",
            "write_bandwidth": "1GB/s", "mixed_bandwidth": "1GB/s"}  # fmt: skip
    with AdamW(params, swap=swap) as opt:
        step(opt, params, 3)
        text = opt.describe()
        for word in ("bfloat16", "split", "float32", "param", "storage", "host memory", "bound by"):
            assert word in text
        stats = opt.stats()
        assert all(isinstance(value, int | float) for value in stats.values())
        assert stats["predicted_step_seconds"] == opt.plan.time.step > 0
        for name in ("device_share", "prediction_ratio", "read_gb_per_second",
                     "write_gb_per_second", "checksum_seconds", "compute_seconds",
                     "cached_bytes", "written_bytes_per_day", "stall_seconds"):  # fmt: skip
            assert stats[name] > 0, name
    with AdamW(params, swap=None) as opt:
        step(opt, params)
        assert opt.stats()["read_gb_per_second"] == opt.stats()["device_share"] == 0
        assert "RAM" in opt.describe()
