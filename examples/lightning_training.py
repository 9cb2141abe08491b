# SPDX-License-Identifier: Apache-2.0
"""Lightning: configure_optimizers with a scheduler, accumulation, clipping, and a resume.

    python examples/lightning_training.py --swap /nvme/run1 --epochs 2 --output out
    python examples/lightning_training.py --swap /nvme/run1 --epochs 4 --output out --resume

Lightning hands `optimizer.step` a closure that computes the loss and runs backward, as torch's
LBFGS needs; swapio runs it once, before it looks at gradients.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from swapio.optim import AdamW


class Regression(lightning.LightningModule):
    """A model with tensors above and below the 1 MiB block size."""

    def __init__(self, swap: str | None) -> None:
        super().__init__()
        self.swap = swap
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 1024),
            torch.nn.GELU(),
            torch.nn.Linear(1024, 512),
            torch.nn.Linear(512, 1),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), wanted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = AdamW(self.named_parameters(), lr=1e-3, swap=self.swap)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        self.optimizers(use_pl_optimizer=False).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--swap", help="folder for the optimizer state, or a .json or .toml file")
    parser.add_argument("--epochs", type=int, default=2, help="of four steps each")
    parser.add_argument("--output", default="output", help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in output")
    parser.add_argument("--weights", help="save the trained weights to this file")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    inputs = torch.randn(64, 64)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, checkpoint = Regression(args.swap), Path(args.output) / "last.ckpt"
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        args.output,
        filename="last",
        every_n_epochs=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(
        accelerator="cpu" if args.cpu else "auto", devices=1, max_epochs=args.epochs, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=1.0, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=args.output,
        callbacks=[keep],
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=str(checkpoint) if args.resume else None)
    print(f"step {trainer.global_step} loss {trainer.callback_metrics['loss'].item():.6f}")
    if args.weights:
        torch.save(model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
