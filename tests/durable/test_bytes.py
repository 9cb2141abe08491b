# SPDX-License-Identifier: Apache-2.0
"""What a save moves, and what the steps around it move: counted by the store."""

from __future__ import annotations

import pytest
import torch

from support.training import assert_same, make_parameters, snapshot, train
from swapio.optim import AdamW

SIZES = [1 << 20, 1 << 20, (300, 1000), 5]
SMALL = {"sub_group_numel": 1 << 19, "chunk_numel": 1 << 18, "min_swap_bytes": 0}
# Sub-groups of two chunks, of which some stay in the buffers from one step to the next.
MODES = {
    "pipelined": SMALL,
    "read when needed": {**SMALL, "pipeline_read": False},
    "partitioned": {**SMALL, "pipeline_read": False, "pipeline_write": False},
}


def counted(opt):
    stats = opt.stats()
    return {name: stats[name] for name in ("bytes_read", "bytes_written", "bytes_copied")}


def moved_by(opt, work, mode):
    before = counted(opt)
    work()
    opt.synchronize()
    moved = {name: value - before[name] for name, value in counted(opt).items()}
    if mode == "pipelined":
        del moved["bytes_read"]  # a chunk that is read ahead may count for the step before
    return moved


def resident_after(dtype, steps):
    params = make_parameters(SIZES, dtype)
    with AdamW(params, swap={"master": "param" if dtype is torch.float32 else "split"}) as opt:
        train(opt, params, steps)
        return snapshot(opt, params)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_steps_around_a_save_move_no_byte_more(tmp_path, dtype, mode):
    """A kept chunk was written to the new slot as well, and once more when it left the buffers."""
    dtype = getattr(torch, dtype)
    params = make_parameters(SIZES, dtype)
    memory = "14MiB" if dtype is torch.float32 else "16MiB"
    swap = {"path": tmp_path / "a", "host_memory": memory, **MODES[mode]}
    with AdamW(params, swap=swap) as opt:

        def step(number):
            return moved_by(opt, lambda: train(opt, params, 1, first=number), mode)

        def save(number):
            return moved_by(opt, lambda: opt.save(tmp_path / "c", f"{number}", keep_last=1), mode)

        step(1)
        # The direction of the sweep alternates, and with it what is kept.
        usual = {0: step(2), 1: step(3)}
        for first in (4, 7):
            found = save(first)
            assert found.get("bytes_read", 0) == found["bytes_copied"] == 0
            assert (found["bytes_written"] > 0) == (mode != "partitioned")  # what was kept
            for number in range(first, first + 3):
                assert step(number) == usual[number % 2]
        assert_same(snapshot(opt, params), resident_after(dtype, 9))
        fresh = make_parameters(SIZES, dtype, seed=7)
        with AdamW(fresh) as other:
            other.load(tmp_path / "c")
            for mine, theirs in zip(fresh, resident_after(dtype, 6)[0], strict=True):
                assert torch.equal(mine, theirs)
