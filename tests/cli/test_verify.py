# SPDX-License-Identifier: Apache-2.0
"""swapio verify and swapio inspect, on checkpoints and on what runs left."""

from __future__ import annotations

import json

import pytest
import torch

from swapio.cli import main
from swapio.optim import AdamW


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of step 1, and a run with step 2 committed."""
    root = tmp_path_factory.mktemp("verify")
    param = torch.nn.Parameter(torch.ones(700_000))
    swap = {"path": str(root / "swap"), "durability": "step", "min_swap_bytes": 0}
    with AdamW([("w", param)], swap=swap) as opt:
        for _ in range(2):
            param.grad = torch.ones(700_000)
            opt.step()
            if opt.stats()["num_steps"] == 1:
                opt.save(root / "c", "one")
    return root


def run(capsys, *args):
    status = main(list(args))
    return status, capsys.readouterr().out


def test_whole_states_are_ok(folders, capsys):
    status, text = run(capsys, "verify", str(folders / "c"))
    assert (status, text.split()[:4]) == (0, ["ok", "checkpoint", "step", "1"])
    status, text = run(capsys, "verify", str(folders / "swap"), "--json")
    (result,) = json.loads(text)
    assert (status, result["kind"], result["step"], result["problems"]) == (0, "run", 2, [])
    assert result["blocks"] == 9


@pytest.mark.parametrize("kind", ["c", "swap"])
def test_damage_is_found_and_mended_again(folders, capsys, kind):
    paths = [p for p in (folders / kind).rglob("*.bin") if p.stat().st_nlink == 1 or kind == "c"]
    changed = 0
    for path in paths:
        if "commit" in path.name:
            continue
        content = path.read_bytes()
        damaged = bytearray(content)
        for at in range(5000, len(content), 1 << 20):
            damaged[at] ^= 1
        path.write_bytes(damaged)
        status, text = run(capsys, "verify", str(folders / kind))
        changed += status
        assert ("DAMAGED" in text) == bool(status)
        path.write_bytes(content)
    assert changed >= 1
    assert run(capsys, "verify", str(folders / kind))[0] == 0


def test_inspect(folders, capsys):
    status, text = run(capsys, "inspect", str(folders / "c"))
    assert status == 0
    assert "one" in text
    status, text = run(capsys, "inspect", str(folders / "c"), "--tag", "one", "--json")
    facts = json.loads(text)
    assert facts["parameters"][0]["name"] == "w"
    assert facts["parameters"][0]["records"]["exp_avg"] == "float32"
    status, text = run(capsys, "inspect", str(folders / "swap"))
    assert "commits [2, 1]" in text
    assert str(folders / "c" / "one") in text


def test_nothing_there(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["inspect", str(tmp_path)]) == 1
    assert "neither a checkpoint" in capsys.readouterr().err
