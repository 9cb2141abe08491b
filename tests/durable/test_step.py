# SPDX-License-Identifier: Apache-2.0
"""Durability "step": what a killed run committed is continued from, bit for bit."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from support.trainer import KilledRun, assert_same, reference, run_child
from support.trainer_child import everything, make_params, train
from swapio.errors import CheckpointError, ConfigError
from swapio.optim import AdamW

SIZES = [(5,), (300, 1000), (1_200_001,), (1,), (64, 64)]
SMALL = {
    "sub_group_numel": 1 << 18,
    "chunk_numel": 1 << 18,
    "min_swap_bytes": 0,
    "host_memory": "11MiB",
    "cpu_threads": 1,
}
SWAPPERS = {
    "pipelined": {},
    "partitioned": {"pipeline_read": False, "pipeline_write": False},
    "all-resident": {"host_memory": "64MiB"},
    "one-resident": {"resident": ["exp_avg"], "host_memory": "16MiB"},
}
FORMS = [
    ("float32", "param"),
    ("bfloat16", "split"),
    ("bfloat16", "separate"),
    ("float16", "separate"),
    ("bfloat16", "none"),
]


def settings(path, durability="step", **more):
    return {"path": str(path), "durability": durability, **SMALL, **more}


def cases():
    """Every form with the pipelined swapper, every swapper with two forms; the rest is slow."""
    for swapper in SWAPPERS:
        for dtype, master in FORMS:
            is_quick = swapper == "pipelined" or master == "split"
            yield pytest.param(swapper, dtype, master, marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize(("swapper", "dtype", "master"), list(cases()))
@pytest.mark.filterwarnings("ignore:.*master='none'.*")
def test_a_crash_is_continued_bit_for_bit(tmp_path, swapper, dtype, master):
    """The process goes on in this one: leaving files locked is what a kill does too."""
    swap = settings(tmp_path, master=master, **SWAPPERS[swapper])
    expected = reference(SIZES, dtype, 5, master)
    params = make_params(SIZES, getattr(torch, dtype))
    first = AdamW(named(params), lr=1.0, swap=swap)
    train(first, params, 1, 3)
    first.synchronize()
    first.close()
    params = make_params(SIZES, getattr(torch, dtype))
    with AdamW(named(params), lr=1.0, swap=swap, resume=True) as second:
        assert second.recovered_step == 3
        assert second.commit_payload == b"after 3"
        assert second.param_groups[0]["tag"] == {"step": 3}
        train(second, params, 4, 5)
        assert_same(everything(second, params), expected)


def named(params):
    return [(f"p{i}", param) for i, param in enumerate(params)]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["step", "power"])
def test_kill_at_random_points_of_steps_and_commits(tmp_path, durability):
    random_source = random.Random(5)
    dump = tmp_path / "end.pt"
    job = {
        "swap": settings(tmp_path / "swap", durability),
        "sizes": SIZES,
        "steps": 40,
        "resume": True,
        "dump": str(dump),
        "dtype": "bfloat16",
    }
    last = 0
    for _ in range(4):
        with KilledRun(job) as run:
            run.wait_for("ready")
            first = run.last_number
            assert first >= last - 2, "a step that was committed before is lost"
            run.kill_after(random_source.uniform(0.0, 0.4))
            last = run.last_number
    run_child({**job, "steps": max(last, 3) + 1})
    steps = max(last, 3) + 1
    assert_same(torch.load(dump), reference(SIZES, "bfloat16", steps, "split"))


def test_recover_goes_back_to_the_last_commit(tmp_path):
    params = make_params(SIZES, torch.bfloat16)
    with AdamW(named(params), lr=1.0, swap=settings(tmp_path)) as opt:
        train(opt, params, 1, 2)
        with torch.no_grad():
            params[1].zero_()
        opt.param_groups[0]["lr"] = 7.0
        assert opt.recover() == 2
        assert_same(everything(opt, params), reference(SIZES, "bfloat16", 2, "split"))
        train(opt, params, 3, 4)
        assert_same(everything(opt, params), reference(SIZES, "bfloat16", 4, "split"))


def test_a_commit_outlives_a_start_without_resume(tmp_path, caplog):
    params = make_params(SIZES, torch.float32)
    with AdamW(named(params), lr=1.0, swap=settings(tmp_path)) as opt:
        train(opt, params, 1, 2)
    params = make_params(SIZES, torch.float32)
    with (
        caplog.at_level(logging.WARNING, "swapio"),
        AdamW(named(params), lr=1.0, swap=settings(tmp_path)) as opt,
    ):
        assert "resume=True" in caplog.text
        assert float(opt.state[params[0]]["step"]) == 0
        assert opt.recover() == 2
        assert_same(everything(opt, params), reference(SIZES, "float32", 2, "param"))


def test_parameters_that_were_never_stepped_are_the_users(tmp_path):
    params = make_params(SIZES, torch.float32)
    with AdamW(named(params), lr=1.0, swap=settings(tmp_path)) as opt:
        params[0].grad = torch.ones_like(params[0])
        opt.step()
    params = make_params(SIZES, torch.float32)
    with torch.no_grad():
        params[1].fill_(3)
    with AdamW(named(params), lr=1.0, swap=settings(tmp_path), resume=True) as opt:
        assert opt.recovered_step == 1
        assert (params[1] == 3).all()
        assert float(opt.state[params[0]]["step"]) == 1


def test_other_parameters_are_refused(tmp_path):
    params = make_params(SIZES, torch.float32)
    with AdamW(named(params), swap=settings(tmp_path)) as opt:
        train(opt, params, 1, 1)
    others = make_params([(5,), (1000, 300), (1_200_001,), (1,), (64, 64)], torch.float32)
    with pytest.raises(CheckpointError, match="other parameters"):
        AdamW(named(others), swap=settings(tmp_path), resume=True)
    smaller = make_params(SIZES[:3], torch.float32)
    with pytest.raises(CheckpointError, match="other sub-groups"):
        AdamW(named(smaller), swap=settings(tmp_path), resume=True)


def test_resume_needs_commits(tmp_path):
    params = make_params(SIZES, torch.float32)
    with pytest.raises(ConfigError, match="durability='step'"):
        AdamW(params, swap=settings(tmp_path, "checkpoint"), resume=True)
    with pytest.raises(ConfigError, match="durability='step'"):
        AdamW(params, resume=True)


def test_resume_of_nothing_starts_anew(tmp_path):
    params = make_params(SIZES, torch.float32)
    with AdamW(named(params), lr=1.0, swap=settings(tmp_path), resume=True) as opt:
        assert opt.recovered_step is None
        train(opt, params, 1, 1)
        assert_same(everything(opt, params), reference(SIZES, "float32", 1, "param"))


def test_nothing_is_copied_between_slots(tmp_path):
    params = make_params([(3 << 20,)], torch.float32)
    with AdamW(params, swap=settings(tmp_path, sub_group_numel=1 << 22)) as opt:
        for _ in range(3):
            params[0].grad = torch.ones_like(params[0])
            opt.step()
        opt.synchronize()
        stats = opt.stats()
        assert stats["bytes_copied"] == 0
        assert stats["num_commits"] == 3
        assert stats["commit_seconds"] > 0


@pytest.mark.parametrize("value", ["text", 5, None, [1]])
def test_a_payload_that_is_not_bytes_is_refused_at_once(value):
    with AdamW(make_params([(5,)], torch.float32)) as opt:
        opt.commit_payload = bytearray(b"before")
        with pytest.raises(TypeError, match="must be bytes"):
            opt.commit_payload = value
        assert opt.commit_payload == b"before"
