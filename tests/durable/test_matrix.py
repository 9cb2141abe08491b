# SPDX-License-Identifier: Apache-2.0
"""Resume in fresh processes: masters, swappers, RAM and storage, through checkpoints."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.trainer import assert_same, reference
from support.trainer_child import build, everything, train

SIZES = [(5,), (300, 1000), (1_200_001,), (64, 64)]
COMMON = {
    "sub_group_numel": 1 << 18,
    "min_swap_bytes": 0,
    "cpu_threads": 1,
    "chunk_numel": 1 << 18,
}
PLACES = {
    "ram": {},
    "pipelined": {"path": True, "host_memory": "11MiB"},
    "partitioned": {
        "path": True,
        "host_memory": "11MiB",
        "pipeline_read": False,
        "pipeline_write": False,
    },
    "threads": {"path": True, "host_memory": "11MiB", "engine": "threads", "durability": "step"},
}
FORMS = [("float32", "param"), ("bfloat16", "split"), ("bfloat16", "separate")]
ALL = list(itertools.product(FORMS, PLACES, PLACES))


def job_of(folder, place, dtype, master, **more):
    swap = {**COMMON, **PLACES[place], "master": master}
    swap["path"] = str(folder / f"swap-{place}") if swap.pop("path", False) else None
    return {"swap": swap, "sizes": SIZES, "dtype": dtype, **more}


def check(crashes, folder, form, source, target):
    dtype, master = form
    other = {"split": "separate", "separate": "split"}.get(master, master)
    saved, dump = folder / "c", folder / "end.pt"
    crashes.run(job_of(folder, source, dtype, master, steps=2, save_every=2, save=str(saved)))
    crashes.run(job_of(folder, target, dtype, other, steps=4, load=str(saved), dump=str(dump)))
    assert_same(torch.load(dump), reference(SIZES, dtype, 4, master))


@pytest.mark.parametrize(("form", "source", "target"), ALL[::7])
def test_a_fresh_process_goes_on_from_a_checkpoint(crashes, tmp_path, form, source, target):
    check(crashes, tmp_path, form, source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "source", "target"), ALL)
def test_every_pair(crashes, tmp_path, form, source, target):
    check(crashes, tmp_path, form, source, target)


MUON_SIZES = [(17, 33), (512, 512), (300,), (270, 1000)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("partitioned", "pipelined"),
        pytest.param("pipelined", "ram", marks=pytest.mark.slow),
        pytest.param("ram", "threads", marks=pytest.mark.slow),
    ],
)
def test_muon_goes_on_in_a_fresh_process(crashes, tmp_path, dtype, source, target):
    saved, dump = tmp_path / "c", tmp_path / "end.pt"
    common = {"muon": True, "sizes": MUON_SIZES}
    jobs = [
        job_of(tmp_path, place, dtype, "auto", **common, **more)
        for place, more in (
            (source, {"steps": 2, "save_every": 2, "save": str(saved)}),
            (target, {"steps": 4, "load": str(saved), "dump": str(dump)}),
        )
    ]
    for job in jobs:
        if job["swap"].get("path"):
            job["swap"]["host_memory"] = "48MiB"
        crashes.run(job)
    whole = job_of(tmp_path, "ram", dtype, "auto", **common)
    opt, params, *_ = build(whole)
    with opt:
        train(opt, params, 1, 4)
        assert_same(torch.load(dump), everything(opt, params))
