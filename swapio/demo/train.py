# SPDX-License-Identifier: Apache-2.0
"""The training loop. Nothing in it knows where the optimizer's state lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LRScheduler

from swapio.demo.model import GPT


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    report: Callable[[float], None],
) -> None:
    """Train on `batches` of (inputs, targets) and report each step's loss."""
    for inputs, targets in batches:
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(loss.item())
