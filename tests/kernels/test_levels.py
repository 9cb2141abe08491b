# SPDX-License-Identifier: Apache-2.0
"""Every SIMD level gives the bits of the scalar one, for every form, also where values are odd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swapio.optim import kernels
from swapio.optim.kernel_forms import all_forms

SIZES = (0, 1, 7, 15, 17, 1000, 32_785)  # the last: over the edge of a tile
ODD_VALUES = [float("nan"), float("inf"), -float("inf"), 1e-40, -1e-41, -0.0, 3e38, -3e38]


@pytest.fixture(autouse=True)
def _restore_level() -> Iterator[None]:
    level = kernels.simd_level()
    yield
    kernels.set_simd_level(level)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).clone()


def plant(tensor: torch.Tensor, first: int) -> None:
    """Put the odd values in, at other places for each tensor so that they meet plain ones too."""
    if tensor.numel() > first + len(ODD_VALUES):
        tensor[first : first + len(ODD_VALUES)] = torch.tensor(ODD_VALUES).to(tensor.dtype)


def run_form(form: dict[str, Any], numel: int, level: str) -> list[torch.Tensor]:
    kernels.set_simd_level(level)
    generator = torch.Generator().manual_seed(numel)
    param = torch.randn(numel, generator=generator) * 0.1
    grad = (torch.randn(numel, generator=generator) * 0.01).to(form["grad"])
    exp_avg = (torch.randn(numel, generator=generator) * 0.01).to(form["state"])
    exp_avg_sq = (torch.rand(numel, generator=generator) * 1e-4).to(form["state"])
    for first, tensor in enumerate((param, grad, exp_avg)):
        plant(tensor, 3 + 5 * first)
    written = [exp_avg, exp_avg_sq]
    extra: dict[str, Any] = {}
    if form["split"]:
        high, low = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
        extra["ties"] = kernels.split_master_spans(
            [param.data_ptr()], [high.data_ptr()], [low.data_ptr()], [numel], [0]
        )
        extra["low"] = low
        param = high
        written.append(low)
    param = param.to(form["param"])
    if form["out"]:
        extra["out"] = torch.zeros(numel, dtype=form["out"])
        written.append(extra["out"])
    if form["stochastic"]:
        extra["seed"] = 7
    kernels.adam_step(param, grad, exp_avg, exp_avg_sq, step=3, **extra)
    return [bits(tensor) for tensor in [param, *written]]


@pytest.mark.parametrize("level", kernels.simd_levels()[1:])
@pytest.mark.parametrize("numel", SIZES)
def test_levels_agree_bit_for_bit(level: str, numel: int) -> None:
    for form in all_forms():
        expected = run_form(form, numel, "scalar")
        for got, wanted in zip(run_form(form, numel, level), expected, strict=True):
            assert torch.equal(got, wanted), form
