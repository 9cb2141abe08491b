# SPDX-License-Identifier: Apache-2.0
"""Oracles for the Adam kernels in plain numpy, apart from the code under test.

`step64` is the textbook formula in float64. `step32` rounds to fp32 after every operation in the
documented order, one numpy ufunc at a time, so that kernels can be held to it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array64 = NDArray[np.float64]
Array32 = NDArray[np.float32]


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one step."""

    step: int = 1
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    bias_correction: bool = True
    maximize: bool = False

    def keywords(self) -> dict[str, object]:
        """The arguments of swapio.optim.kernels.adam_step."""
        return {
            "step": self.step,
            "lr": self.lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
            "bias_correction": self.bias_correction,
            "maximize": self.maximize,
        }

    @property
    def corrections(self) -> tuple[float, float]:
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step


def step64(
    p: Array64, g: Array64, m: Array64, v: Array64, h: Hyper, scale: float = 1.0
) -> tuple[Array64, Array64, Array64]:
    """One step in float64; the inputs are not changed."""
    g = (-scale if h.maximize else scale) * g
    if not h.decoupled:
        g = g + h.weight_decay * p
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g * g
    correction1, correction2 = h.corrections
    decay = 1 - h.lr * h.weight_decay if h.decoupled else 1.0
    denominator = np.sqrt(v) / np.sqrt(correction2) + h.eps
    return p * decay - h.lr / correction1 * m / denominator, m, v


def step32(
    p: Array32, g: Array32, m: Array32, v: Array32, h: Hyper, scale: float = 1.0
) -> tuple[Array32, Array32, Array32]:
    """One step in fp32 in the documented order of operations."""
    f = np.float32
    correction1, correction2 = h.corrections
    with np.errstate(all="ignore"):
        g = g * f(-scale if h.maximize else scale)
        if not h.decoupled and h.weight_decay:
            g = g + f(h.weight_decay) * p
        m = f(h.beta1) * m + f(1 - h.beta1) * g
        v = f(h.beta2) * v + (f(1 - h.beta2) * g) * g
        decay = f(1 - h.lr * h.weight_decay if h.decoupled else 1.0)
        denominator = np.sqrt(v) * f(1 / np.sqrt(correction2)) + f(h.eps)
        p = p * decay - f(h.lr / correction1) * m / denominator
    return p, m, v


def ulp32(values: Array64) -> Array64:
    """Spacing of fp32 at each magnitude."""
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)
