# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at numbered operations of step, commit, save and load, and at random times.

After each kill the next process starts at once; what it finds must be a whole step, equal to the
uninterrupted run bit for bit, never older than what was told to be done.
"""

from __future__ import annotations

import random

import pytest
import torch

from support.crashes import last_number
from support.trainer import assert_same, reference
from support.trainer_child import everything, make_params, train
from swapio.aio import Engine
from swapio.checkpoint import list_checkpoints, verify_checkpoint
from swapio.optim import AdamW

SIZES = [(5,), (300, 1000), (1_500_000,), (64, 64)]
SWAP = {
    "sub_group_numel": 1 << 19,
    "min_swap_bytes": 0,
    "host_memory": "11MiB",
    "cpu_threads": 1,
    "chunk_numel": 1 << 18,
}


def job_of(folder, durability="step", **more):
    return {
        "swap": {"path": str(folder / "swap"), "durability": durability, **SWAP},
        "sizes": SIZES,
        "steps": 3,
        "dump": str(folder / "end.pt"),
        **more,
    }


def check_resume(crashes, job, at_least, at_most):
    """The next process continues from a committed step and ends where an unbroken run does."""
    steps = at_most + 1
    _, lines = crashes.run({**job, "kill": ["nothing", -1], "resume": True, "steps": steps})
    assert at_least <= last_number(lines, "ready") <= at_most
    assert_same(torch.load(job["dump"]), reference(SIZES, "float32", steps, "param"))


def points_of(total, count, seed):
    """The first and last operations, and others at random."""
    rest = random.Random(seed).sample(range(1, total - 1), max(0, min(total, count) - 2))
    return sorted({0, total - 1, *rest})


def count_operations(crashes, job, phase):
    _, lines = crashes.run({**job, "kill": [phase, -1]})
    return last_number(lines, "operations")


def kill_steps(crashes, tmp_path, durability, count):
    total = count_operations(crashes, job_of(tmp_path / "count", durability), "step")
    assert total > 10
    for number in points_of(total, count, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = job_of(folder, durability)
        was_killed, lines = crashes.run({**job, "kill": ["step", number]})
        # The number of operations differs a little from run to run: reads are batched.
        done = last_number(lines, "step")
        # With the default slots the commits of two steps may be on their way when the next begins.
        check_resume(crashes, job, max(0, done - 2) if was_killed else 3, min(3, done + 1))


@pytest.mark.parametrize("durability", ["step", "power"])
def test_kill_within_steps(crashes, tmp_path, durability):
    (tmp_path / "count").mkdir()
    kill_steps(crashes, tmp_path, durability, 4)


def check_checkpoints(folder, at_least):
    """Every checkpoint that is there is whole and right, and the latest is recent."""
    found = list_checkpoints(folder)
    assert max((manifest.step for _, manifest in found), default=0) >= at_least
    with Engine() as engine:
        for path, manifest in found:
            assert verify_checkpoint(path, manifest, engine) == []
    params = make_params(SIZES, torch.float32)
    with AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0) as opt:
        for path, manifest in found:
            opt.load(path)
            assert_same(
                everything(opt, params), reference(SIZES, "float32", manifest.step, "param")
            )
    return len(found)


def kill_saves(crashes, tmp_path, count, keep_last):
    common = {"durability": "checkpoint", "save_every": 1, "keep_last": keep_last}
    folder = tmp_path / "count"
    folder.mkdir()
    job = job_of(folder, **common, save=str(folder / "c"))
    total = count_operations(crashes, job, "save")
    for number in points_of(total, count, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = job_of(folder, **common, save=str(folder / "c"))
        _, lines = crashes.run({**job, "kill": ["save", number]})
        saved = last_number(lines, "saved")
        if check_checkpoints(folder / "c", saved):
            # The next run goes on from it, in the same folders, and cleans up.
            again = {**job, "load": str(folder / "c"), "kill": ["nothing", -1]}
            crashes.run({**again, "steps": 4})
            assert_same(torch.load(job["dump"]), reference(SIZES, "float32", 4, "param"))
            for path, manifest in list_checkpoints(folder / "c"):
                assert [p.name for p in path.glob("data-*")] == [manifest.data]


@pytest.mark.parametrize("keep_last", [None, 1])
def test_kill_within_saves(crashes, tmp_path, keep_last):
    kill_saves(crashes, tmp_path, 4, keep_last)


def kill_loads(crashes, tmp_path, count):
    params = make_params(SIZES, torch.float32)
    with AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0) as opt:
        train(opt, params, 1, 2)
        opt.save(tmp_path / "c")
    folder = tmp_path / "count"
    folder.mkdir()
    job = job_of(folder, load=str(tmp_path / "c"))
    total = count_operations(crashes, job, "load")
    for number in points_of(total, count, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = job_of(folder)
        crashes.run({**job, "steps": 1})
        crashes.run({**job, "resume": True, "load": str(tmp_path / "c"), "kill": ["load", number]})
        # Either what was committed before the load, or what was loaded.
        check_resume(crashes, job, 1, 3)


def test_kill_within_loads(crashes, tmp_path):
    kill_loads(crashes, tmp_path, 3)


def kill_at_random(crashes, tmp_path, count, durability, seed):
    generator = random.Random(seed)
    folder = tmp_path / durability
    folder.mkdir()
    job = job_of(folder, durability, save_every=2, keep_last=2, save=str(folder / "c"), resume=True)
    job["steps"] = 100_000
    known = 0
    for turn in range(count):
        _, lines = crashes.run(job, kill_after=generator.uniform(0, 0.6))
        assert last_number(lines, "ready") >= known - 2, f"seed {seed}, turn {turn}"
        known = last_number(lines, "ready", "step")
    check_checkpoints(folder / "c", 0)
    if known < 400:
        check_resume(crashes, job, max(0, known - 2), known + 1)


@pytest.mark.parametrize("durability", ["step"])
def test_kill_at_random_times(crashes, tmp_path, durability):
    kill_at_random(crashes, tmp_path, 4, durability, 7)


# Tests of their own: one process would be busy with all of them for the better part of an hour.
@pytest.mark.slow
@pytest.mark.parametrize(("durability", "count"), [("step", 50), ("power", 30)])
def test_kill_at_many_points_of_steps(crashes, tmp_path, durability, count):
    (tmp_path / "count").mkdir()
    kill_steps(crashes, tmp_path, durability, count)


@pytest.mark.slow
@pytest.mark.parametrize("keep_last", [None, 1])
def test_kill_at_many_points_of_saves(crashes, tmp_path, keep_last):
    kill_saves(crashes, tmp_path, 40, keep_last)


@pytest.mark.slow
def test_kill_at_many_points_of_loads(crashes, tmp_path):
    kill_loads(crashes, tmp_path, 30)


@pytest.mark.slow
@pytest.mark.parametrize(("durability", "seed"), [("step", 0), ("power", 1)])
def test_kill_at_many_random_times(crashes, tmp_path, durability, seed):
    kill_at_random(crashes, tmp_path, 30, durability, seed)
