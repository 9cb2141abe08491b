# SPDX-License-Identifier: Apache-2.0
"""Muon's steps against the plain reference, and against themselves wherever the state lives."""

from __future__ import annotations

import pytest
import torch
from oracles.muon import MuonReference, relative_error

from support.muon_training import BIASES, MODES, SHAPES, assert_same, train


@pytest.fixture(scope="module")
def in_ram():
    return {dtype: train(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@pytest.mark.parametrize(
    ("adjust", "nesterov"), [(None, True), ("original", False), ("match_rms_adamw", True)]
)
def test_updates_equal_the_reference(adjust, nesterov):
    run = train(adjust_lr_fn=adjust, nesterov=nesterov)
    matrices = len(SHAPES)
    reference = MuonReference(run.start[:matrices], lr=0.02, adjust=adjust, nesterov=nesterov)
    for row in run.grads:
        reference.step(row[:matrices])
    for got, want, start in zip(run.updates(), reference.params, run.start, strict=False):
        assert relative_error(got, want - start) <= 1e-5


def test_the_auxiliary_group_is_adamw():
    run = train(steps=5)
    params = [start.clone().requires_grad_() for start in run.start[len(SHAPES) :]]
    reference = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, foreach=False)
    for row in run.grads:
        for param, grad in zip(params, row[len(SHAPES) :], strict=True):
            param.grad = grad
        reference.step()
    for got, want in zip(run.params[len(SHAPES) :], params, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resident", [(), ("momentum_buffer",)])
def test_swapped_equals_resident(tmp_path, in_ram, mode, resident):
    run = train({"path": tmp_path, "resident": resident, **MODES[mode]})
    assert_same(run, in_ram[torch.float32])
    assert (run.stats["write_bytes"] > 0) == (mode == "step" or not resident)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["partitioned", "pipelined"])
def test_swapped_equals_resident_in_half_precision(tmp_path, in_ram, mode, dtype):
    assert_same(train({"path": tmp_path, **MODES[mode]}, dtype=dtype), in_ram[dtype])


@pytest.mark.parametrize("form", ["split", "separate"])
@pytest.mark.parametrize("resident", [(), ("momentum_buffer",)])
def test_split_and_separate_masters_agree(tmp_path, in_ram, form, resident):
    swap = {"path": tmp_path, "master": form, "resident": resident}
    run = train(swap, dtype=torch.bfloat16)
    assert_same(run, in_ram[torch.bfloat16])
    for param, state in zip(run.params, run.states, strict=True):
        assert torch.equal(param, state["master"].bfloat16())


def test_each_matrix_is_orthogonalised_once_a_step(in_ram):
    assert in_ram[torch.float32].stats["num_newton_schulz"] == 3 * len(SHAPES)
    assert len(in_ram[torch.float32].states) == len(SHAPES) + len(BIASES)
