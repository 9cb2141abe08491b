# SPDX-License-Identifier: Apache-2.0
"""The pure arithmetic of a Muon step, against torch.optim.Muon and the full-matrix reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.muon import MuonReference, relative_error, torch_zeropower
from torch import Tensor

from support.pure_muon import PureMuon
from swapio.errors import ConfigError
from swapio.optim.muon_math import (
    AdjustLr,
    adjusted_lr,
    apply_update,
    matrix_layout,
    momentum_step,
)

ADJUSTS: tuple[AdjustLr, ...] = (None, "original", "match_rms_adamw")


def gradients(shapes: list[tuple[int, ...]], steps: int, seed: int = 0) -> list[list[Tensor]]:
    """Full-rank gradients: those of a squared loss over a wide batch are as generic as these."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def start(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [0.02 * torch.randn(shape, generator=generator) for shape in shapes]


def updates(after: list[Tensor], before: list[Tensor]) -> Tensor:
    return torch.cat(
        [(a.double() - b.double()).flatten() for a, b in zip(after, before, strict=True)]
    )


def run_torch(initial: list[Tensor], grads: list[list[Tensor]], **settings: Any) -> list[Tensor]:
    params = [torch.nn.Parameter(tensor.clone()) for tensor in initial]
    optimizer = torch.optim.Muon(params, **settings)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


SHAPES: list[tuple[int, ...]] = [(17, 33), (64, 32), (32, 128), (48, 48)]


@pytest.mark.parametrize("adjust", ADJUSTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_agrees_with_torch_muon_in_fp32(
    adjust: AdjustLr, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch orthogonalises in bf16 whatever the dtype, so its loop is replaced by an fp32 one."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", torch_zeropower)
    initial, grads = start(SHAPES), gradients(SHAPES, 5)
    expected = run_torch(
        initial, grads, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust
    )
    ours = PureMuon(initial, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust=adjust)
    for step in grads:
        ours.step(step)
    assert relative_error(updates(ours.params, initial), updates(expected, initial)) < 1e-5


@pytest.mark.parametrize("adjust", ADJUSTS)
@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
def test_is_near_unmodified_torch_muon(adjust: AdjustLr, ns_dtype: torch.dtype) -> None:
    initial, grads = start(SHAPES), gradients(SHAPES, 5)
    expected = run_torch(initial, grads, lr=0.02, adjust_lr_fn=adjust)
    ours = PureMuon(initial, lr=0.02, adjust=adjust, ns_dtype=ns_dtype)
    for step in grads:
        ours.step(step)
    assert relative_error(updates(ours.params, initial), updates(expected, initial)) < 5e-2


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_agrees_with_the_reference_over_steps(adjust: AdjustLr) -> None:
    shapes: list[tuple[int, ...]] = [(17, 33), (33, 17), (4, 24, 40), (8, 3, 3, 3), (520, 560)]
    initial, grads = start(shapes), gradients(shapes, 4)
    ours = PureMuon(initial, lr=0.02, adjust=adjust)
    reference = MuonReference(initial, lr=0.02, adjust=adjust)
    for number, step in enumerate(grads):
        masked = [grad if number != 2 or index else None for index, grad in enumerate(step)]
        ours.step(masked)
        reference.step(masked)
    for got, expected, before in zip(ours.params, reference.params, initial, strict=True):
        assert relative_error(got - before, expected - before) < 1e-5


def test_momentum_agrees_with_torch_bit_for_bit() -> None:
    grads = gradients([(17, 33)], 4)
    param = torch.nn.Parameter(torch.zeros(17, 33))
    optimizer = torch.optim.Muon([param])
    buffer, u = torch.zeros(17, 33), torch.empty(17, 33)
    for (grad,) in grads:
        param.grad = grad.clone()
        optimizer.step()
        momentum_step(buffer, grad, u, beta=0.95)
        assert torch.equal(buffer, optimizer.state[param]["momentum_buffer"])
        assert torch.equal(u, grad.lerp(buffer, 0.95))


@given(
    cuts=st.lists(st.integers(0, 561), max_size=4),
    nesterov=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 1 / 3]),
)
@settings(max_examples=30, deadline=None)
def test_shards_give_the_same_bits_as_the_whole(
    cuts: list[int], nesterov: bool, scale: float
) -> None:
    """A shard is one-dimensional and may begin and end anywhere in the matrix."""
    generator = torch.Generator().manual_seed(5)
    grad, momentum, param = (torch.randn(561, generator=generator) for _ in range(3))
    whole = [momentum.clone(), torch.empty(561), param.clone()]
    momentum_step(whole[0], grad, whole[1], beta=0.9, nesterov=nesterov, grad_scale=scale)
    apply_update(whole[2], whole[1], lr=0.1, update_lr=0.3, weight_decay=0.1)
    pieces = [momentum.clone(), torch.empty(561), param.clone()]
    bounds = sorted({0, 561, *cuts})
    for first, last in itertools.pairwise(bounds):
        m, u, p = (tensor[first:last] for tensor in pieces)
        momentum_step(m, grad[first:last], u, beta=0.9, nesterov=nesterov, grad_scale=scale)
        apply_update(p, u, lr=0.1, update_lr=0.3, weight_decay=0.1)
    for piece, expected in zip(pieces, whole, strict=True):
        assert torch.equal(piece, expected)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_mix(grad_dtype: torch.dtype, momentum_dtype: torch.dtype) -> None:
    grad = gradients([(17, 33)], 1)[0][0].to(grad_dtype)
    momentum = torch.zeros(17, 33, dtype=momentum_dtype)
    u = momentum_step(momentum, grad, torch.empty(17, 33), beta=0.95)
    assert u.dtype == torch.float32
    assert momentum.dtype == momentum_dtype
    assert torch.isfinite(u).all()
    torch.testing.assert_close(momentum.float(), 0.05 * grad.float(), rtol=1e-2, atol=1e-6)
    param = torch.zeros(17, 33, dtype=grad_dtype)
    apply_update(param, u, lr=0.1, update_lr=0.1, weight_decay=0.1)
    assert param.dtype == grad_dtype


def test_gradient_may_be_the_output() -> None:
    grad = gradients([(17, 33)], 1)[0][0]
    first, second = torch.zeros(17, 33), torch.zeros(17, 33)
    expected = momentum_step(first, grad, torch.empty(17, 33), beta=0.9, grad_scale=0.5)
    in_place = grad.clone()
    assert momentum_step(second, in_place, in_place, beta=0.9, grad_scale=0.5) is in_place
    assert torch.equal(in_place, expected)
    assert torch.equal(first, second)


@pytest.mark.parametrize("factor", [1.0, 1000.0, 1e-5])
def test_loss_scale_and_gradient_scale_cancel(factor: float) -> None:
    shapes: list[tuple[int, ...]] = [(17, 33), (64, 32)]
    initial, grads = start(shapes), gradients(shapes, 3)
    plain, scaled, larger = (PureMuon(initial, lr=0.02) for _ in range(3))
    for step in grads:
        plain.step(step)
        scaled.step([1024 * grad for grad in step], grad_scale=1 / 1024)
        larger.step([factor * grad for grad in step])
    expected = updates(plain.params, initial)
    assert torch.equal(updates(scaled.params, initial), expected)
    assert relative_error(updates(larger.params, initial), expected) < 1e-4


def test_heads_equal_stacked_matrices() -> None:
    """num_heads = 4 on 64 x 32 is four matrices of 16 x 32, each with its own scale."""
    initial, grads = start([(64, 32)]), gradients([(64, 32)], 3)
    for adjust in ADJUSTS:
        heads = PureMuon(initial, lr=0.02, adjust=adjust, num_heads=4)
        stacked = PureMuon([initial[0].view(4, 16, 32)], lr=0.02, adjust=adjust)
        separate = PureMuon(list(initial[0].split(16)), lr=0.02, adjust=adjust)
        reference = MuonReference(initial, lr=0.02, adjust=adjust, num_heads=4)
        for (grad,) in grads:
            heads.step([grad])
            stacked.step([grad.view(4, 16, 32)])
            separate.step(list(grad.split(16)))
            reference.step([grad])
        assert torch.equal(heads.params[0], stacked.params[0].view(64, 32))
        joined = torch.cat(separate.params)
        expected = reference.params[0] - initial[0]
        for got in (heads.params[0], joined):
            assert relative_error(got - initial[0], expected) < 1e-5


def test_convolution_equals_the_flattened_linear() -> None:
    conv, grads = start([(8, 3, 3, 3)]), gradients([(8, 3, 3, 3)], 3)
    ours = PureMuon(conv, lr=0.02)
    linear = PureMuon([conv[0].flatten(1)], lr=0.02)
    for (grad,) in grads:
        ours.step([grad])
        linear.step([grad.flatten(1)])
    assert torch.equal(ours.params[0].flatten(1), linear.params[0])


def test_scaled_heads_differ_from_the_whole_matrix() -> None:
    initial, grads = start([(64, 32)]), gradients([(64, 32)], 1)
    heads, whole = PureMuon(initial, num_heads=4), PureMuon(initial)
    heads.step(grads[0])
    whole.step(grads[0])
    assert not torch.allclose(heads.params[0] - initial[0], whole.params[0] - initial[0])


def test_matrix_layouts() -> None:
    assert matrix_layout((6, 4)).shape == (1, 6, 4)
    assert matrix_layout((5, 6, 4)).shape == (5, 6, 4)
    assert matrix_layout((6, 4, 3), view="flat").shape == (1, 6, 12)
    assert matrix_layout((8, 3, 2, 2)).shape == (1, 8, 12)
    assert matrix_layout((2, 3, 6, 4), view="stacked").shape == (6, 6, 4)
    assert matrix_layout((5, 6, 4), num_heads=3).shape == (15, 2, 4)
    assert matrix_layout((6, 4)).numel == 24


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ((12,), {}, r"layers\.0\.w: Muon steps matrices, but its logical shape is \(12,\)"),
        ((), {}, "logical shape is"),
        ((10, 4), {"num_heads": 4}, r"layers\.0\.w: num_heads=4 must divide its 10 rows"),
        ((10, 4), {"num_heads": 0}, "num_heads=0"),
        ((10, 4), {"view": "round"}, "view must be one of"),
    ],
)
def test_layout_errors_name_the_parameter(
    shape: tuple[int, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        matrix_layout(shape, name="layers.0.w", **settings)


def test_adjusted_learning_rates() -> None:
    assert adjusted_lr(0.1, 64, 16) == 0.2
    assert adjusted_lr(0.1, 16, 64, "original") == 0.1
    assert adjusted_lr(0.1, 16, 64, "match_rms_adamw") == pytest.approx(0.1 * 0.2 * 8)
    for rows, cols in ((64, 16), (16, 64)):
        for adjust in ADJUSTS:
            expected = torch.optim._muon._adjust_lr(0.1, adjust, torch.Size((rows, cols)))
            assert math.isclose(adjusted_lr(0.1, rows, cols, adjust), expected, rel_tol=1e-15)
    with pytest.raises(ConfigError, match="match_rms_adamw"):
        adjusted_lr(0.1, 1, 1, "rms")  # type: ignore[arg-type]
