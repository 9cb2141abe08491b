# SPDX-License-Identifier: Apache-2.0
"""Muon for parameters on a GPU: momentum and master in RAM or on storage, products on the GPU."""

from __future__ import annotations

import pytest
import torch
from oracles.muon import MuonReference, relative_error

from support.muon_training import MODES, gradients
from swapio.optim import Muon

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPES = [(600, 600), (64, 64), (17, 33), (1040, 256), (256, 1100), (4, 96, 128), (600,)]
NUM_MUON = 6
SMALL = {"sub_group_numel": 1 << 20, "min_swap_bytes": 0, "host_memory": "128MiB"}


def train(device, *, dtype=torch.bfloat16, steps=3, spoiled=None, **kwargs):
    """Updates of the masters, weights on the CPU, state, and stats."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) / 8 for shape in SHAPES]
    params = [torch.nn.Parameter(value.to(dtype).to(device)) for value in made]
    start = [value.to(dtype).float().clone() for value in made]
    groups = [
        {"params": params[:NUM_MUON]},
        {"params": params[NUM_MUON:], "use_muon": False, "lr": 1e-3},
    ]
    with Muon(groups, lr=0.02, **kwargs) as opt:
        for at, row in enumerate(gradients(SHAPES, steps, dtype)):
            if at == spoiled:
                row[3][5, 7] = float("nan")
            loss = sum(
                (param * grad.to(device)).sum(dtype=torch.float32)
                for param, grad in zip(params, row, strict=True)
            )
            loss.backward()
            opt.step()
            opt.zero_grad()
        states = [{k: v.clone() for k, v in opt.state_of(param).items()} for param in params]
        stats = opt.stats()
    weights = [param.detach().cpu() for param in params]
    finals = [s.get("master", w).float() for s, w in zip(states, weights, strict=True)]
    return [f - s for f, s in zip(finals, start, strict=True)], weights, states, stats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", ["keep", "stream"])
@pytest.mark.parametrize("mode", [None, "partitioned", "pipelined"])
def test_agrees_with_the_cpu(tmp_path, dtype, how, mode):
    swap = {"master": "separate"}
    if mode is not None:
        swap |= {**SMALL, **MODES[mode], "path": tmp_path}
    expected = train("cpu", dtype=dtype, swap={"master": "separate"}, ns_dtype=torch.float32)
    for ns_dtype, bound in ((torch.float32, 1e-4), (None, 5e-2)):
        got = train("cuda", dtype=dtype, swap=swap, gradients=how, ns_dtype=ns_dtype)
        assert got[3]["num_newton_schulz"] == expected[3]["num_newton_schulz"]
        for one, other in zip(got[0], expected[0], strict=True):
            assert relative_error(one, other) <= bound
        for one, other in zip(got[2][:NUM_MUON], expected[2], strict=False):
            assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
        for weight, state in zip(got[1], got[2], strict=True):
            assert torch.equal(weight, state["master"].to(dtype))


def test_agrees_with_the_reference():
    got = train("cuda", dtype=torch.float32, ns_dtype=torch.float32)[0]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) / 8 for shape in SHAPES[:NUM_MUON]]
    reference = MuonReference(start, lr=0.02)
    for row in gradients(SHAPES, 3):
        reference.step(row[:NUM_MUON])
    for update, want, begin in zip(got, reference.params, start, strict=False):
        assert relative_error(update, want - begin) <= 1e-4


def test_state_anywhere_gives_the_same_bits(tmp_path):
    ram = train("cuda")
    for name, resident in (("a", ()), ("b", ("momentum_buffer",))):
        swap = {**SMALL, "path": tmp_path / name, "resident": resident}
        stored = train("cuda", swap=swap, gradients="stream")
        for one, other in zip(stored[1], ram[1], strict=True):
            assert torch.equal(one, other)


def test_a_skipped_step_leaves_everything(tmp_path):
    swap = {**SMALL, "path": tmp_path, "master": "separate"}
    got = train("cuda", swap=swap, spoiled=2, nonfinite="skip", gradients="stream")
    expected = train("cuda", steps=2, swap={"master": "separate"})
    for one, other in zip(got[2], expected[2], strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name
    assert got[3]["num_newton_schulz"] == expected[3]["num_newton_schulz"]


def test_parameters_that_are_not_contiguous():
    plain = torch.randn(96, 40, generator=torch.Generator().manual_seed(0))
    updates = []
    for twisted in (False, True):
        value = plain.cuda()
        param = torch.nn.Parameter(value.t().contiguous().t() if twisted else value)
        with Muon([param], lr=0.02, ns_dtype=torch.float32) as opt:
            (param * plain.flip(0).cuda()).sum().backward()
            opt.step()
        updates.append(param.detach().cpu() - plain)
    assert relative_error(updates[1], updates[0]) <= 1e-5
