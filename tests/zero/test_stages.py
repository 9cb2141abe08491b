# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1 and ZeRO-2 train as one process does, whatever the number of ranks and the shards."""

from __future__ import annotations

import pytest
import torch

from support.zero_cases import run_stage
from support.zero_training import alone, alone_by_torch, make
from swapio.optim import AdamW

# Padded last shard (17 x 33), an empty shard (3 elements on 4 ranks), one element, larger than a
# bucket, and something that is swapped.
SHAPES = [(17, 33), (3,), (1,), (300, 40), (600, 1024), (5,)]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


CASES = [
    # stage, world size, mode, micro-batches, options of ZeroOptimizer
    (1, 1, "ram", 1, {}),
    (1, 2, "pipelined", 4, {}),
    (2, 2, "partitioned", 1, {}),
    (2, 2, "ram", 4, {}),
    (1, 3, "ram", 1, {}),
    (2, 3, "pipelined", 4, {"accumulate": "shard"}),
    (2, 4, "ram", 1, {"accumulate": "shard"}),
    (1, 4, "partitioned", 4, {}),
]


@pytest.mark.parametrize(("stage", "world_size", "mode", "micros", "zero"), CASES)
def test_training_is_that_of_one_process(
    ranks, tmp_path, stage, world_size, mode, micros, zero
) -> None:
    training = {
        "steps": 4,
        "micros": micros,
        "clip_on": (2, 4),
        "unused": {(2, 0, 1), *((3, rank, 4) for rank in range(world_size))},
        "overflow": {(3, world_size - 1, 0)} if micros == 1 else set(),
    }
    found = ranks.run(
        run_stage,
        world_size,
        stage=stage,
        shapes=SHAPES,
        mode=mode,
        folder=tmp_path,
        settings=SETTINGS,
        zero=zero,
        training=training,
    )
    params, state, _ = alone(AdamW, SHAPES, world_size, training, settings=SETTINGS)
    initial = make(SHAPES)
    exact = (world_size <= 2 or stage == 2) and zero.get("accumulate") != "shard"
    for rank in found:
        for index, (mine, wanted) in enumerate(zip(rank["params"], params, strict=True)):
            assert torch.equal(mine, found[0]["params"][index])
            if exact:
                assert torch.equal(mine, wanted), f"parameter {index}"
            assert_moved_alike(mine, wanted, initial[index])
        for mine, wanted in zip(rank["state"], state, strict=True):
            assert mine.keys() == wanted.keys()
            assert torch.equal(mine["step"], wanted["step"])
            if exact:
                assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    check_shards([rank["local"] for rank in found], world_size)
    check_figures(found, mode, micros, zero)


def assert_moved_alike(mine, wanted, initial):
    """The bound of rescaled and sharded steps, norm-wise."""
    moved = wanted.double() - initial.detach().double()
    error = mine.double() - wanted.double()
    assert error.norm() <= 1e-5 * moved.norm() + 2**-23 * wanted.norm()


@pytest.mark.parametrize("stage", [1, 2])
def test_training_is_torchs(ranks, tmp_path, stage) -> None:
    """Against torch's AdamW and clip_grad_norm_, of which swapio has nothing."""
    training = {"steps": 4, "micros": 2, "clip_on": (2, 4)}
    common = {"shapes": SHAPES, "settings": SETTINGS}
    zero = {"stage": stage, "mode": "pipelined", "folder": tmp_path}
    found = ranks.run(run_stage, 3, **zero, **common, training=training)
    wanted = alone_by_torch(SHAPES, 3, settings=SETTINGS, **training)
    for rank in found:
        for mine, theirs, initial in zip(rank["params"], wanted, make(SHAPES), strict=True):
            assert_moved_alike(mine, theirs, initial)


def check_figures(found, mode, micros, zero):
    """State was swapped if it was to be; collectives were those of the plan."""
    for rank in found:
        stats = rank["stats"]
        assert (stats.get("bytes_read", 0) > 0) == (mode != "ram")
        cycles = 4 * (micros if zero.get("accumulate") == "shard" else 1)
        for name, count in rank["planned"].items():
            steps = cycles if name != "all_gather" else stats["num_steps"]
            assert stats[f"num_{name}"] == steps * count


def check_shards(local, world_size):
    """The cases above have what they claim to have: padding, an empty shard."""
    for index, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        assert sum(rank[index] for rank in local) == numel
    if world_size == 4:
        assert local[3][0] < local[0][0]
        assert local[3][1] == 0
