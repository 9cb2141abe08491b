# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on the GPU: bf16 by default, fp32 on request, and no wait for the stream."""

from __future__ import annotations

import pytest
import torch
from oracles.muon import plain_newton_schulz, relative_error

from swapio.optim.newton_schulz import newton_schulz, newton_schulz_workspace_bytes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPES = [(17, 33), (512, 512), (1024, 256), (5, 64, 300)]


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_the_default_and_within_its_bound(shape: tuple[int, ...]) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = newton_schulz(u.cuda())
    assert got.dtype == torch.bfloat16
    for matrix, result in zip(u.view(-1, *shape[-2:]), got.view(-1, *shape[-2:]), strict=True):
        exact = plain_newton_schulz(matrix, dtype=torch.float64)
        assert relative_error(result.cpu(), exact) < 5e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_agrees_with_the_cpu(shape: tuple[int, ...]) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = newton_schulz(u.cuda(), dtype=torch.float32)
    assert relative_error(got.cpu(), newton_schulz(u)) < 2e-5


def test_scales_and_zeros_without_waiting_for_the_stream() -> None:
    u = torch.randn(4, 17, 33, generator=torch.Generator().manual_seed(0)).cuda()
    factors = torch.tensor([1e-30, 0.0, 1.0, 1e25], device="cuda").view(-1, 1, 1)
    scaled = u[:1] * factors
    nbytes = newton_schulz_workspace_bytes(scaled.shape, device_type="cuda")
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    newton_schulz(scaled, eps=0.0, workspace=workspace)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = newton_schulz(scaled, eps=0.0, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    for index in (0, 3):
        assert torch.equal(got[index], got[2])
