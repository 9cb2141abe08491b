# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz against the plain five-step loop in torch, in pairs of runs.

    ratio        time / time of the plain loop, the median over pairs run one after the other
    rate_share   operations it does / time / rate of one large product of torch in the same dtype
    bound        its operations / those of the plain loop: what perfect products would reach

A machine that is busy with other things slows both halves of a pair; `spread` says how much the
ratios differed. `--clock thread` with `--threads 1` counts CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from swapio.optim.kernels import simd_level
from swapio.optim.newton_schulz import (
    DEFAULT_COEFFICIENTS,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_workspace_bytes,
)

STEPS = 5


def plain_loop(u: Tensor, dtype: torch.dtype) -> Tensor:
    """The loop as torch.optim.Muon has it, in `dtype`."""
    a, b, c = DEFAULT_COEFFICIENTS
    x = u.to(dtype)
    x = x.mT if u.shape[0] > u.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.mT if u.shape[0] > u.shape[1] else x


class Stopwatch:
    """Times a call, on the wall or on the thread's CPU; waits for CUDA."""

    def __init__(self, device: str, clock: str) -> None:
        self.device = device
        self.clock = time.thread_time if clock == "thread" else time.perf_counter

    def __call__(self, function: Callable[[], object]) -> float:
        self._wait()
        start = self.clock()
        function()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def product_rate(dtype: torch.dtype, device: str, stopwatch: Stopwatch) -> float:
    """Operations per second of one large square product: the ceiling."""
    n = 2048 if device == "cpu" else 8192
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = [stopwatch(lambda: torch.mm(left, right, out=out)) for _ in range(4)]
    return 2 * n**3 / min(times[1:])


def measure(shape: tuple[int, int], args: argparse.Namespace) -> dict[str, object]:
    rows, cols = shape
    dtype = getattr(torch, args.dtype)
    stopwatch = Stopwatch(args.device, args.clock)
    u = torch.randn(rows, cols, device=args.device)
    out = torch.empty(rows, cols, device=args.device, dtype=dtype)
    nbytes = newton_schulz_workspace_bytes(
        shape, dtype=dtype, device_type=args.device, reuses_out=True
    )
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=args.device)

    def ours() -> Tensor:
        return newton_schulz(u, dtype=dtype, out=out, workspace=workspace)

    ours()
    pairs, rates = [], []
    for _ in range(args.pairs):
        rates.append(product_rate(dtype, args.device, stopwatch))
        pairs.append((stopwatch(lambda: plain_loop(u, dtype)), stopwatch(ours)))
    ratios = sorted(mine / plain for plain, mine in pairs)
    flops = newton_schulz_flops(shape, dtype=dtype, device_type=args.device)
    order, longer = min(shape), max(shape)
    plain_flops = STEPS * (4 * order**2 * longer + 2 * order**3)
    shares = [flops / mine / rate for (_, mine), rate in zip(pairs, rates, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "bound": round(flops / plain_flops, 3),
        "rate_share": round(statistics.median(shares), 3),
        "plain_seconds": round(statistics.median(plain for plain, _ in pairs), 4),
        "seconds": round(statistics.median(mine for _, mine in pairs), 4),
        "product_gflops": round(statistics.median(rates) / 1e9),
        "workspace_mb": round(nbytes / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "4096x1024", "1024x4096"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=["wall", "thread"])
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    torch.set_num_threads(args.threads)
    found = {}
    for text in args.shapes:
        rows, cols = map(int, text.split("x"))
        found[text] = measure((rows, cols), args)
        line = ", ".join(f"{key} {value}" for key, value in found[text].items())
        print(f"{text}: {line}", flush=True)
    settings = {
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "pairs": args.pairs,
        "simd": simd_level(),
        "torch": torch.__version__,
    }
    print(json.dumps({"bench": "newton_schulz", **settings, "matrices": found}))


if __name__ == "__main__":
    main()
