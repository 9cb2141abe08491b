# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on the GPU: bf16 by default, fp32 on request, and no wait for the stream."""

from __future__ import annotations

import warnings

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


def queued(u: torch.Tensor, **settings: float) -> torch.Tensor:
    """newton_schulz, with an error for anything that waits for the stream."""
    nbytes = newton_schulz_workspace_bytes(u.shape, device_type="cuda")
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    newton_schulz(u, workspace=workspace, **settings)  # loads the libraries, which may wait
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        return newton_schulz(u, workspace=workspace, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [*SHAPES, (64, 17, 33), (1, 1)])
def test_nothing_waits_for_the_stream(shape: tuple[int, ...]) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
    for eps in (1e-7, 0.0):
        assert torch.isfinite(queued(u, eps=eps)).all()


def test_scales_and_zeros() -> None:
    u = torch.randn(1, 17, 33, generator=torch.Generator().manual_seed(0)).cuda()
    # Powers of two, so that scaling rounds nothing; near 1e-30, 1 and 1e25.
    factors = torch.tensor([2.0**-100, 0.0, 1.0, 2.0**83], device="cuda").view(-1, 1, 1)
    got = queued(u * factors, eps=0.0)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    for index in (0, 3):
        assert torch.equal(got[index], got[2])
    uneven = newton_schulz(u * 1e-30, eps=0.0)  # rounds u in its last bit
    assert relative_error(uneven[0].cpu(), got[2].cpu()) < 2e-2


def test_non_finite_values_stay_within_their_matrix() -> None:
    u = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0)).cuda()
    u[1, 2, 3] = float("nan")
    got = queued(u)
    assert torch.isfinite(got[[0, 2]]).all()
    assert torch.isnan(got[1]).any()
