# SPDX-License-Identifier: Apache-2.0
"""Several ranks against references that share no code with the product."""

from __future__ import annotations

import pytest
from oracles.muon import MuonReference, relative_error

from support.zero_cases import export_rows, run_stage
from support.zero_training import alone_by_torch, averaged, make

SHAPES = [(17, 33), (300, 40), (40, 300), (1, 3), (320, 480), (33,), (3,), (1,), (500_001,)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adamw_is_torchs(ranks, tmp_path, stage) -> None:
    """torch's AdamW and clip_grad_norm_, of which swapio has nothing."""
    training = {"steps": 4, "micros": 2, "clip_on": (2, 4)}
    found = run(ranks, tmp_path, training, stage=stage, rule="adamw", mode="pipelined")
    wanted = alone_by_torch(SHAPES, 3, settings=SETTINGS, **training)
    for mine, theirs, initial in zip(found, wanted, make(SHAPES), strict=True):
        moved = (theirs.double() - initial.double()).norm()
        assert (mine.double() - theirs.double()).norm() <= 1e-5 * moved + 2**-23 * theirs.norm()


@pytest.mark.parametrize("stage", [2, 3])
def test_muon_follows_its_definition(ranks, tmp_path, stage) -> None:
    """Plain torch, fp32, without clipping."""
    training = {"steps": 3, "micros": 2}
    found = run(ranks, tmp_path, training, stage=stage, rule="muon", mode="ram")
    params = make(SHAPES)
    initial = [param.detach() for param in params if param.dim() == 2]
    reference = MuonReference(initial, **SETTINGS)
    for step in range(1, 4):
        grads = averaged(params, 3, step, training["micros"])
        reference.step([grads[i] for i, param in enumerate(params) if param.dim() == 2])
    got = [param for param in found if param.dim() == 2]
    for mine, wanted, start in zip(got, reference.params, initial, strict=True):
        assert relative_error(mine - start, wanted - start) <= 1e-4


def run(ranks, folder, training, **more):
    """Train on three ranks and return the parameters of the first."""
    common = {"shapes": SHAPES, "folder": folder, "settings": SETTINGS, "training": training}
    return ranks.run(run_stage, 3, **common, **more)[0]["params"]


def test_an_export_is_refused_on_every_rank(ranks, tmp_path) -> None:
    """Of one row the first rank has all: it exported alone, while the others raised."""
    for error in ranks.run(export_rows, 2, folder=tmp_path):
        assert "ranks have parts only of param.0" in error
    assert not list(tmp_path.iterdir())
