# SPDX-License-Identifier: Apache-2.0
"""Muon's way over a device, without one: the same bits, and no wait but for what is needed."""

from __future__ import annotations

import pytest
import torch

import swapio.optim.muon as muon_module
from support.fake_device import take_device_way
from support.muon_training import (  # noqa: F401
    MODES,
    SWAP,
    assert_same,
    build,
    gradients,
    parameters,
    tight,
    trained,
)
from swapio.optim import Muon

CPU = torch.device("cpu")
SHAPES = [(64, 64), (17, 33), (3, 40, 24), (300, 900), (700, 40, 60), (600,)]
NUM_MUON = 5
WIDE = {"sub_group_numel": 1 << 21, "min_swap_bytes": 0}


@pytest.fixture
def on_fake_device(monkeypatch):
    """CPU parameters take the way of CUDA parameters, over streams that log."""
    return take_device_way(monkeypatch, muon_module, "DeviceMatrices")


def train(swap, *, steps=3, dtype=torch.bfloat16, missing=(), ns_dtype=torch.float32, **kwargs):
    params = parameters(SHAPES, dtype)
    start = [param.detach().clone() for param in params]

    def make(setting):
        return build(params, setting, num_muon=NUM_MUON, ns_dtype=ns_dtype, **kwargs)

    with tight(make, swap) if "path" in swap else make(swap) as opt:
        for at, row in enumerate(gradients(SHAPES, steps, dtype)):
            for index, (param, grad) in enumerate(zip(params, row, strict=True)):
                if (at, index) not in missing:
                    (param * grad).sum().backward()
            opt.step()
            opt.zero_grad()
        return trained(opt, params, start)


@pytest.mark.parametrize("how", ["keep", "stream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", [None, "partitioned", "pipelined"])
def test_the_way_over_a_device_changes_no_bit(request, tmp_path, how, dtype, mode):
    swap = {"master": "separate"}
    if mode is not None:
        swap |= {**WIDE, **MODES[mode], "path": tmp_path}
    missing = {(1, 1), (2, 3)}
    expected = train({"master": "separate"}, dtype=dtype, missing=missing)
    cuda = request.getfixturevalue("on_fake_device")
    found = train(swap, dtype=dtype, missing=missing, gradients=how)
    assert any(entry[0] == "run" for entry in cuda.log)
    assert found.stats["num_newton_schulz"] == expected.stats["num_newton_schulz"]
    for index in range(NUM_MUON):
        one, other = found.states[index], expected.states[index]
        weights = expected.params[index]
        assert torch.equal(found.params[index], weights)
        assert torch.equal(one["master"], other.get("master", weights))
        for name in ("momentum_buffer", "step"):
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("mode", [None, "partitioned", "pipelined", "step"])
def test_split_masters_go_the_same_way(request, tmp_path, mode):
    missing = {(1, 1), (2, 3)}
    expected = train({"master": "split"}, missing=missing)
    request.getfixturevalue("on_fake_device")
    swap = {"master": "split"}
    if mode is not None:
        swap |= {**WIDE, **MODES[mode], "path": tmp_path}
    assert_same(train(swap, missing=missing, gradients="stream"), expected)


def test_products_are_bf16_on_a_device_and_near_those_in_fp32(on_fake_device):  # noqa: ARG001
    half = train({"master": "separate"}, ns_dtype=None)
    single = train({"master": "separate"}, ns_dtype=torch.float32)
    for one, other in zip(half.updates()[:NUM_MUON], single.updates(), strict=False):
        error = float((one - other).norm() / other.norm())
        assert 1e-4 < error < 5e-2


def test_a_block_is_awaited_only_when_its_place_is_needed_again(on_fake_device, monkeypatch):
    """Two blocks are with the device while the host steps others."""
    params = parameters([(32, 24)] * 5)
    with Muon(params, swap={"master": "separate"}) as opt:
        for param in params:
            param.sum().backward()
        waited = []
        original = type(on_fake_device.Event()).synchronize
        monkeypatch.setattr(
            type(on_fake_device.Event()),
            "synchronize",
            lambda self: (waited.append(self.number), original(self)),
        )
        on_fake_device.log.clear()
        opt.step()
        matrices = opt._on_device
        places = [place._done.number for place in matrices._places]
    ends = [entry[2] for entry in on_fake_device.log if entry[0] == "record"]
    started = [number for number in ends if number in places]
    assert started == [places[0], places[1], places[0], places[1], places[0]]
    awaited = [number for number in waited if number in places]
    assert awaited == [places[0], places[1], places[0], places[1], places[0]]
    assert opt.stats()["num_newton_schulz"] == 5


def test_memory_for_a_device_is_reserved(on_fake_device):  # noqa: ARG001
    (param,) = parameters([(200, 100)], torch.bfloat16)
    with Muon([param], swap={"master": "separate"}) as opt:
        numel = param.numel()
        # A piece in fp32, and two blocks of bf16 on their way; no workspace, which is the device's.
        assert opt.workspace_bytes([]) >= 4 * numel + 2 * 2 * numel
        assert opt.workspace_bytes([]) < 4 * numel + 2 * 2 * numel + 5 * 4096


def test_an_error_leaves_no_block_under_way(on_fake_device, monkeypatch):  # noqa: ARG001
    params = parameters([(32, 24)] * 3)
    opt = Muon(params, swap={"master": "separate"})
    for param in params:
        param.sum().backward()

    def fail(*args: object, **kwargs: object) -> None:
        del args, kwargs
        raise MemoryError("injected")

    monkeypatch.setattr("swapio.optim.muon_update.apply_update", fail)
    with pytest.raises(MemoryError, match="injected"):
        opt.step()
    assert all(place.is_free for place in opt._on_device._places)
    opt.close()
