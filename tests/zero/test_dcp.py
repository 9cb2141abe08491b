# SPDX-License-Identifier: Apache-2.0
"""FSDP2's parameters through DCP and through swapio's checkpoints: every rank's values compared."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.dcp_cases import run

SHAPES = [(17, 33), (300, 40), (1, 300), (512, 600), (33,), (2,)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUICK = [("float32", 2, 3), ("bfloat16", 3, 2)]


def cases():
    """Every dtype and pair of world sizes; most are slow."""
    for case in itertools.product(DTYPES, (1, 2, 3), (1, 2, 3)):
        yield pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("dtype", "saved", "loaded"), list(cases()))
def test_what_some_ranks_saved_others_load(ranks, tmp_path, dtype, saved, loaded) -> None:
    common = {"shapes": SHAPES, "dtype": DTYPES[dtype], "folder": tmp_path}
    first = ranks.run(run, saved, how="save", **common)
    state, params = first[0]
    assert any(entry["exp_avg"].any() for entry in state)
    for how in ("plain", "streamed", "own"):
        for found, weights in ranks.run(run, loaded, how=how, **common):
            for mine, wanted in zip(found, state, strict=True):
                assert mine.keys() == wanted.keys()
                for name, value in wanted.items():
                    assert torch.equal(mine[name], value), (how, name)
            if how == "own" or dtype == "bfloat16":  # a master sets its parameter too
                for mine, wanted in zip(weights, params, strict=True):
                    assert torch.equal(mine, wanted)
