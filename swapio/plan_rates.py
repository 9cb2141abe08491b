# SPDX-License-Identifier: Apache-2.0
"""Which speeds a plan is made with: given, remembered, or measured in milliseconds.

Invariant: what is measured here is the work itself (the update kernel, products of matrices, the
checksums) with the threads that steps use, on memory larger than a core's own caches.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import numpy as np
import torch

from swapio import _kernels
from swapio.checksum import measure_hash_rate
from swapio.config import SwapConfig
from swapio.plan_devices import known_rates
from swapio.plan_time import Rates

_NUMEL = 1 << 21
_ORDER = 1024
_UPDATE_ARRAYS = ("param", "grad", "exp_avg", "exp_avg_sq")
_TOUCHED_BYTES = 4 * (2 * len(_UPDATE_ARRAYS) - 1)  # all are read, all but the gradient written


def rates_of(config: SwapConfig, *, has_products: bool = False) -> Rates:
    """Return what the configuration says of the drives, else what `swapio tune` found here.

    Where a drive is known, the speeds of the CPUs are measured, once a process. Blocks for it.

    Args:
        config: The settings.
        has_products: Whether the update has products of matrices (Muon).
    """
    rates = Rates(
        read=config.read_bandwidth, write=config.write_bandwidth, mixed=config.mixed_bandwidth
    )
    if rates.read is None and rates.write is None and config.paths:
        rates = known_rates(config.paths) or rates
    if rates.read is None:
        return rates
    return dataclasses.replace(
        rates,
        compute=measure_update_rate(),
        products=measure_product_rate() if has_products else None,
        checksum=measure_hash_rate() if config.checksum else None,
    )


@functools.cache
def measure_update_rate() -> int:
    """Return how many bytes of RAM the fp32 update kernel touches in a second, all threads."""
    memory = np.zeros((len(_UPDATE_ARRAYS), _NUMEL), np.float32)
    spans = np.zeros(1, _kernels.SPAN_DTYPE)
    for name, array in zip(_UPDATE_ARRAYS, memory, strict=True):
        spans[name] = array.ctypes.data
    spans["numel"] = _NUMEL
    hypers = np.zeros(1, _kernels.HYPER_DTYPE)
    for name, value in {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 1}.items():
        hypers[name] = value
    seconds = _least_seconds(lambda: _kernels.adam_step_spans(0, spans, hypers))
    return int(_NUMEL * _TOUCHED_BYTES / seconds)


@functools.cache
def measure_product_rate() -> int:
    """Return the operations a second of products of fp32 matrices, as torch is set up now."""
    left = torch.ones(_ORDER, _ORDER)
    out = torch.empty_like(left)
    seconds = _least_seconds(lambda: torch.mm(left, left, out=out))
    return int(2 * _ORDER**3 / seconds)


def _least_seconds(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return max(min(seconds), 1e-9)
