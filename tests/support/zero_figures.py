# SPDX-License-Identifier: Apache-2.0
"""What ranks run to show figures: collectives, and the trace."""

from __future__ import annotations

import json
from itertools import pairwise

import torch

from support.zero_training import RULES, make, rule_groups, train
from swapio.optim import AdamW, ZeroOptimizer


def count_collectives(rank, group, *, rule, stage, shapes):
    """Collectives of each of three steps, and those that were planned."""
    params = make(shapes)
    groups, options = rule_groups(params, rule), {"bucket_bytes": 1 << 15, "lr": 0.01}
    opt = ZeroOptimizer(groups, RULES[rule], stage=stage, process_group=group, **options)
    with opt:
        seen = [dict(opt._ranks.comm.counts)]
        for step in range(1, 4):
            train(opt, params, rank, steps=1, first=step)
            seen.append(dict(opt._ranks.comm.counts))
        planned, described = opt.planned_collectives(), opt.describe()
    steps = [
        {name: after[name] - before.get(name, 0) for name in after}
        for before, after in pairwise(seen)
    ]
    return planned, described, steps


def trace_backward(rank, group, *, stage, folder):
    """Train a chain of layers; return the trace's events in the lanes of gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    path = folder / f"rank{rank}.json"
    options = {"bucket_bytes": 1 << 14, "process_group": group, "swap": {"trace": str(path)}}
    with ZeroOptimizer(model, AdamW, stage=stage, **options) as opt:
        for step in range(2):
            model(torch.full((8, 64), float(1 + rank + step))).square().sum().backward()
            opt.step()
            opt.zero_grad()
        num_buckets = len(opt._ranks.reducer.buckets)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [(e["cat"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    return num_buckets, [span for span in spans if span[0] in ("backward", "reduce")]
