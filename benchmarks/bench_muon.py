#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Muon step with its state on storage beside the same step with its state in RAM.

Each round steps the same matrices in RAM and once for each form on storage, one after the other,
in swapped order every second round; ratios are taken within a round.

    ratio         step on storage / step in RAM, the median over rounds, with its range
    stall         share of the step that waited for I/O
    read, written bytes per parameter and step

    bound         on a GPU: step / the longest of what the step consists of, each measured alone:
                  newton_schulz (all matrices, queued on the GPU), bus (2 + 2 bytes per parameter
                  down and up at the same time), host (the elementwise passes, on the CPU)

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
from collections.abc import Callable
from typing import Any

import torch

from swapio.optim import Muon
from swapio.optim.muon_math import apply_update, momentum_step
from swapio.optim.muon_update import PIECE_NUMEL
from swapio.optim.newton_schulz import newton_schulz, newton_schulz_workspace_bytes

FORMS: dict[str, dict[str, Any]] = {
    "separate": {"master": "separate"},
    "split": {"master": "split"},
    "split, momentum in RAM": {"master": "split", "resident": ["momentum_buffer"]},
}
CUDA_FORMS: dict[str, dict[str, Any]] = {
    "separate": {"master": "separate"},
    "separate, momentum in RAM": {"master": "separate", "resident": ["momentum_buffer"]},
}


def parameters(args: argparse.Namespace) -> list[torch.nn.Parameter]:
    shapes = [(args.rows, args.cols)] * args.matrices + [(args.adamw,)]
    values = [torch.randn(shape, dtype=torch.bfloat16, device=args.device) for shape in shapes]
    made = [torch.nn.Parameter(value) for value in values]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


def forms(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return CUDA_FORMS if args.device == "cuda" else FORMS


def wait_for_device(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def best_of(function: Callable[[], object], args: argparse.Namespace) -> float:
    times = []
    for _ in range(4):
        wait_for_device(args)
        began = time.perf_counter()
        function()
        wait_for_device(args)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def bounds(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the parts of a step on a GPU, each alone."""
    shape = (args.rows, args.cols)
    u = torch.randn(shape, device="cuda").to(torch.bfloat16)
    nbytes = newton_schulz_workspace_bytes(shape, device_type="cuda")
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def orthogonalise() -> None:
        for _ in range(args.matrices):
            newton_schulz(u, out=u, workspace=workspace)

    numel = args.rows * args.cols * args.matrices
    host = [torch.empty(2 * numel, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    device = [torch.empty(2 * numel, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both_ways() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    momentum, master = torch.zeros(numel), torch.zeros(numel)
    gradient, update, weights = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(3))
    exact = torch.empty(PIECE_NUMEL)

    def elementwise() -> None:
        for start in range(0, numel, PIECE_NUMEL):
            run = slice(start, min(numel, start + PIECE_NUMEL))
            piece = exact[: run.stop - run.start]
            momentum_step(momentum[run], gradient[run], piece, beta=0.95)
            update[run].copy_(piece)
            apply_update(master[run], update[run], lr=1e-3, update_lr=1e-3, weight_decay=0.1)
            weights[run].copy_(master[run])

    found = {"newton_schulz": orthogonalise, "bus": both_ways, "host": elementwise}
    return {name: best_of(function, args) for name, function in found.items()}


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
        wait_for_device(args)
        before, began = opt.stats(), time.perf_counter()
        for _ in range(args.steps):
            opt.step()
        wait_for_device(args)
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
    for name, form in forms(args).items():
        numel = args.rows * args.cols * args.per_group
        swap = {**form, "path": folder, "sub_group_numel": numel, "spare_slots": 0}
        memory = least_memory(args, swap) + args.more_memory
        settings[name] = {**swap, "host_memory": memory}
    names = list(settings)
    found = {name: measure(args, settings[name]) for name in (names[::-1] if reverse else names)}
    parts = bounds(args) if args.device == "cuda" else {}
    for name, figures in found.items():
        figures["ratio"] = figures["seconds"] / found["RAM"]["seconds"]
        if parts:
            figures |= parts | {"bound": figures["seconds"] / max(parts.values())}
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
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    rounds = []
    for at in range(args.rounds):
        print(f"round {at + 1}", flush=True)
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="swapio-bench-") as folder:
            rounds.append(round_of(args, folder, reverse=bool(at % 2)))
    result: dict[str, dict[str, Any]] = {}
    for name in ("RAM", *forms(args)):
        columns = {k: [one[name][k] for one in rounds] for k in rounds[0][name]}
        result[name] = {k: round(statistics.median(v), 4) for k, v in columns.items()}
        result[name]["range"] = [round(min(columns["ratio"]), 3), round(max(columns["ratio"]), 3)]
        print(f"{name:24}" + "  ".join(f"{k} {v}" for k, v in result[name].items()))
    print(json.dumps({"settings": vars(args), "results": result}))


if __name__ == "__main__":
    main()
