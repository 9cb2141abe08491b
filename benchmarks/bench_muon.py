#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Muon step with its state on storage beside the same step with its state in RAM.

Each round steps the same matrices in RAM and once for each form on storage, one after the other,
in swapped order every second round; ratios are taken within a round.

    ratio         step on storage / step in RAM, the median over rounds, with its range
    stall         share of the step that waited for I/O
    read, written bytes per parameter and step

A step is the wall time of --steps consecutive step() calls with gradients given, drained at the
end, divided by their number; a step of warm-up comes first. One AdamW group of --adamw elements is
stepped in the same sweep. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch

from swapio.optim import Muon

FORMS: dict[str, dict[str, Any]] = {
    "separate": {"master": "separate"},
    "split": {"master": "split"},
    "split, momentum in RAM": {"master": "split", "resident": ["momentum_buffer"]},
}


def parameters(args: argparse.Namespace) -> list[torch.nn.Parameter]:
    shapes = [(args.rows, args.cols)] * args.matrices + [(args.adamw,)]
    made = [torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in shapes]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


def least_memory(args: argparse.Namespace, swap: dict[str, Any]) -> int:
    """Bytes of host_memory below which the planner refuses these settings."""
    with Muon(groups(args), swap={**swap, "host_memory": "1TiB"}) as opt:
        return opt.plan.minimum_host_memory


def groups(args: argparse.Namespace) -> list[dict[str, Any]]:
    params = parameters(args)
    return [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}]


def measure(args: argparse.Namespace, swap: dict[str, Any] | None) -> dict[str, float]:
    with Muon(groups(args), lr=1e-3, swap=swap) as opt:
        opt.step()
        opt.synchronize()
        before, began = opt.stats(), time.perf_counter()
        for _ in range(args.steps):
            opt.step()
        inside = time.perf_counter() - began
        opt.synchronize()
        seconds = (time.perf_counter() - began) / args.steps
        after, numel = opt.stats(), sum(group.numel for group in opt._layout.groups.values())

    def growth(name: str) -> float:
        return float(after.get(name, 0)) - float(before.get(name, 0))

    return {
        "seconds": seconds,
        "stall": growth("stall_seconds") / inside,
        "read": growth("read_bytes") / numel / args.steps,
        "written": growth("write_bytes") / numel / args.steps,
        "host_bytes": float(after["host_bytes"]),
    }


def round_of(args: argparse.Namespace, folder: str, reverse: bool) -> dict[str, dict[str, float]]:
    settings: dict[str, dict[str, Any] | None] = {"RAM": None}
    for name, form in FORMS.items():
        numel = args.rows * args.cols * args.per_group
        swap = {**form, "path": folder, "sub_group_numel": numel, "spare_slots": 0}
        memory = least_memory(args, swap) + args.more_memory
        settings[name] = {**swap, "host_memory": memory}
    names = list(settings)
    found = {name: measure(args, settings[name]) for name in (names[::-1] if reverse else names)}
    for name, figures in found.items():
        figures["ratio"] = figures["seconds"] / found["RAM"]["seconds"]
        print(f"  {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", default=".", help="folder on the device that holds the state")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--matrices", type=int, default=12)
    parser.add_argument("--per-group", type=int, default=1, help="matrices of a sub-group")
    parser.add_argument("--adamw", type=int, default=4 << 20, help="elements of the AdamW group")
    parser.add_argument("--more-memory", type=int, default=0, help="bytes beyond the least budget")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = []
    for at in range(args.rounds):
        print(f"round {at + 1}", flush=True)
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="swapio-bench-") as folder:
            rounds.append(round_of(args, folder, reverse=bool(at % 2)))
    result: dict[str, dict[str, Any]] = {}
    for name in ("RAM", *FORMS):
        columns = {k: [one[name][k] for one in rounds] for k in rounds[0][name]}
        result[name] = {k: round(statistics.median(v), 4) for k, v in columns.items()}
        result[name]["range"] = [round(min(columns["ratio"]), 3), round(max(columns["ratio"]), 3)]
        print(f"{name:24}" + "  ".join(f"{k} {v}" for k, v in result[name].items()))
    print(json.dumps({"settings": vars(args), "results": result}))


if __name__ == "__main__":
    main()
