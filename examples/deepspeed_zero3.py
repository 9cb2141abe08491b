# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed ZeRO-3 with its optimizer state on NVMe, on swapio's engine and CPU kernels.

    python examples/deepspeed_zero3.py --nvme /nvme/run1       # state on the drive
    python examples/deepspeed_zero3.py                         # state in RAM: the same weights

DeepSpeed is used as it is; `install()` is the only line that is swapio's. One process, CPU or GPU.
"""

from __future__ import annotations

import argparse
import os
import socket

import deepspeed
import torch

import swapio.integrations.deepspeed

WIDTH = 768


def config_of(args: argparse.Namespace) -> dict[str, object]:
    state: dict[str, object] = {"device": "cpu"}
    if args.nvme:
        pipelined = args.swapper == "pipelined"
        state = {
            "device": "nvme",
            "nvme_path": args.nvme,
            "buffer_count": 12 if pipelined else 5,
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
        }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": WIDTH * WIDTH,
            "offload_optimizer": state,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1},
    }


def train(args: argparse.Namespace) -> list[float]:
    """Train a stack of layers on one batch; return the losses."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(args)
    )
    losses = []
    inputs = torch.randn(4, WIDTH, dtype=torch.bfloat16, device=engine.device)
    for _ in range(args.steps):
        loss = (engine(inputs).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if args.weights:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.save(
                [parameter.detach().clone() for parameter in model.parameters()], args.weights
            )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nvme", help="folder for the optimizer state; without it, RAM")
    parser.add_argument("--swapper", choices=("partitioned", "pipelined"), default="pipelined")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--weights", help="save the trained weights to this file")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
        os.environ.setdefault(name, value)
    swapio.integrations.deepspeed.install()
    print("losses", *(f"{loss:.6f}" for loss in train(args)))


if __name__ == "__main__":
    main()
