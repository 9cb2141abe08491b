# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer: a small GPT-2 from its config, optimizer given either way, and a resume.

    python examples/hf_trainer.py --swap /nvme/run1 --output out --steps 20
    python examples/hf_trainer.py --swap /nvme/run1 --output out --steps 40 --resume

`--through optimizers` hands the Trainer an optimizer; `--through class` names the class and its
arguments (`optimizer_cls_and_kwargs`), and the Trainer makes the param groups and the optimizer.
"""

from __future__ import annotations

import argparse

import torch
import transformers

from swapio.integrations.accelerate import keep_state_in_place
from swapio.optim import AdamW


class Tokens(torch.utils.data.Dataset):
    """Sequences of 32 tokens, each counting upwards from a random one."""

    def __init__(self) -> None:
        start = torch.randint(0, 200, (256, 1), generator=torch.Generator().manual_seed(1))
        self.tokens = start + torch.arange(32)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build() -> transformers.PreTrainedModel:
    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=192, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def build_trainer(args: argparse.Namespace) -> transformers.Trainer:
    model, swap = build(), args.swap
    arguments = transformers.TrainingArguments(
        args.output, max_steps=args.steps, save_steps=args.save_steps, learning_rate=1e-3,
        warmup_steps=4, weight_decay=0.1, per_device_train_batch_size=4, logging_steps=1,
        gradient_accumulation_steps=2, report_to=[], use_cpu=args.cpu, disable_tqdm=True,
    )  # fmt: skip
    common = {"model": model, "args": arguments, "train_dataset": Tokens()}
    if args.through == "class":
        choice = (AdamW, {"lr": 1e-3, "weight_decay": 0.1, "swap": swap})
        return transformers.Trainer(**common, optimizer_cls_and_kwargs=choice)
    optimizer = AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, swap=swap)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 4, args.steps)
    return transformers.Trainer(**common, optimizers=(optimizer, scheduler))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--swap", help="folder for the optimizer state, or a .json or .toml file")
    parser.add_argument("--output", default="output", help="the Trainer's folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--through", choices=("optimizers", "class"), default="optimizers")
    parser.add_argument(
        "--resume", action="store_true", help="from the newest checkpoint in output"
    )
    parser.add_argument("--weights", help="save the trained weights to this file")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    trainer = build_trainer(args)
    keep_state_in_place(trainer.accelerator)
    result = trainer.train(resume_from_checkpoint=args.resume or None)
    print(f"step {trainer.state.global_step} loss {result.training_loss:.6f}")
    if args.weights:
        torch.save(trainer.model.state_dict(), args.weights)
    trainer.optimizer.optimizer.close()


if __name__ == "__main__":
    main()
