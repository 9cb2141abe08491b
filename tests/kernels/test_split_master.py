# SPDX-License-Identifier: Apache-2.0
"""The split master loses nothing: every lower half, both parities, both signs, ties, odd values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swapio.optim import kernels


@pytest.fixture(params=kernels.simd_levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.simd_level()
    kernels.set_simd_level(request.param)
    yield request.param
    kernels.set_simd_level(before)


class Split:
    def __init__(self, bits: NDArray[np.uint32], position: int = 0) -> None:
        self.master = torch.from_numpy(bits.view(np.float32).copy())
        self.numel, self.position = len(bits), position
        self.high = torch.empty(self.numel, dtype=torch.bfloat16)
        self.low = torch.empty(self.numel, dtype=torch.int16)
        addresses = [[t.data_ptr()] for t in (self.master, self.high, self.low)]
        self.ties = kernels.split_master_spans(*addresses, [self.numel], [position])

    def joined(self) -> NDArray[np.uint32]:
        whole = torch.empty(self.numel)
        addresses = [[t.data_ptr()] for t in (self.high, self.low, whole)]
        kernels.join_master_spans(*addresses, [self.numel], [self.position], ties=self.ties)
        return whole.numpy().view(np.uint32)


def canonical(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    is_nan = np.isnan(bits.view(np.float32))
    return np.where(is_nan, np.uint32(0x7FC00000), bits).astype(np.uint32)


LOWER = np.arange(1 << 16, dtype=np.uint32)
# even, odd; both signs; zero and subnormals; the largest finite (rounds to infinity); infinity, nan
UPPER = (
    0x3F80,
    0x3F81,
    0xBF80,
    0xBF81,
    0x0000,
    0x8000,
    0x0001,
    0x007F,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
)


@pytest.mark.parametrize("upper", UPPER, ids=hex)
def test_every_lower_half_comes_back(upper: int) -> None:
    bits = (np.uint32(upper << 16) | LOWER).astype(np.uint32)
    split = Split(bits)
    assert np.array_equal(split.joined(), canonical(bits))
    rounded = split.master.to(torch.bfloat16)
    is_nan = torch.isnan(split.master)
    assert torch.equal(split.high[~is_nan], rounded[~is_nan])
    assert (split.high.view(torch.int16)[is_nan] == 0x7FC0).all()
    expected = [0x8000] if upper % 2 == 0 and upper & 0x7F80 != 0x7F80 else []
    assert split.ties.tolist() == expected  # the one code that needs the list


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 33_000])
def test_blocks_of_nothing_but_ties(numel: int) -> None:
    upper = np.arange(0x3F00, 0x3F00 + numel, dtype=np.uint32) % 0x7F80
    bits = ((upper << 16) | 0x8000).astype(np.uint32)
    split = Split(bits, position=1000)
    assert np.array_equal(split.joined(), bits)
    assert torch.equal(split.high, split.master.bfloat16())
    assert split.ties.tolist() == (1000 + np.flatnonzero(upper % 2 == 0)).tolist()


def test_a_missing_tie_list_shows_only_in_ties() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001], np.uint32)
    split = Split(bits)
    split.ties = np.zeros(0, np.uint32)
    assert (split.joined() == bits).tolist() == [False, True, True, True]


def test_random_bits_come_back() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_003, dtype=np.uint32)
    split = Split(bits)
    assert np.array_equal(split.joined(), canonical(bits))


def test_split_steps_equal_separate_ones_through_ties_and_odd_values() -> None:
    """Masters planted on ties, at overflow and beyond take the bits of a separate fp32 master."""
    numel = 70_000
    random = np.random.default_rng(1)
    bits = random.integers(0x3F000000, 0x3F900000, numel, dtype=np.uint32)
    bits[::3] = (bits[::3] & 0xFFFF0000) | 0x8000
    bits[5:11] = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0x7FC12345, 0xFFC00000]
    split = Split(bits)
    separate, out = split.master.clone(), torch.empty(numel, dtype=torch.bfloat16)
    grad = torch.from_numpy(random.standard_normal(numel).astype(np.float32)).bfloat16()
    grad[::2] = 0  # with no decay these stay where they are: ties stay ties
    one = [torch.zeros(numel), torch.zeros(numel)]
    two = [torch.zeros(numel), torch.zeros(numel)]
    for step in (1, 2):
        options = {"step": step, "weight_decay": 0.0, "lr": 2.0**-9}
        split.ties = kernels.adam_step(
            split.high, grad, *one, low=split.low, ties=split.ties, **options
        )
        kernels.adam_step(separate, grad, *two, out=out, **options)
        assert np.array_equal(split.joined(), separate.numpy().view(np.uint32))
        assert torch.equal(split.high.view(torch.int16), out.view(torch.int16))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert len(split.ties) > 1000


def test_ties_are_those_of_the_stepped_elements() -> None:
    bits = np.full(100, 0x3F808000, np.uint32)
    split = Split(bits)
    assert len(split.ties) == 100
    form = kernels.adam_form(param=torch.bfloat16, grad=torch.float32, split=True)
    zeros = [torch.zeros(100) for _ in range(3)]
    spans = np.zeros(1, kernels.SPAN_DTYPE)
    for name, tensor in zip(
        ("param", "grad", "exp_avg", "exp_avg_sq", "low"),
        (split.high, *zeros, split.low),
        strict=True,
    ):
        spans[name] = tensor.data_ptr() + 40 * tensor.element_size()
    spans["numel"], spans["position"] = 20, 40
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["step"], hypers["eps"] = 1, 1e-8
    found = kernels.adam_step_spans(form, spans, hypers, ties=split.ties)
    assert found is not None
    assert found.tolist() == list(range(40, 60))
    same = kernels.adam_rescale_spans(
        form, spans, hypers, old_scale=1.0, new_scale=1.0, ties=split.ties
    )
    assert same is not None
    assert same.tolist() == list(range(40, 60))


def test_bad_tie_lists_and_positions_are_refused() -> None:
    split = Split(np.full(4, 0x3F808000, np.uint32))
    zeros = [torch.zeros(4) for _ in range(3)]
    with pytest.raises(ValueError, match="strictly increasing"):
        kernels.adam_step(
            split.high, *zeros, step=1, low=split.low, ties=np.array([2, 1], np.uint32)
        )
    with pytest.raises(ValueError, match="2\\^32"):
        Split(np.zeros(4, np.uint32), position=(1 << 32) - 3)
    assert (
        Split(np.full(4, 0x3F808000, np.uint32), position=(1 << 32) - 4).ties[-1] == (1 << 32) - 1
    )
