# SPDX-License-Identifier: Apache-2.0
"""Training iterations of a decoder on one GPU, its optimizer on the CPU: what the step costs.

A Llama-like decoder (by default 27 layers of width 2048, 1.52e9 parameters, 8 x 2048 tokens, bf16,
checkpointed layers, clipping at 1.0). Cases, each in the same process and with the same model:

    none      forward and backward alone: nothing can be faster
    gpu       torch's fused AdamW on fp32 masters on the GPU: the limit where memory allows it
    keep      swapio, gradients in p.grad, step after the norm
    stream    swapio, gradients leave during backward, step after the norm
    early     swapio, speculate="always"
    adaptive  swapio, speculate="adaptive"
    nvme      swapio, state on storage (--path, --host-memory), gradients in p.grad
    nvme-early  the same with speculate="always"
    item      `.item()` while gradients are copied
    adam      the CPU's update kernel alone, on as many values: what early steps must hide

A row gives seconds of an iteration (median, least and most), of which `exposed` come on top of
forward and backward, the norm, and host memory. The gain of the last norm keeps gradients small, so
that clipping is armed but does not bite; --clip-always makes it bite in every step.

Example:
    python benchmarks/bench_gpu.py none keep stream early --iterations 6
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from swapio.optim import AdamW, kernels


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.join = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Add what both halves find."""
        batch, length, width = x.shape
        normal = self.norms[0](x)
        q, k, v = (
            part(normal).view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(q, turn), rotate(k, turn), v, is_causal=True
        )
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        normal = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions: `turn` holds cosines and sines of shape (length, half)."""
    one, other = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Decoder(nn.Module):
    """The model; `gain` scales the last norm, and with it the gradients."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width = args.width
        self.embed = nn.Embedding(args.vocab, width)
        self.layers = nn.ModuleList(
            Layer(width, width // 128, args.inner) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, args.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.constant_(self.norm.weight, args.gain)
        positions = torch.arange(args.length).float()[:, None]
        rates = 10_000.0 ** (-torch.arange(64).float() / 64)
        turn = torch.stack([torch.cos(positions * rates), torch.sin(positions * rates)])
        self.register_buffer("turn", turn.to(torch.bfloat16), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next token."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, self.turn, use_reentrant=False)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class OnGpu:
    """fp32 masters and moments on the GPU, torch's fused AdamW, clipping by torch."""

    def __init__(self, model: nn.Module, clip: float) -> None:
        self.params = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.adam = torch.optim.AdamW(self.masters, lr=1e-5, fused=True)
        self.clip = clip
        self.grad_norm: torch.Tensor | None = None

    def step(self) -> None:
        """Clip, step the masters, and round."""
        self.grad_norm = nn.utils.clip_grad_norm_(self.params, self.clip)
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for param in [*self.params, *self.masters]:
            param.grad = None

    def close(self) -> None:
        """Nothing to give up."""


def make(case: str, model: nn.Module, args: argparse.Namespace) -> Any:
    """The optimizer of a case; None for "none"."""
    if case == "none":
        return None
    if case == "gpu":
        return OnGpu(model, args.clip)
    kwargs: dict[str, Any] = {"lr": 1e-5, "max_grad_norm": args.clip}
    swap: dict[str, Any] = dict(args.swap)
    if case in ("early", "adaptive", "nvme-early"):
        kwargs["speculate"] = "adaptive" if case == "adaptive" else "always"
    else:
        kwargs["gradients"] = "stream" if case == "stream" else "keep"
    if case.startswith("nvme"):
        swap |= {"path": args.path, "host_memory": args.host_memory}
    return AdamW(model.named_parameters(), swap=swap, **kwargs)


def iterate(
    model: nn.Module, opt: Any, batches: list[torch.Tensor], accumulation: int
) -> tuple[float, float, float]:
    """One iteration: seconds in all, of forward and backward on the GPU, and inside step()."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin.record()
    for micro in range(accumulation):
        loss = model(batches[micro % len(batches)])
        (loss / accumulation).backward()
    end.record()
    before = time.perf_counter()
    if opt is not None:
        opt.step()
        opt.zero_grad()
    else:
        model.zero_grad(set_to_none=True)
    inside = time.perf_counter() - before
    torch.cuda.synchronize()
    return time.perf_counter() - began, begin.elapsed_time(end) / 1e3, inside


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time a case; see the module for its fields."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(args)
    model.to(torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())
    batches = [
        torch.randint(args.vocab, (args.batch, args.length + 1), device="cuda") for _ in range(2)
    ]
    began = time.perf_counter()
    opt = make(case, model, args)
    built = time.perf_counter() - began
    norms: list[float] = []
    rows = []
    for at in range(args.warmup + args.iterations):
        row = iterate(model, opt, batches, args.accumulation)
        norms.append(float(opt.grad_norm) if opt is not None and opt.grad_norm is not None else 0)
        if at >= args.warmup:
            rows.append(row)
    total, forward, inside = (sorted(column) for column in zip(*rows, strict=True))
    found: dict[str, Any] = {
        "case": case,
        "params": numel,
        "tokens": args.batch * args.length * args.accumulation,
        "seconds": spread(total),
        "forward_backward": spread(forward),
        "inside_step": spread(inside),
        "exposed": spread(sorted(row[0] - row[1] for row in rows)),
        "norms": [round(norm, 4) for norm in norms],
        "construct_seconds": round(built, 2),
        "gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    if hasattr(opt, "stats"):
        chosen = ("speculation_", "bytes_", "read_", "write_", "stall", "compute", "step_sec")
        found["stats"] = {
            k: round(v, 4) for k, v in opt.stats().items() if k.startswith(chosen) and v
        }
    if opt is not None:
        opt.close()
    del opt, model, batches
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def spread(ordered: list[float]) -> dict[str, float]:
    """Median, least and most of an ordered list."""
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }


def run_adam(args: argparse.Namespace) -> dict[str, Any]:
    """The update kernel alone: fp32 masters and moments, bf16 gradient in, bf16 weights out."""
    numel = args.adam_numel
    arrays = [torch.zeros(numel) for _ in range(3)]
    grad, out = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    seconds = {}
    for threads in (kernels.default_num_threads(), max(1, kernels.default_num_threads() - 1)):
        kernels.set_threads(threads)
        times = []
        for step in range(1, 6):
            began = time.perf_counter()
            kernels.adam_step(arrays[0], grad, arrays[1], arrays[2], step=step, out=out)
            times.append(time.perf_counter() - began)
        seconds[threads] = min(times[1:])
        away = [torch.zeros(numel) for _ in range(3)]
        seconds[f"{threads} elsewhere"] = min(_step_away(arrays, grad, out, away))
    per_value = {key: value / numel for key, value in seconds.items()}
    return {
        "case": "adam",
        "numel": numel,
        "seconds_for_1.52e9": {k: round(v * 1.518e9, 4) for k, v in per_value.items()},
        "gb_per_s": {k: round(28 / v / 1e9, 1) for k, v in per_value.items()},
    }


def _step_away(
    arrays: list[torch.Tensor], grad: torch.Tensor, out: torch.Tensor, away: list[torch.Tensor]
) -> list[float]:
    import numpy as np

    form = kernels.adam_form(param=torch.float32, grad=grad.dtype, out=out.dtype)
    spans = np.zeros(1, kernels.SPAN_DTYPE)
    names = ("param", "exp_avg", "exp_avg_sq")
    for name, source, target in zip(names, arrays, away, strict=True):
        spans[name], spans[f"{name}_to"] = source.data_ptr(), target.data_ptr()
    spans["grad"], spans["out"], spans["numel"] = grad.data_ptr(), out.data_ptr(), out.numel()
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["lr"], hypers["beta1"], hypers["beta2"], hypers["eps"] = 1e-3, 0.9, 0.999, 1e-8
    hypers["step"], hypers["flags"] = 2, kernels.DECOUPLED | kernels.BIAS_CORRECTION
    times = []
    for _ in range(5):
        began = time.perf_counter()
        kernels.adam_step_spans(form, spans, hypers)
        times.append(time.perf_counter() - began)
    return times[1:]


def run_item(args: argparse.Namespace) -> dict[str, Any]:
    """The wait of `.item()` behind queued gradient copies, and the rate of the copies."""
    from swapio.buffers import BufferPool
    from swapio.optim.cuda_copies import CopyQueue

    nbytes, count = 100 << 20, 4
    device = torch.device("cuda:0")
    sources = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    pool = BufferPool(nbytes * count, pin=True)
    lease = pool.lease(nbytes * count)
    targets = [lease.tensor(torch.uint8, nbytes, at * nbytes) for at in range(count)]
    probe = torch.zeros(1, device=device)

    queue = CopyQueue(device)
    aside = torch.cuda.Stream()

    def chained() -> None:
        for source, target in zip(sources, targets, strict=True):
            queue.copy(source, target)

    def whole() -> None:
        with torch.cuda.stream(aside):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    found: dict[str, Any] = {"case": "item", "is_pinned": pool.is_pinned}
    for name, start in (("chained", chained), ("whole", whole)):
        waits = sorted(_item_wait(start, probe) for _ in range(args.items))
        found[name] = {
            "item_ms_median": round(1e3 * statistics.median(waits), 3),
            "item_ms_p99": round(1e3 * waits[int(0.99 * (len(waits) - 1))], 3),
            "copies_ms": round(1e3 * statistics.median(_whole_time(start) for _ in range(25)), 3),
        }
    lease.release()
    pool.close(force=True)
    return found


def _item_wait(queue: Callable[[], None], probe: torch.Tensor) -> float:
    torch.cuda.synchronize()
    queue()
    began = time.perf_counter()
    probe.item()
    waited = time.perf_counter() - began
    torch.cuda.synchronize()
    return waited


def _whole_time(queue: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    queue()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--clip-always", action="store_true", help="clip at a hundredth")
    parser.add_argument("--gain", type=float, default=0.1, help="of the last norm")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--adam-numel", type=int, default=200_000_000)
    parser.add_argument("--path", type=Path, default=None, help="folder for the case nvme")
    parser.add_argument("--host-memory", default="8GiB", help="budget of the case nvme")
    parser.add_argument("--swap", type=json.loads, default={}, help="more settings, as JSON")
    args = parser.parse_args(argv)
    if args.clip_always:
        args.clip = 0.01
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the cases; prints one JSON object for each."""
    args = arguments(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 1
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    special = {"item": run_item, "adam": run_adam}
    for case in args.cases:
        run = special.get(case)
        result = run_case(case, args) if run is None else run(args)
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
