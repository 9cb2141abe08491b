# SPDX-License-Identifier: Apache-2.0
"""Parameters on a GPU: state in RAM or on storage, gradients down, weights up."""

from __future__ import annotations

import warnings

import pytest
import torch

from support.early import wait
from swapio.optim import AdamW, GradScaler

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SMALL = {"sub_group_numel": 1 << 19, "min_swap_bytes": 0, "host_memory": "96MiB"}


def model(device, dtype):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 7)]
    return torch.nn.Sequential(*layers).to(dtype=dtype).to(device)


def train(device, *, dtype=torch.bfloat16, steps=4, accumulation=1, scaler=False, **kwargs):
    """Gradients are made on the CPU and given to both, so that the results can be equal."""
    net = model(device, dtype)
    generator = torch.Generator().manual_seed(1)
    scale = GradScaler(device, init_scale=1024.0) if scaler else None
    with AdamW(net.named_parameters(), lr=1e-3, **kwargs) as opt:
        for _ in range(steps):
            for _ in range(accumulation):
                loss = 0
                for param in net.parameters():
                    factor = torch.randn(param.shape, generator=generator).to(dtype).to(device)
                    loss = loss + (param * factor).sum(dtype=torch.float32)
                (loss if scale is None else scale.scale(loss)).backward()
            wait(opt)
            if scale is None:
                opt.step()
            else:
                scale.step(opt)
                scale.update()
            opt.zero_grad()
        torch.cuda.synchronize()
        states = [opt.state_of(param) for param in net.parameters()]
        numbers = opt.stats()
    assert numbers["num_steps"] == steps
    return [p.detach().cpu() for p in net.parameters()], states


@pytest.mark.parametrize("gradients", ["keep", "stream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_state_on_the_device_has_the_kernels_bits(gradients, dtype, ratio):
    """What torch steps on the GPU is what the kernels step on the CPU."""
    kwargs = {"dtype": dtype, "gradients": gradients, "swap": {"master": "separate"}}
    check_equal(train("cuda", ratio=ratio, **kwargs), train("cuda", **kwargs))


def sync_mode(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, torch says
        torch.cuda.set_sync_debug_mode(name)


def check_equal(left, right):
    for mine, theirs in zip(left[0], right[0], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(left[1], right[1], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("gradients", ["keep", "stream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [False, True])
def test_equals_the_cpu(tmp_path, gradients, dtype, stored):
    swaps = [{"master": "separate"} | ({"path": tmp_path / d, **SMALL} if stored else {})
             for d in ("a", "b")]  # fmt: skip
    check_equal(
        train("cuda", dtype=dtype, gradients=gradients, swap=swaps[0]),
        train("cpu", dtype=dtype, gradients=gradients, swap=swaps[1]),
    )


def test_fp32_parameters_are_within_the_bound(tmp_path):
    del tmp_path
    got, _ = train("cuda", dtype=torch.float32)
    expected, _ = train("cpu", dtype=torch.float32)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("gradients", ["keep", "stream"])
def test_split_masters_equal_the_cpu(tmp_path, gradients):
    swaps = [{"path": tmp_path / name, **SMALL} for name in "ab"]
    check_equal(
        train("cuda", gradients=gradients, swap=swaps[0]),
        train("cpu", gradients=gradients, swap=swaps[1]),
    )


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_early_steps_equal_late_ones(tmp_path, stored, limit):
    swaps = [{"path": tmp_path / name, **SMALL} if stored else None for name in "ab"]
    kwargs = {"steps": 6, "max_grad_norm": limit}
    early = train("cuda", speculate="always", swap=swaps[0], **kwargs)
    check_equal(early, train("cuda", gradients="stream", swap=swaps[1], **kwargs))


def test_early_steps_on_a_device_are_taken_and_undone():
    net = model("cuda", torch.bfloat16)
    inputs = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    with AdamW(net.parameters(), speculate="always", max_grad_norm=1e9) as opt:
        for _ in range(3):
            net(inputs).sum().backward()
            wait(opt)
            opt.step()
        numbers = opt.stats()
        assert numbers["speculation_num_kept"] == numbers["speculation_num_early"] > 0
        before = [p.detach().clone() for p in net.parameters()]
        (net(inputs).sum() * float("inf")).backward()
        wait(opt)
        opt.step()
        assert opt.step_skipped
        for mine, kept in zip(net.parameters(), before, strict=True):
            assert torch.equal(mine, kept)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_equals_the_cpu(accumulation):
    kwargs = {"gradients": "stream", "accumulation": accumulation, "swap": {"master": "separate"}}
    check_equal(train("cuda", **kwargs), train("cpu", **kwargs))


def test_clipping_and_a_scaler_are_close_to_the_cpu():
    kwargs = {"gradients": "stream", "max_grad_norm": 0.5, "swap": {"master": "separate"}}
    for scaler in (False, True):
        got = train("cuda", scaler=scaler, dtype=torch.float16, **kwargs)
        expected = train("cpu", scaler=scaler, dtype=torch.float16, **kwargs)
        for mine, theirs in zip(got[1], expected[1], strict=True):
            torch.testing.assert_close(mine["master"], theirs["master"], rtol=1e-5, atol=1e-8)


def test_save_load_and_state_dict(tmp_path):
    net = model("cuda", torch.bfloat16)
    with AdamW(net.parameters(), swap={"path": tmp_path / "run", **SMALL}) as opt:
        net(torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)).sum().backward()
        opt.step()
        opt.save(tmp_path / "save")
        kept = opt.state_dict()
        expected = [p.detach().clone() for p in net.parameters()]
        again = model("cuda", torch.bfloat16)
        for how in ("load", "load_state_dict"):
            with AdamW(again.parameters()) as other:
                if how == "load":
                    other.load(tmp_path / "save")
                else:
                    other.load_state_dict(kept)
                for mine, theirs in zip(again.parameters(), expected, strict=True):
                    assert torch.equal(mine, theirs)
            for param in again.parameters():
                param.data.zero_()
        del kept


def test_committed_steps_are_recovered(tmp_path):
    swap = {"path": tmp_path, "durability": "step", **SMALL}
    net = model("cuda", torch.bfloat16)
    inputs = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    with AdamW(net.parameters(), swap=swap) as opt:
        net(inputs).sum().backward()
        opt.step()
        expected = [p.detach().clone() for p in net.parameters()]
        opt.synchronize()
        for param in net.parameters():
            param.data.zero_()
        assert opt.recover() == 1
        for mine, theirs in zip(net.parameters(), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_backward_does_not_wait_for_the_device():
    net = model("cuda", torch.bfloat16)
    inputs = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    with AdamW(net.parameters(), gradients="stream") as opt:
        for _ in range(2):  # the first one makes the kernels
            opt.step()
            torch.cuda.synchronize()
            sync_mode("error")
            try:
                net(inputs).sum().backward()
            finally:
                sync_mode("default")


def test_an_item_slips_in_between_the_pieces():
    big = torch.nn.Parameter(torch.zeros(200 << 20, dtype=torch.bfloat16, device="cuda"))
    with AdamW([big], gradients="stream") as opt:
        big.sum().backward()
        assert opt._source.stream._copier.num_pieces == 25
        opt.step()
        assert torch.equal(big[:4].cpu(), torch.full((4,), -1e-3, dtype=torch.bfloat16))
