# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of some ranks is loaded by another number of them, and training goes on."""

from __future__ import annotations

import pytest
import torch

from support.zero_cases import committed_steps, save_or_load

SHAPES = [(17, 33), (3,), (300, 700), (40, 30)]


def same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("muon", "before", "after"),
    [(False, (2, 1), (3, 2)), (True, (3, 2), (2, 1)), (True, (1, 1), (4, 2))],
)
def test_state_moves_between_world_sizes(ranks, tmp_path, muon, before, after) -> None:
    """Every rank has the same gradients here, so the number of ranks does not matter."""
    swap = {"path": str(tmp_path / "swap"), "host_memory": "16MiB", "min_swap_bytes": 0}
    common = {"shapes": SHAPES, "folder": str(tmp_path / "checkpoints"), "muon": muon}
    (world_size, stage), (new_world_size, new_stage) = before, after
    saved = ranks.run(
        save_or_load, world_size, stage=stage, swap=swap, steps=2, load=False, save=True, **common
    )
    loaded = ranks.run(
        save_or_load,
        new_world_size,
        stage=new_stage,
        swap=None,
        steps=2,
        load=True,
        save=False,
        **common,
    )
    whole = ranks.run(
        save_or_load,
        1,
        stage=1,
        swap=None,
        steps=4,
        load=False,
        save=False,
        **{**common, "folder": str(tmp_path / "none")},
    )
    for params, state, at_load in loaded:
        same(at_load, saved[0][1])
        for mine, wanted in zip(params, whole[0][0], strict=True):
            assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-5)
        assert all(entry["step"] == 4 for entry in state)


@pytest.mark.parametrize("muon", [False, True])
def test_steps_are_resumed_by_the_same_ranks(ranks, tmp_path, muon) -> None:
    """A shard's slots hold its parameters too: whole parameters come back on every rank."""
    swap = {
        "path": str(tmp_path / "swap"),
        "host_memory": "24MiB",
        "min_swap_bytes": 0,
        "durability": "step",
    }
    common = {"stage": 2, "shapes": SHAPES, "muon": muon}
    first = ranks.run(committed_steps, 2, swap=swap, steps=2, resume=False, **common)
    resumed = ranks.run(committed_steps, 2, swap=swap, steps=2, resume=True, **common)
    whole = ranks.run(committed_steps, 2, swap=None, steps=4, resume=False, **common)
    for mine, wanted in zip(resumed, whole, strict=True):
        same(mine[1], wanted[1])
        assert all(torch.equal(a, b) for a, b in zip(mine[0], wanted[0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(mine[2], first[0][0], strict=True))
