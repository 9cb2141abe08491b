# SPDX-License-Identifier: Apache-2.0
"""Symmetric products: right, symmetric to the bit, the same for any threads and vector width."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swapio.optim import kernels
from swapio.optim.newton_schulz import newton_schulz, resolve_coefficients
from swapio.optim.newton_schulz_plan import Plan, make_plan
from swapio.optim.newton_schulz_products import Spare, symmetric

LEVELS = [level for level in kernels.simd_levels() if level != "scalar"]
SENTINEL = 12345.0
# Around the edges of vectors (8, 16), groups (24, 48), tiles (192) and blocks of depth (128).
ORDERS = [1, 7, 8, 17, 23, 24, 25, 40, 47, 48, 49, 97, 193, 385]
DEPTHS = [1, 8, 127, 129, 521]

pytestmark = pytest.mark.skipif(kernels.symmetric_group_rows() == 0, reason="no FMA, or scalar")


@pytest.fixture(autouse=True)
def automatic_level() -> Iterator[None]:
    yield
    kernels.set_simd_level("auto")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def symmetric_matrix(order: int, seed: int = 0) -> Tensor:
    half = gaussian(order, order, seed=seed)
    return half + half.T


def fused_plan() -> Plan:
    triples = resolve_coefficients((3.0, -4.0, 2.0), 5)
    plan = make_plan((600, 600), triples, torch.float32, "cpu")
    assert plan.fused
    return plan


class Guarded:
    """A matrix with padded rows between sentinels, to see what is written outside it."""

    def __init__(self, rows: int, cols: int, padding: int = 5) -> None:
        self.memory = torch.full((rows + 2, cols + padding), SENTINEL)
        self.matrix = self.memory[1 : 1 + rows, :cols]

    def is_intact(self) -> bool:
        copy = self.memory.clone()
        copy[1 : 1 + self.matrix.shape[0], : self.matrix.shape[1]] = SENTINEL
        return bool((copy == SENTINEL).all())


def product(left: Tensor, right: Tensor, add: Tensor | None = None) -> Tensor:
    """symmetric(), checked for what it writes; 3 left right - 2 add with an `add`."""
    order, depth = left.shape
    out = Guarded(order, order)
    count = 1 if left.data_ptr() == right.data_ptr() else 2
    packed, tail = (
        Guarded(1, count * order * depth),
        Guarded(1, count * kernels.PACKED_GROUP * depth),
    )
    spare = Spare(packed.matrix.view(-1), tail.matrix.view(-1))
    factors = {} if add is None else {"beta": -2.0, "alpha": 3.0}
    symmetric(fused_plan(), left, right, out.matrix, spare, add=add, **factors)
    assert out.is_intact()
    assert packed.is_intact()
    assert tail.is_intact()
    assert torch.equal(out.matrix.nan_to_num(), out.matrix.T.nan_to_num())
    return out.matrix


def assert_near(got: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within what fp32 sums of this depth may be off, element by element."""
    assert ((got.double() - expected).abs() <= 4e-6 * scale).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ORDERS)
def test_gram_matrices_of_wide_and_tall_matrices(level: str, order: int) -> None:
    kernels.set_simd_level(level)
    for depth in DEPTHS:
        x = gaussian(order, depth)
        wide, tall = product(x, x.T), product(x.T.contiguous().T, x.T.contiguous())
        expected = x.double() @ x.double().T
        assert_near(wide, expected, x.double().abs() @ x.double().abs().T)
        assert torch.equal(wide, tall)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ORDERS)
def test_products_of_symmetric_matrices_with_an_addend(level: str, order: int) -> None:
    kernels.set_simd_level(level)
    a = symmetric_matrix(order)
    square = a.double() @ a.double()
    b = (0.5 * square - a + 0.25 * torch.eye(order)).float()
    b = (b + b.T) / 2  # commutes with a up to rounding, so their product is symmetric
    add = symmetric_matrix(order, seed=1)
    for right in (a, b):
        exact = a.double() @ right.double()
        exact = (exact + exact.T) / 2
        scale = 3 * (a.double().abs() @ right.double().abs()) + 2 * add.double().abs()
        assert_near(product(a.T, right, add), 3 * exact - 2 * add.double(), 2 * scale)
        assert_near(product(a.T, right), exact, 2 * scale)


def test_bits_depend_on_neither_width_nor_threads() -> None:
    before = torch.get_num_threads()
    x, a = gaussian(415, 700), symmetric_matrix(415)
    results = []
    try:
        for level in LEVELS:
            kernels.set_simd_level(level)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                kernels.set_threads(threads)
                results.append((product(x, x.T), product(a.T, a, a)))
    finally:
        torch.set_num_threads(before)
        kernels.set_threads(kernels.default_num_threads())
    for gram, square in results[1:]:
        assert torch.equal(gram, results[0][0])
        assert torch.equal(square, results[0][1])


@pytest.mark.parametrize("level", LEVELS)
def test_operands_that_are_packed_already(level: str) -> None:
    kernels.set_simd_level(level)
    order = 121
    a = symmetric_matrix(order)
    square = product(a.T, a)
    spare = Spare(torch.empty(2 * order * order), torch.empty(2 * kernels.PACKED_GROUP * order))
    plan, outs = fused_plan(), [torch.empty(order, order) for _ in range(4)]
    symmetric(plan, a.T, a, outs[0], spare)
    symmetric(plan, a.T, square, outs[1], spare, packed="left")
    symmetric(plan, square.T, square.clone(), outs[2], spare, packed="right")
    symmetric(plan, a.T, square, outs[3], spare, packed="right")
    assert torch.equal(outs[0], square)
    assert torch.equal(outs[1], product(a.T, square))
    assert torch.equal(outs[2], product(square.T, square))
    assert torch.equal(outs[3], outs[1])


def test_any_strides() -> None:
    wide = gaussian(100, 600)
    x = wide[:, ::2]
    assert torch.equal(product(x, x.T), product(x.contiguous(), x.contiguous().T))


def test_non_finite_values_stay_where_they_belong() -> None:
    x = gaussian(100, 60)
    x[70, 3], x[10, 5] = float("nan"), float("inf")
    got = product(x, x.T)
    expected = x @ x.T
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    assert torch.equal(torch.isinf(got), torch.isinf(expected))


def test_without_the_kernel_the_result_is_as_good() -> None:
    u = gaussian(520, 600)
    fused = newton_schulz(u)
    kernels.set_simd_level("scalar")
    assert kernels.symmetric_group_rows() == 0
    panels = newton_schulz(u)
    assert float((fused - panels).norm() / panels.norm()) < 1e-5


def test_without_a_kernel_the_call_says_so() -> None:
    kernels.set_simd_level("scalar")
    x = gaussian(4, 4)
    operand = (x.data_ptr(), 4, 1, x.data_ptr(), x.data_ptr(), False)
    with pytest.raises(RuntimeError, match="no symmetric product"):
        kernels.symmetric_product(operand, operand, x.data_ptr(), 4, 4, 4)
