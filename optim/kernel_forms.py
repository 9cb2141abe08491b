# SPDX-License-Identifier: Apache-2.0
"""Which combinations of dtypes have a kernel, and their codes.

Invariant: the tables here and those in csrc/kernels/adam-inl.h (`fill_adam`) name the same set; the
native side refuses a code it has no kernel for, so a mistake here cannot reach wrong memory.
"""

from __future__ import annotations

from itertools import product

import torch

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPE_CODES = {FP32: 0, BF16: 1, FP16: 2}
_DTYPES = tuple(DTYPE_CODES)
_NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}

# (param, split) -> the dtypes its moments may have. Gradients may be fp32, bf16 or fp16 everywhere.
_STATES = {
    (FP32, False): (FP32, BF16),
    (BF16, True): (FP32, BF16),
    (BF16, False): (FP32, BF16),
    (FP16, False): (FP32, FP16),
}
_MASTER_CODES = {(FP32, False): 0, (BF16, True): 1, (BF16, False): 2, (FP16, False): 3}
_MASTERS_BY_CODE = {code: key for key, code in _MASTER_CODES.items()}
_STATE_SHIFT, _GRAD_SHIFT, _OUT_SHIFT, _STOCHASTIC_SHIFT = 2, 4, 6, 8


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of fp32, bf16 or fp16; raise TypeError for another dtype."""
    try:
        return DTYPE_CODES[dtype]
    except KeyError:
        raise TypeError(f"no kernel for {dtype}; there are kernels for {_DTYPES}") from None


def describe_forms(op: str = "step") -> str:
    """Return a table of the combinations that `op` ("step", "rescale", "rollback") has."""
    lines = []
    for (param, split), states in _STATES.items():
        if op != "step" and not (param is FP32 or split):
            continue
        kept = states if op == "step" else (FP32,)
        line = f"param {_NAMES[param]}{' split' if split else ''}: grad fp32, bf16 or fp16; "
        line += "state " + " or ".join(_NAMES[state] for state in kept)
        line += "; out none, bf16 or fp16" if param is FP32 else ""
        line += "; stochastic rounding" if param is BF16 and not split else ""
        lines.append(line)
    return "\n".join(lines)


def adam_form(
    *,
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype = torch.float32,
    out: torch.dtype | None = None,
    split: bool = False,
    stochastic: bool = False,
) -> int:
    """Return the code of a combination of dtypes for the `*_spans` functions.

    Args:
        param: Of the updated array: fp32 (a parameter or a separate master), or bf16 or fp16.
        grad: Of the gradient.
        state: Of both moments.
        out: Of a low-precision copy of an fp32 `param`; None for no copy.
        split: `param` is the bf16 upper half of a master, the int16 array `low` the rest.
        stochastic: Round a masterless bf16 `param` up or down at random.

    Returns:
        The code.

    Raises:
        TypeError: There is no such kernel; the message lists those there are.
    """
    known = (
        state in _STATES.get((param, split), ())
        and grad in DTYPE_CODES
        and (out is None or (param is FP32 and out in (BF16, FP16)))
        and (not stochastic or (param is BF16 and not split))
    )
    if not known:
        raise TypeError(
            f"no Adam kernel for param={param}, grad={grad}, state={state}, out={out}, "
            f"split={split}, stochastic={stochastic}; there are:\n{describe_forms()}"
        )
    return (
        _MASTER_CODES[param, split]
        | DTYPE_CODES[state] << _STATE_SHIFT
        | DTYPE_CODES[grad] << _GRAD_SHIFT
        | (0 if out is None else DTYPE_CODES[out]) << _OUT_SHIFT
        | int(stochastic) << _STOCHASTIC_SHIFT
    )


def all_forms(op: str = "step") -> list[dict[str, object]]:
    """Return the keyword arguments of adam_form() for each combination that `op` has."""
    forms: list[dict[str, object]] = []
    for (param, split), states in _STATES.items():
        if op != "step" and not (param is FP32 or split):
            continue
        outs = (None, BF16, FP16) if param is FP32 else (None,)
        roundings = (False, True) if op == "step" and param is BF16 and not split else (False,)
        kept = states if op == "step" else (FP32,)
        forms += [
            {
                "param": param,
                "grad": grad,
                "state": state,
                "out": out,
                "split": split,
                "stochastic": stochastic,
            }
            for grad, state, out, stochastic in product(_DTYPES, kept, outs, roundings)
        ]
    return forms


def check_form(form: int, op: str) -> None:
    """Raise TypeError unless `op` ("rescale" or "rollback") has a kernel for the form."""
    master = _MASTERS_BY_CODE[form & 3]
    state_code = form >> _STATE_SHIFT & 3
    if master not in ((FP32, False), (BF16, True)) or state_code != DTYPE_CODES[FP32]:
        raise TypeError(
            f"no {op} kernel for param {_NAMES[master[0]]}{' split' if master[1] else ''} with "
            f"{_NAMES[_DTYPES[state_code]] if state_code < len(_DTYPES) else '?'} moments: what "
            f"the step rounded away cannot be recovered; there are:\n{describe_forms(op)}"
        )
