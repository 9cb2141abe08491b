# SPDX-License-Identifier: Apache-2.0
"""Law 7: what swapio adds to RssAnon and RssShmem is host_memory and a little more.

DeepSpeed#3481 and others: hosts were killed because a default was gigabytes, or a size was rounded
up to a power of two. Measured in a process of its own, from before construction to the peak.
"""

from __future__ import annotations

import inspect

import pytest

from support import memory_watch
from support.memory_watch import MIB
from support.script import run_script

_SCRIPT = (
    inspect.getsource(memory_watch)
    + """
import sys
import torch
from swapio.optim import AdamW

torch.set_num_threads(1)
count, numel, budget, dtype = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dtype = getattr(torch, dtype)
base = torch.zeros(count * numel, dtype=dtype)
params = [torch.nn.Parameter(base[i * numel : (i + 1) * numel]) for i in range(count)]
grad = torch.full((numel,), 0.01, dtype=dtype)
for param in params:
    param.grad = grad.view(numel)
warm = torch.nn.Parameter(torch.zeros(5))  # torch imports much of itself at the first optimizer
warm.grad = torch.zeros(5)
torch.optim.AdamW([warm]).step()
growth = Growth()
opt = AdamW(params, swap={"path": sys.argv[1], "host_memory": budget, "spare_slots": 0,
                          "pipeline_read": sys.argv[6] == "pipelined",
                          "pipeline_write": sys.argv[6] == "pipelined",
                          "sub_group_numel": 1 << 21})
for _ in range(3):
    opt.step()
opt.synchronize()
opt.state[params[-1]]["step"]
grown = growth.end()
moved = opt.stats()["read_bytes"]
opt.close()
print(grown, moved)
"""
)

CASES = {
    "large": (3, 8_000_000, 64 * MIB, "float32", "pipelined"),
    "large partitioned": (3, 8_000_000, 64 * MIB, "float32", "partitioned"),
    "large bf16": (3, 8_000_000, 64 * MIB, "bfloat16", "pipelined"),
    "many": (20_000, 1024, 32 * MIB, "float32", "pipelined"),
    "very many": (100_000, 1024, 64 * MIB, "float32", "pipelined"),
}

SLOW = ("large partitioned", "large bf16", "very many")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES]
)
def test_growth_stays_within_host_memory(tmp_path, case):
    count, numel, budget, dtype, kind = CASES[case]
    done = run_script(_SCRIPT, tmp_path, count, numel, budget, dtype, kind, timeout=110)
    assert done.returncode == 0, done.stderr
    growth, moved = map(int, done.stdout.split())
    assert moved > count * numel * 8, "nothing was swapped: the test shows nothing"
    memory_watch.check_growth(growth, budget)
