# SPDX-License-Identifier: Apache-2.0
"""ZeRO: two ranks on one drive against one, or training on GPUs beside FSDP2's CPU offload.

    python benchmarks/bench_zero.py drive DIR              aggregate I/O of 1 and 2 ranks, gloo
    torchrun --nproc-per-node 2 benchmarks/bench_zero.py gpu --stage 2 [--path DIR]
    torchrun --nproc-per-node 2 benchmarks/bench_zero.py gpu --stage 3 --peer fsdp

`drive` times the sweep over the state alone (read, update, write) of the same number of parameters
in all, as bytes of all ranks over the slowest rank's seconds, in paired rounds. `gpu` prints tokens
per second and seconds in step(), which is what the optimizer exposes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: TID251
import torch.multiprocessing as mp

from swapio.optim import AdamW, Muon, ZeroOptimizer, muon_param_groups

PARAM_NUMEL = 1 << 20


# -- the drive -------------------------------------------------------------------------------


def drive_rank(rank, ranks, args, folder, answers):
    """Take steps and report bytes and seconds of each sweep."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), RANK=str(rank), WORLD_SIZE=str(ranks))
    file = f"file://{folder}/rendezvous-{ranks}"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks)
    params = [torch.nn.Parameter(torch.zeros(PARAM_NUMEL)) for _ in range(args.millions)]
    swap = {"path": folder, "host_memory": args.host_memory // ranks, "min_swap_bytes": 0}
    opt = ZeroOptimizer(params, AdamW, stage=1, bucket_bytes=1 << 20, swap=swap)
    for param in params:
        param.grad = torch.ones_like(param)
    opt._ranks.reducer.close()
    opt._ranks.reducer = None  # gradients are there already
    sweeps, inner = [], opt._sweep

    def timed(*arguments):
        dist.barrier()
        before, began = opt.stats(), time.perf_counter()
        inner(*arguments)
        opt.synchronize()
        after, seconds = opt.stats(), time.perf_counter() - began
        moved = sum(after[k] - before[k] for k in ("bytes_read", "bytes_written"))
        sweeps.append((moved, seconds))

    opt._sweep = timed
    for _ in range(args.steps + 1):
        opt.step()
    opt.close()
    found = [None] * ranks
    dist.all_gather_object(found, sweeps[1:])
    if rank == 0:
        steps = zip(*found, strict=True)
        answers.put([(sum(s[0] for s in step), max(s[1] for s in step)) for step in steps])
    dist.destroy_process_group()


def drive(args):
    """Compare one rank with two, round by round."""
    ratios = []
    for number in range(args.rounds):
        rates = {}
        for ranks in (1, 2) if number % 2 else (2, 1):
            with tempfile.TemporaryDirectory(dir=args.path) as folder:
                answers = mp.get_context("spawn").SimpleQueue()
                mp.spawn(drive_rank, (ranks, args, folder, answers), nprocs=ranks)
                steps = answers.get()
            rates[ranks] = sum(b for b, _ in steps) / sum(s for _, s in steps) / 1e9
        ratios.append(rates[2] / rates[1])
        print(
            f"round {number}: 1 rank {rates[1]:.2f} GB/s, 2 ranks {rates[2]:.2f} GB/s", flush=True
        )
    ratios.sort()
    print(
        f"2 ranks / 1 rank: {ratios[len(ratios) // 2]:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}] "
        f"(asked: 0.97), {args.millions} Mi parameters, {args.rounds} rounds"
    )


# -- GPUs ------------------------------------------------------------------------------------


def build(args, device):
    """A bf16 GPT, the same on every rank."""
    from swapio.demo.model import GPT

    torch.manual_seed(1)
    with torch.device(device):
        return GPT(args.layers, args.width, args.width // 128, args.sequence).bfloat16()


def shard(model, args):
    """Shard the model by FSDP2, block by block."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: TID251

    policy = {"offload_policy": CPUOffloadPolicy()} if args.peer == "fsdp" else {}
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)


def make_optimizer(model, args):
    """The optimizer to measure, or the peer."""
    if args.peer == "fsdp":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    swap = {"host_memory": args.host_memory}
    if args.path:
        swap |= {"path": args.path, "spare_slots": 0}
    settings = {"lr": 1e-4, "swap": swap if args.path else None, "max_grad_norm": 1.0}
    kind = Muon if args.muon else AdamW
    params = muon_param_groups(model, show=False) if args.muon else model.parameters()
    if args.stage == 3:
        return kind(params, nonfinite="skip", **settings)
    return ZeroOptimizer(params, kind, stage=args.stage, **settings)


def gpu(args):
    """Train and print tokens per second, the exposed step, and the loss."""
    rank = int(os.environ["RANK"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    model = build(args, device)
    numel = sum(p.numel() for p in model.parameters())
    if args.stage == 3:
        shard(model, args)
    opt = make_optimizer(model, args)
    generator = torch.Generator().manual_seed(rank)
    times, steps, losses = [], [], []
    for _ in range(args.warmup + args.iterations):
        tokens = torch.randint(256, (args.batch, args.sequence + 1), generator=generator)
        tokens = tokens.to(device)
        began = time.perf_counter()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if args.peer == "fsdp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        synchronize(device)
        before = time.perf_counter()
        opt.step()
        synchronize(device)
        opt.zero_grad()
        ended = time.perf_counter()
        times.append(ended - began)
        steps.append(ended - before)
        losses.append(round(loss.item(), 4))
    seconds = sum(times[args.warmup :]) / args.iterations
    figures = {
        "parameters": numel,
        "ranks": dist.get_world_size(),
        "stage": args.stage,
        "what": args.peer or ("storage" if args.path else "RAM"),
        "tokens_per_second": dist.get_world_size() * args.batch * args.sequence / seconds,
        "seconds": seconds,
        "step_seconds": sum(steps[args.warmup :]) / args.iterations,
        "losses": losses,
    }
    if not args.peer:
        figures |= {k: v for k, v in opt.stats().items() if k.startswith(("num_", "bytes_", "red"))}
        opt.close()
    if rank == 0:
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


def synchronize(device):
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("drive")
    one.add_argument("path", type=Path)
    one.add_argument(
        "--millions", type=int, default=96, help="Mi parameters, of all ranks together"
    )
    one.add_argument("--host-memory", type=int, default=512 << 20)
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--rounds", type=int, default=5)
    one.set_defaults(run=drive)
    two = commands.add_parser("gpu")
    two.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    two.add_argument("--path", help="folder for the state; in RAM if not given")
    two.add_argument("--peer", choices=("fsdp",), help="FSDP2's CPUOffloadPolicy instead")
    two.add_argument("--muon", action="store_true")
    two.add_argument("--host-memory", default="16GiB")
    two.add_argument("--layers", type=int, default=26)
    two.add_argument("--width", type=int, default=3200)
    two.add_argument("--sequence", type=int, default=2048)
    two.add_argument("--batch", type=int, default=8)
    two.add_argument("--warmup", type=int, default=1)
    two.add_argument("--iterations", type=int, default=3)
    two.set_defaults(run=gpu)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
