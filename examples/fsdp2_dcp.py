# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with torch.distributed.checkpoint: each rank swaps the state of the shards it holds.

    torchrun --nproc-per-node 2 examples/fsdp2_dcp.py --swap /nvme/run1 --steps 4 --save ckpt
    torchrun --nproc-per-node 4 examples/fsdp2_dcp.py --swap /nvme/run1 --steps 8 --resume ckpt

Parameters are DTensors; swapio steps their local shards. A run of another number of ranks can
resume from either kind of checkpoint: DCP's, or, with `--own`, swapio's, which links files where
DCP copies bytes. (swapio.integrations.dcp loads large states from DCP's without RAM for them.)
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist  # noqa: TID251
import torch.distributed.checkpoint as dcp  # noqa: TID251
from torch.distributed.device_mesh import init_device_mesh  # noqa: TID251
from torch.distributed.fsdp import fully_shard  # noqa: TID251

from swapio.optim import AdamW

BATCH = 24  # of all ranks together; divisible by 1, 2, 3 and 4


def build(device: str) -> torch.nn.Module:
    """Return a model whose every layer is sharded over all ranks."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 515),
        torch.nn.Linear(515, 1),
    ).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(args: argparse.Namespace, device: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(device)
    with AdamW(model.named_parameters(), lr=1e-3, swap=args.swap) as optimizer:
        progress = {"step": 0}
        everything = {"model": model, "optimizer": optimizer, "progress": progress}
        if args.resume and args.own:
            progress["step"] = optimizer.load(args.resume).step
        elif args.resume:
            dcp.load(everything, checkpoint_id=args.resume)
        for step in range(progress["step"], args.steps):
            data = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
            inputs = data.chunk(ranks)[rank].to(device)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / ranks)
            progress["step"] = step + 1
            if rank == 0:
                print(f"step {step + 1} loss {mean.item():.6f}", flush=True)
        if args.save and args.own:
            optimizer.save(args.save, f"step-{args.steps}").result()
        elif args.save:
            dcp.save(everything, checkpoint_id=args.save)
        if args.weights:
            whole = [parameter.full_tensor().cpu() for parameter in model.parameters()]
            if rank == 0:
                torch.save(whole, args.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--swap", help="folder for the optimizer state, or a .json or .toml file")
    parser.add_argument("--steps", type=int, default=8, help="in total")
    parser.add_argument("--save", help="folder for the checkpoint")
    parser.add_argument("--resume", help="folder of a checkpoint")
    parser.add_argument("--own", action="store_true", help="swapio's own checkpoint, not DCP's")
    parser.add_argument("--weights", help="save the trained weights to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
