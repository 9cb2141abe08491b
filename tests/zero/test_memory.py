# SPDX-License-Identifier: Apache-2.0
"""Law 7 over ranks: buckets, shards of gradients and the exchange of matrices are in host_memory.

Measured in processes of their own, from before construction to the peak, as for one process.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

from support import memory_watch
from support.memory_watch import MIB

_SCRIPT = (
    inspect.getsource(memory_watch)
    + """
import os, sys
import torch
import torch.distributed as dist
from swapio.optim import AdamW, Muon, ZeroOptimizer

folder, rule, rank, stage, budget = *sys.argv[1:3], *map(int, sys.argv[3:])
torch.set_num_threads(1)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
side = 1024
base = torch.zeros(24, side, side)
params = [torch.nn.Parameter(base[i]) for i in range(24)]
kind = {"adamw": AdamW, "muon": Muon}[rule]

def backward():
    torch.stack([(param * 0.01).sum() for param in params]).sum().backward()

if stage == 1:
    backward()  # p.grad is the user's, and stays
warm = torch.nn.Parameter(torch.zeros(5, 5))  # torch imports much of itself at the first step
warm.grad = torch.zeros(5, 5)
with ZeroOptimizer([warm], kind, stage=1) as opt:
    opt.step()
growth = Growth()
swap = {"path": folder, "host_memory": budget, "spare_slots": 0, "sub_group_numel": 1 << 21}
more = {"ns_steps": 1} if rule == "muon" else {}
opt = ZeroOptimizer(params, kind, stage=stage, swap=swap, **more)
for _ in range(3):
    backward()
    opt.step()
opt.synchronize()
grown = growth.end()
stats = opt.stats()
opt.close()
dist.barrier()
print(grown, stats["read_bytes"], stats.get("exchange_peak_bytes", 0))
dist.destroy_process_group()
"""
)

CASES = [
    ("muon", 2, 128 * MIB),
    pytest.param("adamw", 1, 48 * MIB, marks=pytest.mark.slow),
    pytest.param("adamw", 2, 96 * MIB, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rule", "stage", "budget"), CASES)
def test_growth_stays_within_host_memory(tmp_path, rule, stage, budget) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *map(str, (tmp_path, rule, rank, stage, budget))],
            # Else the heap keeps autograd's temporary memory: 80 MiB without any swapio.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        printed, errors = process.communicate(timeout=110)
        assert process.returncode == 0, errors
        growth, moved, staging = map(int, printed.split())
        assert moved > 0, "nothing was swapped: the test shows nothing"
        memory_watch.check_growth(growth, budget)
        assert staging <= 64 * MIB
        assert (staging > 0) == (rule == "muon")
