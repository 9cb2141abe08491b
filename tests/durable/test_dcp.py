# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: its helpers, save, load and async_save, plain and streamed."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp  # noqa: TID251
from torch.distributed.checkpoint.api import CheckpointException  # noqa: TID251
from torch.distributed.checkpoint.state_dict import (  # noqa: TID251
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from support.trainer import assert_same, reference
from support.trainer_child import everything, make_params, train
from swapio.integrations.dcp import LoadPlanner, SnapshotStager
from swapio.optim import AdamW

SIZES = [(5,), (300, 1000), (2_600_000,), (64, 64), (0,)]
SWAP = {"sub_group_numel": 1 << 22, "min_swap_bytes": 0, "host_memory": "22MiB", "cpu_threads": 1}
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(700, 500)
        self.second = torch.nn.Linear(500, 3)
        self.second.bias.requires_grad_(False)


def model_and_optimizer(path, seed=0):
    torch.manual_seed(seed)
    model = Model()
    swap = {"path": str(path), "min_swap_bytes": 0, "cpu_threads": 1}
    return model, AdamW(model.named_parameters(), swap=swap)


def one_step(model, opt):
    opt.zero_grad()
    model.second(model.first(torch.ones(2, 700))).sum().backward()
    opt.step()


def make(path, dtype="bfloat16", **more):
    params = make_params(SIZES, getattr(torch, dtype))
    swap = None if path is None else {"path": str(path), **SWAP, **more}
    return AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0, swap=swap), params


@pytest.mark.parametrize("has_gradients", [True, False])
def test_the_helpers_do_not_step(tmp_path, has_gradients):
    model, opt = model_and_optimizer(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with opt:
        if has_gradients:
            model.second(model.first(torch.ones(2, 700))).sum().backward()
        state = get_optimizer_state_dict(model, opt)
        assert set(state["state"]) == {"first.weight", "first.bias", "second.weight"}
        set_optimizer_state_dict(model, opt, state)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        assert int(opt.state[model.first.weight]["step"]) == 0


def test_the_helpers_carry_state_over(tmp_path):
    model, opt = model_and_optimizer(tmp_path / "a")
    other, fresh = model_and_optimizer(tmp_path / "b", seed=1)
    with opt, fresh:
        for _ in range(3):
            one_step(model, opt)
        set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, opt))
        other.load_state_dict(model.state_dict())
        one_step(model, opt)
        one_step(other, fresh)
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)


def saved_by_dcp(tmp_path, dtype):
    """Save two steps in the folder "dcp"; returns the form of the masters."""
    opt, params = make(tmp_path / "a", dtype)
    with opt:
        train(opt, params, 1, 2)
        state = {"optimizer": opt, "model": dict(enumerate(params))}
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return "param" if dtype == "float32" else "split"


def slot_files(path):
    return {p: p.read_bytes() for p in path.rglob("*.bin") if p.parent.name == "slots"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_save_and_load(tmp_path, dtype):
    form = saved_by_dcp(tmp_path, dtype)
    other, fresh = make(tmp_path / "b", dtype)
    with other:
        train(other, fresh, 1, 1)
        # What DCP writes into before it hands the dict back must not be a slot.
        taken = other.state_dict()
        before = slot_files(tmp_path / "b")
        dcp.load({"optimizer": taken}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert slot_files(tmp_path / "b") == before
        assert torch.equal(taken["state"][2]["exp_avg"], reference_state(dtype, 2)[2]["exp_avg"])
        assert torch.equal(
            other.state[fresh[2]]["exp_avg"], reference_state(dtype, 1)[2]["exp_avg"]
        )
        del taken
        gc.collect()
        state = {"optimizer": other, "model": dict(enumerate(fresh))}
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert_same(everything(other, fresh), reference(SIZES, dtype, 2, form))
        train(other, fresh, 3, 3)
        assert_same(everything(other, fresh), reference(SIZES, dtype, 3, form))


def reference_state(dtype, steps):
    return reference(SIZES, dtype, steps, "param" if dtype == "float32" else "split")["state"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_load(tmp_path, dtype):
    form = saved_by_dcp(tmp_path, dtype)
    for path, more in ((None, {}), (tmp_path / "b", {"sub_group_numel": 1 << 19})):
        other, fresh = make(path, dtype, **more)
        with other:
            planner = LoadPlanner(tmp_path / "dcp")
            state = {"optimizer": planner.streamed(other), "model": dict(enumerate(fresh))}
            dcp.load(state, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
            assert_same(everything(other, fresh), reference(SIZES, dtype, 2, form))
            train(other, fresh, 3, 3)
            assert_same(everything(other, fresh), reference(SIZES, dtype, 3, form))


def weight_and_optimizer(layout):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(8, 6, 5, 7).contiguous(memory_format=layout))
    opt = AdamW([("weight", model.weight)], lr=0.1)
    model.weight.grad = torch.randn_like(model.weight)
    opt.step()
    return model, opt


def save_by_name(model, opt, folder):
    state = {"optimizer": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def stream_by_name(opt, folder):
    planner = LoadPlanner(folder)
    state = {"optimizer": planner.streamed(opt, by_name=True)}
    dcp.load(state, checkpoint_id=folder, planner=planner, no_dist=True)


def test_streamed_load_by_name_into_another_memory_format(tmp_path):
    model, opt = weight_and_optimizer(torch.contiguous_format)
    other, fresh = weight_and_optimizer(torch.channels_last)
    with opt, fresh:
        opt.param_groups[0]["lr"] = 0.25
        save_by_name(model, opt, tmp_path)
        stream_by_name(fresh, tmp_path)
        assert fresh.param_groups[0]["lr"] == 0.25
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(fresh.state[other.weight][name], opt.state[model.weight][name])


def test_what_is_stored_in_another_layout_is_left_to_plain_dcp(tmp_path):
    model, opt = weight_and_optimizer(torch.channels_last)
    other, fresh = weight_and_optimizer(torch.contiguous_format)
    with opt, fresh:
        save_by_name(model, opt, tmp_path)
        before = everything(fresh, [other.weight])
        with pytest.raises(
            CheckpointException, match=r"another layout in .*plain torch\.distributed"
        ):
            stream_by_name(fresh, tmp_path)
        assert_same(everything(fresh, [other.weight]), before)


def test_what_is_missing_is_named(tmp_path):
    opt, _ = make(None, "float32")
    with opt:
        dcp.save({"optimizer": opt}, checkpoint_id=tmp_path, no_dist=True)
    params = make_params([*SIZES, (3,)], torch.float32)
    with AdamW(params) as other:
        planner = LoadPlanner(tmp_path)
        with pytest.raises(
            CheckpointException, match=r"lacks the tensor 'optimizer.state.5.exp_avg'"
        ):
            dcp.load(
                {"optimizer": planner.streamed(other)},
                checkpoint_id=tmp_path,
                planner=planner,
                no_dist=True,
            )


def test_torchs_own_optimizer_is_streamed_into_ours(tmp_path):
    params = make_params(SIZES[:2], torch.float32)
    theirs = torch.optim.AdamW(params, lr=1e-2, foreach=False)
    for param in params:
        param.grad = torch.ones_like(param)
    theirs.step()
    dcp.save({"optimizer": theirs}, checkpoint_id=tmp_path, no_dist=True)
    fresh = make_params(SIZES[:2], torch.bfloat16)
    with AdamW(fresh) as ours:
        planner = LoadPlanner(tmp_path, allow_partial_load=True)
        state = {"optimizer": planner.streamed(ours)}
        dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        for param, twin in zip(fresh, params, strict=True):
            assert torch.equal(ours.state[param]["exp_avg_sq"], theirs.state[twin]["exp_avg_sq"])
            assert torch.equal(ours.state[param]["master"], param.float())
            assert int(ours.state[param]["step"]) == 1
        assert ours.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("stager", [None, SnapshotStager()], ids=["torch", "snapshot"])
def test_async_save_is_a_snapshot(tmp_path, stager):
    opt, params = make(tmp_path / "a")
    with opt:
        train(opt, params, 1, 2)
        state = {"optimizer": opt, "model": dict(enumerate(params))}
        future = dcp.async_save(
            state, checkpoint_id=tmp_path / "dcp", async_stager=stager, no_dist=True
        )
        train(opt, params, 3, 5)
        getattr(future, "upload_completion", future).result()
        del future, state
        gc.collect()
        train(opt, params, 6, 6)
        assert "/slots/" not in Path("/proc/self/maps").read_text()
    other, fresh = make(tmp_path / "b")
    with other:
        planner = LoadPlanner(tmp_path / "dcp")
        state = {"optimizer": planner.streamed(other), "model": dict(enumerate(fresh))}
        dcp.load(state, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
        assert_same(everything(other, fresh), reference(SIZES, "bfloat16", 2, "split"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_ranks_values(crashes, tmp_path, ranks):
    """Replicated parameters, as with DDP: all ranks save together, and every one loads all."""
    job = {
        "ranks": ranks,
        "sizes": SIZES,
        "dtype": "bfloat16",
        "replicas": str(tmp_path / "dcp"),
        "steps": 2,
        "dump": str(tmp_path / "end"),
        "swap": {"path": str(tmp_path / "swap"), **SWAP, "take_turns": "off"},
    }
    _, lines = crashes.run_ranks(job)
    expected = reference(SIZES, "bfloat16", 3, "split")
    for rank in range(ranks):
        for how in ("plain", "streamed"):
            found = torch.load(tmp_path / f"end.{rank}.{how}", weights_only=False)
            assert_same(found, expected)
    assert len({json.dumps(told) for told in lines}) == 1
