# SPDX-License-Identifier: Apache-2.0
"""A Muon step put together from the pure functions, without storage or shards, for their tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swapio.optim.muon_math import (
    AdjustLr,
    MatrixView,
    adjusted_lr,
    apply_update,
    matrix_layout,
    momentum_step,
)
from swapio.optim.newton_schulz import DEFAULT_COEFFICIENTS, Coefficients, newton_schulz


class PureMuon:
    """Keeps masters and momentum; `step` takes the gradients."""

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust: AdjustLr = None,
        eps: float = 1e-7,
        coefficients: Coefficients | Sequence[Coefficients] = DEFAULT_COEFFICIENTS,
        num_heads: int = 1,
        view: MatrixView = "auto",
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        self.params = [param.detach().to(torch.float32, copy=True) for param in params]
        self.buffers = [torch.zeros_like(param) for param in self.params]
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        self.nesterov, self.adjust, self.eps = nesterov, adjust, eps
        self.coefficients, self.ns_dtype = coefficients, ns_dtype
        self.num_heads, self.view = num_heads, view

    def step(self, grads: Sequence[Tensor | None], grad_scale: float = 1.0) -> None:
        for param, buffer, grad in zip(self.params, self.buffers, grads, strict=True):
            if grad is None:
                continue
            layout = matrix_layout(param.shape, view=self.view, num_heads=self.num_heads)
            u = torch.empty_like(param)
            momentum_step(
                buffer,
                grad,
                u,
                beta=self.momentum,
                nesterov=self.nesterov,
                grad_scale=grad_scale,
            )
            matrices = u.view(layout.shape)
            newton_schulz(
                matrices, self.coefficients, eps=self.eps, dtype=self.ns_dtype, out=matrices
            )
            update_lr = adjusted_lr(self.lr, layout.rows, layout.cols, self.adjust)
            apply_update(param, u, lr=self.lr, update_lr=update_lr, weight_decay=self.weight_decay)
