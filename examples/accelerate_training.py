# SPDX-License-Identifier: Apache-2.0
"""accelerate: gradient accumulation, clipping, a scheduler, and a resume from save_state.

    python examples/accelerate_training.py --swap-path /nvme/run1 --steps 20 --save ckpt
    python examples/accelerate_training.py --swap-path /nvme/run1 --steps 20 --resume ckpt

The flags --swap-... are swapio's: one for each setting, through `swapio.config_flags`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import swapio.config_flags
from swapio.integrations.accelerate import keep_state_in_place
from swapio.optim import AdamW


def build() -> tuple[torch.nn.Module, DataLoader]:
    """Return a model with tensors above and below the 1 MiB block size, and 64 batches."""
    set_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 512),
        torch.nn.Linear(512, 1),
    )
    inputs = torch.randn(512, 64)
    return model, DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)
    keep_state_in_place(accelerator)
    model, loader = build()
    with AdamW(
        model.parameters(), lr=1e-3, swap=swapio.config_flags.from_arguments(args)
    ) as swapped:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(swapped, max_lr=1e-2, total_steps=100)
        model, optimizer, loader, scheduler = accelerator.prepare(model, swapped, loader, scheduler)
        done = 0
        if args.resume:
            accelerator.load_state(args.resume)
            done = scheduler.state_dict()["last_epoch"]
        batches = iter(accelerator.skip_first_batches(loader, 2 * done))
        while done < args.steps:
            inputs, wanted = next(batches)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                done += accelerator.sync_gradients
        accelerator.print(f"step {done} loss {loss.item():.6f} lr {scheduler.get_last_lr()[0]:.3e}")
        if args.save:
            accelerator.save_state(args.save)
        if args.weights:
            torch.save(accelerator.unwrap_model(model).state_dict(), args.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, counted from 0")
    parser.add_argument("--save", help="folder for accelerate's save_state")
    parser.add_argument("--resume", help="folder that save_state wrote")
    parser.add_argument("--weights", help="save the trained weights to this file")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    swapio.config_flags.add_arguments(parser)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
