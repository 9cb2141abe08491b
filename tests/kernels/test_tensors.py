# SPDX-License-Identifier: Apache-2.0
"""The tensor functions: which dtypes exist, and what is refused before anything is written."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from swapio import _kernels
from swapio.optim import kernels
from swapio.optim.kernel_forms import all_forms, check_form

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED = {
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
}


def state(numel: int = 17) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.rand(numel, generator=random) for _ in range(4)]


@pytest.mark.parametrize(("param", "grad", "moment"), list(product(DTYPES, DTYPES, DTYPES)))
def test_all_27_combinations(param: torch.dtype, grad: torch.dtype, moment: torch.dtype) -> None:
    """The gradient's dtype is its own: a bf16 gradient of an fp32 parameter was once read as fp32.

    A supported combination equals stepping `grad.float()` bit for bit; another is a TypeError that
    lists those there are.
    """
    p, g, m, v = state()
    one = [p.to(param), g.to(grad), m.to(moment), v.to(moment)]
    if (param, moment) not in SUPPORTED:
        with pytest.raises(TypeError, match=r"there are:\n(.*\n)*param fp32: grad fp32, bf16"):
            kernels.adam_step(*one, step=1)
        return
    two = [one[0].clone(), one[1].float(), one[2].clone(), one[3].clone()]
    for step in (1, 2, 3):
        kernels.adam_step(*one, step=step)
        kernels.adam_step(*two, step=step)
    for index in (0, 2, 3):
        assert torch.equal(one[index], two[index])


@pytest.mark.parametrize("op", ["step", "rescale", "rollback"])
def test_python_and_native_tables_agree(op: str) -> None:
    """Each code that adam_form() gives runs, and the native side refuses all other codes."""
    known = {kernels.adam_form(**form) for form in all_forms(op)}  # type: ignore[arg-type]
    calls: dict[str, Any] = {
        "step": _kernels.adam_step_spans,
        "rescale": lambda *a: _kernels.adam_rescale_spans(*a, old_scale=1.0, new_scale=0.5),
        "rollback": _kernels.adam_rollback_spans,
    }
    none = np.zeros(0, kernels.SPAN_DTYPE), np.zeros(0, kernels.HYPER_DTYPE)
    for code in (*range(512), -1, 512, 1 << 20):
        if code in known:
            calls[op](code, *none)
            if op != "step":
                check_form(code, op)
        else:
            with pytest.raises(ValueError, match="has no kernel"):
                calls[op](code, *none)
    assert len(known) == {"step": 42, "rescale": 12, "rollback": 12}[op]


def freed(numel: int) -> torch.Tensor:
    tensor = torch.rand(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


def unchanged(tensors: list[torch.Tensor], call: Any) -> None:
    before = [t.clone() if t.device.type == "cpu" else None for t in tensors]
    call()
    for tensor, old in zip(tensors, before, strict=True):
        assert old is None or torch.equal(tensor, old)


@pytest.mark.parametrize("index", range(4))
def test_bad_tensors_are_named_and_nothing_is_written(index: int) -> None:
    name = ("param", "grad", "exp_avg", "exp_avg_sq")[index]
    cases: list[tuple[Any, type[Exception], str]] = [
        (torch.rand(34)[::2], ValueError, f"{name}\\[0\\].*not contiguous"),
        (torch.rand(17, device="meta"), ValueError, f"{name}\\[0\\].*meta"),
        (torch.rand(17).to_sparse(), ValueError, f"{name}\\[0\\].*sparse"),
        (torch.rand(16), ValueError, "elements, its param"),
        ([torch.rand(17), torch.rand(17)], ValueError, "params but"),
        (torch._neg_view(torch.rand(17)), ValueError, f"{name}\\[0\\] has the negative bit"),
        (freed(17), ValueError, f"address of {name}"),
        (torch.rand(17).double(), TypeError, "there are|one dtype"),
        (torch.rand(17, dtype=torch.complex64), TypeError, "there are|one dtype"),
        (torch.zeros(17, dtype=torch.int32), TypeError, "there are|one dtype"),
        ([[1.0] * 17], TypeError, f"{name}\\[0\\] is a list"),
    ]
    for bad, error, message in cases:
        arguments: list[Any] = state()
        good = [t for i, t in enumerate(arguments) if i != index]
        arguments[index] = bad

        def call(
            arguments: list[Any] = arguments, error: type[Exception] = error, message: str = message
        ) -> None:
            with pytest.raises(error, match=message):
                kernels.adam_step(*arguments, step=1)

        unchanged(good, call)


def test_overlap_is_refused() -> None:
    whole = torch.rand(100)
    p, g, m, v = state()
    with pytest.raises(ValueError, match="overlaps"):
        kernels.adam_step(whole[:17], g, whole[10:27], v, step=1)
    with pytest.raises(ValueError, match="overlaps"):
        kernels.adam_step(p, p, m, v, step=1)
    with pytest.raises(ValueError, match="overlaps"):
        kernels.adam_step([p, p], [g, g], [m, m.clone()], [v, v.clone()], step=1)
    with pytest.raises(ValueError, match="overlaps"):
        kernels.adam_step(p, g, m, v, step=1, out=g.view(torch.bfloat16)[:17])
    shared_grad = [p.clone(), p.clone()], [g, g], [m.clone(), m.clone()], [v.clone(), v.clone()]
    kernels.adam_step(*shared_grad, step=1)  # reading twice is fine
    assert torch.equal(shared_grad[0][0], shared_grad[0][1])


def test_bad_numbers_are_refused() -> None:
    arguments = state()
    for keywords, message in (
        ({"step": 0}, "counts from 1"),
        ({"step": 1, "betas": (1.0, 0.9)}, "betas"),
        ({"step": 1, "betas": (0.9, -0.1)}, "betas"),
        ({"step": 1, "betas": (float("nan"), 0.1)}, "betas"),
        ({"step": 1, "eps": -1.0}, "eps"),
        ({"step": [1, 2]}, "steps"),
        ({"step": 1, "amsgrad": True}, "amsgrad"),
        ({"step": 1, "threads": 0}, "threads"),
        ({"step": 1, "seed": -1}, "seed"),
        ({"step": 1, "seed": 1 << 64}, "seed"),
    ):

        def call(keywords: Any = keywords, message: str = message) -> None:
            with pytest.raises(ValueError, match=message):
                kernels.adam_step(*arguments, **keywords)

        unchanged(arguments, call)


def test_steps_are_whole_numbers() -> None:
    for step in (1.0, [1.5], torch.tensor(1.0), "1"):
        with pytest.raises(TypeError):
            kernels.adam_step(*state(), step=step)  # type: ignore[arg-type]
    results = []
    for plain in (3, np.int64(3), torch.tensor(3), np.array([3])):
        results.append(state())
        kernels.adam_step(*results[-1], step=plain)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for one in results for a, b in zip(one, results[0], strict=True))


def test_out_and_low_must_have_their_dtypes() -> None:
    p, g, m, v = state()
    with pytest.raises(TypeError, match=r"out=torch\.float32"):
        kernels.adam_step(p, g, m, v, step=1, out=torch.zeros(17))
    with pytest.raises(TypeError, match="int16"):
        kernels.adam_step(p.bfloat16(), g, m, v, step=1, low=torch.zeros(17, dtype=torch.int32))
    with pytest.raises(TypeError, match="split=True"):
        kernels.adam_step(p, g, m, v, step=1, low=torch.zeros(17, dtype=torch.int16))
    with pytest.raises(TypeError, match="stochastic=True"):
        kernels.adam_step(p, g, m, v, step=1, seed=3)
    with pytest.raises(TypeError, match="moments have one dtype"):
        kernels.adam_step(p, g, m, v.bfloat16(), step=1)
    with pytest.raises(TypeError, match="mixes"):
        kernels.adam_step(
            *([t, u] for t, u in zip(state(), [p.half(), g, m, v], strict=True)), step=1
        )
    with pytest.raises(TypeError, match="no kernel for"):
        kernels.grad_stats(p.double())


def test_lists_take_a_step_count_each() -> None:
    many = [[t[i * 5 : i * 5 + 5].clone() for i in range(3)] for t in state(15)]
    alone = [[t.clone() for t in row] for row in many]
    kernels.adam_step(*many, step=[1, 5, 100])
    for index, step in enumerate((1, 5, 100)):
        kernels.adam_step(*(row[index] for row in alone), step=step)
    assert all(
        torch.equal(a, b)
        for x, y in zip(many, alone, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_empty_lists_and_tensors() -> None:
    assert kernels.adam_step([], [], [], [], step=1) is None
    kernels.adam_step(*[torch.zeros(0)] * 4, step=1)
    assert kernels.grad_stats([]) == (0.0, True)
    assert kernels.grad_stats(torch.zeros(0)) == (0.0, True)


def test_autograd_sees_the_write() -> None:
    param = torch.nn.Parameter(torch.rand(17))
    _, g, m, v = state()
    loss = (param * param).sum()
    kernels.adam_step(param, g, m, v, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_spans_are_checked_before_any_is_stepped() -> None:
    tensors = state(16)
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    form = kernels.adam_form(param=torch.float32, grad=torch.float32)
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["step"] = 1

    def spans(**changes: int) -> Any:
        array = np.zeros(2, kernels.SPAN_DTYPE)
        for name, tensor in zip(names, tensors, strict=True):
            array[name] = [tensor.data_ptr(), tensor.data_ptr() + 32]
        array["numel"] = 8
        for name, value in changes.items():
            array[name][1] = value
        return array

    for changes, message in (
        ({"numel": -1}, "span 1: numel"),
        ({"position": -1}, "span 1: position"),
        ({"position": 2**63 - 8}, "span 1: position is too large"),
        ({"hyper": 1}, "span 1: hyper"),
        ({"hyper": -1}, "span 1: hyper"),
        ({"exp_avg": 0}, "span 1: the form needs an address of exp_avg"),
        ({"grad": tensors[1].data_ptr() + 2}, "span 1: the address of grad"),
        ({"param_to": 2}, "span 1: a destination"),
    ):

        def call(changes: dict[str, int] = changes, message: str = message) -> None:
            with pytest.raises(ValueError, match=message):
                kernels.adam_step_spans(form, spans(**changes), hypers)

        unchanged(tensors, call)
    with pytest.raises(ValueError, match="address of out"):
        kernels.adam_step_spans(form | 1 << 6, spans(), hypers)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        kernels.adam_step_spans(form, np.zeros(2), hypers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one dimension"):
        kernels.adam_step_spans(form, spans().reshape(1, 2), hypers)
