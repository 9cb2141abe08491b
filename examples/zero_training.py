# SPDX-License-Identifier: Apache-2.0
"""ZeRO: each rank keeps and swaps its shard of the optimizer state.

    torchrun --nproc-per-node 2 examples/zero_training.py --swap /nvme/run1 --steps 4 --save ckpt
    torchrun --nproc-per-node 3 examples/zero_training.py --swap /nvme/run1 --steps 8 --resume ckpt

Micro-batches of a step are accumulated locally and reduced once, while the last backward goes on.
A checkpoint is one for all ranks: any number of them can go on from it.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist  # noqa: TID251

from swapio.optim import AdamW, Muon, ZeroOptimizer, muon_param_groups

BATCH = 48  # of all ranks and micro-batches together; divisible by 1, 2, 3 and 4 ranks
MICRO_BATCHES = 2


def build() -> torch.nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 515),
        torch.nn.Linear(515, 1),
    )


def batches(step: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """Return this rank's micro-batches of a step."""
    data = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    return list(data.chunk(ranks)[rank].chunk(MICRO_BATCHES))


def train(args: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    params = model
    kind, settings = AdamW, {"lr": 1e-3}
    if args.muon:
        params = muon_param_groups(model, adamw={"lr": 1e-3}, show=rank == 0)
        kind, settings = Muon, {"lr": 0.02}
    with ZeroOptimizer(
        params, kind, stage=args.stage, swap=args.swap, max_grad_norm=1.0, **settings
    ) as optimizer:
        if rank == 0:
            print(optimizer.describe(), flush=True)
        first = optimizer.load(args.resume).step if args.resume else 0
        for step in range(first, args.steps):
            inputs = batches(step, rank, ranks)
            for number, batch in enumerate(inputs):
                is_last = number == len(inputs) - 1
                with contextlib.nullcontext() if is_last else optimizer.no_sync():
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    (loss / len(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.6f} norm {optimizer.grad_norm:.4f}")
        if args.save:
            optimizer.save(args.save, f"step-{args.steps}")
        if args.weights and rank == 0:
            torch.save([parameter.detach() for parameter in model.parameters()], args.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--muon", action="store_true", help="Muon for matrices")
    parser.add_argument("--swap", help="folder for the optimizer state; all ranks may share it")
    parser.add_argument("--steps", type=int, default=8, help="in total")
    parser.add_argument("--save", help="folder for the checkpoint")
    parser.add_argument("--resume", help="folder of a checkpoint")
    parser.add_argument("--weights", help="save the trained weights to this file")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
