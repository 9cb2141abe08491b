# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: accuracy against float64, scales, shapes, forms, workspace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from oracles.muon import COEFFICIENTS, SCHEDULE, Triple, plain_newton_schulz, relative_error
from torch import Tensor

from swapio.errors import ConfigError
from swapio.optim import newton_schulz_plan
from swapio.optim.newton_schulz import (
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_workspace_bytes,
    resolve_coefficients,
)

ACCURACY = 4.0  # times the error of the plain fp32 loop
Schedule = Triple | Sequence[Triple]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def basis(size: int, rank: int, seed: int) -> Tensor:
    orthogonal: Tensor = torch.linalg.qr(gaussian(size, rank, seed=seed).double())[0]
    return orthogonal


def with_spectrum(rows: int, cols: int, values: Tensor, seed: int = 0) -> Tensor:
    """Return a wide matrix with these singular values."""
    left, right = basis(rows, rows, seed), basis(cols, rows, seed + 1)
    return ((left * values) @ right.T).float()


LABELS = ("gaussian", "rank", "1/i", "1/sqrt(i)", "exponential", "zero rows")


def spectrum(label: str, rows: int, cols: int) -> Tensor:
    order = torch.arange(1, rows + 1, dtype=torch.float64)
    low = max(1, rows // 4)
    if label == "rank":
        return gaussian(rows, low) @ gaussian(low, cols, seed=1)
    if label == "zero rows":
        return torch.cat([gaussian(low, cols), torch.zeros(rows - low, cols)])
    values = {"1/i": 1 / order, "1/sqrt(i)": order**-0.5, "exponential": 10 ** (-2 * order / rows)}
    return with_spectrum(rows, cols, values[label]) if label in values else gaussian(rows, cols)


def check_accuracy(u: Tensor, coefficients: Schedule, label: str) -> None:
    """The error against float64 is at most ACCURACY times that of the plain fp32 loop."""
    exact = plain_newton_schulz(u, coefficients, dtype=torch.float64)
    allowed = ACCURACY * relative_error(plain_newton_schulz(u, coefficients), exact)
    for orientation, got in (
        ("wide", newton_schulz(u, coefficients)),
        ("tall", newton_schulz(u.T, coefficients).T),
    ):
        error = relative_error(got, exact)
        assert error <= allowed, f"{label} {orientation}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(
    ("rows", "cols"),
    [(17, 33), (64, 64), (96, 128), (64, 256), (400, 900), (512, 512), (520, 600), (512, 1030)],
)
def test_accuracy_for_every_form(rows: int, cols: int) -> None:
    labels = LABELS if rows < 400 else ("gaussian", "1/i")
    for label in labels:
        check_accuracy(spectrum(label, rows, cols), COEFFICIENTS, label)


@pytest.mark.parametrize(("rows", "cols"), [(64, 256), (512, 1024)])
def test_accuracy_of_a_schedule(rows: int, cols: int) -> None:
    for label in ("gaussian", "1/i", "exponential") if rows < 512 else ("exponential",):
        check_accuracy(spectrum(label, rows, cols), SCHEDULE, label)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), [(1024, 1024), (700, 2100), (1024, 4096)])
def test_accuracy_for_large_matrices(rows: int, cols: int) -> None:
    for label, steps in itertools.product(LABELS, (3, 4, 5, 8)):
        u = spectrum(label, rows, cols)
        check_accuracy(u, (COEFFICIENTS,) * steps, f"{label} {steps} steps")
        if steps == len(SCHEDULE):
            check_accuracy(u, SCHEDULE, f"{label} schedule")


@pytest.mark.parametrize("shape", [(17, 33), (33, 17), (64, 300), (520, 520)])
def test_singular_values_land_around_one(shape: tuple[int, int]) -> None:
    u = gaussian(*shape)
    values = torch.linalg.svdvals(u)
    large = values > 2e-3 * u.norm()
    result = torch.linalg.svdvals(newton_schulz(u))
    assert int(large.sum()) > min(shape) // 2
    assert float(result[large].min()) > 0.6
    assert float(result.max()) < 1.25


@pytest.mark.parametrize("shape", [(17, 33), (64, 300), (3, 20, 8)])
def test_results_do_not_depend_on_the_scale_above_eps(shape: tuple[int, ...]) -> None:
    u = gaussian(*shape)
    expected = newton_schulz(u)
    for exponent in range(-6, 26):
        got = newton_schulz(u * 10.0**exponent)
        assert relative_error(got, expected) < 2e-6, f"1e{exponent}"


def test_zero_eps_makes_every_scale_alike() -> None:
    u = gaussian(17, 33)
    expected = newton_schulz(u, eps=0.0)
    for exponent in range(-30, 26):
        got = newton_schulz(u * 10.0**exponent, eps=0.0)
        assert relative_error(got, expected) < 2e-6, f"1e{exponent}"
    with_extremes = torch.stack([u * 1e-30, torch.zeros_like(u), u * 1e25, u * 1e36])
    got = newton_schulz(with_extremes, eps=0.0)
    assert torch.equal(got[1], torch.zeros_like(u))
    for index in (0, 2, 3):
        assert relative_error(got[index], expected) < 2e-6


def test_eps_is_a_floor_as_in_torch() -> None:
    u = gaussian(17, 33)
    u = u / u.norm()
    for factor in (1e-3, 1e-6):
        got = newton_schulz(u * (factor * 1e-7), eps=1e-7)
        expected = plain_newton_schulz(u * (factor * 1e-7), eps=1e-7, dtype=torch.float64)
        assert relative_error(got, expected) < 1e-5
        assert float(got.norm()) < 600 * factor
    assert torch.equal(newton_schulz(u * 1e-6, eps=1e-3), newton_schulz(u * 1e-6, eps=1e-3))


@pytest.mark.parametrize("eps", [0.0, 1e-7])
@pytest.mark.parametrize("shape", [(5, 5), (4, 90), (2, 3, 5), (520, 520)])
def test_zero_gives_zero(shape: tuple[int, ...], eps: float) -> None:
    assert torch.equal(newton_schulz(torch.zeros(shape), eps=eps), torch.zeros(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_propagate_within_their_matrix(value: float) -> None:
    u = gaussian(2, 6, 10)
    u[1, 2, 3] = value
    got = newton_schulz(u)
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1]).any()


@pytest.mark.parametrize("shape", [(7, 16, 24), (7, 24, 16), (2, 3, 9, 40), (2, 513, 600)])
def test_batched_equals_separate(shape: tuple[int, ...]) -> None:
    u = gaussian(*shape) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    got = newton_schulz(u).flatten(0, -3)
    for matrix, result in zip(u.flatten(0, -3), got, strict=True):
        assert relative_error(result, newton_schulz(matrix)) < 2e-6


def test_groups_of_small_matrices_equal_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    u = gaussian(11, 17, 33)
    expected = newton_schulz(u)
    monkeypatch.setitem(newton_schulz_plan._GROUP_BYTES, "cpu", 1 << 14)
    assert (
        newton_schulz_plan.make_plan(
            u.shape, resolve_coefficients(COEFFICIENTS, 5), torch.float32, "cpu"
        ).group
        < 4
    )
    assert relative_error(newton_schulz(u), expected) < 2e-6
    assert relative_error(newton_schulz(u, out=torch.empty_like(u)), expected) < 2e-6


@pytest.mark.parametrize("shape", [(17, 33), (30, 200), (5, 16, 24), (520, 530), (512, 1100)])
def test_out_in_place_and_strided_inputs_give_the_same_bits(shape: tuple[int, ...]) -> None:
    u = gaussian(*shape)
    before = u.clone()
    expected = newton_schulz(u)
    assert torch.equal(u, before)
    unaligned = torch.empty(u.numel() + 1)[1:].view(shape)
    newton_schulz(u, out=unaligned)
    assert torch.equal(unaligned, expected)
    padded = torch.zeros(*shape[:-1], shape[-1] + 3)
    padded[..., : shape[-1]] = u
    assert torch.equal(newton_schulz(padded[..., : shape[-1]]), expected)
    half = newton_schulz(u, out=torch.empty(shape, dtype=torch.bfloat16))
    assert torch.equal(half, expected.to(torch.bfloat16))
    in_place = u.clone()
    assert newton_schulz(in_place, out=in_place) is in_place
    assert torch.equal(in_place, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 48), (17, 33), (64, 300)])
def test_half_precision_is_within_its_bound(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for scale in (1e-6, 1.0, 1e25):
        u = gaussian(*shape) * scale
        got = newton_schulz(u, dtype=dtype)
        assert got.dtype == dtype
        exact = plain_newton_schulz(u, dtype=torch.float64)
        # The map itself turns a small relative change of a singular value into up to twice that.
        assert relative_error(got, exact) < 5e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    u = gaussian(17, 33).to(dtype)
    got = newton_schulz(u)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(got, plain_newton_schulz(u, dtype=torch.float64)) < 1e-5


def test_coefficient_lists() -> None:
    u = gaussian(40, 40)
    same = newton_schulz(u, [COEFFICIENTS] * 5)
    assert torch.equal(same, newton_schulz(u))
    assert torch.equal(same, newton_schulz(u, COEFFICIENTS, 5))
    check_accuracy(u, SCHEDULE, "schedule")
    check_accuracy(u, [(1.5, -0.5, 0.0)] * 12, "cubic")
    normalised = newton_schulz(u, COEFFICIENTS, 0)
    torch.testing.assert_close(normalised, u / u.norm())


@pytest.mark.parametrize(
    ("coefficients", "steps", "message"),
    [
        ((1.0, 2.0), None, "three numbers"),
        ([(1.0, 2.0)], None, "three numbers"),
        ("abc", None, "three numbers"),
        ([COEFFICIENTS] * 8, 5, "8 triples"),
        (COEFFICIENTS, 100, "below 100"),
        (COEFFICIENTS, -1, "at least 0"),
        (COEFFICIENTS, 5.0, "an int"),
        ([COEFFICIENTS, 3.0], None, "three numbers"),
    ],
)
def test_wrong_coefficients_are_named(coefficients: Schedule, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_coefficients(coefficients, steps)


def test_wrong_arguments_are_named() -> None:
    u = gaussian(8, 8)
    with pytest.raises(ConfigError, match="at least two dimensions"):
        newton_schulz(u[0])
    with pytest.raises(ConfigError, match="floating point"):
        newton_schulz(u.to(torch.int32))
    with pytest.raises(ConfigError, match="eps"):
        newton_schulz(u, eps=-1.0)
    with pytest.raises(ConfigError, match="out must be"):
        newton_schulz(u, out=torch.empty(8, 9))
    with pytest.raises(ConfigError, match="contiguous bytes, but has 16"):
        newton_schulz(u, workspace=torch.empty(16, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="one-dimensional uint8"):
        newton_schulz(u, workspace=torch.empty(1 << 20))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4)])
def test_empty_matrices(shape: tuple[int, ...]) -> None:
    assert newton_schulz(torch.empty(shape)).shape == shape
    assert newton_schulz_workspace_bytes(shape) == 0


@pytest.mark.parametrize("shape", [(17, 33), (5, 16, 24), (30, 200), (512, 520), (512, 1100)])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_the_stated_workspace_suffices_and_nothing_else_is_allocated(
    shape: tuple[int, ...], steps: int
) -> None:
    u = gaussian(*shape)
    expected = newton_schulz(u, COEFFICIENTS, steps)
    for out in (torch.empty_like(u), torch.empty(u.numel() + 1)[1:].view(shape)):
        reuses = out.data_ptr() % 64 == 0
        nbytes = newton_schulz_workspace_bytes(shape, COEFFICIENTS, steps, reuses_out=reuses)
        for offset in (0, 3):
            workspace = torch.empty(nbytes + offset, dtype=torch.uint8)[offset:]
            newton_schulz(u, COEFFICIENTS, steps, out=out, workspace=workspace)
            assert torch.equal(out, expected)
        with pytest.raises(ConfigError, match="contiguous bytes"):
            newton_schulz(u, COEFFICIENTS, steps, out=out, workspace=workspace[:nbytes][:-1])


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_temporaries_are_small() -> None:
    """Everything as large as a matrix lies in the workspace: 1024 x 1024 is 4 MiB in fp32."""
    u = gaussian(1024, 1024)
    workspace = torch.empty(
        newton_schulz_workspace_bytes(u.shape, reuses_out=True), dtype=torch.uint8
    )
    out = torch.empty_like(u)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        newton_schulz(u, COEFFICIENTS, 1, out=out, workspace=workspace)
    largest = max(abs(event.self_cpu_memory_usage) for event in profile.events())
    assert largest < 4 << 20


def test_flops_are_counted_by_form() -> None:
    n = 4096
    square = newton_schulz_flops((n, n))
    assert 5 * 4 * n**3 < square < 5 * 4.3 * n**3
    assert newton_schulz_flops((1024, n)) < 0.5 * 5 * (4 * 1024**2 * n + 2 * 1024**3)
    assert newton_schulz_flops((3, 64, 64)) == 3 * 5 * 6 * 64**3
    assert newton_schulz_flops((n, n), dtype=torch.bfloat16, device_type="cuda") == 5 * 6 * n**3
    assert newton_schulz_flops((0, 4)) == 0
