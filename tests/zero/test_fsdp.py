# SPDX-License-Identifier: Apache-2.0
"""Stage 3: AdamW and Muon step what FSDP2 has sharded, uneven and empty row blocks included."""

from __future__ import annotations

import pytest
import torch

from support.zero_cases import export_rows, run_fsdp
from support.zero_training import alone, make
from swapio.optim import AdamW, Muon

SHAPES = [(17, 33), (300, 40), (1, 300), (512, 600), (33,), (2,)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("muon", "world_size", "mode", "micros"),
    [
        (False, 2, "pipelined", 4),
        (False, 4, "ram", 1),
        (True, 2, "ram", 1),
        (True, 3, "pipelined", 4),
    ],
)
def test_training_is_that_of_one_process(ranks, tmp_path, muon, world_size, mode, micros) -> None:
    training = {
        "steps": 4,
        "micros": micros,
        "clip_on": (2, 4),
        "unused": {(3, rank, 1) for rank in range(world_size)},
        "overflow": {(3, world_size - 1, 0)} if micros == 1 else set(),
    }
    found = ranks.run(
        run_fsdp,
        world_size,
        shapes=SHAPES,
        mode=mode,
        folder=tmp_path,
        settings=SETTINGS,
        training=training,
        muon=muon,
    )
    kind = Muon if muon else AdamW
    params, state, norm = alone(kind, SHAPES, world_size, training, settings=SETTINGS)
    initial = make(SHAPES)
    bound = 1e-4 if muon else 1e-5
    for rank in found:
        assert rank["norm"] == pytest.approx(norm, rel=1e-6)
        for index, (mine, wanted) in enumerate(zip(rank["params"], params, strict=True)):
            assert torch.equal(mine, found[0]["params"][index])
            moved = wanted.double() - initial[index].detach().double()
            error = (mine.double() - wanted.double()).norm()
            assert error <= bound * moved.norm() + 2**-23 * wanted.norm(), f"parameter {index}"
        assert all(rank["kept"])
        for mine, wanted in zip(rank["state"], state, strict=True):
            assert mine.keys() == wanted.keys()
            for name, value in mine.items():
                assert torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-6)
    assert any(rank["local"][2] == 0 for rank in found)  # one row: an empty shard
    if muon:
        skipped = bool(training["overflow"])
        total = sum(rank["stats"]["num_newton_schulz"] for rank in found)
        assert total == (12 if skipped else 15)


def test_an_export_is_refused_on_every_rank(ranks, tmp_path) -> None:
    """Of one row the first rank has all: it exported alone, while the others raised."""
    for error in ranks.run(export_rows, 2, folder=tmp_path):
        assert "ranks have parts only of param.0" in error
    assert not list(tmp_path.iterdir())
