# SPDX-License-Identifier: Apache-2.0
"""CPU Adam kernels against the memory read-modify-write ceiling of this machine.

The ceiling is a C loop, compiled here, that touches memory exactly as an fp32 Adam step does (three
arrays read and written, one read: 28 bytes per parameter) and does two operations a value.
`of_ceiling` is (ceiling time per byte) / (row time per byte); bytes are those a row must move: a
value that is read and written counts twice. The loop has no software prefetch, so a row can pass 1.

Every ratio is of two runs that follow each other, in random order; the pairs are run in random
order too, until the 95 % interval of the median is narrower than --half-width on both sides, or
--max-rounds are used up.

Rows: fp32 in place at every SIMD level; bf16 gradient with bf16 weights out; split master; rescale;
rollback; 1000 tensors of 4096 against one of the same size; torch fused; DeepSpeedCPUAdam where
--peer-python has it. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from paired import Pair, Peer, PeerFailed, interval, run_pairs

from swapio.optim import kernels

CEILING_C = r"""
void ceiling(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
             long n) {
#pragma omp parallel for simd schedule(static)
  for (long i = 0; i < n; i++) {
    const float x = g[i];
    m[i] = m[i] * 0.9f + x;
    v[i] = v[i] * 0.9f + x;
    p[i] = p[i] * 0.9f + x;
  }
}
"""
HYPERS = {"lr": 1e-3, "weight_decay": 1e-2}
FP32, BF16 = torch.float32, torch.bfloat16
SMALL_COUNT, SMALL_NUMEL = 1000, 4096

Row = tuple[Callable[[], object], float]  # what to time, and the bytes it must move


def build_ceiling() -> ctypes.CDLL:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        sys.exit("the ceiling is compiled here and needs gcc")
    with tempfile.TemporaryDirectory(prefix="swapio-bench-") as folder:
        source, library = Path(folder, "ceiling.c"), Path(folder, "ceiling.so")
        source.write_text(CEILING_C)
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.ceiling.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
    return loaded


class Arrays:
    """The tensors of one size, shared by the rows so that memory holds few of them."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numel = numel
        self.param = torch.randn(numel, generator=generator).mul_(0.1)
        self.grad = torch.randn(numel, generator=generator).mul_(0.01)
        self.exp_avg = torch.zeros(numel)
        self.exp_avg_sq = torch.full((numel,), 1e-4)
        self.grad_bf16 = self.grad.to(BF16)
        self.out = torch.zeros(numel, dtype=BF16)
        self.high = self.param.to(BF16)
        self.low = torch.zeros(numel, dtype=torch.int16)

    def spans(self, count: int = 1, **overrides: torch.Tensor) -> np.ndarray:
        arrays = {
            "param": self.param,
            "grad": self.grad,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        } | overrides
        spans = np.zeros(count, kernels.SPAN_DTYPE)
        piece = self.numel // count
        starts = np.arange(count, dtype=np.uint64) * np.uint64(piece)
        for name, tensor in arrays.items():
            address = np.uint64(tensor.data_ptr())
            spans[name] = address + starts * np.uint64(tensor.element_size())
        spans["numel"] = piece
        return spans


def hyper_array() -> np.ndarray:
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["lr"], hypers["weight_decay"] = HYPERS["lr"], HYPERS["weight_decay"]
    hypers["beta1"], hypers["beta2"], hypers["eps"], hypers["step"] = 0.9, 0.999, 1e-8, 100
    hypers["flags"] = kernels.DECOUPLED | kernels.BIAS_CORRECTION
    return hypers


def at_level(level: str, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        kernels.set_simd_level(level)
        call()

    return run


def kernel_rows(arrays: Arrays) -> dict[str, Row]:
    hypers, numel = hyper_array(), arrays.numel
    fp32 = kernels.adam_form(param=FP32, grad=FP32)
    bf16_out = kernels.adam_form(param=FP32, grad=BF16, out=BF16)
    split = kernels.adam_form(param=BF16, grad=BF16, split=True)
    plain = arrays.spans()
    mixed = arrays.spans(grad=arrays.grad_bf16, out=arrays.out)
    halves = arrays.spans(grad=arrays.grad_bf16, param=arrays.high, low=arrays.low)

    def step() -> None:
        kernels.adam_step_spans(fp32, plain, hypers)

    def rescale() -> None:
        # There and back, in turns, would drift as well: the other rows step in between anyway.
        kernels.adam_rescale_spans(fp32, plain, hypers, old_scale=1.0, new_scale=0.9)

    def rollback() -> None:
        # A zero gradient: undoing steps that were not taken would let the moments explode.
        kernels.adam_rollback_spans(fp32, plain, hypers, grad_scale=0.0)

    best = kernels.simd_levels()[-1]
    rows: dict[str, Row] = {}
    for level in kernels.simd_levels()[1:]:
        rows[f"step fp32 {level}"] = (at_level(level, step), 28 * numel)
    rows["step bf16 grad, bf16 out"] = (
        at_level(best, lambda: kernels.adam_step_spans(bf16_out, mixed, hypers)),
        28 * numel,
    )
    rows["step split, bf16 grad"] = (
        at_level(best, lambda: kernels.adam_step_spans(split, halves, hypers)),
        26 * numel,
    )
    rows["rescale fp32"] = (at_level(best, rescale), 28 * numel)
    rows["rollback fp32"] = (at_level(best, rollback), 28 * numel)
    return rows


def torch_row(arrays: Arrays) -> Row:
    param = torch.nn.Parameter(arrays.param)  # shares the memory
    param.grad = arrays.grad
    return torch.optim.AdamW([param], fused=True, **HYPERS).step, 28 * arrays.numel


def small_rows(arrays: Arrays) -> dict[str, Row]:
    hypers = hyper_array()
    form = kernels.adam_form(param=FP32, grad=FP32)

    def repeat(spans: np.ndarray) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                kernels.adam_step_spans(form, spans, hypers)

        return at_level(kernels.simd_levels()[-1], run)

    moved = 10 * 28 * arrays.numel
    return {
        "one tensor": (repeat(arrays.spans(1)), moved),
        f"{SMALL_COUNT} of {SMALL_NUMEL}": (repeat(arrays.spans(SMALL_COUNT)), moved),
    }


def cost_of(row: Row, samples: list[float], *, warm: bool = False) -> Callable[[], float]:
    """Return a function that runs the row once and returns its seconds per byte.

    With `warm` an untimed run comes first: what fits a cache would else pay for what ran before.
    """
    call, moved = row

    def run() -> float:
        if warm:
            call()
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) / moved)
        return samples[-1]

    call()  # what is made on first use is not timed
    return run


def cost_of_peer(peer: Peer, samples: list[float]) -> Callable[[], float]:
    def run() -> float:
        result = peer.ask("step")
        samples.append(result["seconds"] / result["nbytes"])
        return samples[-1]

    return run


def make_pairs(costs: dict[str, Callable[[], float]]) -> list[Pair]:
    """Every row with the ceiling, and the pairs of rows that the targets name."""
    pairs = [
        Pair(f"{name} / ceiling", cost, costs["ceiling"])
        for name, cost in costs.items()
        if name not in ("ceiling", "one tensor", f"{SMALL_COUNT} of {SMALL_NUMEL}")
    ]
    best = f"step fp32 {kernels.simd_levels()[-1]}"
    named = [
        *((f"step fp32 {level}", best) for level in kernels.simd_levels()[1:-1]),
        ("rescale fp32", best),
        ("rollback fp32", best),
        (best, "torch fused"),
        (best, "DeepSpeedCPUAdam"),
        (f"{SMALL_COUNT} of {SMALL_NUMEL}", "one tensor"),
    ]
    return pairs + [
        Pair(f"{row} / {base}", costs[row], costs[base])
        for row, base in named
        if row in costs and base in costs
    ]


def report(
    samples: dict[str, list[float]], pairs: list[Pair]
) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    rows: dict[str, dict[str, object]] = {}
    for name, costs in samples.items():
        middle = statistics.median(costs)
        rows[name] = {"gb_per_s": round(1e-9 / middle, 2)}
        print(f"{name:30s}{1e-9 / middle:8.2f} GB/s", file=sys.stderr)
    ratios: dict[str, dict[str, object]] = {}
    for pair in pairs:
        median, low, high = interval(pair.ratios)
        ratios[pair.name] = {
            "speed_ratio": round(median, 4),
            "interval_95": [round(low, 4), round(high, 4)],
            "rounds": len(pair.rounds),
        }
        print(
            f"{pair.name:44s}{median:7.3f} [{low:.3f}, {high:.3f}] in {len(pair.rounds)} rounds",
            file=sys.stderr,
        )
    return rows, ratios


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=15, help="of every pair")
    parser.add_argument("--max-rounds", type=int, default=60, help="of pairs that stay wide")
    parser.add_argument("--half-width", type=float, default=0.01, help="share of the median")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="of the rounds")
    parser.add_argument("--threads", type=int, default=kernels.default_num_threads())
    parser.add_argument("--peer-python", default="", help="a Python that has DeepSpeed")
    return parser.parse_args()


def peer_for(args: argparse.Namespace, numel: int) -> Peer | None:
    if not args.peer_python:
        return None
    try:
        return Peer(args.peer_python, "adam", str(numel), str(args.threads))
    except (OSError, PeerFailed) as error:
        print(f"DeepSpeedCPUAdam is left out: {error}", file=sys.stderr)
        return None


def main() -> None:
    args = parse()
    numel = int(args.numel)
    kernels.set_threads(args.threads)
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when the ceiling loads its OpenMP
    library, arrays = build_ceiling(), Arrays(numel)
    small_arrays = Arrays(SMALL_COUNT * SMALL_NUMEL)  # spans hold addresses only: keep it alive
    in_place = (arrays.param, arrays.grad, arrays.exp_avg, arrays.exp_avg_sq)
    pointers = [tensor.data_ptr() for tensor in in_place]
    rows: dict[str, Row] = {"ceiling": (lambda: library.ceiling(*pointers, numel), 28 * numel)}
    small = small_rows(small_arrays)
    rows |= kernel_rows(arrays) | {"torch fused": torch_row(arrays)} | small
    samples: dict[str, list[float]] = {name: [] for name in rows}
    costs = {name: cost_of(row, samples[name], warm=name in small) for name, row in rows.items()}
    with contextlib.ExitStack() as stack:
        peer = peer_for(args, numel)
        if peer is not None:
            stack.enter_context(peer)
            samples["DeepSpeedCPUAdam"] = []
            costs["DeepSpeedCPUAdam"] = cost_of_peer(peer, samples["DeepSpeedCPUAdam"])
        pairs = make_pairs(costs)
        run_pairs(
            pairs,
            rounds=args.rounds,
            max_rounds=args.max_rounds,
            half_width=args.half_width,
            max_seconds=args.max_seconds,
        )
    table, ratios = report(samples, pairs)
    result = {
        "bench": "kernels",
        "numel": numel,
        "threads": args.threads,
        "simd": kernels.simd_levels()[-1],
        "torch": torch.__version__,
        "rows": table,
        "ratios": ratios,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
