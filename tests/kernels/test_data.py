# SPDX-License-Identifier: Apache-2.0
"""Square sums, conversions, copies and hashes."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash

from swapio import _kernels
from swapio.optim import kernels

SIZES = (0, 1, 7, 15, 17, 1000, 16384, 16385, 65537)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    level, threads = kernels.simd_level(), kernels.num_threads()
    yield
    kernels.set_simd_level(level)
    kernels.set_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sum_is_that_of_float64_and_the_same_everywhere(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(numel, generator=random).to(dtype) for numel in SIZES]
    seen = set()
    for level in kernels.simd_levels():
        for threads in (1, 2, 5):
            kernels.set_simd_level(level)
            kernels.set_threads(threads)
            seen.add(kernels.grad_stats(grads))
    assert len(seen) == 1
    total, finite = seen.pop()
    exact = math.fsum(float(value) ** 2 for grad in grads for value in grad.double())
    assert total == pytest.approx(exact, rel=1e-14)
    assert finite is True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("index", [0, 16383, 16384, 39_999])
def test_one_bad_value_is_seen(dtype: torch.dtype, bad: float, index: int) -> None:
    grad = torch.ones(40_000, dtype=dtype)
    grad[index] = bad
    assert kernels.grad_stats(grad)[1] is False
    grad[index] = torch.finfo(dtype).max
    total, finite = kernels.grad_stats(grad)
    assert finite
    assert math.isfinite(total)


def test_subnormal_gradients_count() -> None:
    grad = torch.full((1000,), 1e-42)
    assert torch.set_flush_denormal(True)
    try:
        total, _ = kernels.grad_stats(grad)
    finally:
        torch.set_flush_denormal(False)
    assert total == pytest.approx(1000 * float(grad[0]) ** 2, rel=1e-12)


@pytest.mark.parametrize("mode", ["down", "up", "zero"])
def test_the_callers_rounding_mode_changes_no_bit(mode: str) -> None:
    """The sums of the tiles were once added with the caller's rounding."""
    if platform.machine() != "x86_64":
        pytest.skip("the values of <fenv.h> are the processor's")
    libm = ctypes.CDLL("libm.so.6")
    values = torch.randn(100_003)
    state = [torch.randn(4099), torch.randn(4099), torch.randn(4099), torch.rand(4099)]
    results = []
    for wanted in (0, {"down": 0x400, "up": 0x800, "zero": 0xC00}[mode]):
        stepped, converted = [t.clone() for t in state], torch.empty(100_003, dtype=torch.float16)
        spans = [values.data_ptr()], [values.numel()]
        assert libm.fesetround(wanted) == 0
        try:
            sums = kernels.grad_stats_spans(*spans, torch.float32)
            each = kernels.square_sum_spans(*spans, torch.float32).tolist()
            kernels.adam_step(*stepped, step=3)
            kernels.convert_spans(
                spans[0], [converted.data_ptr()], spans[1], torch.float32, torch.float16
            )
            kept = libm.fegetround()
        finally:
            libm.fesetround(0)
        assert kept == wanted, "the caller's own setting was not restored"
        results.append((sums, each, *(t.tolist() for t in (*stepped, converted))))
    assert results[0] == results[1]


def test_per_span_sums_do_not_depend_on_their_neighbours() -> None:
    grads = [torch.randn(numel) for numel in SIZES]
    addresses, numels = [t.data_ptr() for t in grads], [t.numel() for t in grads]
    together = kernels.square_sum_spans(addresses, numels, torch.float32)
    alone = [
        kernels.grad_stats_spans([a], [n], torch.float32)[0]
        for a, n in zip(addresses, numels, strict=True)
    ]
    assert together.tolist() == alone


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit value, or for fp32 all upper halves with lower ones around halfway points."""
    if dtype != torch.float32:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    return torch.from_numpy((upper[:, None] | lower).ravel().view(np.float32))


@pytest.mark.parametrize("level", kernels.simd_levels())
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_conversions_equal_torch(level: str, source: torch.dtype, target: torch.dtype) -> None:
    values = all_values(source)
    if source == target:
        with pytest.raises(ValueError, match="equal"):
            kernels.convert_spans([8], [8], [1], source, target)
        return
    kernels.set_simd_level(level)
    got = torch.empty(values.numel(), dtype=target)
    kernels.convert_spans([values.data_ptr()], [got.data_ptr()], [values.numel()], source, target)
    is_nan = torch.isnan(values)
    assert torch.equal(got[~is_nan], values[~is_nan].to(target))
    canonical = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[target]
    view = torch.int32 if target == torch.float32 else torch.int16
    assert (got.view(view)[is_nan] == canonical).all()


def test_copy_and_fill() -> None:
    source = torch.randint(0, 256, (600_001,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    kernels.copy_spans(
        [source.data_ptr(), source.data_ptr() + 300_000],
        [target.data_ptr(), target.data_ptr() + 300_000],
        [300_000, 300_001],
    )
    assert torch.equal(source, target)
    kernels.fill_spans([target.data_ptr() + 1], [600_000], value=255)
    assert target[0] == source[0]
    assert (target[1:] == 255).all()
    kernels.fill_spans([target.data_ptr()], [600_001])
    assert not target.any()


@pytest.mark.skipif(not kernels.has_xxh3, reason="built without xxhash.h")
@pytest.mark.parametrize("level", kernels.simd_levels())
def test_hashes_are_xxh3(level: str) -> None:
    kernels.set_simd_level(level)
    sizes = [0, 1, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 4096, 100_003, 1 << 20]
    data = torch.randint(0, 256, (sum(sizes) + 1,), dtype=torch.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    got = kernels.hash_spans(data.data_ptr() + starts.astype(np.uint64), sizes)
    wanted = [
        xxhash.xxh3_64_intdigest(data[start : start + size].numpy().tobytes())
        for start, size in zip(starts.tolist(), sizes, strict=True)
    ]
    assert got.tolist() == wanted


def test_spans_are_checked() -> None:
    for call in (
        lambda: _kernels.hash_spans([0], [1]),
        lambda: _kernels.hash_spans([64], [-1]),
        lambda: _kernels.hash_spans([64, 64], [1]),
        lambda: _kernels.grad_stats_spans([66], [1], 0),
        lambda: _kernels.grad_stats_spans([64], [1], 7),
        lambda: _kernels.convert_spans([64], [0], [1], 0, 1),
        lambda: _kernels.fill_spans([64], [0], value=256),
        lambda: _kernels.hash_spans([64], [0], threads=0),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
    assert _kernels.hash_spans([0], [0]).shape == (1,) if kernels.has_xxh3 else True
