# SPDX-License-Identifier: Apache-2.0
"""Rescaling and undoing a step: against the direct step, float64, and the exact state before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.adam_reference import Hyper, step32, step64, ulp32
from swapio.optim import kernels

NUMEL = 40_001
RATIOS = (0.5, 0.1, 1 / 32, 1e-2, 1e-3, 2.4e-4, 1e-5, 1e-6)
HYPER = Hyper(step=7)
Arrays = list[torch.Tensor]  # param, grad, exp_avg, exp_avg_sq


def arrays(fresh: float, seed: int = 0, grad_size: float = 0.01) -> Arrays:
    """State after some steps, of which a share has never been touched."""
    random = np.random.default_rng(seed)
    p = (random.standard_normal(NUMEL) * 0.1).astype(np.float32)
    g = (random.standard_normal(NUMEL) * grad_size).astype(np.float32)
    m = (random.standard_normal(NUMEL) * 0.003).astype(np.float32)
    v = ((0.2 + random.random(NUMEL)) * 1e-4).astype(np.float32)
    untouched = random.random(NUMEL) < fresh
    m[untouched] = 0
    v[untouched] = 0
    return [torch.from_numpy(array) for array in (p, g, m, v)]


def clone(tensors: Arrays) -> Arrays:
    return [tensor.clone() for tensor in tensors]


def same(one: Arrays, two: Arrays) -> bool:
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, two, strict=True)
    )


def stepped(before: Arrays, scale: float, hyper: Hyper = HYPER) -> Arrays:
    after = clone(before)
    kernels.adam_step(*after, **hyper.keywords(), grad_scale=scale)
    return after


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("fresh", [0.0, 0.02, 1.0])
def test_rescale_follows_the_direct_step(ratio: float, fresh: float) -> None:
    before = arrays(fresh)
    direct = stepped(before, ratio)
    rescaled = stepped(before, 1.0)
    kernels.adam_rescale(*rescaled, **HYPER.keywords(), old_scale=1.0, new_scale=ratio)
    exact = step64(*(t.numpy().astype(np.float64) for t in before), HYPER, scale=ratio)

    untouched = (before[3] == 0).numpy()
    for index in (2, 3):  # moments without history: the direct step's bits
        mine, theirs = rescaled[index].numpy(), direct[index].numpy()
        assert np.array_equal(mine[untouched].view(np.int32), theirs[untouched].view(np.int32))
    start = before[0].numpy().astype(np.float64)
    change = rescaled[0].numpy().astype(np.float64) - start
    wanted = exact[0] - start
    norm = np.linalg.norm
    allowed = 1e-5 * norm(wanted) + 2.0**-23 * norm(start)
    assert norm(change - wanted) <= allowed
    # No element moves more than 1 % further than the direct step moves it.
    slack = 4 * ulp32(np.maximum(np.abs(start), np.abs(exact[0]))) + 1e-6 * HYPER.lr
    assert (np.abs(change) <= 1.01 * np.abs(wanted) + slack).all()


@pytest.mark.parametrize("ratio", [r for r in RATIOS if r >= 1 / 32])
def test_rescaled_second_moment_is_within_its_bound(ratio: float) -> None:
    """A spike that dominates v: what v keeps is known to 2^-24 (old / new)^2 of the new one."""
    before = arrays(0.0, grad_size=100.0)
    rescaled = stepped(before, 1.0)
    kernels.adam_rescale(*rescaled, **HYPER.keywords(), old_scale=1.0, new_scale=ratio)
    exact = step64(*(t.numpy().astype(np.float64) for t in before), HYPER, scale=ratio)
    error = np.abs(rescaled[3].numpy() - exact[2]) / exact[2]
    assert error.max() <= 2 * 2.0**-24 / ratio**2 + 1e-6
    floor = np.float32(1 - HYPER.beta2) * (before[1].numpy() * np.float32(ratio))
    floor = floor * (before[1].numpy() * np.float32(ratio))
    assert (rescaled[3].numpy() >= floor).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_first_step_moments_are_exact(ratio: float) -> None:
    hyper = Hyper(step=1)
    before = arrays(1.0)
    direct, rescaled = stepped(before, ratio, hyper), stepped(before, 1.0, hyper)
    kernels.adam_rescale(*rescaled, **hyper.keywords(), old_scale=1.0, new_scale=ratio)
    assert same(rescaled[2:], direct[2:])
    assert torch.allclose(rescaled[0], direct[0], rtol=0, atol=2e-6 * HYPER.lr + 3e-8)


def test_untouched_elements_are_seen_at_late_steps_with_any_old_scale() -> None:
    hyper = Hyper(step=1000)
    before = arrays(1.0)
    direct, rescaled = stepped(before, 0.01, hyper), stepped(before, 0.7, hyper)
    kernels.adam_rescale(*rescaled, **hyper.keywords(), old_scale=0.7, new_scale=0.01)
    assert same(rescaled[2:], direct[2:])


def test_equal_scales_leave_every_bit() -> None:
    after = stepped(arrays(0.02), 0.3)
    after[0][5], after[2][6], after[2][7] = -0.0, -0.0, float("nan")
    rescaled = clone(after)
    kernels.adam_rescale(*rescaled, **HYPER.keywords(), old_scale=0.3, new_scale=0.3)
    assert same(rescaled, after)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_equal_scales_still_write_what_goes_elsewhere(out: torch.dtype) -> None:
    """They once returned early, and left a new copy and other destinations as they were."""
    after = stepped(arrays(0.02), 0.3)
    after[2][7], after[3][8] = -0.0, 1e-45
    copy = torch.full((NUMEL,), 7.0, dtype=out)
    rescaled = clone(after)
    kernels.adam_rescale(*rescaled, **HYPER.keywords(), old_scale=0.3, new_scale=0.3, out=copy)
    assert same(rescaled, after)
    assert torch.equal(copy, after[0].to(out))
    targets = [torch.full((NUMEL,), 7.0) for _ in range(3)]
    spans = np.zeros(1, kernels.SPAN_DTYPE)
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    for name, tensor in zip(names, after, strict=True):
        spans[name] = tensor.data_ptr()
    for name, tensor in zip((names[0], *names[2:]), targets, strict=True):
        spans[f"{name}_to"] = tensor.data_ptr()
    spans["numel"] = NUMEL
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["step"] = 7
    form = kernels.adam_form(param=torch.float32, grad=torch.float32)
    kernels.adam_rescale_spans(form, spans, hypers, old_scale=0.3, new_scale=0.3)
    assert same(targets, [after[0], *after[2:]])


def test_equal_scales_move_a_split_master() -> None:
    p, g, m, v = arrays(0.02)
    p.view(torch.int32)[:4] = 0x3F808000  # ties
    high, low = torch.empty(NUMEL, dtype=torch.bfloat16), torch.empty(NUMEL, dtype=torch.int16)
    addresses = [[t.data_ptr()] for t in (p, high, low)]
    ties = kernels.split_master_spans(*addresses, [NUMEL], [0])
    targets = [torch.zeros_like(t) for t in (high, low, m, v)]
    spans = np.zeros(1, kernels.SPAN_DTYPE)
    names = ("param", "low", "exp_avg", "exp_avg_sq")
    for name, tensor, target in zip(names, (high, low, m, v), targets, strict=True):
        spans[name], spans[f"{name}_to"] = tensor.data_ptr(), target.data_ptr()
    spans["grad"], spans["numel"] = g.data_ptr(), NUMEL
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["step"] = 7
    form = kernels.adam_form(param=torch.bfloat16, grad=torch.float32, split=True)
    scales = {"old_scale": 0.3, "new_scale": 0.3}
    kept = kernels.adam_rescale_spans(form, spans, hypers, ties=ties, **scales)
    assert kept is not None
    assert kept.tolist() == ties.tolist() == [0, 1, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(targets, (high, low, m, v), strict=True))


def test_nan_stays_and_extreme_values_take_the_careful_path() -> None:
    odd = [0.0, -0.0, np.nan, np.inf, 1e-40, 1e-25, 1e-10, 3e18, 1e25, 3e38]
    grid = np.array(np.meshgrid(odd, odd, odd)).reshape(3, -1).astype(np.float32)
    g, m, v = (torch.from_numpy(np.ascontiguousarray(row)) for row in grid)
    state = [torch.ones_like(g), g, m, v]
    kernels.adam_rescale(*state, **HYPER.keywords(), old_scale=1.0, new_scale=0.5)
    lost = torch.isnan(g) | torch.isnan(m) | torch.isnan(v)
    assert torch.isnan(state[0][lost]).all()
    plain = ~lost & torch.isfinite(g) & torch.isfinite(m) & torch.isfinite(v)
    moderate = plain & (g < 1e18) & (m < 1e20) & (v < 1e30)
    assert torch.isfinite(state[0][moderate]).all()


ROLLBACKS = {
    "plain": Hyper(step=7, weight_decay=0.0),
    "decay": Hyper(step=7, weight_decay=0.01),
    "low betas": Hyper(step=7, beta1=0.1, beta2=0.1),
    "most is decayed": Hyper(step=7, lr=0.3, weight_decay=3.0),
    "nearly all is decayed": Hyper(step=7, lr=1.0, weight_decay=0.999),
}


@pytest.mark.parametrize("name", ROLLBACKS)
@pytest.mark.parametrize("fresh", [0.0, 0.02, 1.0])
def test_rollback_returns_to_the_state_before(name: str, fresh: float) -> None:
    """To 2 ulp where little is forgotten; a step that forgets most leaves less to go by."""
    hyper = ROLLBACKS[name]
    kept = (1 - hyper.lr * hyper.weight_decay, hyper.beta1, hyper.beta2)
    before = arrays(fresh)
    after = stepped(before, 0.4, hyper)
    back = clone(after)
    kernels.adam_rollback(*back, **hyper.keywords(), grad_scale=0.4)
    for index, factor in zip((0, 2, 3), kept, strict=True):
        values = [t[index].numpy().astype(np.float64) for t in (before, after)]
        size = np.maximum(*(np.abs(value) for value in values))
        error = np.abs(back[index].numpy() - values[0])
        allowed = 2 if factor >= 0.9 else 1.5 + 1.5 / factor
        assert (error <= allowed * ulp32(size)).all()
    untouched = before[3] == 0
    assert (back[2][untouched] == 0).all()
    assert (back[3][untouched] == 0).all()
    assert (back[3] >= 0).all()


def test_rollback_keeps_nan_and_is_lost_where_v_overflowed() -> None:
    before = arrays(0.0)
    before[1][3], before[1][4] = float("nan"), 1e22
    after = stepped(before, 1.0)
    assert torch.isinf(after[3][4])
    kernels.adam_rollback(*after, **HYPER.keywords())
    assert torch.isnan(after[0][3])
    assert torch.isnan(after[3][3])
    assert not torch.isfinite(after[3][4])
    assert torch.isfinite(after[0][5:]).all()


@pytest.mark.parametrize("call", ["rescale", "rollback"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_and_gradient_dtypes_agree(call: str, split: bool, dtype: torch.dtype) -> None:
    """A split master, and a separate one with its copy, follow the widened fp32 call."""
    p, g, m, v = arrays(0.02)
    grad = g.to(dtype)
    scales: dict[str, Any] = {"old_scale": 1.0, "new_scale": 0.2}
    function = kernels.adam_rescale if call == "rescale" else kernels.adam_rollback
    scales = scales if call == "rescale" else {"grad_scale": 0.2}
    plain = [p.clone(), grad.float(), m.clone(), v.clone()]
    function(*plain, **HYPER.keywords(), **scales)
    if not split:
        out = torch.empty(NUMEL, dtype=torch.bfloat16)
        separate = [p.clone(), grad, m.clone(), v.clone()]
        function(*separate, **HYPER.keywords(), **scales, out=out)
        assert same([separate[0], *separate[2:]], [plain[0], *plain[2:]])
        assert torch.equal(out, plain[0].bfloat16())
        return
    high, low = torch.empty(NUMEL, dtype=torch.bfloat16), torch.empty(NUMEL, dtype=torch.int16)
    addresses = [[t.data_ptr()] for t in (p, high, low)]
    ties = kernels.split_master_spans(*addresses, [NUMEL], [0])
    moments = [m.clone(), v.clone()]
    ties = function(high, grad, *moments, **HYPER.keywords(), **scales, low=low, ties=ties)
    joined = torch.empty(NUMEL)
    kernels.join_master_spans(*addresses[1:], [joined.data_ptr()], [NUMEL], [0], ties=ties)
    assert same([joined, *moments], [plain[0], *plain[2:]])


@pytest.mark.parametrize("level", kernels.simd_levels()[1:])
def test_levels_agree(level: str) -> None:
    results = []
    before = kernels.simd_level()
    try:
        for name in ("scalar", level):
            kernels.set_simd_level(name)
            after = stepped(arrays(0.02), 1.0)
            after[1][::97] = float("inf")
            after[3][::89] = 1e38
            rescaled, back = clone(after), clone(after)
            kernels.adam_rescale(*rescaled, **HYPER.keywords(), old_scale=1.0, new_scale=0.01)
            kernels.adam_rollback(*back, **HYPER.keywords())
            results.append([rescaled[0], *rescaled[2:], back[0], *back[2:]])
    finally:
        kernels.set_simd_level(before)
    assert same(*results)


def test_what_cannot_be_undone_is_refused() -> None:
    state = arrays(0.0)
    l2 = Hyper(decoupled=False, weight_decay=0.1).keywords()
    with pytest.raises(ValueError, match="L2 weight decay"):
        kernels.adam_rescale(*state, **l2, old_scale=1.0, new_scale=0.5)
    with pytest.raises(ValueError, match="L2 weight decay"):
        kernels.adam_rollback(*state, **l2)
    with pytest.raises(ValueError, match="zero beta"):
        kernels.adam_rollback(*state, step=1, betas=(0.0, 0.9))
    with pytest.raises(ValueError, match="lr \\* weight_decay"):
        kernels.adam_rollback(*state, step=1, lr=0.5, weight_decay=2.0)
    kernels.adam_rollback(*state, step=1, decoupled=False, weight_decay=0.0)
    masterless = [state[0].bfloat16(), *state[1:]]
    with pytest.raises(TypeError, match="no rescale kernel"):
        kernels.adam_rescale(*masterless, step=1, old_scale=1.0, new_scale=0.5)
    with pytest.raises(TypeError, match="no rollback kernel"):
        kernels.adam_rollback(*masterless, step=1)


def test_reference_agrees_with_itself() -> None:
    """The fp32 oracle stays near the float64 one: a slip in either would show."""
    before = [t.numpy() for t in arrays(0.02)]
    single = step32(*before, HYPER)
    double = step64(*(t.astype(np.float64) for t in before), HYPER)
    for one, two in zip(single, double, strict=True):
        assert np.allclose(one, two, rtol=2e-5, atol=1e-8)
