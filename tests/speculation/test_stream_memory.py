# SPDX-License-Identifier: Apache-2.0
"""Law 7 with streamed gradients and early steps: host_memory covers them and their images."""

from __future__ import annotations

import inspect

import pytest

from support import memory_watch
from support.memory_watch import MIB
from support.script import run_script

_SCRIPT = (
    inspect.getsource(memory_watch)
    + """
import ctypes, sys
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: torch's gradients are given back at once
import torch
from swapio.optim import AdamW

torch.set_num_threads(1)
folder, budget, speculate, swap_gradients = sys.argv[1:5]
params = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(16)]

def backward():
    for param in params:
        param.sum().backward()

backward()
for param in params:
    param.grad = None
torch.optim.AdamW(params[:1]).step()
growth = Growth()
swap = {"host_memory": int(budget), "sub_group_numel": 1 << 20, "spare_slots": 0,
        "swap_gradients": swap_gradients != "kept"}
if folder != "-":
    swap["path"] = folder
if swap_gradients == "small":
    swap["min_swap_bytes"] = 5 << 20  # a fragment has 4 MiB, a sub-group's record 8
opt = AdamW(params, swap=swap, gradients="stream", speculate="always" if speculate else False)
for _ in range(3):
    backward()
    if speculate:
        opt._early.wait()
    opt.step()
opt.synchronize()
grown = growth.end()
early = opt.stats().get("speculation_num_early", 0)
opt.close()
print(grown, early)
"""
)


@pytest.mark.parametrize(
    ("where", "budget", "speculate", "gradients"),
    [
        pytest.param("disk", 112 * MIB, "", "kept", marks=pytest.mark.slow),
        pytest.param("disk", 80 * MIB, "", "swapped", marks=pytest.mark.slow),
        pytest.param("disk", 112 * MIB, "", "small", marks=pytest.mark.slow),
        ("disk", 144 * MIB, "early", "kept"),
        ("ram", 300 * MIB, "early", "kept"),
    ],
)
def test_growth_stays_within_host_memory(tmp_path, where, budget, speculate, gradients):
    folder = tmp_path if where == "disk" else "-"
    done = run_script(_SCRIPT, folder, budget, speculate, gradients, timeout=110)
    assert done.returncode == 0, done.stderr
    growth, early = map(int, done.stdout.split())
    assert (early > 0) == bool(speculate)
    memory_watch.check_growth(growth, budget)
