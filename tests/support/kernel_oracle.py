# SPDX-License-Identifier: Apache-2.0
"""Adam, its rescale and its rollback in numpy, with the roundings that the kernels document.

Independent of the code under test: constants in double and rounded once, then float32 operations in
the written order; conversions by bit arithmetic (bf16) and by numpy (fp16).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = np.float32
CANONICAL_NAN = np.uint32(0x7FC00000)
DECOUPLED, BIAS_CORRECTION, MAXIMIZE = 1, 2, 4


def load(raw: Array, dtype: str) -> Array:
    """Widen stored bits (uint32 or uint16) to float32."""
    if dtype == "fp32":
        return raw.view(F32).copy()
    if dtype == "bf16":
        return (raw.astype(np.uint32) << 16).view(F32)
    return raw.view(np.float16).astype(F32)


def store(values: Array, dtype: str) -> Array:
    """Narrow float32 to stored bits, to nearest even."""
    if dtype == "fp32":
        return values.view(np.uint32).copy()
    if dtype == "bf16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype(np.float16).view(np.uint16).copy()


def split(values: Array) -> tuple[Array, Array, Array]:
    """Return the bf16 bits, the low halves, and the indices of ties that round down by 32768."""
    high = store(values, "bf16")
    rest = values.view(np.uint32).astype(np.int64) - (high.astype(np.int64) << 16)
    return high, (rest & 0xFFFF).astype(np.uint16).view(np.int16), np.flatnonzero(rest == 32768)


def join(high: Array, low: Array, ties: Array) -> Array:
    """Put float32 masters together; `ties` are indices."""
    bits = (high.astype(np.int64) << 16) + low.astype(np.int64)
    bits[ties] += 65536
    return (bits & 0xFFFFFFFF).astype(np.uint32).view(F32)


def constants(hyper: dict[str, Any], scale: float, new_scale: float) -> dict[str, Any]:
    decoupled = bool(hyper["flags"] & DECOUPLED)
    corrects = bool(hyper["flags"] & BIAS_CORRECTION)
    sign = -1.0 if hyper["flags"] & MAXIMIZE else 1.0
    step = float(hyper["step"])
    first = 1.0 - math.pow(hyper["beta1"], step) if corrects else 1.0
    second = 1.0 - math.pow(hyper["beta2"], step) if corrects else 1.0
    with np.errstate(all="ignore"):
        decay = 1.0 - np.float64(hyper["lr"]) * hyper["weight_decay"] if decoupled else 1.0
        exact = {
            "scale": sign * scale,
            "new_scale": sign * new_scale,
            "b1": hyper["beta1"],
            "c1": 1.0 - hyper["beta1"],
            "b2": hyper["beta2"],
            "c2": 1.0 - hyper["beta2"],
            "decay": decay,
            "l2": hyper["weight_decay"],
            "size": np.float64(hyper["lr"]) / first,
            "r2": 1.0 / np.sqrt(np.float64(second)),
            "eps": hyper["eps"],
        }
        rounded = {name: F32(np.float64(value)) for name, value in exact.items()}
        for name in ("b1", "b2", "decay"):
            rounded[f"inverse_{name}"] = F32(1.0 / np.float64(rounded[name]))
    return rounded | {"use_l2": not decoupled and hyper["weight_decay"] != 0.0}


def _denominator(v: Array, c: dict[str, Any]) -> Array:
    return np.sqrt(v) * c["r2"] + c["eps"]


def _step(p: Array, g: Array, m: Array, v: Array, c: dict[str, Any]) -> tuple[Array, ...]:
    g = g * c["scale"]
    if c["use_l2"]:
        g = g + c["l2"] * p
    m = c["b1"] * m + c["c1"] * g
    v = c["b2"] * v + (c["c2"] * g) * g
    return p * c["decay"] - (c["size"] * m) / _denominator(v, c), m, v


def _rescale(p: Array, g: Array, m: Array, v: Array, c: dict[str, Any]) -> tuple[Array, ...]:
    old, new = g * c["scale"], g * c["new_scale"]
    v_first, v_bound = (c["c2"] * old) * old, (c["c2"] * new) * new
    fresh = v == v_first
    m_new = np.where(fresh & (m == c["c1"] * old), c["c1"] * new, m + c["c1"] * (new - old))
    v_moved = v + (v_bound - v_first)
    v_new = np.where(fresh | (v_moved < v_bound), v_bound, v_moved)
    d_new, d_old = _denominator(v_new, c), _denominator(v, c)
    product = d_new * d_old
    fast = (m_new * d_old - m * d_new) / product
    far = (product < F32(2.0**-60)) | (F32(2.0**60) < product)
    bad = far | ~(np.abs(fast) < np.inf)
    difference = np.where(bad, m_new / d_new - m / d_old, fast)
    return p - c["size"] * difference, m_new, v_new


def _rollback(p: Array, g: Array, m: Array, v: Array, c: dict[str, Any]) -> tuple[Array, ...]:
    g = g * c["scale"]
    update = (c["size"] * m) / _denominator(v, c)
    v_signed = (v - (c["c2"] * g) * g) * c["inverse_b2"]
    return (
        (p + update) * c["inverse_decay"],
        (m - c["c1"] * g) * c["inverse_b1"],
        np.where(v_signed < 0, F32(0), v_signed),
    )


_FORMULAS = {"step": _step, "rescale": _rescale, "rollback": _rollback}


def apply(
    op: str, state: tuple[Array, Array, Array, Array], c: dict[str, Any]
) -> tuple[Array, Array, Array]:
    """Return p, m and v after `op` on (p, g, m, v), every nan canonical."""
    with np.errstate(all="ignore"):
        results = _FORMULAS[op](*state, c)
    for array in results:
        array[np.isnan(array)] = CANONICAL_NAN.view(F32)
    p, m, v = results
    return p, m, v
