# SPDX-License-Identifier: Apache-2.0
"""state_dict and load_state_dict: torch's keys, a true snapshot, no casts, nothing leaked."""

from __future__ import annotations

import gc
import io
import itertools
from pathlib import Path

import pytest
import torch

from support.trainer import assert_same, reference
from support.trainer_child import everything, make_params, set_gradients, train
from swapio.errors import SwapStateError
from swapio.optim import AdamW

SIZES = [(5,), (300, 1000), (2_600_000,), (64, 64), (0,)]
SMALL = {"sub_group_numel": 1 << 22, "min_swap_bytes": 0, "host_memory": "22MiB", "cpu_threads": 1}
MODES = {
    "ram": None,
    "pipelined": {},
    "partitioned": {"pipeline_read": False, "pipeline_write": False, "host_memory": "40MiB"},
    "cut": {"sub_group_numel": 1 << 19},
    "step": {"durability": "step"},
}


def make(tmp_path, mode="pipelined", dtype="float32", sizes=SIZES, **more):
    params = make_params(sizes, getattr(torch, dtype))
    settings = MODES[mode]
    swap = None if settings is None else {"path": str(tmp_path), **SMALL, **settings, **more}
    return AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0, swap=swap), params


def copy_of(state):
    return {
        index: {name: value.clone() for name, value in entry.items()}
        for index, entry in state["state"].items()
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for index, entry in expected.items():
        assert found[index].keys() == entry.keys()
        for name, value in entry.items():
            assert found[index][name].dtype == value.dtype
            assert torch.equal(found[index][name], value), (index, name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_dict_is_a_snapshot(tmp_path, mode, dtype):
    opt, params = make(tmp_path, mode, dtype)
    form = "param" if dtype == "float32" else "split"
    with opt:
        train(opt, params, 1, 2)
        state = opt.state_dict()
        train(opt, params, 3, 4)
        expected = reference(SIZES, dtype, 2, form)["state"]
        assert_equal(state["state"], dict(enumerate(expected)))
        for entry in state["state"].values():
            for value in entry.values():
                assert value.untyped_storage().nbytes() == value.nbytes
        del state, value, entry
        gc.collect()
        assert_same(everything(opt, params), reference(SIZES, dtype, 4, form))


def test_writing_to_a_state_dict_touches_nothing(tmp_path):
    opt, params = make(tmp_path)
    with opt:
        train(opt, params, 1, 1)
        for entry in opt.state_dict()["state"].values():
            for value in entry.values():
                value.fill_(3)
        assert_same(everything(opt, params), reference(SIZES, "float32", 1, "param"))


def test_without_a_spare_slot_it_raises_and_training_goes_on(tmp_path):
    opt, params = make(tmp_path)
    with opt:
        train(opt, params, 1, 1)
        first = opt.state_dict()
        train(opt, params, 2, 2)
        with pytest.raises(SwapStateError, match="spare_slots"):
            opt.state_dict()
        train(opt, params, 3, 3)
        del first
        gc.collect()
        second = opt.state_dict()
        assert float(second["state"][0]["step"]) == 3


@pytest.mark.parametrize("mode", ["pipelined", "ram"])
def test_twenty_state_dicts_leak_nothing(tmp_path, mode):
    opt, params = make(tmp_path, mode)
    with opt:
        allocated = opt.stats().get("bytes_allocated")
        for step in range(1, 21):
            train(opt, params, step, step)
            opt.state_dict()
        assert opt.stats().get("bytes_allocated") == allocated
        maps = Path("/proc/self/maps").read_text()
        assert maps.count("/slots/") == 0
        assert maps.count("snapshot-") == 0


def resumes():
    """Every source and target; the rest of their product is slow."""
    quick = [("pipelined", "cut"), ("pipelined", "step"), ("ram", "partitioned")]
    pairs = itertools.product(
        ("ram", "pipelined"), ("ram", "pipelined", "partitioned", "cut", "step")
    )
    for pair in pairs:
        yield pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow])


@pytest.mark.parametrize(("source", "target"), list(resumes()))
def test_a_bf16_run_resumed_through_torch_save_is_bit_equal(tmp_path, source, target):
    opt, params = make(tmp_path / "a", source, "bfloat16")
    file = io.BytesIO()
    with opt:
        train(opt, params, 1, 2)
        torch.save(opt.state_dict(), file)
        assert file.tell() < 1.05 * sum(12 * p.numel() for p in params) + 100_000
        train(opt, params, 3, 3)
        expected = everything(opt, params)
    file.seek(0)
    opt, params = make(tmp_path / "b", target, "bfloat16")
    with opt:
        opt.load_state_dict(torch.load(file, weights_only=True))
        train(opt, params, 3, 3)
        assert_same(everything(opt, params), expected)


def test_torch_takes_our_dict_and_we_take_torchs(tmp_path):
    sizes = SIZES[:2]
    opt, params = make(tmp_path, sizes=sizes)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    theirs = torch.optim.AdamW(twins, lr=1e-2, foreach=False)
    with opt:
        train(opt, params, 1, 3)
        theirs.load_state_dict(opt.state_dict())
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(theirs.state[twin]["exp_avg"], opt.state[param]["exp_avg"])
            twin.data.copy_(param)
        set_gradients(params, 4)
        set_gradients(twins, 4)
        opt.step()
        theirs.step()
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)
        opt.load_state_dict(theirs.state_dict())
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(opt.state[param]["exp_avg_sq"], theirs.state[twin]["exp_avg_sq"])


def test_nothing_is_cast_to_the_parameters_dtype(tmp_path):
    opt, params = make(tmp_path / "a", "pipelined", "bfloat16")
    with opt:
        train(opt, params, 1, 2)
        state = opt.state_dict()
        assert state["state"][1]["exp_avg"].dtype is torch.float32
        other, _ = make(tmp_path / "b", "pipelined", "bfloat16")
        with other:
            other.load_state_dict(state)
            assert_equal(copy_of(other.state_dict()), copy_of(state))
        halved, _ = make(tmp_path / "c", "pipelined", "bfloat16", state_dtype="bfloat16")
        with halved:
            with pytest.warns(UserWarning, match="rounded once"):
                halved.load_state_dict(state)
            found = halved.state_dict()["state"][1]["exp_avg"]
            assert torch.equal(found, state["state"][1]["exp_avg"].bfloat16())


def test_groups_are_restored(tmp_path):
    (param,) = make_params([(10,)], torch.float32)
    with AdamW([{"params": [param], "lr": 0.125, "tag": {"x": 1}}]) as opt:
        param.grad = torch.ones(10)
        for _ in range(58):
            opt.step()
        opt.save(tmp_path)
        state = opt.state_dict()
        opt.step()
        expected = param.detach().clone()
    for how in ("dict", "checkpoint"):
        (param,) = make_params([(10,)], torch.float32)
        with AdamW([{"params": [param], "lr": 0.75}]) as opt:
            opt.load(tmp_path)
            if how == "dict":
                opt.param_groups[0].update(lr=7, tag=None)
                opt.load_state_dict(state)
            group = opt.param_groups[0]
            assert (group["lr"], group["tag"]) == (0.125, {"x": 1})
            assert int(opt.state[param]["step"]) == 58
            param.grad = torch.ones(10)
            opt.step()
            assert torch.equal(param, expected)


def test_bad_dicts_change_nothing(tmp_path):
    opt, params = make(tmp_path)
    with opt:
        train(opt, params, 1, 1)
        state = opt.state_dict()
        state["state"][2] = {**state["state"][2], "exp_avg": torch.zeros(3)}
        state["param_groups"][0]["lr"] = 9.0
        with pytest.raises(ValueError, match="state exp_avg of p2 has shape"):
            opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] != 9.0
        del state
        assert_same(everything(opt, params), reference(SIZES, "float32", 1, "param"))


def test_safetensors_there_and_back(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    opt, params = make(tmp_path / "a", "pipelined", "bfloat16")
    with opt:
        train(opt, params, 1, 2)
        expected = everything(opt, params)
        opt.export_safetensors(tmp_path / "out", max_bytes=20_000_000)
        found = {}
        for path in (tmp_path / "out").glob("*.safetensors"):
            found.update(safetensors.load_file(path))
        assert torch.equal(found["p2.exp_avg"], expected["state"][2]["exp_avg"])
    other, fresh = make(tmp_path / "b", "ram", "bfloat16")
    with other:
        other.import_safetensors(tmp_path / "out")
        assert_same(everything(other, fresh), expected)
