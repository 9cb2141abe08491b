# SPDX-License-Identifier: Apache-2.0
"""The typed face of the CPU kernels in swapio._kernels.

Two levels. The `*_spans` functions take numpy arrays of addresses (SPAN_DTYPE, HYPER_DTYPE) and are
what the swapper uses: one call steps a list of fragments in one parallel loop. The tensor functions
(`adam_step`, `adam_rescale`, `adam_rollback`, `grad_stats`) check dtype, device, contiguity, numel
and overlap, and are for people.

Invariants: kernels keep no state; results are the same bits for every SIMD level, number of threads
and way of cutting into spans; the GIL is released while they run. The formula and its roundings are
in csrc/kernels/adam-inl.h: torch's AdamW in fp32, eps after the bias correction, no fused
multiply-add, every nan that is stored is 0x7fc00000.

A form says how the arrays of a call lie in memory:

    param     what is updated: an fp32 parameter or separate fp32 master; a masterless bf16 or fp16
              parameter; or with split=True the bf16 upper half of a master whose lower half is
              the int16 array `low`
    out       a bf16 or fp16 copy of an fp32 `param`, written in the same pass, equal to .to(dtype)
    state     of both moments; grad is promoted to fp32 before it is scaled
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from swapio import _kernels
from swapio._kernels import (
    BIAS_CORRECTION,
    DECOUPLED,
    HYPER_DTYPE,
    MAXIMIZE,
    PACKED_GROUP,
    SPAN_DTYPE,
    adam_step_spans,
    copy_spans,
    default_num_threads,
    fill_spans,
    has_xxh3,
    hash_spans,
    join_master_spans,
    num_threads,
    set_simd_level,
    set_threads,
    simd_level,
    simd_levels,
    split_master_spans,
    stop_threads,
    symmetric_group_rows,
    symmetric_product,
    thread_cores,
)
from swapio.optim.kernel_forms import adam_form, check_form, describe_forms, dtype_code
from swapio.optim.tensor_kernels import adam_rescale, adam_rollback, adam_step, grad_stats

__all__ = [
    "BIAS_CORRECTION",
    "DECOUPLED",
    "HYPER_DTYPE",
    "MAXIMIZE",
    "PACKED_GROUP",
    "SPAN_DTYPE",
    "adam_form",
    "adam_rescale",
    "adam_rescale_spans",
    "adam_rollback",
    "adam_rollback_spans",
    "adam_step",
    "adam_step_spans",
    "convert_spans",
    "copy_spans",
    "default_num_threads",
    "describe_forms",
    "fill_spans",
    "grad_stats",
    "grad_stats_spans",
    "has_xxh3",
    "hash_spans",
    "join_master_spans",
    "num_threads",
    "set_simd_level",
    "set_threads",
    "simd_level",
    "simd_levels",
    "split_master_spans",
    "square_sum_spans",
    "stop_threads",
    "symmetric_group_rows",
    "symmetric_product",
    "thread_cores",
]


def adam_rescale_spans(
    form: int,
    spans: NDArray[np.void],
    hypers: NDArray[np.void],
    *,
    old_scale: float,
    new_scale: float,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None:
    """Turn the result of a step on old_scale * g into that of a step on new_scale * g, in one pass.

    Blocks until done, with the GIL released. `spans`, `hypers` and `ties` are those of the step
    (ties: those it returned). Equal scales leave everything bit for bit; what the spans send to
    other memory (`out`, and the addresses that end in `_to`) is written there all the same.

    Args:
        form: From adam_form(); an fp32 or split master with fp32 moments.
        spans: SPAN_DTYPE array; the caller keeps the memory alive.
        hypers: HYPER_DTYPE array with the values of the step.
        old_scale: The factor the step was taken with.
        new_scale: The factor it should have been taken with.
        ties: The tie list of a split master.
        threads: At most this many threads; None for the budget.

    Returns:
        The new tie list of a split master, else None.

    Raises:
        TypeError: The form has no rescale kernel.
        ValueError: L2 weight decay, or an invalid span.
    """
    check_form(form, "rescale")
    return _kernels.adam_rescale_spans(
        form,
        spans,
        hypers,
        old_scale=old_scale,
        new_scale=new_scale,
        ties=ties,
        threads=threads,
    )


def adam_rollback_spans(
    form: int,
    spans: NDArray[np.void],
    hypers: NDArray[np.void],
    *,
    grad_scale: float = 1.0,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None:
    """Undo a step algebraically, in one pass: close to the state before, but not bit exact.

    The bound is that of adam_rollback. Arguments as for adam_rescale_spans; `grad_scale` is the
    step's. A gradient so large that the second moment overflowed cannot be undone.

    Raises:
        TypeError: The form has no rollback kernel.
        ValueError: L2 weight decay, a zero beta, lr * weight_decay == 1, or an invalid span.
    """
    check_form(form, "rollback")
    return _kernels.adam_rollback_spans(
        form, spans, hypers, grad_scale=grad_scale, ties=ties, threads=threads
    )


def grad_stats_spans(
    addresses: ArrayLike, numels: ArrayLike, dtype: torch.dtype, *, threads: int | None = None
) -> tuple[float, bool]:
    """Return the float64 sum of squares of gradients and whether all of them are finite.

    One pass. The same bits for any number of threads and SIMD level; the sum (not the flag)
    depends on where the spans are cut, as tiles of 16384 elements are added in order.
    """
    return _kernels.grad_stats_spans(addresses, numels, dtype_code(dtype), threads=threads)


def square_sum_spans(
    addresses: ArrayLike, numels: ArrayLike, dtype: torch.dtype, *, threads: int | None = None
) -> NDArray[np.float64]:
    """Return the float64 sum of squares of each span; finite if all its elements are. Blocks.

    The arguments are as for copy_spans: addresses, numels of one dtype, and at most this many
    threads.
    """
    return _kernels.square_sum_spans(addresses, numels, dtype_code(dtype), threads=threads)


def convert_spans(
    src: ArrayLike,
    dst: ArrayLike,
    numels: ArrayLike,
    src_dtype: torch.dtype,
    dst_dtype: torch.dtype,
    *,
    threads: int | None = None,
) -> None:
    """Convert between fp32, bf16 and fp16, rounding to nearest even as Tensor.to does."""
    _kernels.convert_spans(
        src, dst, numels, dtype_code(src_dtype), dtype_code(dst_dtype), threads=threads
    )
