# SPDX-License-Identifier: Apache-2.0
"""Adam kernels on tensors: checks, spans, one native call.

Every function takes single tensors or sequences of them (one call, one parallel loop over all).
Invariant: nothing is written before every argument has been checked.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from swapio import _kernels
from swapio.optim.kernel_forms import adam_form, check_form, dtype_code

TensorOrList = torch.Tensor | Sequence[torch.Tensor]


class _Array(NamedTuple):
    """One argument of a call: a tensor for each parameter."""

    name: str
    tensors: list[torch.Tensor]
    is_written: bool


def adam_step(
    param: TensorOrList,
    grad: TensorOrList,
    exp_avg: TensorOrList,
    exp_avg_sq: TensorOrList,
    *,
    step: int | Sequence[int],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    amsgrad: bool = False,
    grad_scale: float = 1.0,
    out: TensorOrList | None = None,
    low: TensorOrList | None = None,
    ties: NDArray[np.uint32] | None = None,
    seed: int | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None:
    """Take one AdamW (or, with decoupled=False, Adam) step in place.

    As torch.optim.AdamW computes it, in fp32 whatever the dtypes, to 2 ulp. Blocks until done with
    the GIL released. The moments are those before the step; `step` counts from 1.

    Args:
        param: What is updated: fp32, bf16 or fp16. With `low`, the bf16 half of a split master.
        grad: fp32, bf16 or fp16, promoted to fp32 and then multiplied by `grad_scale`.
        exp_avg: First moments: fp32, or of the parameter's dtype (fp32 parameters: bf16).
        exp_avg_sq: Second moments, of the same dtype.
        step: The number of this step, one for all or one for each parameter.
        lr: Learning rate.
        betas: Decay rates of the moments, in [0, 1).
        eps: Added to the bias-corrected root of the second moment.
        weight_decay: Decoupled, or L2 with decoupled=False.
        decoupled: AdamW's decay, else Adam's.
        bias_correction: Whether the moments are corrected for their start at zero.
        maximize: Ascend.
        amsgrad: Not supported.
        grad_scale: Factor of the gradient, such as 1 / loss_scale times a clip factor.
        out: bf16 or fp16 tensors that receive the new fp32 `param` rounded to nearest even.
        low: int16 lower halves of split masters.
        ties: What the last step on this split master returned; positions count through the list.
        seed: Round masterless bf16 parameters stochastically, by a hash of this, `step` and the
            element's position.
        threads: At most this many threads; None for the budget.

    Returns:
        The tie list of a split master, else None.

    Raises:
        TypeError: No kernel for these dtypes (the message lists those there are), or no tensor.
        ValueError: A tensor that is not on the CPU, not contiguous, of another numel, with the
            negative bit, without memory, or that overlaps one that is written; an invalid
            hyperparameter or seed.
    """
    if amsgrad:
        raise ValueError("amsgrad is not supported; use amsgrad=False")
    if seed is not None and not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be at least 0 and below 2^64, got {seed}")
    arrays = _arrays(param, grad, exp_avg, exp_avg_sq, out, low)
    form = _form(arrays, out=out is not None, split=low is not None, stochastic=seed is not None)
    hypers = _hypers(
        len(arrays[0].tensors),
        step,
        (lr, betas[0], betas[1], eps, weight_decay),
        _flags(decoupled=decoupled, bias_correction=bias_correction, maximize=maximize),
    )
    result = _kernels.adam_step_spans(
        form,
        _spans(arrays),
        hypers,
        grad_scale=grad_scale,
        ties=ties,
        seed=seed or 0,
        threads=threads,
    )
    _mark_written(arrays)
    return result


def adam_rescale(
    param: TensorOrList,
    grad: TensorOrList,
    exp_avg: TensorOrList,
    exp_avg_sq: TensorOrList,
    *,
    step: int | Sequence[int],
    old_scale: float,
    new_scale: float,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    out: TensorOrList | None = None,
    low: TensorOrList | None = None,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None:
    """Turn the result of a step on old_scale * grad into that of a step on new_scale * grad.

    The other arguments are those of the step, the tensors what it left. Moments of elements
    without visible history come out bit-equal to the direct step. Where the gradient dominates
    the old second moment, that is known to 2^-24 (old_scale / new_scale)^2 of the new one only:
    below a ratio of 1/32 restore the state before the step and step again if you can.

    Raises:
        TypeError: No kernel for these dtypes.
        ValueError: As adam_step; L2 weight decay.
    """
    arrays = _arrays(param, grad, exp_avg, exp_avg_sq, out, low)
    form = _form(arrays, out=out is not None, split=low is not None, stochastic=False)
    check_form(form, "rescale")
    hypers = _hypers(
        len(arrays[0].tensors),
        step,
        (lr, betas[0], betas[1], eps, weight_decay),
        _flags(decoupled=decoupled, bias_correction=bias_correction, maximize=maximize),
    )
    result = _kernels.adam_rescale_spans(
        form,
        _spans(arrays),
        hypers,
        old_scale=old_scale,
        new_scale=new_scale,
        ties=ties,
        threads=threads,
    )
    _mark_written(arrays)
    return result


def adam_rollback(
    param: TensorOrList,
    grad: TensorOrList,
    exp_avg: TensorOrList,
    exp_avg_sq: TensorOrList,
    *,
    step: int | Sequence[int],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    grad_scale: float = 1.0,
    out: TensorOrList | None = None,
    low: TensorOrList | None = None,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None:
    """Undo a step algebraically: close to the state before, but not bit exact.

    To 1.5 + 1.5 / f ulp of the larger of the values before and after, where f is what the step
    multiplied the old value by: beta1, beta2, or 1 - lr * weight_decay for the parameter. With the
    usual values 2 ulp were seen. The arguments are those of the step, the tensors what it left.

    Raises:
        TypeError: No kernel for these dtypes.
        ValueError: As adam_step; L2 weight decay, a zero beta, or lr * weight_decay == 1.
    """
    arrays = _arrays(param, grad, exp_avg, exp_avg_sq, out, low)
    form = _form(arrays, out=out is not None, split=low is not None, stochastic=False)
    check_form(form, "rollback")
    hypers = _hypers(
        len(arrays[0].tensors),
        step,
        (lr, betas[0], betas[1], eps, weight_decay),
        _flags(decoupled=decoupled, bias_correction=bias_correction, maximize=maximize),
    )
    result = _kernels.adam_rollback_spans(
        form, _spans(arrays), hypers, grad_scale=grad_scale, ties=ties, threads=threads
    )
    _mark_written(arrays)
    return result


def grad_stats(grads: TensorOrList, *, threads: int | None = None) -> tuple[float, bool]:
    """Return the float64 sum of squares of all gradients and whether all are finite, in one pass.

    The sum is the same for any number of threads and SIMD level.

    Raises:
        TypeError: A dtype without a kernel, or no tensor.
        ValueError: A tensor that is not on the CPU or not contiguous.
    """
    tensors = _as_list("grads", grads)
    sums = np.empty(len(tensors), np.float64)
    for dtype in {tensor.dtype for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sums[chosen] = _kernels.square_sum_spans(
            np.array([tensors[i].data_ptr() for i in chosen], np.uint64),
            np.array([tensors[i].numel() for i in chosen], np.int64),
            dtype_code(dtype),
            threads=threads,
        )
    total = sum(sums.tolist(), 0.0)
    return total, bool(np.isfinite(total))


def _as_list(name: str, value: TensorOrList) -> list[torch.Tensor]:
    tensors = [value] if isinstance(value, torch.Tensor) else list(value)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}[{index}] is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError(
                f"{name}[{index}] is a {tensor.layout} tensor on {tensor.device}; "
                "the kernels take strided tensors on the CPU"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}[{index}] of shape {tuple(tensor.shape)} and strides {tensor.stride()} is "
                "not contiguous; a copy would be stepped in its place, so pass .contiguous() "
                "and copy back"
            )
        if tensor.is_neg():
            raise ValueError(
                f"{name}[{index}] has the negative bit: its memory holds the opposite of its "
                "elements; pass .resolve_neg()"
            )
    return tensors


def _arrays(
    param: TensorOrList,
    grad: TensorOrList,
    exp_avg: TensorOrList,
    exp_avg_sq: TensorOrList,
    out: TensorOrList | None,
    low: TensorOrList | None,
) -> list[_Array]:
    arrays = [
        _Array("param", _as_list("param", param), True),
        _Array("grad", _as_list("grad", grad), False),
        _Array("exp_avg", _as_list("exp_avg", exp_avg), True),
        _Array("exp_avg_sq", _as_list("exp_avg_sq", exp_avg_sq), True),
    ]
    for name, value in (("out", out), ("low", low)):
        if value is not None:
            arrays.append(_Array(name, _as_list(name, value), True))
    params = arrays[0].tensors
    for array in arrays[1:]:
        if len(array.tensors) != len(params):
            raise ValueError(f"{len(params)} params but {len(array.tensors)} of {array.name}")
        for index, (tensor, wanted) in enumerate(zip(array.tensors, params, strict=True)):
            if tensor.numel() != wanted.numel():
                raise ValueError(
                    f"{array.name}[{index}] has {tensor.numel()} elements, "
                    f"its param {wanted.numel()}"
                )
    _check_overlap(arrays)
    return arrays


def _check_overlap(arrays: Iterable[_Array]) -> None:
    """Raise ValueError if memory that is written is also another argument."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, array.is_written, array.name, index)
        for array in arrays
        for index, tensor in enumerate(array.tensors)
        if tensor.numel()
    )
    furthest = {True: (0, ""), False: (0, "")}  # by is_written: the furthest end so far, and whose
    for start, end, is_written, name, index in ranges:
        for other_written, (other_end, other) in furthest.items():
            if start < other_end and (is_written or other_written):
                raise ValueError(f"{name}[{index}] overlaps {other}, and one of them is written")
        if end > furthest[is_written][0]:
            furthest[is_written] = (end, f"{name}[{index}]")


def _one_dtype(array: _Array) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in array.tensors}
    if len(dtypes) > 1:
        raise TypeError(f"{array.name} mixes {sorted(map(str, dtypes))}; one call takes one dtype")
    return dtypes.pop() if dtypes else torch.float32


def _form(arrays: Sequence[_Array], *, out: bool, split: bool, stochastic: bool) -> int:
    dtypes = {array.name: _one_dtype(array) for array in arrays}
    if dtypes["exp_avg"] != dtypes["exp_avg_sq"]:
        raise TypeError(
            f"exp_avg is {dtypes['exp_avg']} but exp_avg_sq is {dtypes['exp_avg_sq']}; "
            "the moments have one dtype"
        )
    if split and dtypes["low"] != torch.int16:
        raise TypeError(f"low is {dtypes['low']}; the lower half of a split master is int16")
    return adam_form(
        param=dtypes["param"],
        grad=dtypes["grad"],
        state=dtypes["exp_avg"],
        out=dtypes["out"] if out else None,
        split=split,
        stochastic=stochastic,
    )


def _flags(*, decoupled: bool, bias_correction: bool, maximize: bool) -> int:
    return (
        _kernels.DECOUPLED * decoupled
        | _kernels.BIAS_CORRECTION * bias_correction
        | _kernels.MAXIMIZE * maximize
    )


def _hypers(
    num_params: int,
    step: int | Sequence[int],
    values: tuple[float, float, float, float, float],
    flags: int,
) -> NDArray[np.void]:
    try:
        steps = [operator.index(cast("int", step))] * num_params
    except TypeError:
        steps = [operator.index(one) for one in cast("Sequence[int]", step)]
    if len(steps) != num_params:
        raise ValueError(f"{num_params} params but {len(steps)} steps")
    hypers = np.zeros(num_params, _kernels.HYPER_DTYPE)
    for name, value in zip(("lr", "beta1", "beta2", "eps", "weight_decay"), values, strict=True):
        hypers[name] = value
    hypers["step"] = steps
    hypers["flags"] = flags
    return hypers


def _spans(arrays: Sequence[_Array]) -> NDArray[np.void]:
    params = arrays[0].tensors
    spans = np.zeros(len(params), _kernels.SPAN_DTYPE)
    for array in arrays:
        spans[array.name] = [tensor.data_ptr() for tensor in array.tensors]
    numels = np.array([tensor.numel() for tensor in params], np.int64)
    spans["numel"] = numels
    spans["position"] = np.cumsum(numels) - numels
    spans["hyper"] = np.arange(len(params))
    return spans


def _mark_written(arrays: Iterable[_Array]) -> None:
    for array in arrays:
        if array.is_written and array.tensors:
            torch.autograd.graph.increment_version(array.tensors)
