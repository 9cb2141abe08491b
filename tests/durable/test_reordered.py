# SPDX-License-Identifier: Apache-2.0
"""Writes that never landed, or landed in part, at any block of any file of a committed run.

A device may write in any order until it is told to sync, and may lose what is on its way. So of
the writes of the last steps one is taken back, whole or in half, while all others, the commit
record included, are there. What comes back must be a step, equal to an unbroken run to the bit, or
an error that says so; never a mix.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from support.trainer import ONE_AT_A_TIME, reference
from support.trainer_child import everything, make_params, train
from swapio.errors import CheckpointError, CorruptionError
from swapio.optim import AdamW

SIZES = [(5,), (300, 1000), (300_001,)]
BLOCK = 1 << 20
FORMS = {"float32": "param", "bfloat16": "split"}


def open_run(path, dtype, **more):
    swap = {"path": str(path), "durability": "step", **ONE_AT_A_TIME}
    params = make_params(SIZES, getattr(torch, dtype))
    return AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0, swap=swap, **more), params


def files_of(path):
    return {p: p.read_bytes() for p in sorted(path.rglob("*.bin"))}


def changed_blocks(before, after):
    """(file, offset, old bytes) of each block that the last steps wrote; tables by themselves."""
    for path, new in after.items():
        old = before.get(path, b"").ljust(len(new), b"\0")
        cuts = [0, 4096, *range(4096 + BLOCK, len(new), BLOCK), len(new)]
        for start, stop in itertools.pairwise(cuts):
            if old[start:stop] != new[start:stop]:
                yield path, start, old[start:stop]


def put_back(path, start, content):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def is_whole_step(opt, params, dtype):
    """Whether everything is that of the step that was recovered."""
    found, step = everything(opt, params), opt.recovered_step
    expected = reference(SIZES, dtype, step, FORMS[dtype])
    same = all(map(torch.equal, found["params"], expected["params"]))
    return same and all(
        torch.equal(a[name], b[name])
        for a, b in zip(found["state"], expected["state"], strict=True)
        for name in b
    )


@pytest.mark.parametrize("dtype", FORMS)
def test_a_write_that_did_not_land_is_found(tmp_path, dtype):
    opt, params = open_run(tmp_path, dtype)
    with opt:
        train(opt, params, 1, 2)
        opt.synchronize()
        before = files_of(tmp_path)
        train(opt, params, 3, 4)
    after = files_of(tmp_path)
    generator = random.Random(11)
    outcomes, messages = {"error": 0, 3: 0, 4: 0}, set()
    blocks = list(changed_blocks(before, after))
    assert len(blocks) > 10
    for path, start, old in blocks:
        for part in (old, old[: generator.randrange(1, len(old))]):
            put_back(path, start, part)
            try:
                again, fresh = open_run(tmp_path, dtype, resume=True)
                with again:
                    assert is_whole_step(again, fresh, dtype), (path.name, start, len(part))
                    outcomes[again.recovered_step] += 1
            except (CorruptionError, CheckpointError) as error:
                outcomes["error"] += 1
                messages.add(str(error).partition(";")[0])
            # Recovery changes commit records only: it drops those that it passed over.
            put_back(path, start, after[path][start : start + len(old)])
            for other, content in after.items():
                if other.name.startswith("commit-"):
                    other.write_bytes(content)
    assert files_of(tmp_path) == after
    # Lost data is an error or the step before; a lost record is the step before.
    assert all("checksum" in m or "no commit is whole" in m for m in messages), messages
    assert outcomes["error"] > 0
    assert outcomes[3] > 0
