# SPDX-License-Identifier: Apache-2.0
"""The Adam step against plain numpy (bit for bit), float64 and torch (within the stated bound)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from support.adam_reference import Hyper, step32, step64, ulp32
from swapio.optim import kernels
from swapio.optim.kernel_forms import all_forms

TILE = 1 << 15
SIZES = (0, 1, 7, 15, 17, 1000, 65537)
HYPERS = {
    "adamw": Hyper(step=3),
    "l2": Hyper(step=3, decoupled=False, weight_decay=0.1),
    "no_correction": Hyper(step=3, bias_correction=False),
    "maximize": Hyper(step=3, maximize=True),
    "maximize_l2": Hyper(step=3, maximize=True, decoupled=False, weight_decay=0.1),
    "zero_beta1": Hyper(step=3, beta1=0.0),
    "zero_beta2": Hyper(step=3, beta2=0.0),
    "zero_betas": Hyper(step=1, beta1=0.0, beta2=0.0, weight_decay=0.0),
    "late": Hyper(step=100_000, lr=0.3),
    "eps": Hyper(step=1, eps=1e-4),
}


def arrays32(numel: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal(numel) * 0.1).astype(np.float32),
        (random.standard_normal(numel) * 0.01).astype(np.float32),
        (random.standard_normal(numel) * 0.01).astype(np.float32),
        (random.random(numel) * 1e-4).astype(np.float32),
    ]


def same_bits(got: torch.Tensor, wanted: np.ndarray) -> bool:
    """Equal to the bit, but that every nan must be the canonical one."""
    bits = got.detach().numpy().view(np.int32)
    nan = np.isnan(wanted)
    expected = np.where(nan, np.int32(0x7FC00000), wanted.view(np.int32))
    return bool(np.array_equal(bits, expected))


@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("numel", [17, TILE + 17])
def test_fp32_step_is_the_documented_formula_bit_for_bit(name: str, numel: int) -> None:
    hyper = HYPERS[name]
    inputs = arrays32(numel)
    tensors = [torch.from_numpy(array.copy()) for array in inputs]
    kernels.adam_step(*tensors, **hyper.keywords(), grad_scale=0.37)
    p, m, v = step32(*inputs, hyper, scale=0.37)
    for got, wanted in zip((tensors[0], tensors[2], tensors[3]), (p, m, v), strict=True):
        assert same_bits(got, wanted)


def test_odd_values_go_through_as_in_the_formula() -> None:
    odd = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-45, 3e38, 1e-20, 1.0]
    pairs = np.array(np.meshgrid(odd, odd, odd)).reshape(3, -1).astype(np.float32)
    p, g, m = (np.ascontiguousarray(row) for row in pairs)
    v = np.abs(np.roll(m, 7))
    tensors = [torch.from_numpy(array.copy()) for array in (p, g, m, v)]
    kernels.adam_step(*tensors, **Hyper(step=2).keywords())
    for got, wanted in zip(tensors, (None, g, None, None), strict=True):
        assert wanted is None or torch.equal(
            got.view(torch.int32), torch.from_numpy(wanted).view(torch.int32)
        )
    new = step32(p, g, m, v, Hyper(step=2))
    assert all(
        same_bits(t, w) for t, w in zip((tensors[0], tensors[2], tensors[3]), new, strict=True)
    )


class Widened:
    """A form's arrays, and beside them the same values widened to fp32 and stepped by numpy."""

    def __init__(self, form: dict[str, Any], numel: int) -> None:
        p, g, m, _ = arrays32(numel)
        self.form = form
        self.grad = torch.from_numpy(g).to(form["grad"])
        self.moments = [torch.from_numpy(m * 0).to(form["state"]) for _ in range(2)]
        self.param = torch.from_numpy(p.copy()).to(form["param"])
        self.expected = p if form["split"] else self.param.float().numpy().copy()
        self.expected_moments = [m * 0, m * 0]
        self.extra: dict[str, Any] = {}
        if form["split"]:
            low = torch.empty(numel, dtype=torch.int16)
            addresses = ([t.data_ptr()] for t in (torch.from_numpy(p), self.param, low))
            self.extra["ties"] = kernels.split_master_spans(*addresses, [numel], [0])
            self.extra["low"] = low
        if form["out"]:
            self.extra["out"] = torch.zeros(numel, dtype=form["out"])
        if form["stochastic"]:
            self.extra["seed"] = 1

    def step(self, hyper: Hyper) -> None:
        arrays = (self.param, self.grad, *self.moments)
        ties = kernels.adam_step(*arrays, **hyper.keywords(), **self.extra)
        if self.form["split"]:
            self.extra["ties"] = ties
        g = self.grad.float().numpy()
        self.expected, *rest = step32(self.expected, g, *self.expected_moments, hyper)
        state = self.form["state"]
        self.expected_moments = [torch.from_numpy(x).to(state).float().numpy() for x in rest]

    def check(self) -> None:
        for moment, wanted in zip(self.moments, self.expected_moments, strict=True):
            assert torch.equal(moment.float(), torch.from_numpy(wanted))
        rounded = torch.from_numpy(self.expected).to(self.form["param"])
        if self.form["stochastic"]:  # a neighbour; the distribution has its own test
            got = self.param.float().numpy()
            assert (np.abs(got - self.expected) <= ulp32(self.expected) * 2.0**16).all()
            self.expected = got.copy()
        else:
            assert torch.equal(self.param, rounded)
        if self.form["out"]:
            wanted_out = torch.from_numpy(self.expected).to(self.form["out"])
            assert torch.equal(self.extra["out"], wanted_out)
        if self.form["split"]:
            joined = torch.empty(rounded.numel())
            addresses = ([t.data_ptr()] for t in (self.param, self.extra["low"], joined))
            kernels.join_master_spans(*addresses, [rounded.numel()], [0], ties=self.extra["ties"])
            assert torch.equal(joined, torch.from_numpy(self.expected))
        elif not self.form["stochastic"]:
            self.expected = rounded.float().numpy().copy()  # masterless: what was rounded is gone


def form_id(form: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in form.values())


@pytest.mark.parametrize("form", all_forms(), ids=form_id)
def test_every_form_steps_its_widened_inputs(form: dict[str, Any]) -> None:
    """Three steps equal those of the fp32 formula on widened inputs, rounded where it is stored."""
    for numel in SIZES:
        arrays = Widened(form, numel)
        for step in (1, 2, 3):
            arrays.step(Hyper(step=step))
            arrays.check()


@pytest.mark.parametrize("offsets", [(1, 0, 0, 0), (0, 1, 2, 3), (3, 3, 3, 3), (5, 1, 7, 2)])
def test_unaligned_arrays(offsets: tuple[int, ...]) -> None:
    numel = TILE + 1001
    inputs = arrays32(numel)
    tensors = []
    for array, offset in zip(inputs, offsets, strict=True):
        holder = torch.full((numel + 16,), 7.0)
        holder[offset : offset + numel] = torch.from_numpy(array)
        tensors.append(holder[offset : offset + numel])
        tensors[-1].guard = holder
    kernels.adam_step(*tensors, **Hyper().keywords())
    for tensor, wanted in zip((tensors[0], *tensors[2:]), step32(*inputs, Hyper()), strict=True):
        assert same_bits(tensor, wanted)
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert (tensor.guard[:offset] == 7).all()
        assert (tensor.guard[offset + numel :] == 7).all()


# Without memory of the second moment a step is m / |g|: where g happens to be tiny it amplifies the
# rounding of m beyond any bound on the update.
@pytest.mark.parametrize("name", [name for name in HYPERS if name != "zero_beta2"])
def test_ten_steps_stay_within_the_stated_bound_of_float64(name: str) -> None:
    hyper = HYPERS[name]
    numel = 4099
    p = arrays32(numel)[0]
    param, exp_avg, exp_avg_sq = torch.from_numpy(p.copy()), torch.zeros(numel), torch.zeros(numel)
    exact = [p.astype(np.float64), np.zeros(numel), np.zeros(numel)]
    largest, updates = np.abs(exact[0]), np.zeros(numel)
    for index in range(10):
        g = arrays32(numel, seed=index + 1)[1]
        now = replace(hyper, step=hyper.step + index)
        kernels.adam_step(param, torch.from_numpy(g), exp_avg, exp_avg_sq, **now.keywords())
        before = exact[0]
        exact = list(step64(before, g.astype(np.float64), *exact[1:], now))
        updates += np.abs(exact[0] - before)
        largest = np.maximum(largest, np.abs(exact[0]))
    error = np.abs(param.numpy().astype(np.float64) - exact[0])
    assert (error <= 2 * ulp32(largest) * 10 + 1e-6 * updates).all()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("eps", [1e-4, 1e-8])
def test_torch_takes_the_same_steps(decoupled: bool, maximize: bool, eps: float) -> None:
    """eps placement, decay kind and step count; gradients near eps make a wrong one visible."""
    torch.manual_seed(0)
    start = torch.randn(1001)
    mine, exp_avg, exp_avg_sq = start.clone(), torch.zeros(1001), torch.zeros(1001)
    theirs = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"lr": 1e-3, "eps": eps, "weight_decay": 0.1, "maximize": maximize}
    optimizer = kind([theirs], foreach=False, **options)
    for step in range(1, 6):
        grad = torch.randn(1001) * 1e-7
        theirs.grad = grad.clone()
        optimizer.step()
        kernels.adam_step(
            mine, grad, exp_avg, exp_avg_sq, step=step, decoupled=decoupled, **options
        )
        assert torch.allclose(mine - start, theirs.detach() - start, rtol=1e-5, atol=3e-7 * step)
    assert torch.allclose(exp_avg, optimizer.state[theirs]["exp_avg"], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_calls_write_the_same_copy_past_the_caches(dtype: torch.dtype) -> None:
    numel = (1 << 20) + 37
    param, grad = torch.linspace(-1, 1, numel), torch.linspace(2, -2, numel).to(torch.bfloat16)
    level = kernels.simd_level()
    try:
        for name, offset in product(kernels.simd_levels(), (0, 1, 16)):
            kernels.set_simd_level(name)
            holder = torch.zeros(numel + 48, dtype=dtype)
            shift = (-holder.data_ptr() // 2) % 32 + offset  # from a cache line, in elements
            out, stepped = holder[shift : shift + numel], param.clone()
            kernels.adam_step(
                stepped, grad, torch.zeros(numel), torch.zeros(numel), step=1, out=out
            )
            assert torch.equal(out, stepped.to(dtype))
            assert not holder[:shift].any()
            assert not holder[shift + numel :].any()
    finally:
        kernels.set_simd_level(level)


def test_scaling_inside_equals_scaling_first() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p, g, m, v = (torch.from_numpy(array) for array in arrays32(1000))
        grad = g.to(dtype)
        one = [p.clone(), grad, m.clone(), v.clone()]
        two = [p.clone(), grad.float() * 0.3, m.clone(), v.clone()]
        kernels.adam_step(*one, step=4, grad_scale=0.3)
        kernels.adam_step(*two, step=4)
        assert all(
            torch.equal(a, b) for a, b in zip(one[2:] + one[:1], two[2:] + two[:1], strict=True)
        )


def test_subnormals_are_kept_under_set_flush_denormal() -> None:
    p, g, m, v = (torch.from_numpy(array) for array in arrays32(1000))
    m *= 1e-38
    plain = [t.clone() for t in (p, g * 0, m, v)]
    flushed = [t.clone() for t in (p, g * 0, m, v)]
    kernels.adam_step(*plain, step=2)
    assert torch.set_flush_denormal(True)
    try:
        kernels.adam_step(*flushed, step=2)
        still_set = torch.tensor([1e-40]) * 1.0
    finally:
        torch.set_flush_denormal(False)
    assert still_set.item() == 0.0, "the caller's own setting was not restored"
    subnormal = plain[2].abs() < torch.finfo(torch.float32).tiny
    assert (plain[2][subnormal] != 0).any()
    for a, b in zip(plain, flushed, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_stochastic_rounding_is_unbiased_and_depends_on_position_only() -> None:
    numel = 1 << 17
    value = 1.0 + 0.3 * 2.0**-7  # three tenths of the way between two bf16 values
    form = kernels.adam_form(
        param=torch.bfloat16, grad=torch.float32, state=torch.float32, stochastic=True
    )

    def run(seed: int, step: int, cuts: list[int]) -> torch.Tensor:
        param = torch.ones(numel, dtype=torch.bfloat16)
        grad = torch.full((numel,), -1.0)  # with zero betas the update is lr * sign
        moments = [torch.zeros(numel), torch.zeros(numel)]
        edges = [0, *cuts, numel]
        spans = np.zeros(len(edges) - 1, kernels.SPAN_DTYPE)
        for i, start in enumerate(edges[:-1]):
            for name, t in zip(
                ("param", "grad", "exp_avg", "exp_avg_sq"), (param, grad, *moments), strict=True
            ):
                spans[name][i] = t.data_ptr() + start * t.element_size()
            spans["numel"][i], spans["position"][i] = edges[i + 1] - start, (1 << 32) - 1000 + start
        hypers = np.zeros(1, kernels.HYPER_DTYPE)
        hypers["lr"], hypers["step"] = value - 1.0, step
        kernels.adam_step_spans(form, spans, hypers, seed=seed)
        return param

    whole = run(5, 1, [])
    assert set(whole.float().unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    up = (whole != 1.0).double().mean().item()
    assert abs(up - 0.3) < 5 * (0.3 * 0.7 / numel) ** 0.5
    assert torch.equal(whole, run(5, 1, [1, 500, 1000, 33_333, 33_340]))
    # A span that begins off a cache line and passes position 2^32 before the next one.
    assert torch.equal(whole, run(5, 1, [993]))
    assert not torch.equal(whole, run(6, 1, []))
    assert not torch.equal(whole, run(5, 2, []))
