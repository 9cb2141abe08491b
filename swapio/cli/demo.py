# SPDX-License-Identifier: Apache-2.0
"""`swapio demo`: the same training twice, with optimizer state in RAM and on storage.

Started by torchrun it trains on all ranks, with ZeroOptimizer; rank 0 does the talking.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from swapio.demo.model import GPT
    from swapio.demo.observe import Device, Run
    from swapio.optim.base import SwapOptimizer
    from swapio.optim.zero.comm import Comm

WARMUP_STEPS = 10
DEVICE_BYTES = 256 << 20
ZERO_BUFFER_BYTES = 16 << 20
DEVICE_SECONDS = 0.7


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small GPT with its optimizer state in RAM and on storage",
        description="Trains a byte-level GPT twice from the same seeds, once with the optimizer's "
        "state in RAM and once on storage, and compares them bit by bit. The exit status is 0 only "
        "if not one bit differs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", metavar="FILE", help="text to learn; Python's standard library if not given")
    add("--path", metavar="DIR", default=".", help="folder on the device that holds the state")
    add("--host-memory", default="64MiB", help="RAM for optimizer state in the second run")
    add("--sub-group-numel", default="4Mi", help="parameters swapped as one unit")
    add("--layers", type=int, default=8, help="blocks of the model")
    add("--width", type=int, default=512, help="size of the residual stream")
    add("--heads", type=int, default=8, help="attention heads")
    add("--sequence", type=int, default=128, help="bytes of a sequence")
    add("--batch", type=int, default=4, help="sequences of a step")
    add("--steps", type=int, default=40, help="training steps of each run")
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon steps the matrices of the blocks by Muon, and the rest by AdamW",
    )
    add(
        "--stage",
        type=int,
        choices=(1, 2),
        default=None,
        help="ZeRO stage of a run on several ranks (torchrun -m swapio demo --stage 2)",
    )
    add("--lr", type=float, default=6e-4, help="peak learning rate")
    add("--seed", type=int, default=1, help="seed of model and data")
    add("--plot", metavar="FILE", default="swapio-demo.png", help="picture to write; '' for none")
    add("--json", action="store_true", help="print figures as JSON")
    add("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train twice, compare, report; 0 if the runs are equal to the bit, on every rank."""
    if args.stage is None:
        return _run(args, None)
    from swapio.optim.zero.comm import joined

    with joined() as comm:
        args.quiet |= comm.rank > 0
        args.seed_of_data = args.seed + 1000 * comm.rank
        args.world_size = comm.world_size
        return _run(args, comm)


def _run(args: argparse.Namespace, comm: Comm | None) -> int:
    from swapio.demo.data import load_text
    from swapio.demo.report import differences

    folder = _check(args)
    text, where = load_text(args.data)
    _say(args, f"text: {text.numel():,} bytes, {where}")
    with tempfile.TemporaryDirectory(prefix="swapio-demo-", dir=folder) as scratch:
        device = _measure_device(args, Path(scratch), comm)
        swap = {
            "path": scratch,
            "host_memory": args.host_memory,
            "sub_group_numel": args.sub_group_numel,
            "trace": str(Path(scratch) / "trace.json"),
        }
        _warm_up(args, text)
        runs = [
            _train(args, text, "state in RAM", None, device),
            _train(args, text, "state on storage", swap, device),
        ]
    found = differences(*runs)
    if comm is not None:
        of_ranks = enumerate(comm.gather(found))
        found = [f"rank {rank}: {text}" for rank, texts in of_ranks for text in texts]
    if comm is None or comm.rank == 0:
        _report(args, runs, device, found)
    return 1 if found else 0


def _report(args: argparse.Namespace, runs: list[Run], device: Device, found: list[str]) -> None:
    from swapio.demo.report import draw, summary, table

    if args.json:
        figures: dict[str, Any] = {run.label: summary(run, device) for run in runs}
        print(json.dumps({**figures, "losses": runs[0].losses, "differences": found}))
    else:
        print(table(runs, device))
        print(f"DIFFERENT: {'; '.join(found)}" if found else _verdict(runs))
    if args.plot and not draw(runs, Path(args.plot)):
        _say(args, "no picture: matplotlib is missing (pip install 'swapio[plot]')")
    elif args.plot:
        _say(args, f"picture: {args.plot}")


def _verdict(runs: list[Run]) -> str:
    steps, tensors = len(runs[0].losses), len(runs[0].parameters)
    return f"equal to the bit: all {steps} losses and all {tensors} parameters"


def _say(args: argparse.Namespace, message: str) -> None:
    if getattr(args, "seed_of_data", args.seed) != args.seed:
        return  # another rank says it
    print(message, file=sys.stderr if args.json else sys.stdout)


def _check(args: argparse.Namespace) -> Path:
    """Check what argparse cannot; return the folder for the state."""
    from swapio.errors import ConfigError

    for name in ("layers", "width", "heads", "sequence", "batch", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.width % args.heads:
        raise ConfigError(f"--width {args.width} is no multiple of --heads {args.heads}")
    folder = Path(args.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--path {folder}: no such folder; make it, or name one on the device")
    return folder


def _measure_device(args: argparse.Namespace, folder: Path, comm: Comm | None) -> Device:
    """Measure the folder's device for two seconds, for the share that the training reaches."""
    if comm is None:
        return _measure(args, folder)
    mine = _measure(args, folder) if comm.rank == 0 else None
    return comm.gather(mine)[0] or _measure(args, folder)


def _measure(args: argparse.Namespace, folder: Path) -> Device:
    from swapio.cli.measure import PATTERNS, Bench, EngineSettings
    from swapio.demo.observe import Device

    with Bench(folder, EngineSettings(), nbytes=DEVICE_BYTES) as bench:
        rates = {name: bench.rate(name, seconds=DEVICE_SECONDS) for name in PATTERNS}
        engine, way = bench.engine.kind, "direct" if bench.is_direct else "buffered"
    figures = ", ".join(f"{name} {rate.gb_per_second:.2f}" for name, rate in rates.items())
    _say(args, f"device: {figures} GB/s ({engine}, {way} I/O)")
    return Device(**{name: rate.gb_per_second * 1e9 for name, rate in rates.items()})


def _schedule(steps: int) -> Callable[[int], float]:
    """Return a factor by step: a linear warm-up, then half a cosine."""
    warmup = min(WARMUP_STEPS, steps)

    def factor(step: int) -> float:
        rest = max(0.0, (step - warmup) / max(1, steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * rest)))

    return factor


def _build(args: argparse.Namespace) -> GPT:
    import torch

    from swapio.demo.model import GPT

    torch.manual_seed(args.seed)
    return GPT(args.layers, args.width, args.heads, args.sequence).bfloat16()


def _warm_up(args: argparse.Namespace, text: torch.Tensor) -> None:
    """Go through a model once: torch may add in another order in a process's first pass."""
    from swapio.demo.data import batches

    model = _build(args)
    for inputs, targets in batches(
        text, steps=1, batch=args.batch, sequence=args.sequence, seed=args.seed
    ):
        model.loss(inputs, targets).backward()


def _optimizer(args: argparse.Namespace, model: GPT, swap: dict[str, Any] | None) -> SwapOptimizer:
    """Make the optimizer; both kinds take the same learning rates."""
    from swapio.optim import AdamW, Muon, ZeroOptimizer, muon_param_groups

    betas = (0.9, 0.95)
    params: Any = model.parameters()
    settings: dict[str, Any] = {"lr": args.lr, "swap": swap}
    if args.optimizer == "adamw":
        settings["betas"] = betas
    else:
        adamw = {"betas": betas, "weight_decay": 0.01}
        params = muon_param_groups(model, adamw=adamw, show=False)
        settings["adjust_lr_fn"] = "match_rms_adamw"
    kind = AdamW if args.optimizer == "adamw" else Muon
    if args.stage is None:
        return kind(params, **settings)
    return ZeroOptimizer(params, kind, stage=args.stage, **settings)


def _train(
    args: argparse.Namespace,
    text: torch.Tensor,
    label: str,
    swap: dict[str, Any] | None,
    device: Device,
) -> Run:
    """Train once and return what was seen."""
    from torch.optim.lr_scheduler import LambdaLR

    from swapio.config_values import parse_size
    from swapio.demo.data import batches
    from swapio.demo.observe import Observer, Run, counters_of, read_trace
    from swapio.demo.train import train
    from swapio.tracing import trace_path

    model = _build(args)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if swap is not None and args.stage is not None:
        # Shards of gradients, and buffers of collectives, are no optimizer state.
        more = ZERO_BUFFER_BYTES + (4 * numel // args.world_size if args.stage == 2 else 0)
        swap = {**swap, "host_memory": parse_size("--host-memory", args.host_memory) + more}
    seen = Run(label, numel, args.batch * args.sequence)
    seed = getattr(args, "seed_of_data", args.seed)
    data = batches(text, steps=args.steps, batch=args.batch, sequence=args.sequence, seed=seed)
    with _optimizer(args, model, swap) as optimizer:
        observer = Observer(
            seen, model, optimizer, device=device, num_steps=args.steps, quiet=args.quiet
        )
        train(model, optimizer, LambdaLR(optimizer, _schedule(args.steps)), data, observer)
        observer.close()
        optimizer.synchronize()
        seen.stats = counters_of(optimizer)
        seen.state_bytes = float(seen.stats.get("host_bytes", 0))
        seen.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    if swap is not None:
        # SWAPIO_TRACE may have named another file.
        seen.events = read_trace(trace_path(optimizer.config.trace or swap["trace"]))
    return seen
