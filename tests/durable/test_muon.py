# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum and masters survive: save and load between modes, and resumed steps."""

from __future__ import annotations

import pytest
import torch

from support.muon_training import (
    MODES,
    SWAP,
    assert_same,
    build,
    gradients,
    parameters,
    tight,
    trained,
)

SHAPES = [(17, 33), (512, 512), (270, 1000), (300,), (5,)]
ROWS = gradients(SHAPES, 4)


def step(opt, params, rows):
    for row in rows:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.to(param.dtype)
        opt.step()


def make(params, swap):
    if swap is None:
        return build(params, None, num_muon=3)
    return tight(lambda setting: build(params, setting, num_muon=3), {**SWAP, **swap})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("partitioned", "pipelined"), ("pipelined", None), ("step", "partitioned")],
)
def test_a_checkpoint_is_loaded_in_another_mode(tmp_path, dtype, saved, loaded):
    first = parameters(SHAPES, dtype)
    start = [param.detach().clone() for param in first]
    with make(first, {"path": tmp_path / "a", **MODES[saved]}) as opt:
        step(opt, first, ROWS[:2])
        opt.save(tmp_path / "checkpoints", "two").result()
        step(opt, first, ROWS[2:])
        want = trained(opt, first, start)
    second = parameters(SHAPES, dtype, seed=7)
    swap = None if loaded is None else {"path": tmp_path / "b", **MODES[loaded]}
    with make(second, swap) as opt:
        opt.load(tmp_path / "checkpoints")
        assert [int(opt.state[param]["step"]) for param in second] == [2] * len(SHAPES)
        step(opt, second, ROWS[2:])
        assert_same(trained(opt, second, start), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_committed_steps_are_resumed(tmp_path, dtype):
    swap = {"path": tmp_path / "a", "namespace": "run", **SWAP, "durability": "step"}
    swap["host_memory"] = "24MiB"
    first = parameters(SHAPES, dtype)
    start = [param.detach().clone() for param in first]
    with build(first, swap, num_muon=3) as opt:
        step(opt, first, ROWS[:2])
        with torch.no_grad():
            first[0].zero_()
        assert opt.recover() == 2
    second = parameters(SHAPES, dtype, seed=7)
    with build(second, swap, num_muon=3, resume=True) as opt:
        assert opt.recovered_step == 2
        step(opt, second, ROWS[2:])
        got = trained(opt, second, start)
    third = parameters(SHAPES, dtype)
    with build(third, None, num_muon=3) as opt:
        step(opt, third, ROWS)
        assert_same(got, trained(opt, third, start))
