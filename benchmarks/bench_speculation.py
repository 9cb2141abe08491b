# SPDX-License-Identifier: Apache-2.0
"""Early steps on a machine without accelerator: what they cost where they can hide nothing.

Iterations of a network on the CPU. A round runs every case, in random order, so that other load
meets all cases alike; ratios are taken within a round:

    off        gradients="stream", step after the norm
    always     speculate="always"
    adaptive   speculate="adaptive", after it has decided
    redo       speculate="always", and every early step is in vain (lr changes after backward)
    rescale    speculate="always", undo="algebraic"; the clip comes when all steps were taken early
    none       forward and backward alone

without clipping, and with clipping in every step (`-clipped`; the limit is a thousandth of the
norm, for `rescale` a third). Printed are the median of each ratio and its 95 % interval: of whole
iterations, and of what a case takes beyond `none` (`cost`). With --path, state is on storage.

What is asked: adaptive at most 1.02 of off, with and without clipping; the cost of always-clipped
at most 1.15 of off-clipped and 0.6 of redo-clipped. The exit status is 0 in any case.

Example:
    python benchmarks/bench_speculation.py --seconds 240
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from paired import interval
from torch import nn

from swapio.optim import AdamW

SETTLE = 12  # iterations in which "adaptive" decides
CASES = (
    *("off", "always", "adaptive"),
    *("off-clipped", "always-clipped", "adaptive-clipped", "redo-clipped", "rescale-clipped"),
    "none",
)
ASKED = {
    "adaptive / off": 1.02,
    "adaptive-clipped / off-clipped": 1.02,
    "cost of always-clipped / off-clipped": 1.15,
    "cost of always-clipped / redo-clipped": 0.6,
}


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
        self.kind = kind
        self.opt: AdamW | None = None
        if kind == "none":
            return
        self.opt = AdamW(
            self.model.parameters(),
            lr=1e-5,
            gradients="stream",
            speculate={"off": False, "redo": "always", "rescale": "always"}.get(kind, kind),
            undo="algebraic" if kind == "rescale" else "exact",
            max_grad_norm=1e-6 if clipped else 1e9,
            swap=swap,
        )
        if kind in ("redo", "rescale"):
            self.opt.max_grad_norm = 1e9  # so that all of them are taken

    def iterate(self) -> float:
        """Seconds of one iteration."""
        began = time.perf_counter()
        self.model(self.data).square().mean().backward()
        if self.opt is None:
            self.model.zero_grad()
            return time.perf_counter() - began
        if self.kind == "redo":
            group = self.opt.param_groups[0]
            group["lr"] = 1e-5 if group["lr"] != 1e-5 else 2e-5
        elif self.kind == "rescale":
            self.opt.clip_grad_norm_(float(self.opt.clip_grad_norm_(1e9)) / 3)
        self.opt.step()
        return time.perf_counter() - began


def run(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Time all cases; returns medians, ratios and counters."""
    end = time.monotonic() + args.seconds
    rounds: list[dict[str, float]] = []
    order = random.Random(0)
    with ExitStack() as stack:
        cases = {name: Case(name, args, folder) for name in CASES}
        for case in cases.values():
            if case.opt is not None:
                stack.enter_context(case.opt)
            for _ in range(SETTLE):
                case.iterate()
        while len(rounds) < args.rounds and (len(rounds) < 3 or time.monotonic() < end):
            found = {}
            for name in order.sample(CASES, len(CASES)):
                found[name] = statistics.median(cases[name].iterate() for _ in range(3))
            rounds.append(found)
        counters = {
            name: {k: v for k, v in case.opt.stats().items() if k.startswith("speculation_")}
            for name, case in cases.items()
            if case.opt is not None
        }
    ratios = ratios_of(rounds)
    return {
        "params": sum(p.numel() for p in cases["off"].model.parameters()),
        "rounds": len(rounds),
        "seconds": {n: round(statistics.median(r[n] for r in rounds), 4) for n in CASES},
        "asked": {
            name: {"at most": most, "is": ratios[name], "met": ratios[name][0] <= most}
            for name, most in ASKED.items()
        },
        "ratios": ratios,
        "counters": counters,
    }


def ratios_of(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """All ratios, taken within rounds: their median and a 95 % interval of it."""
    pairs = [(name, f"off{'-clipped' * name.endswith('-clipped')}") for name in CASES[:-1]]
    pairs.append(("always-clipped", "redo-clipped"))
    found = {}
    for name, base in pairs:
        if name == base:
            continue
        found[f"{name} / {base}"] = spread([r[name] / r[base] for r in rounds])
        costs = [(r[name] - r["none"]) / (r[base] - r["none"]) for r in rounds]
        found[f"cost of {name} / {base}"] = spread(costs)
    return found


def spread(values: list[float]) -> list[float]:
    """Median, and the ends of its interval."""
    return [round(value, 3) for value in interval(values)]


def main(argv: list[str] | None = None) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=101, help="at most so many")
    parser.add_argument("--seconds", type=float, default=240, help="no round begins after this")
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
