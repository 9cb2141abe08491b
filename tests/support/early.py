# SPDX-License-Identifier: Apache-2.0
"""A model that gives early steps a hard time, and its training with and without them."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from swapio.optim import AdamW
from swapio.subgroup import SubGroupState

SMALL = {"sub_group_numel": 1 << 12, "cpu_threads": 2}


class Net(torch.nn.Module):
    """A tied embedding and head, a matrix used twice, an unused parameter, several sub-groups."""

    def __init__(self, width=64, vocab=96):
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(vocab, width)
        self.twice = torch.nn.Linear(width, width)
        self.wide = torch.nn.Linear(width, 3 * width)
        self.narrow = torch.nn.Linear(3 * width, width)
        self.out = torch.nn.Linear(width, vocab, bias=False)
        self.out.weight = self.embed.weight
        self.unused = torch.nn.Parameter(torch.randn(5))

    def forward(self, tokens, use_reentrant=None):
        x = self.embed(tokens)
        for block in (self.twice, lambda y: self.narrow(torch.tanh(self.wide(y))), self.twice):
            if use_reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = torch.tanh(checkpoint(block, x, use_reentrant=use_reentrant))
        return self.out(x).square().mean() * 4


def batch(step):
    return torch.randint(0, 96, (4, 6), generator=torch.Generator().manual_seed(step))


def groups_of(model):
    """Two groups, as with and without decay."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


class Run:
    """A training of 12 steps, with or without early steps; everything that came of it."""

    def __init__(self, speculate, *, dtype=torch.float32, make=None, width=64, **kwargs):
        self.model = Net(width).to(dtype)
        params = groups_of(self.model) if make is None else make(self.model)
        cls = kwargs.pop("cls", AdamW)
        swap = {**SMALL, **kwargs.pop("swap", {})}
        self.opt = cls(
            params, lr=1e-2, gradients="stream", speculate=speculate, swap=swap, **kwargs
        )
        self.skipped, self.norms = [], []

    def train(
        self, *, steps=12, accumulation=1, scaler=None, use_reentrant=None, before=None, after=None
    ):
        """`before` is called before each forward, `after` when all early steps were taken."""
        opt = self.opt
        with opt:
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
            for step in range(steps):
                for group in opt.param_groups:
                    if "betas" in group:
                        group["betas"] = (0.85 + 0.01 * step, 0.99)
                if before is not None:  # which may set them to something else
                    before(step, self)
                for micro in range(accumulation):
                    self.go_back(step, micro, scaler, use_reentrant)
                wait(opt)
                if after is not None:
                    after(step, self)
                if scaler is None:
                    opt.step()
                else:
                    scaler.step(opt)
                    scaler.update()
                opt.zero_grad()
                cosine.step()
                self.skipped.append(opt.step_skipped)
                self.norms.append(opt.grad_norm)
            self.found = {n: p.detach().clone() for n, p in self.model.named_parameters()}
            for name, param in self.model.named_parameters():
                for key, value in opt.state_of(param).items():
                    self.found[f"{name}:{key}"] = value.clone()
            self.stats = opt.stats()
        return self

    def num_stored(self):
        """How many sub-groups are not all in RAM."""
        swapper = self.opt.swapper
        keys = self.opt._layout.groups
        return sum(swapper.state(key) is not SubGroupState.RESIDENT for key in keys)

    def go_back(self, step, micro=0, scaler=None, use_reentrant=None):
        loss = self.model(batch(step * 8 + micro), use_reentrant)
        if getattr(self, "poison", None) == step:
            loss = loss + (self.model.wide.bias * float("inf")).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()


def check_equal(early, plain):
    assert early.skipped == plain.skipped
    assert early.norms == plain.norms
    for name, value in plain.found.items():
        assert torch.equal(early.found[name], value), name
    stats = early.stats
    settled = sum(stats[f"speculation_num_{n}"] for n in ("kept", "redone", "undone"))
    assert settled == stats["speculation_num_early"]


def wait(opt):
    """Let every early step be taken that can be: what is stepped early must not depend on time."""
    if opt._early is not None:
        opt._early.wait()


def odd_limit(step, run):
    """Clipping in odd steps only."""
    run.opt.max_grad_norm = 0.05 if step % 2 else 1e6
