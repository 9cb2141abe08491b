# SPDX-License-Identifier: Apache-2.0
"""Resume in fresh processes: masters, swappers, RAM and storage, through checkpoints."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.crashes import Crashes
from support.trainer import assert_same, reference

SIZES = [(5,), (300, 1000), (2_600_000,), (64, 64)]
COMMON = {
    "sub_group_numel": 1 << 19,
    "min_swap_bytes": 0,
    "cpu_threads": 1,
    "chunk_numel": 1 << 18,
}
PLACES = {
    "ram": {},
    "pipelined": {"path": True, "host_memory": "19MiB"},
    "partitioned": {
        "path": True,
        "host_memory": "19MiB",
        "pipeline_read": False,
        "pipeline_write": False,
    },
    "threads": {"path": True, "host_memory": "19MiB", "engine": "threads", "durability": "step"},
}
FORMS = [("float32", "param"), ("bfloat16", "split"), ("bfloat16", "separate")]
ALL = list(itertools.product(FORMS, PLACES, PLACES))


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    with Crashes(tmp_path_factory.mktemp("matrix")) as server:
        yield server


def job_of(folder, place, dtype, master, **more):
    swap = {**COMMON, **PLACES[place], "master": master}
    if swap.pop("path", False):
        swap["path"] = str(folder / f"swap-{place}")
    else:
        swap["path"] = None
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
