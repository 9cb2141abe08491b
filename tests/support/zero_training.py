# SPDX-License-Identifier: Apache-2.0
"""Small trainings for ZeRO: every rank's gradients are seeded, so that one process can redo them.

The loss of a micro-batch is the sum of each parameter times a seeded tensor, which is therefore
exactly its gradient, of full rank, and arrives by a real backward pass.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from swapio.optim import AdamW, Muon


@functools.cache
def noise():
    """Drawing all numbers anew took most of the time of a test."""
    return torch.randn(1 << 21, generator=torch.Generator().manual_seed(1))


def gradient(shape, step, micro, rank, index):
    """The gradient of one parameter on one rank in one micro-batch: a stretch of noise."""
    seed = ((step * 10 + micro) * 10 + rank) * 1000 + index
    numel = torch.Size(shape).numel()
    start = seed * 2654435761 % (len(noise()) - numel)
    return noise()[start : start + numel].view(shape)


def make(shapes, dtype=torch.float32, seed=0):
    """Seeded parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def groups_of(params, *, muon):
    """Named parameters; for Muon in two groups, matrices and the rest."""
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    if not muon:
        return named
    matrices = [item for item in named if item[1].dim() == 2]
    rest = [item for item in named if item[1].dim() != 2]
    return [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]


RULES = {"adamw": AdamW, "muon": Muon}


def rule_groups(params, rule):
    """Param groups of a rule; AdamW's second one has fewer elements than there may be ranks."""
    if rule == "muon":
        return groups_of(params, muon=True)
    named = groups_of(params, muon=False)
    small = [item for item in named if item[1].numel() == 3]
    large = [item for item in named if item[1].numel() != 3]
    return [{"params": large}, {"params": small, "lr": 0.005}] if small else named


def rank_gradients(params, step, micro, rank, *, unused=(), overflow=()):
    """Gradients of one rank; None for (step, rank, index) in `unused`, inf for `overflow`."""
    found = []
    for index, param in enumerate(params):
        if (step, rank, index) in unused:
            found.append(None)
            continue
        value = gradient(param.shape, step, micro, rank, index)
        if param.dtype is not torch.float32:
            # Small whole numbers: the averages of 2 or 4 ranks have no more bits than their dtype.
            value = (2 * value).round().clamp(-4, 4).to(param.dtype)
        if (step, rank, index) in overflow:
            value = value.clone()
            value.view(-1)[-1] = float("inf")
        found.append(value)
    return found


def loss_of(params, grads):
    """A loss whose backward pass gives each parameter its gradient."""
    pairs = zip(params, grads, strict=True)
    return torch.stack([(p * g).sum().float() for p, g in pairs if g is not None]).sum()


class Bank(torch.nn.Module):
    """A module whose loss gives each of its parameters the gradient that it is handed."""

    def __init__(self, params):
        super().__init__()
        self.params = torch.nn.ParameterList(params)

    def forward(self, grads):
        """The loss of one micro-batch."""
        return loss_of(self.params, grads)


def train(
    opt,
    params,
    rank,
    *,
    steps,
    first=1,
    micros=1,
    clip_on=(),
    max_norm=1.0,
    model=None,
    scaler=None,
    **faults,
):
    """Train one rank; clipping by the optimizer's setting on the steps in `clip_on`.

    With a loss scaler, clipping is by the optimizer's method, after the scaler's unscale_().
    """
    no_sync = getattr(opt, "no_sync", contextlib.nullcontext)
    for step in range(first, first + steps):
        opt.max_grad_norm = max_norm if step in clip_on and scaler is None else None
        for micro in range(micros):
            grads = rank_gradients(params, step, micro, rank, **faults)
            last = micro == micros - 1
            with contextlib.nullcontext() if last else no_sync():
                loss = loss_of(params, grads) if model is None else model(grads)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            opt.step()
        else:
            step_scaled(opt, scaler, max_norm if step in clip_on else None)
        opt.zero_grad()


def step_scaled(opt, scaler, max_norm):
    """Step as a loop with a loss scaler does."""
    if max_norm is not None:
        scaler.unscale_(opt)
        opt.clip_grad_norm_(max_norm)
    scaler.step(opt)
    scaler.update()


def averaged(params, world_size, step, micros, **faults):
    """What all ranks' micro-batches average to: sums in order of ranks, then one multiplication."""
    total = [None] * len(params)
    for rank in range(world_size):
        mine = [None] * len(params)
        for micro in range(micros):
            for index, grad in enumerate(rank_gradients(params, step, micro, rank, **faults)):
                if grad is not None:
                    mine[index] = grad if mine[index] is None else mine[index] + grad
        for index, grad in enumerate(mine):
            if grad is not None:
                grad = grad.float()
                total[index] = grad if total[index] is None else total[index] + grad
    return [None if grad is None else grad * (1.0 / world_size) for grad in total]


def train_alone(opt, params, world_size, *, steps, micros=1, clip_on=(), max_norm=1.0, **faults):
    """The same training in one process, with the product's single-process optimizer."""
    for step in range(1, steps + 1):
        opt.max_grad_norm = max_norm if step in clip_on else None
        found = averaged(params, world_size, step, micros, **faults)
        for param, grad in zip(params, found, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype)
        opt.step()


def alone(rule, shapes, world_size, training, *, settings, dtype=torch.float32):
    """Train in one process with state in RAM; return parameters, state and the last norm."""
    params = make(shapes, dtype)
    with RULES[rule](rule_groups(params, rule), nonfinite="skip", **settings) as opt:
        train_alone(opt, params, world_size, **training)
        state = [opt.state_of(param) for param in params]
        return [param.detach() for param in params], state, opt.grad_norm


def alone_by_torch(shapes, world_size, *, settings, steps, micros=1, clip_on=(), max_norm=1.0):
    """The same training by torch's own AdamW and clip_grad_norm_."""
    params = make(shapes)
    opt = torch.optim.AdamW(rule_groups(params, "adamw"), **settings)
    for step in range(1, steps + 1):
        for param, grad in zip(params, averaged(params, world_size, step, micros), strict=True):
            param.grad = grad
        if step in clip_on:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        opt.step()
    return [param.detach() for param in params]
