# SPDX-License-Identifier: Apache-2.0
"""CPU Adam kernels against the memory read-modify-write ceiling of this machine.

The ceiling is a C loop, compiled here, that touches memory exactly as an fp32 Adam step does (three
arrays read and written, one read: 28 bytes per parameter) and does two operations a value. Every
row is timed in turn with it, round by round; `of_ceiling` is the median over rounds of
(ceiling time per byte) / (row time per byte), with a 95 % interval of that median. Bytes are those
a row must move: a value that is read and written counts twice.

Rows: fp32 in place at every SIMD level; bf16 gradient with bf16 weights out; split master; rescale;
rollback; 1000 tensors of 4096 against one of the same size; torch fused; DeepSpeedCPUAdam if it is
installed. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
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


def peer_rows(arrays: Arrays) -> dict[str, Row]:
    def parameter() -> torch.nn.Parameter:
        param = torch.nn.Parameter(arrays.param)  # shares the memory
        param.grad = arrays.grad
        return param

    fused = torch.optim.AdamW([parameter()], fused=True, **HYPERS)
    rows: dict[str, Row] = {"torch fused": (fused.step, 28 * arrays.numel)}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return rows
    rows["DeepSpeedCPUAdam"] = (DeepSpeedCPUAdam([parameter()], **HYPERS).step, 28 * arrays.numel)
    return rows


def small_rows(arrays: Arrays) -> dict[str, Row]:
    hypers = hyper_array()
    form = kernels.adam_form(param=FP32, grad=FP32)
    many, one = arrays.spans(SMALL_COUNT), arrays.spans(1)
    moved = 28 * arrays.numel
    return {
        "one tensor": (lambda: kernels.adam_step_spans(form, one, hypers), moved),
        f"{SMALL_COUNT} of {SMALL_NUMEL}": (
            lambda: kernels.adam_step_spans(form, many, hypers),
            moved,
        ),
    }


def time_rounds(rows: dict[str, Row], num_rounds: int) -> dict[str, list[float]]:
    """Time every row once a round; the start moves on so that no row always follows the same."""
    for call, _ in rows.values():
        call()
    names = list(rows)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(num_rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            began = time.perf_counter()
            rows[name][0]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its distribution-free 95 % interval (order statistics of the binomial)."""
    ordered, count = sorted(values), len(values)
    half_width = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - half_width))
    high = min(count - 1, math.ceil(count / 2 + half_width))
    return statistics.median(ordered), ordered[low], ordered[high]


def compare(
    rows: dict[str, Row], seconds: dict[str, list[float]], base: str
) -> dict[str, dict[str, object]]:
    report: dict[str, dict[str, object]] = {}
    base_bytes = rows[base][1]
    for name, (_, moved) in rows.items():
        ratios = [
            (one / base_bytes) / (other / moved)
            for one, other in zip(seconds[base], seconds[name], strict=True)
        ]
        median, low, high = median_interval(ratios)
        middle = statistics.median(seconds[name])
        report[name] = {
            "median_ms": round(middle * 1e3, 3),
            "gb_per_s": round(moved / middle / 1e9, 2),
            f"of {base}": round(median, 4),
            "interval_95": [round(low, 4), round(high, 4)],
        }
        print(
            f"{name:26s}{middle * 1e3:9.2f} ms {moved / middle / 1e9:7.2f} GB/s   "
            f"{median:.3f} of {base} [{low:.3f}, {high:.3f}]",
            file=sys.stderr,
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=kernels.default_num_threads())
    args = parser.parse_args()
    numel = int(args.numel)
    kernels.set_threads(args.threads)
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when the ceiling loads its OpenMP
    library, arrays = build_ceiling(), Arrays(numel)
    pointers = [
        tensor.data_ptr()
        for tensor in (arrays.param, arrays.grad, arrays.exp_avg, arrays.exp_avg_sq)
    ]
    rows: dict[str, Row] = {"ceiling": (lambda: library.ceiling(*pointers, numel), 28 * numel)}
    rows |= kernel_rows(arrays) | peer_rows(arrays)
    report = compare(rows, time_rounds(rows, args.rounds), "ceiling")
    kernels.set_simd_level("auto")
    small_arrays = Arrays(SMALL_COUNT * SMALL_NUMEL)  # spans hold addresses only: keep it alive
    small = small_rows(small_arrays)
    lists = compare(small, time_rounds(small, 10 * args.rounds), "one tensor")
    result = {
        "bench": "kernels",
        "numel": numel,
        "rounds": args.rounds,
        "threads": args.threads,
        "simd": kernels.simd_level(),
        "torch": torch.__version__,
        "rows": report,
        "lists": lists,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
