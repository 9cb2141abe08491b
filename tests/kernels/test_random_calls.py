# SPDX-License-Identifier: Apache-2.0
"""Random calls of every form against the written formula, bit for bit, at every SIMD level.

Sizes, cuts, alignments, destinations, thread counts, hyperparameters and values are drawn from a
seed, with the odd ones (nan payloads, infinities, subnormals, overflowing constants, zero betas)
as likely as plain ones; bytes beside the arrays must stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from support import kernel_oracle as oracle
from swapio import _kernels
from swapio.optim import kernels
from swapio.optim.kernel_forms import all_forms

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: None}
GUARD, PAD = 0xA5, 64
ODD_BITS = np.array(
    [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x80000001, 0x7F7FFFFF,
     0x00800000, 0x3F800000, 0x7F800001],
    np.uint32,
)  # fmt: skip
HYPERS: dict[str, list[Any]] = {
    "lr": [1e-3, 1e-3, 0.0, 1e-30, 1e30, 1e39, -1e-2, 5e-324],
    "beta1": [0.9, 0.9, 0.0, 1 - 2**-53, 0.5, 1e-300],
    "beta2": [0.999, 0.999, 0.0, 1 - 2**-53, 0.5],
    "eps": [1e-8, 1e-8, 0.0, 1e-45, 1e30],
    "weight_decay": [0.0, 1e-2, 1e3, -0.1],
    "step": [1, 2, 1000, 2**31, 2**40],
    "flags": list(range(8)),
}
SCALES = [1.0, 1.0, 0.125, 0.0, -1.0, 1e-30, 1e38, math.inf, math.nan]
SIZES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 1000, 4097, 32768, 32769]


@pytest.fixture(autouse=True)
def _restore_level() -> Iterator[None]:
    yield
    kernels.set_simd_level("auto")


class Guarded:
    """Bits in memory of their own, off the cache lines by some elements, with guards around."""

    def __init__(self, raw: np.ndarray, shift: int) -> None:
        self.nbytes, self.dtype = raw.nbytes, raw.dtype
        self.memory = np.full(raw.nbytes + 5 * PAD + shift * raw.itemsize, GUARD, np.uint8)
        self.start = -self.address_of_memory % PAD + PAD + shift * raw.itemsize
        self.bits[:] = raw

    @property
    def address_of_memory(self) -> int:
        address: int = self.memory.__array_interface__["data"][0]
        return address

    @property
    def address(self) -> int:
        return self.address_of_memory + self.start

    @property
    def bits(self) -> np.ndarray:
        return self.memory[self.start : self.start + self.nbytes].view(self.dtype)

    def is_guarded(self) -> bool:
        before, after = self.memory[: self.start], self.memory[self.start + self.nbytes :]
        return bool((before == GUARD).all() and (after == GUARD).all())


def draw_bits(random: np.random.Generator, numel: int, dtype: str, positive: bool) -> np.ndarray:
    kind = random.integers(6)
    if kind == 0:
        wide = random.integers(0, 1 << 32, numel, dtype=np.uint32)
        raw = wide if dtype == "fp32" else (wide >> 16).astype(np.uint16)
    elif kind == 1:
        raw = oracle.store(random.choice(ODD_BITS, numel).view(np.float32), "fp32")
        raw = raw if dtype == "fp32" else (raw >> 16).astype(np.uint16)
    elif kind == 2:
        top = {"fp32": 1 << 23, "bf16": 1 << 7, "fp16": 1 << 10}[dtype]
        raw = random.integers(0, top, numel).astype(np.uint32 if dtype == "fp32" else np.uint16)
    else:
        power = 10.0 ** random.integers(-8, 3)
        raw = oracle.store((random.standard_normal(numel) * power).astype(np.float32), dtype)
    return raw & (np.iinfo(raw.dtype).max >> 1) if positive else raw


class Call:
    """One drawn call and what it must write."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.random, self.seed = random, seed
        self.op = str(random.choice(["step", "step", "rescale", "rollback"]))
        forms = [form for form in all_forms(self.op) if not form["stochastic"]]
        form: dict[str, Any] = forms[random.integers(len(forms))]
        self.code = kernels.adam_form(**form)
        self.split = form["split"]
        dtypes = [NAMES[form[name]] for name in ("param", "grad", "state", "state")]
        self.out = NAMES[form["out"]]
        plain = random.random() < 0.5
        self.numel = int(random.integers(1, 300) if plain else random.choice(SIZES))
        self.raw = [
            draw_bits(random, self.numel, str(dtype), index == 3 and random.random() < 0.8)
            for index, dtype in enumerate(dtypes)
        ]
        self.hyper = {name: values[random.integers(len(values))] for name, values in HYPERS.items()}
        self.scale = SCALES[random.integers(len(SCALES))]
        self.new_scale = float(random.choice([0.5, 0.0, 2.0, 1e-20]))
        self.position = int(random.choice([0, 7, 2**32 - self.numel]))
        self.low = random.integers(-32768, 32768, self.numel).astype(np.int16)
        self.low[random.random(self.numel) < 0.3] = -32768
        ties = np.empty(0, np.int64)
        if self.split:
            ambiguous = ((self.raw[0] & 1) == 0) & (self.low == -32768)
            ties = np.flatnonzero(ambiguous & (random.random(self.numel) < 0.5))
        self.ties = (ties + self.position).astype(np.uint32) if self.split else None
        p, g, m, v = (
            oracle.load(raw, str(dtype)) for raw, dtype in zip(self.raw, dtypes, strict=True)
        )
        if self.split:
            p = oracle.join(self.raw[0], self.low, ties)
        rounded = oracle.constants(self.hyper, self.scale, self.new_scale)
        self.is_same_scale = rounded["scale"] == rounded["new_scale"]
        p, m, v = oracle.apply(self.op, (p, g, m, v), rounded)
        state = str(dtypes[2])
        self.expected = {"m": oracle.store(m, state), "v": oracle.store(v, state)}
        self.expected_ties = np.empty(0, np.uint32)
        if self.split:
            self.expected["p"], self.expected["low"], found = oracle.split(p)
            self.expected_ties = (found + self.position).astype(np.uint32)
        else:
            self.expected["p"] = oracle.store(p, str(dtypes[0]))
        if self.out:
            self.expected["out"] = oracle.store(p, str(self.out))
        edges = random.integers(0, self.numel + 1, random.choice([0, 1, 5, 30]))
        self.edges = np.unique(np.concatenate([[0, self.numel], edges]))
        self.shifts = random.integers(0, 17, 10).tolist()
        self.moves_elsewhere = bool(random.random() < 0.3)
        self.threads = int(random.choice([1, 2, 3, 7]))

    def run(self, level: str) -> None:
        kernels.set_simd_level(level)
        raws = [*self.raw, self.low, np.zeros(self.numel, np.uint16)]
        arrays = [Guarded(raw, shift) for raw, shift in zip(raws, self.shifts, strict=False)]
        names = ["param", "grad", "exp_avg", "exp_avg_sq", "low", "out"]
        named = dict(zip(names, arrays, strict=True))
        if not self.split:
            del named["low"]
        if not self.out:
            del named["out"]
        targets = dict(named)
        if self.moves_elsewhere:
            for name, shift in zip(("param", "exp_avg", "exp_avg_sq", "low"), self.shifts[6:],
                                   strict=True):  # fmt: skip
                if name in named:
                    targets[name] = Guarded(np.zeros_like(named[name].bits), shift)
        result = self._call(named, targets)
        where = f"seed {self.seed}, {self.op}, {level}, {self.hyper}"
        for name, short in (("param", "p"), ("exp_avg", "m"), ("exp_avg_sq", "v"), ("low", "low"),
                            ("out", "out")):  # fmt: skip
            if name in targets:
                np.testing.assert_array_equal(targets[name].bits, self.expected[short], where)
        if self.split:
            np.testing.assert_array_equal(result, self.expected_ties, where)
        assert all(array.is_guarded() for array in [*arrays, *targets.values()]), where
        assert (named["grad"].bits == self.raw[1]).all(), where
        if self.moves_elsewhere:
            assert (named["param"].bits == self.raw[0]).all(), where

    def _call(self, named: dict[str, Guarded], targets: dict[str, Guarded]) -> Any:
        spans = np.zeros(max(1, len(self.edges) - 1), kernels.SPAN_DTYPE)
        starts = self.edges[:-1].astype(np.uint64)
        for name, array in named.items():
            address, size = np.uint64(array.address), np.uint64(array.dtype.itemsize)
            spans[name][: len(starts)] = address + starts * size
            if targets[name] is not array:
                spans[f"{name}_to"][: len(starts)] = (
                    np.uint64(targets[name].address) + starts * size
                )
        spans["numel"][: len(starts)] = np.diff(self.edges)
        spans["position"][: len(starts)] = self.position + self.edges[:-1]
        hypers = np.zeros(1, kernels.HYPER_DTYPE)
        for name, value in self.hyper.items():
            hypers[name] = value
        options: dict[str, Any] = {"ties": self.ties, "threads": self.threads}
        if self.op == "rescale":
            options |= {"old_scale": self.scale, "new_scale": self.new_scale}
        else:
            options["grad_scale"] = self.scale
        return getattr(_kernels, f"adam_{self.op}_spans")(self.code, spans, hypers, **options)


def is_refused(call: Call) -> bool:
    """Whether the call asks for what cannot be undone, or (equal scales) for nothing."""
    if call.op == "step":
        return False
    if not call.hyper["flags"] & kernels.DECOUPLED and call.hyper["weight_decay"]:
        return True
    if call.op == "rescale":
        return call.is_same_scale
    forgets = bool(call.hyper["flags"] & kernels.DECOUPLED)
    forgets = forgets and call.hyper["lr"] * call.hyper["weight_decay"] == 1.0
    return forgets or 0.0 in (call.hyper["beta1"], call.hyper["beta2"])


@pytest.mark.parametrize(
    "first", [*range(0, 400, 100), *(pytest.param(i, marks=pytest.mark.slow) for i in
                                     range(1000, 21_000, 1000))],
)  # fmt: skip
def test_random_calls_do_what_is_written(first: int) -> None:
    num_done = 0
    for seed in range(first, first + (100 if first < 1000 else 1000)):
        call = Call(seed)
        if is_refused(call):
            continue
        for level in kernels.simd_levels():
            call.run(level)
        num_done += 1
    assert num_done > 50
