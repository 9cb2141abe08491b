# SPDX-License-Identifier: Apache-2.0
"""Law 1: swapped equals resident, bit for bit; and both equal torch within the stated bound."""

from __future__ import annotations

import pytest
import torch

from swapio import _kernels, checksum
from swapio.errors import SwapStateError
from swapio.optim import Adam, AdamW, kernels

SIZES = [1, 7, 4096, 262143, 262144, 262145, 600 * 600]
SMALL = {"sub_group_numel": 1 << 19, "min_swap_bytes": 0, "host_memory": "24MiB"}
MODES = {
    "partitioned": {**SMALL, "pipeline_read": False, "pipeline_write": False},
    "pipelined": {**SMALL, "host_memory": "16MiB"},
    "pipelined-wide": {**SMALL, "sub_group_numel": 1 << 24},
    "read": {**SMALL, "pipeline_write": False},
    "write": {**SMALL, "pipeline_read": False},
    "threads": {**SMALL, "engine": "threads"},
    "buffered": {**SMALL, "direct": "off"},
    "step": {**SMALL, "durability": "step"},
}


def parameters(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def train(cls, swap, *, dtype=torch.float32, steps=10, sizes=SIZES, **kwargs):
    params = parameters(dtype, sizes)
    generator = torch.Generator().manual_seed(1)
    opt = cls(params, swap=swap, lr=1e-2, **kwargs)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        opt.step()
    states = [{k: v.clone() for k, v in opt.state_of(p).items()} for p in params]
    opt.close()
    return [p.detach().clone() for p in params], states


def same(left, right):
    for a, b in zip(left[0], right[0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(left[1], right[1], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swapped_equals_resident(tmp_path, mode, dtype):
    same(
        train(AdamW, None, dtype=dtype),
        train(AdamW, {"path": tmp_path, **MODES[mode]}, dtype=dtype),
    )


@pytest.mark.parametrize("mode", ["partitioned", "pipelined"])
def test_split_and_separate_masters_agree(tmp_path, mode):
    runs = [
        train(AdamW, {"path": tmp_path / form, "master": form, **MODES[mode]}, dtype=torch.bfloat16)
        for form in ("split", "separate")
    ]
    same(*runs)
    for param, state in zip(*runs[0], strict=True):
        assert torch.equal(param, state["master"].bfloat16())


@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_equals_torch_within_the_elementwise_bound(cls):
    kwargs = {"weight_decay": 0.1, "betas": (0.8, 0.97)}
    ours, _ = train(cls, None, **kwargs)
    reference = [p.detach().double().requires_grad_() for p in parameters()]
    generator = torch.Generator().manual_seed(1)
    opt = getattr(torch.optim, cls.__name__)(reference, lr=1e-2, foreach=False, **kwargs)
    largest = [p.detach().abs() for p in reference]
    moved = [torch.zeros_like(p) for p in largest]
    for _ in range(10):
        for param in reference:
            param.grad = torch.randn(param.shape, generator=generator).double()
        before = [p.detach().clone() for p in reference]
        opt.step()
        for i, param in enumerate(reference):
            largest[i] = torch.maximum(largest[i], param.detach().abs())
            moved[i] += (param.detach() - before[i]).abs()
    for mine, ref, large, path in zip(ours, reference, largest, moved, strict=True):
        ulp = torch.nextafter(large.float(), torch.tensor(float("inf"))).double() - large.float()
        bound = 10 * 2 * ulp + 1e-6 * path
        assert ((mine.double() - ref).abs() <= bound).all()


def test_parameters_without_gradient_are_left_alone(tmp_path):
    for swap in (None, {"path": tmp_path, **MODES["pipelined"]}):
        a, b, c = parameters(sizes=[300_000, 300_000, 300_000])
        start = c.detach().clone()
        reference = [p.detach().clone().requires_grad_() for p in (a, b, c)]
        opt = AdamW([a, b, c], lr=0.1, weight_decay=0.1, swap=swap)
        torch_opt = torch.optim.AdamW(reference, lr=0.1, weight_decay=0.1, foreach=False)
        for step in range(1, 6):
            for mine, ref, has in zip(
                (a, b, c), reference, (True, step in (2, 4), False), strict=True
            ):
                mine.grad = ref.grad = torch.full((300_000,), float(step)) if has else None
            opt.step()
            torch_opt.step()
        assert torch.equal(c, start)
        assert [int(opt.state[p]["step"]) for p in (a, b, c)] == [5, 2, 0]
        for mine, ref in zip((a, b, c), reference, strict=True):
            torch.testing.assert_close(mine, ref, rtol=1e-6, atol=1e-7)
        opt.close()


@pytest.mark.parametrize("form", ["separate", "split"])
@pytest.mark.parametrize("hashed", ["as built", "by the wheel"])
def test_a_foreign_change_of_a_parameter_becomes_the_new_master(
    tmp_path, form, hashed, monkeypatch
):
    """A build without xxhash.h took digests with a kernel that it does not have."""
    if hashed == "by the wheel":
        monkeypatch.setattr(checksum, "_hash_spans", checksum._hash_spans_in_python)
        monkeypatch.delattr(_kernels, "hash_spans")
        monkeypatch.setattr(kernels, "hash_spans", None)
    (param,) = parameters(torch.bfloat16, [600_000])
    opt = AdamW([param], lr=1e-3, swap={"path": tmp_path, "master": form, **MODES["pipelined"]})
    param.grad = torch.ones_like(param)
    opt.step()
    param.data.mul_(2)
    twin = torch.nn.Parameter(param.detach().float())
    fresh = AdamW([twin], lr=1e-3)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        fresh.set_state(twin, name, opt.state[param][name])
    with pytest.warns(UserWarning, match=r"param\.0 was changed outside"):
        opt.step()
    twin.grad = torch.ones_like(twin)
    fresh.step()
    assert torch.equal(opt.state[param]["master"], twin)
    assert torch.equal(param, twin.bfloat16())
    opt.close()


def test_a_foreign_change_can_be_an_error(tmp_path):
    (param,) = parameters(torch.bfloat16, [600_000])
    swap = {"path": tmp_path, "on_param_change": "error", **MODES["pipelined"]}
    with AdamW([param], swap=swap) as opt:
        param.grad = torch.ones_like(param)
        opt.step()
        before = {k: v.clone() for k, v in opt.state_of(param).items() if k != "master"}
        param.data[77] += 1
        changed = param.detach().clone()
        with pytest.raises(SwapStateError, match=r"param\.0 was changed"):
            opt.step()
        assert torch.equal(param, changed)
        for name, value in before.items():
            assert torch.equal(opt.state[param][name], value)
