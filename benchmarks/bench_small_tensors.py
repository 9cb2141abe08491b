# SPDX-License-Identifier: Apache-2.0
"""How much a step over many small parameters costs beside one over a single tensor.

Both have the same number of elements and state in RAM. Rounds are paired: in each the two step one
after the other, and the ratio printed is the median over rounds of the ratio within a round, so
that other work on the machine hits both. The ceiling is 1: the same memory traffic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from swapio.optim import AdamW


def make(count, numel, dtype, cls):
    """Return an optimizer over `count` parameters that have a gradient."""
    params = [torch.nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(numel).to(dtype)
    return cls(params)


def seconds(opt):
    """Time one step."""
    began = time.perf_counter()
    opt.step()
    return time.perf_counter() - began


def measure(count, numel, dtype, rounds, cls):
    """Return (median ratio, spread, median milliseconds of many, of one)."""
    many, one = make(count, numel, dtype, cls), make(1, count * numel, dtype, cls)
    for _ in range(5):
        many.step()
        one.step()
    pairs = [(seconds(many), seconds(one)) for _ in range(rounds)]
    ratios = [left / right for left, right in pairs]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "many_ms": round(1e3 * statistics.median(pair[0] for pair in pairs), 3),
        "one_ms": round(1e3 * statistics.median(pair[1] for pair in pairs), 3),
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="parameters")
    parser.add_argument("--numel", type=int, default=4096, help="elements of each")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        results[name] = measure(arguments.count, arguments.numel, dtype, arguments.rounds, AdamW)
        if not arguments.json:
            print(f"{arguments.count} x {arguments.numel} {name}: {results[name]}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
