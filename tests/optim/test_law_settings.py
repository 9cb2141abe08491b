# SPDX-License-Identifier: Apache-2.0
"""Law 1 under every setting: they change where bytes are and when they move, never a bit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from support.training import assert_same, make_parameters, snapshot, swap_of, train
from swapio.errors import ConfigError
from swapio.optim import AdamW, kernels
from swapio.residency import tag_resident

SIZES = [1, 7, 4097, 700_001, (600, 999)]
NAMES = ["a.bias", "b", "c", "embed.weight", "head.weight"]


def resident(dtype):
    params = make_parameters(SIZES, dtype)
    opt = AdamW(params, lr=0.01)
    train(opt, params, 4)
    return snapshot(opt, params)


@pytest.fixture(scope="module")
def expected():
    return {dtype: resident(dtype) for dtype in (torch.float32, torch.bfloat16)}


SETTINGS = {
    "odd sub-groups": {"sub_group_numel": 100_003},
    "tiny sub-groups": {"sub_group_numel": 65_536, "host_memory": "9MiB"},
    "one sub-group": {"sub_group_numel": 1 << 24},
    "small ones stay": {"min_swap_bytes": 1 << 22, "host_memory": "17MiB"},
    "resident by state": {"resident": ["exp_avg"], "host_memory": "17MiB"},
    "resident by pattern": {"resident": ["embed*:exp_avg_sq", "b:*"], "host_memory": "17MiB"},
    "resident masters": {"resident": ["*:master"], "host_memory": "17MiB"},
    "one thread": {"cpu_threads": 1},
    "two threads": {"cpu_threads": 2},
    "thread engine": {"engine": "threads", "queue_depth": 2},
    "buffered": {"direct": "off"},
    "small blocks": {"block_size": 65536, "queue_depth": 3},
    "no checksums": {"checksum": False},
    "no spare slots": {"spare_slots": 0},
    "step": {"durability": "step", "host_memory": "20MiB"},
    "chunks": {"chunk_numel": 1 << 19, "host_memory": "17MiB"},
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_no_bit(tmp_path, expected, name, dtype):
    params = make_parameters(SIZES, dtype)
    more = {"host_memory": "9MiB" if dtype is torch.float32 else "17MiB", **SETTINGS[name]}
    if dtype is torch.bfloat16 and more["host_memory"] == "9MiB":
        more["host_memory"] = "17MiB"
    swap = swap_of("pipelined", tmp_path, **more)
    with AdamW(list(zip(NAMES, params, strict=True)), lr=0.01, swap=swap) as opt:
        train(opt, params, 4)
        assert_same(snapshot(opt, params), expected[dtype])
    kernels.set_threads(kernels.default_num_threads())


@pytest.mark.parametrize("way", ["tag_resident", "swappable"])
def test_tagged_tensors_stay_and_change_no_bit(tmp_path, expected, way):
    params = make_parameters(SIZES)
    if way == "swappable":
        params[3].swappable = False
    else:
        tag_resident(params[3])
    with AdamW(params, lr=0.01, swap=swap_of("pipelined", tmp_path, host_memory="13MiB")) as opt:
        train(opt, params, 2)
        before = opt.stats()["read_bytes"]
        opt.state[params[3]]["exp_avg"]
        assert opt.stats()["read_bytes"] == before
        train(opt, params, 2, first=3)
        assert_same(snapshot(opt, params), expected[torch.float32])


_LEVEL = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from support.training import make_parameters, snapshot, swap_of, train
from swapio.optim import AdamW
sizes = [1, 7, 4097, 700_001, (600, 999)]
for dtype in (torch.float32, torch.bfloat16):
    params = make_parameters(sizes, dtype)
    swap = swap_of("pipelined", sys.argv[1], host_memory="17MiB")
    with AdamW(params, lr=0.01, swap=swap) as opt:
        train(opt, params, 4)
        torch.save(snapshot(opt, params), f"{sys.argv[1]}/{dtype}.pt")
"""


@pytest.mark.parametrize("level", ["scalar", pytest.param("avx2", marks=pytest.mark.slow)])
def test_simd_levels_change_no_bit(tmp_path, expected, level):
    if level not in kernels.simd_levels():
        pytest.skip(f"this processor has no {level}")
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    done = subprocess.run(
        (sys.executable, "-c", _LEVEL, str(tmp_path), tests),
        env={**os.environ, "SWAPIO_SIMD": level},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for dtype, values in expected.items():
        assert_same(torch.load(tmp_path / f"{dtype}.pt"), values)


SWEEP = {
    "mode": [(True, True), (False, False), (True, False)],
    "resident": [(), ("exp_avg",), ("*:*",)],
    "min_swap_bytes": [0, 1 << 20, 1 << 40],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "master": ["auto", "param", "split", "separate", "none"],
    "host_memory": ["2MiB", "20MiB"],
    "durability": ["checkpoint", "step"],
    "state_dtype": ["float32", "bfloat16"],
}


def test_every_combination_works_or_is_refused(tmp_path):
    """DeepSpeed#1035, #1543: half-configured combinations crashed deep inside."""
    combinations = list(itertools.product(*SWEEP.values()))
    chosen = combinations[:: len(combinations) // 100 | 1]
    outcomes = {"works": 0, "refused": 0}
    for number, values in enumerate(chosen):
        settings = dict(zip(SWEEP, values, strict=True))
        read, write = settings.pop("mode")
        dtype = settings.pop("dtype")
        params = make_parameters([300_000, 5], dtype)
        swap = {
            "path": tmp_path / str(number),
            "pipeline_read": read,
            "pipeline_write": write,
            "sub_group_numel": 200_000,
            "spare_slots": 0,
            **settings,
        }
        try:
            opt = AdamW(params, swap=swap)
        except ConfigError:
            outcomes["refused"] += 1
            continue
        before = params[0].detach().clone()
        with opt:
            train(opt, params, 1)
            opt.synchronize()
            assert int(opt.state[params[0]]["step"]) == 1
        assert not torch.equal(before, params[0])
        outcomes["works"] += 1
    assert min(outcomes.values()) >= 10, outcomes
