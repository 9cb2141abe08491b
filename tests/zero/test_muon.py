# SPDX-License-Identifier: Apache-2.0
"""Muon over ranks: whole matrices, whatever the shards, and one Newton-Schulz for each."""

from __future__ import annotations

import pytest
import torch
from oracles.muon import MuonReference, relative_error

from support.zero_cases import run_stage
from support.zero_training import alone, averaged, make
from swapio.optim import Muon

# Padded (17 x 33), tall, wide, a matrix of fewer elements than ranks, and what AdamW steps.
SHAPES = [(17, 33), (300, 40), (40, 300), (1, 3), (512, 600), (33,)]
NUM_MATRICES = 5
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


def oracle(world_size, training):
    """The matrices by the independent reference, without clipping and skipped steps."""
    params = make(SHAPES)
    matrices = [param.detach() for param in params if param.dim() == 2]
    reference = MuonReference(matrices, **SETTINGS)
    for step in range(1, training["steps"] + 1):
        grads = averaged(params, world_size, step, training["micros"])
        reference.step([grads[i] for i, param in enumerate(params) if param.dim() == 2])
    return matrices, reference.params


CASES = [
    # stage, world size, mode, micro-batches, dtype
    (1, 2, "pipelined", 1, torch.float32),
    (2, 2, "partitioned", 4, torch.bfloat16),
    (2, 3, "ram", 1, torch.float32),
    (2, 4, "pipelined", 1, torch.float32),
]


@pytest.mark.parametrize(("stage", "world_size", "mode", "micros", "dtype"), CASES)
def test_training_is_that_of_one_process(
    ranks, tmp_path, stage, world_size, mode, micros, dtype
) -> None:
    training = {
        "steps": 4,
        "micros": micros,
        "clip_on": (2, 4),
        "unused": {(2, 0, 1), *((3, rank, 2) for rank in range(world_size))},
        "overflow": {(3, world_size - 1, 0)} if micros == 1 else set(),
    }
    found = ranks.run(
        run_stage,
        world_size,
        stage=stage,
        shapes=SHAPES,
        mode=mode,
        folder=tmp_path,
        dtype=dtype,
        settings=SETTINGS,
        training=training,
        muon=True,
    )
    params, state, _ = alone(Muon, SHAPES, world_size, training, settings=SETTINGS, dtype=dtype)
    for rank in found:
        for index, (mine, wanted) in enumerate(zip(rank["params"], params, strict=True)):
            assert torch.equal(mine, wanted), f"parameter {index}"
        for mine, wanted in zip(rank["state"], state, strict=True):
            assert mine.keys() == wanted.keys()
            assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    skipped = 1 if training["overflow"] else 0
    matrices = NUM_MATRICES * (4 - skipped) - (0 if skipped else 1)  # one was unused in step 3
    assert sum(rank["stats"]["num_newton_schulz"] for rank in found) == matrices


def test_matrices_follow_the_definition(ranks, tmp_path) -> None:
    """Against a reference that shares no code, without clipping."""
    training = {"steps": 3, "micros": 2}
    settings = {**SETTINGS, "nonfinite": "propagate"}
    found = ranks.run(
        run_stage,
        3,
        stage=2,
        shapes=SHAPES,
        mode="ram",
        folder=tmp_path,
        settings=settings,
        training=training,
        muon=True,
    )
    initial, wanted = oracle(3, training)
    got = [param for param in found[0]["params"] if param.dim() == 2]
    for mine, expected, start in zip(got, wanted, initial, strict=True):
        assert relative_error(mine - start, expected - start) <= 1e-4
