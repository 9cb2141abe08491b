# SPDX-License-Identifier: Apache-2.0
"""Early steps on a machine without accelerator: what they cost where they can hide nothing.

Iterations of a network on the CPU, in alternate rounds, so that other load meets all cases alike:

    off        gradients="stream", step after the norm
    always     speculate="always"
    adaptive   speculate="adaptive", after it has decided
    redo       speculate="always", and every early step is in vain (lr changes after backward)
    none       forward and backward alone

each without clipping and with clipping in every step (`-clipped`; the limit is a thousandth of the
norm). Ratios are medians over rounds: of whole iterations, and of what a case takes beyond `none`
(`cost`). With --path, state is on storage.

What is asked: adaptive at most 1.02 of off, with and without clipping; the cost of always-clipped
at most 1.15 of off-clipped and 0.6 of redo-clipped.

Example:
    python benchmarks/bench_speculation.py --rounds 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapio.optim import AdamW

SETTLE = 12  # iterations in which "adaptive" decides


class Case:
    """A model and its optimizer, trained one iteration at a time."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path | None) -> None:
        torch.manual_seed(0)
        width = args.width
        layers: list[nn.Module] = []
        for _ in range(args.layers):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.model = nn.Sequential(*layers)
        self.data = torch.randn(args.batch, width)
        kind, _, clipped = name.partition("-")
        swap: dict[str, Any] = {"sub_group_numel": args.sub_group_numel}
        if folder is not None:
            swap |= {"path": str(folder / name), "host_memory": args.host_memory}
        self.is_in_vain = kind == "redo"
        self.opt: AdamW | None = None
        if kind == "none":
            return
        self.opt = AdamW(
            self.model.parameters(),
            lr=1e-5,
            gradients="stream",
            speculate={"off": False, "redo": "always"}.get(kind, kind),
            max_grad_norm=1e-6 if clipped else 1e9,
            swap=swap,
        )
        if self.is_in_vain:
            self.opt.max_grad_norm = 1e9  # so that all of them are taken

    def iterate(self) -> float:
        """Seconds of one iteration."""
        began = time.perf_counter()
        self.model(self.data).square().mean().backward()
        if self.opt is None:
            self.model.zero_grad()
            return time.perf_counter() - began
        if self.is_in_vain:
            group = self.opt.param_groups[0]
            group["lr"] = 1e-5 if group["lr"] != 1e-5 else 2e-5
        self.opt.step()
        return time.perf_counter() - began


def run(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Time all cases; returns medians, ratios and counters."""
    names = [f"{kind}{end}" for end in ("", "-clipped") for kind in ("off", "always", "adaptive")]
    names += ["redo-clipped", "none"]
    times: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        cases = {name: Case(name, args, folder) for name in names}
        for case in cases.values():
            if case.opt is not None:
                stack.enter_context(case.opt)
            for _ in range(SETTLE):
                case.iterate()
        for at in range(args.rounds):
            for name in names[at % len(names) :] + names[: at % len(names)]:
                times[name].append(statistics.median(cases[name].iterate() for _ in range(3)))
        counters = {
            name: {k: v for k, v in case.opt.stats().items() if k.startswith("speculation_")}
            for name, case in cases.items()
            if case.opt is not None
        }
    costs = {
        name: [t - none for t, none in zip(times[name], times["none"], strict=True)]
        for name in names
    }
    ratios = {}
    for name in names[:-1]:
        base = "off-clipped" if name.endswith("-clipped") else "off"
        ratios[f"{name} / {base}"] = ratio(times[name], times[base])
        ratios[f"cost of {name} / {base}"] = ratio(costs[name], costs[base])
    ratios["cost of always-clipped / redo-clipped"] = ratio(
        costs["always-clipped"], costs["redo-clipped"]
    )
    return {
        "params": sum(p.numel() for p in cases["off"].model.parameters()),
        "seconds": {name: round(statistics.median(t), 4) for name, t in times.items()},
        "ratios": ratios,
        "counters": counters,
    }


def ratio(left: list[float], right: list[float]) -> list[float]:
    """Median, least and most of the ratios of two lists."""
    return spread([a / b for a, b in zip(left, right, strict=True)])


def spread(values: list[float]) -> list[float]:
    """Median, least and most."""
    return [round(v, 3) for v in (statistics.median(values), min(values), max(values))]


def main(argv: list[str] | None = None) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sub-group-numel", type=int, default=1 << 21)
    parser.add_argument("--path", type=Path, default=None, help="put state into a folder here")
    parser.add_argument("--host-memory", default="256MiB")
    args = parser.parse_args(argv)
    if args.path is None:
        print(json.dumps(run(args, None)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        print(json.dumps(run(args, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
