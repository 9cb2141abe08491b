# SPDX-License-Identifier: Apache-2.0
"""Muon in plain torch: whole matrices, full gradients, momentum kept over steps. No swapio.

`MuonReference` is what every path of the product is compared with. It works in one dtype
throughout (fp32, or float64 for the error of the fp32 loop itself), with the definitions of
torch.optim.Muon and nothing clever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Triple = tuple[float, float, float]
COEFFICIENTS: Triple = (3.4445, -4.775, 2.0315)
# A schedule of different triples, of the kind that minimax designs give: steep first, then mild.
SCHEDULE: tuple[Triple, ...] = (
    (8.2, -23.0, 17.0),
    (4.1, -2.95, 0.55),
    (3.9, -2.9, 0.55),
    (3.3, -2.5, 0.5),
    (2.3, -1.67, 0.42),
)


def plain_newton_schulz(
    u: Tensor,
    coefficients: Triple | Sequence[Triple] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The loop of the definition for one matrix, norm in float64, everything else in `dtype`."""
    single = isinstance(coefficients[0], float)
    triples: Sequence[Any] = [coefficients] * steps if single else coefficients
    norm = u.to(torch.float64).norm().clamp(min=eps)
    if norm == 0:
        return torch.zeros_like(u, dtype=dtype)
    x = (u.to(torch.float64) / norm).to(dtype)
    tall = u.shape[0] > u.shape[1]
    x = x.mT if tall else x
    for a, b, c in triples:
        gram = x @ x.mT
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    result: Tensor = x.mT if tall else x
    return result


def torch_zeropower(grad: Tensor, coefficients: Triple, steps: int, eps: float) -> Tensor:
    """Stand in for torch.optim._muon._zeropower_via_newtonschulz, in fp32 instead of bf16."""
    return plain_newton_schulz(grad, coefficients, steps, eps)


def matrices_of(u: Tensor, num_heads: int = 1, stacked: bool | None = None) -> list[Tensor]:
    """Cut a parameter into the matrices that are orthogonalised alone, as views."""
    stacked = u.ndim == 3 if stacked is None else stacked
    whole = list(u.flatten(0, -3)) if stacked and u.ndim > 2 else [u.flatten(1)]
    return [block for matrix in whole for block in matrix.tensor_split(num_heads)]


class MuonReference:
    """Steps a list of parameters, each a whole tensor, from gradients handed to `step`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust: str | None = None,
        eps: float = 1e-7,
        coefficients: Triple | Sequence[Triple] = COEFFICIENTS,
        steps: int = 5,
        num_heads: int = 1,
        stacked: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.params = [param.detach().to(dtype, copy=True) for param in params]
        self.buffers = [torch.zeros_like(param) for param in self.params]
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        self.nesterov, self.adjust, self.dtype = nesterov, adjust, dtype
        self.newton_schulz = (coefficients, steps, eps)
        self.num_heads, self.stacked = num_heads, stacked

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for param, buffer, grad in zip(self.params, self.buffers, grads, strict=True):
            if grad is not None:
                self._step_one(param, buffer, grad.to(self.dtype))

    def _step_one(self, param: Tensor, buffer: Tensor, grad: Tensor) -> None:
        beta = self.momentum
        buffer.copy_(beta * buffer + (1 - beta) * grad)
        u = (1 - beta) * grad + beta * buffer if self.nesterov else buffer
        param.mul_(1 - self.lr * self.weight_decay)
        coefficients, steps, eps = self.newton_schulz
        matrices = matrices_of(u, self.num_heads, self.stacked)
        targets = matrices_of(param, self.num_heads, self.stacked)
        for matrix, target in zip(matrices, targets, strict=True):
            x = plain_newton_schulz(matrix, coefficients, steps, eps, self.dtype)
            target.sub_(self._adjusted(*matrix.shape) * x)

    def _adjusted(self, rows: int, cols: int) -> float:
        if self.adjust == "match_rms_adamw":
            return self.lr * 0.2 * math.sqrt(max(rows, cols))
        return self.lr * math.sqrt(max(1.0, rows / cols))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected|| in float64; of updates, not of weights."""
    difference = got.to(torch.float64) - expected.to(torch.float64)
    return float(difference.norm() / expected.to(torch.float64).norm())
