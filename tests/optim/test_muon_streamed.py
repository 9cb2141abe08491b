# SPDX-License-Identifier: Apache-2.0
"""Muon with streamed and swapped gradients: fragments of all sizes, and the same bits."""

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

SHAPES = [(64, 64), (17, 33), (512, 512), (270, 1000), (500, 530), (600,), (5,)]
NUM_MUON = 5
# Fragments that go to storage: all, those of at least 1 MiB, none.
SWAPPED = {"large": 0, "mixed": 1 << 20, "small": 1 << 30}


def train(swap=None, *, dtype=torch.float32, micro_batches=1, bad=None, **kwargs):
    """Three steps from gradients that autograd makes, `bad` of which has an inf."""
    params = parameters(SHAPES, dtype)
    start = [param.detach().clone() for param in params]

    def make(setting):
        return build(params, setting, num_muon=NUM_MUON, **kwargs)

    with make(None) if swap is None else tight(make, {**SWAP, **swap}) as opt:
        rows = gradients(SHAPES, 3 * micro_batches, dtype)
        for at in range(3):
            for part in range(micro_batches):
                row = rows[at * micro_batches + part]
                if at == bad and part == micro_batches - 1:
                    row[2][3, 4] = float("inf")
                sum((p * g).sum() for p, g in zip(params, row, strict=True)).backward()
            opt.step()
            opt.zero_grad()
        return trained(opt, params, start)


@pytest.fixture(scope="module")
def in_ram():
    return {dtype: train(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_equals_kept(in_ram, dtype):
    assert_same(train(dtype=dtype, gradients="stream"), in_ram[dtype])


@pytest.mark.parametrize("mode", ["partitioned", "pipelined"])
@pytest.mark.parametrize("resident", [(), ("momentum_buffer",)])
@pytest.mark.parametrize("swapped", [None, "mixed"])
def test_momentum_and_gradients_may_each_be_swapped_or_not(
    tmp_path, in_ram, mode, resident, swapped
):
    swap = {"path": tmp_path, "resident": resident, **MODES[mode]}
    if swapped is not None:
        swap |= {"swap_gradients": True, "min_swap_bytes": SWAPPED[swapped]}
    run = train(swap, gradients="stream")
    assert_same(run, in_ram[torch.float32])
    assert run.stats["num_newton_schulz"] == 3 * NUM_MUON


@pytest.mark.parametrize("swapped", SWAPPED)
@pytest.mark.parametrize("mode", ["partitioned", "pipelined"])
def test_fragments_of_every_size_reach_the_update(tmp_path, in_ram, mode, swapped):
    swap = {
        "path": tmp_path,
        "swap_gradients": True,
        "min_swap_bytes": SWAPPED[swapped],
        **MODES[mode],
    }
    assert_same(train(swap, dtype=torch.bfloat16, gradients="stream"), in_ram[torch.bfloat16])


@pytest.mark.parametrize("swapped", [None, "mixed"])
def test_micro_batches_are_one_step(tmp_path, swapped):
    """DeepSpeed#8443, with gradients that leave p.grad after each backward."""
    kept = train(micro_batches=2)
    swap = {"path": tmp_path}
    if swapped is not None:
        swap |= {"swap_gradients": True, "min_swap_bytes": SWAPPED[swapped]}
    run = train(swap, micro_batches=2, gradients="stream")
    assert_same(run, kept)
    assert run.stats["num_newton_schulz"] == 3 * NUM_MUON


@pytest.mark.parametrize("swapped", [None, "mixed", "large"])
def test_a_skipped_step_drops_the_gradients_and_nothing_else(tmp_path, swapped):
    swap = {"path": tmp_path}
    if swapped is not None:
        swap |= {"swap_gradients": True, "min_swap_bytes": SWAPPED[swapped]}
    run = train(swap, bad=1, nonfinite="skip", gradients="stream")
    kept = train(bad=1, nonfinite="skip")
    assert_same(run, kept)
    assert run.stats["num_newton_schulz"] == 2 * NUM_MUON
