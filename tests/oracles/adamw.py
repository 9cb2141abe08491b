# SPDX-License-Identifier: Apache-2.0
"""AdamW and Adam in float64, plain torch, with the bounds that products are held to. No swapio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class AdamWReference:
    """Steps a list of parameters in float64; a gradient of None leaves its parameter alone.

    `largest` and `moved` are what `check_elementwise` bounds the error with: the largest |p| that
    each element had so far, and the sum of the |update| of its steps.
    """

    params: Sequence[Tensor]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    maximize: bool = False
    steps: list[int] = field(init=False)
    exp_avg: list[Tensor] = field(init=False)
    exp_avg_sq: list[Tensor] = field(init=False)
    largest: list[Tensor] = field(init=False)
    moved: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.params = [param.detach().to(torch.float64, copy=True) for param in self.params]
        self.steps = [0] * len(self.params)
        self.exp_avg = [torch.zeros_like(param) for param in self.params]
        self.exp_avg_sq = [torch.zeros_like(param) for param in self.params]
        self.largest = [param.abs() for param in self.params]
        self.moved = [torch.zeros_like(param) for param in self.params]

    def step(self, grads: Sequence[Tensor | None], grad_scale: float = 1.0) -> None:
        for index, grad in enumerate(grads):
            if grad is not None:
                self._step_one(index, grad.detach().to(torch.float64) * grad_scale)

    def _step_one(self, index: int, grad: Tensor) -> None:
        param = self.params[index]
        before = param.clone()
        self.steps[index] += 1
        step, (beta1, beta2) = self.steps[index], self.betas
        grad = -grad if self.maximize else grad
        if self.decoupled:
            param.mul_(1 - self.lr * self.weight_decay)
        else:
            grad = grad + self.weight_decay * param
        exp_avg, exp_avg_sq = self.exp_avg[index], self.exp_avg_sq[index]
        exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * grad)
        exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * grad * grad)
        denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + self.eps
        param.sub_(self.lr / (1 - beta1**step) * exp_avg / denominator)
        self.largest[index] = torch.maximum(self.largest[index], param.abs())
        self.moved[index] += (param - before).abs()

    def check(self, params: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        """Hold `params` to the elementwise bound after the steps taken so far."""
        for index, param in enumerate(params):
            check_elementwise(
                param,
                self.params[index],
                num_steps=self.steps[index],
                largest=self.largest[index],
                moved=self.moved[index],
                dtype=dtype,
            )


def ulp(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the spacing of `dtype` at |values|, in float64."""
    info = torch.finfo(dtype)
    magnitude = values.abs().to(torch.float64).clamp(min=info.tiny)
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, info.eps / 2), exponent)


def check_elementwise(
    param: Tensor,
    reference: Tensor,
    *,
    num_steps: int,
    largest: Tensor,
    moved: Tensor,
    dtype: torch.dtype = torch.float32,
    ulps: float = 2.0,
    relative: float = 1e-6,
) -> None:
    """Raise unless |p - p_ref| <= 2 ulp(largest |p|) per step + 1e-6 of the summed |updates|.

    Args:
        param: What the product computed.
        reference: The float64 result.
        num_steps: Steps that were taken.
        largest: The largest |p| of each element on the way, of the reference.
        moved: Sum of |update| over the steps, of the reference.
        dtype: The dtype whose ulp counts: fp32 for masters; bf16 for parameters without master.
        ulps: Ulps allowed per step.
        relative: Share of `moved` allowed.
    """
    assert param.shape == reference.shape
    param = param.detach()
    error = (param.to(torch.float64) - reference).abs()
    bound = ulps * num_steps * ulp(largest, dtype) + relative * moved
    excess = error / bound
    assert torch.isfinite(param).all(), "not finite"
    worst = int(excess.flatten().argmax()) if excess.numel() else 0
    assert bool((error <= bound).all()), (
        f"element {worst}: got {float(param.flatten()[worst])!r}, expected "
        f"{float(reference.flatten()[worst])!r}, {float(excess.max()):.3g} times the bound"
    )


def check_normwise(
    param: Tensor,
    reference: Tensor,
    initial: Tensor,
    *,
    relative: float = 1e-5,
) -> None:
    """Raise unless ||d - d_ref|| <= 1e-5 ||d_ref|| + 2^-23 ||p||, d the update from `initial`."""
    start = initial.detach().to(torch.float64)
    update = param.detach().to(torch.float64) - start
    expected = reference.detach().to(torch.float64) - start
    bound = relative * expected.norm() + 2.0**-23 * reference.detach().to(torch.float64).norm()
    error = (update - expected).norm()
    assert bool(error <= bound), f"off by {float(error):.3g}, allowed {float(bound):.3g}"
