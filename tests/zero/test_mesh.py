# SPDX-License-Identifier: Apache-2.0
"""Stage 3 on other meshes: HSDP, where each shard has several owners, and what is refused."""

from __future__ import annotations

import pytest
import torch

from support.zero_mesh import load_alone, refuse_placements, run_hybrid
from support.zero_training import alone, make

SHAPES = [(17, 33), (300, 40), (1, 30), (33,), (2,)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
SWAP = {"host_memory": "16MiB", "min_swap_bytes": 0, "cpu_threads": 1}


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_copies_of_a_sharded_model_train_as_one_process(ranks, tmp_path, rule) -> None:
    training = {"steps": 3, "clip_on": (2, 3), "overflow": {(2, 3, 0)}}
    common = {"rule": rule, "shapes": SHAPES, "settings": SETTINGS}
    places = {"swap": {**SWAP, "path": str(tmp_path / "swap")}, "save": str(tmp_path / "saved")}
    found = ranks.run(run_hybrid, 4, training=training, **common, **places)
    params, state, norm = alone(rule, SHAPES, 4, training, settings=SETTINGS)
    bound = 1e-4 if rule == "muon" else 1e-5
    for rank in found:
        assert rank["norm"] == pytest.approx(norm, rel=1e-6)
        assert all(map(torch.equal, rank["params"], found[0]["params"]))
        for mine, wanted, initial in zip(rank["params"], params, make(SHAPES), strict=True):
            moved = (wanted.double() - initial.double()).norm()
            error = (mine.double() - wanted.double()).norm()
            assert error <= bound * moved + 2**-23 * wanted.norm()
        assert [entry["step"] for entry in rank["state"]] == [entry["step"] for entry in state]
    halves = [found[0]["local"][at] + found[1]["local"][at] for at in range(len(SHAPES))]
    assert halves == [torch.Size(shape).numel() for shape in SHAPES]
    assert found[0]["local"] == found[2]["local"]
    (loaded,) = ranks.run(load_alone, 1, folder=str(tmp_path / "saved"), **common)
    for mine, wanted in zip(loaded[0], found[0]["params"], strict=True):
        assert torch.equal(mine, wanted)
    for mine, wanted in zip(loaded[1], found[0]["state"], strict=True):
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_other_placements_are_refused_by_name(ranks) -> None:
    for found in ranks.run(refuse_placements, 2):
        for name in ("columns", "copies"):
            assert "weight is a DTensor placed" in found[name]
        for name in ("partial", "replicated"):
            assert "the gradient of weight is placed" in found[name]
            assert "Nothing was stepped" in found[name]
        assert not found["stepped"]
        assert found["works"]
