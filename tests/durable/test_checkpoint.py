# SPDX-License-Identifier: Apache-2.0
"""save and load: what comes back, from any form into any other, and what a save moves."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

from support.trainer import assert_same, reference
from support.trainer_child import everything, make_params, train
from swapio.checkpoint import list_checkpoints, read_manifest
from swapio.errors import CheckpointError, ConfigError, CorruptionError, SwapioError
from swapio.optim import AdamW

# More state than host_memory in every form, in half a dozen sub-groups.
SIZES = [(5,), (300, 1000), (1_200_001,), (1,), (64, 64), (0,)]
SMALL = {
    "sub_group_numel": 1 << 18,
    "chunk_numel": 1 << 18,
    "min_swap_bytes": 0,
    "host_memory": "10MiB",
    "cpu_threads": 1,
}
PARTITIONED = {"pipeline_read": False, "pipeline_write": False}


def named(params):
    return [(f"p{i}", param) for i, param in enumerate(params)]


def make(path, dtype="float32", sizes=SIZES, **more):
    params = make_params(sizes, getattr(torch, dtype))
    swap = None if path is None else {"path": str(path), **SMALL, **more}
    if path is None and more:
        swap = more
    return AdamW(named(params), lr=1.0, swap=swap), params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_save_then_load_is_the_same_optimizer(tmp_path, dtype, durability):
    opt, params = make(tmp_path / "a", dtype, durability=durability)
    with opt:
        train(opt, params, 1, 3)
        path = opt.save(tmp_path / "c", "three").result()
        assert path == tmp_path / "c" / "three"
        before = opt.stats()["bytes_copied"]
        train(opt, params, 4, 5)
        opt.synchronize()
        assert opt.stats()["bytes_copied"] - before <= 10 << 20
    form = "param" if dtype == "float32" else "split"
    other, params = make(tmp_path / "b", dtype, durability=durability)
    with other:
        found = other.load(tmp_path / "c")
        assert (found.step, found.tag, found.payload) == (3, "three", b"after 3")
        assert other.param_groups[0]["tag"] == {"step": 3}
        assert_same(everything(other, params), reference(SIZES, dtype, 3, form))
        train(other, params, 4, 5)
        assert_same(everything(other, params), reference(SIZES, dtype, 5, form))


TARGETS = {
    "ram": (None, {}),
    "pipelined": ("b", {"sub_group_numel": 200_000}),
    "partitioned": ("b", {**PARTITIONED, "engine": "threads"}),
    "separate": ("b", {"master": "separate"}),
    "resident": ("b", {"resident": ["exp_avg"], "host_memory": "16MiB"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of step 2 by master form of a bf16 model."""
    folder = tmp_path_factory.mktemp("saved")
    for source in ("split", "separate", "ram"):
        path = None if source == "ram" else folder / source
        more = {"master": source} if path else {}
        opt, params = make(path, "bfloat16", **more)
        with opt:
            train(opt, params, 1, 2)
            opt.save(folder / "c", source)
    return folder / "c"


def pairs():
    """Every source and every target; the rest of their product is slow."""
    quick = [("split", "separate"), ("split", "partitioned"), ("separate", "pipelined")]
    quick += [("ram", "resident"), ("separate", "ram")]
    for pair in itertools.product(("split", "separate", "ram"), TARGETS):
        yield pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow])


@pytest.mark.parametrize(("source", "target"), list(pairs()))
def test_any_form_loads_into_any_other(tmp_path, saved, source, target):
    path, more = TARGETS[target]
    opt, params = make(path and tmp_path / path, "bfloat16", **more)
    with opt:
        opt.load(saved, source)
        assert_same(everything(opt, params), reference(SIZES, "bfloat16", 2, "split"))
        train(opt, params, 3, 4)
        assert_same(everything(opt, params), reference(SIZES, "bfloat16", 4, "split"))


def test_a_bf16_checkpoint_loads_into_an_fp32_model(tmp_path, saved):
    opt, params = make(tmp_path, "float32")
    with opt:
        opt.load(saved, "split")
        masters = [entry["master"] for entry in reference(SIZES, "bfloat16", 2, "split")["state"]]
        for param, master in zip(params, masters, strict=True):
            assert torch.equal(param, master)


def test_a_save_links_and_moves_nothing(tmp_path):
    opt, params = make(tmp_path / "a")
    with opt:
        train(opt, params, 1, 2)
        opt.synchronize()
        before = opt.stats()
        handle = opt.save(tmp_path / "c")
        after = opt.stats()
        linked, written = handle.stats.linked_bytes, handle.stats.ram_bytes
        assert linked > 8e6
        assert linked + written == sum(12 * p.numel() for p in params)
        assert after["bytes_read"] == before["bytes_read"]
        assert after["bytes_allocated"] == before["bytes_allocated"]
        data = next((tmp_path / "c" / handle.tag).glob("data-*"))
        assert any(path.stat().st_nlink == 2 for path in data.iterdir())


def test_keep_last_reuses_slots(tmp_path):
    opt, params = make(tmp_path / "a")
    with opt:
        for step in range(1, 9):
            train(opt, params, step, step)
            opt.save(tmp_path / "c", keep_last=1)
        assert opt.stats()["bytes_allocated"] <= 2.2 * sum(8 * p.numel() for p in params)
        assert [m.step for _, m in list_checkpoints(tmp_path / "c")] == [8]
        assert_same(everything(opt, params), reference(SIZES, "float32", 8, "param"))
    used = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file())
    assert used < 2.5 * sum(12 * p.numel() for p in params)


def test_without_keep_last_every_checkpoint_stays(tmp_path):
    opt, params = make(tmp_path / "a")
    with opt:
        for step in range(1, 5):
            train(opt, params, step, step)
            opt.save(tmp_path / "c")
    for step in (1, 3, 4):
        other, params = make(None)
        with other:
            assert other.load(tmp_path / "c", f"step-{step:08d}").step == step
            assert_same(everything(other, params), reference(SIZES, "float32", step, "param"))


def test_the_same_tag_is_replaced(tmp_path):
    opt, params = make(tmp_path / "a")
    with opt:
        for step in range(1, 4):
            train(opt, params, step, step)
            opt.save(tmp_path / "c", "last")
        assert len(list((tmp_path / "c" / "last").iterdir())) == 2
        assert opt.load(tmp_path / "c").step == 3


@pytest.mark.parametrize("wait", [True, False])
def test_another_file_system_gets_copies(tmp_path, wait):
    elsewhere = "/dev/shm"
    if Path(elsewhere).stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    folder = f"{elsewhere}/swapio-test-{os.getpid()}"
    try:
        opt, params = make(tmp_path / "a", "bfloat16")
        with opt:
            train(opt, params, 1, 2)
            handle = opt.save(folder, wait=wait)
            train(opt, params, 3, 4)
            handle.result()
            copied, written = handle.stats.copied_bytes, handle.stats.ram_bytes
            assert copied > 12e6
            assert 0 <= copied + written - sum(12 * p.numel() for p in params) < 4096
            opt.load(folder)
            assert_same(everything(opt, params), reference(SIZES, "bfloat16", 2, "split"))
    finally:
        shutil.rmtree(folder)


def test_strict_and_not(tmp_path):
    opt, params = make(None)
    with opt:
        train(opt, params, 1, 2)
        opt.save(tmp_path)
    params = make_params(SIZES, torch.float32)
    with AdamW([*named(params)[:-2], ("new", params[-2])], lr=1.0) as other:
        with pytest.raises(CheckpointError, match="lacks \\['new'\\]"):
            other.load(tmp_path)
        assert float(other.state[params[0]]["step"]) == 0
        found = other.load(tmp_path, strict=False)
        assert found.missing == ("new",)
        assert found.unexpected == ("p4", "p5")
        assert float(other.state[params[0]]["step"]) == 2
        assert not other.state[params[-2]]["exp_avg"].any()


def test_other_shapes_are_refused(tmp_path):
    opt, _ = make(None)
    with opt:
        opt.save(tmp_path)
    other, _ = make(None, sizes=[(5,), (1000, 300), *SIZES[2:]])
    with other, pytest.raises(CheckpointError, match="'p1' has shape"):
        other.load(tmp_path)


def test_memory_format_does_not_matter(tmp_path):
    shape = (8, 6, 5, 7)
    value = torch.randn(shape)
    a = torch.nn.Parameter(value.clone().to(memory_format=torch.channels_last))
    b = torch.nn.Parameter(torch.zeros(shape))
    with AdamW([("w", a)]) as opt:
        a.grad = torch.randn(shape)
        opt.step()
        opt.save(tmp_path)
        with AdamW([("w", b)]) as other:
            other.load(tmp_path)
            assert torch.equal(a, b)
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(opt.state[a][name], other.state[b][name])


def test_damage_is_found(tmp_path):
    opt, params = make(tmp_path / "a")
    with opt:
        train(opt, params, 1, 1)
        folder = opt.save(tmp_path / "c", "x").result()
    data = next(folder.glob("data-*"))
    for path in sorted(data.iterdir()):
        content = bytearray(path.read_bytes())
        content[-4096 - 5] ^= 1
        path.write_bytes(content)
    other, _ = make(None)
    with other, pytest.raises(CorruptionError, match="checksum of block"):
        other.load(tmp_path / "c")


def test_a_save_removes_what_dead_saves_left_and_nothing_else(tmp_path):
    old = tmp_path / "c" / "dead"
    for name in ("data-0123456789abcdef", ".0123456789abcdef", ".fedcba9876543210"):
        (old / name).mkdir(parents=True)
    for name in ("mine", ".0123456789abcdef"):
        (tmp_path / "c" / name).mkdir()
    os.utime(old / ".0123456789abcdef", (0, 0))
    opt, _ = make(None)
    with opt:
        opt.save(tmp_path / "c", "x")
    assert [path.name for path in old.iterdir()] == [".fedcba9876543210"]
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        "dead",
        "mine",
        ".0123456789abcdef",
        "x",
    }


def test_two_parameters_of_one_name_are_not_saved_as_one(tmp_path):
    groups = [{"params": [("w", torch.nn.Parameter(torch.ones(n)))]} for n in (3, 3)]
    with AdamW(groups) as opt, pytest.raises(CheckpointError, match="'w' are there twice"):
        opt.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_a_load_that_fails_half_way_is_never_trained_on(tmp_path, durability):
    opt, params = make(tmp_path / "a", durability=durability)
    with opt:
        for step in (1, 2):
            train(opt, params, step, step)
            folder = opt.save(tmp_path / "c", f"{step}").result()
        manifest = read_manifest(folder)
        # The last sub-group's: others are filled before it is found.
        piece = manifest.packs[-1].records["exp_avg_sq"].pieces[0]
        damaged = folder / manifest.data / manifest.files[piece.file][0]
        copied = damaged.read_bytes()
        damaged.unlink()  # the slots that it shares stay as they are
        at = piece.offset + 17
        damaged.write_bytes(copied[:at] + bytes([copied[at] ^ 1]) + copied[at + 1 :])
        train(opt, params, 3, 3)
        with pytest.raises(CorruptionError, match="checksum of block"):
            opt.load(tmp_path / "c", "2")
        with pytest.raises(SwapioError, match="failed earlier"):
            train(opt, params, 4, 4)
        if durability == "step":
            assert opt.recover() == 3
            assert_same(everything(opt, params), reference(SIZES, "float32", 3, "param"))
            with pytest.raises(CorruptionError, match="checksum of block"):
                opt.load(tmp_path / "c", "2")
        assert opt.load(tmp_path / "c", "1").step == 1
        assert_same(everything(opt, params), reference(SIZES, "float32", 1, "param"))
        train(opt, params, 2, 3)
        assert_same(everything(opt, params), reference(SIZES, "float32", 3, "param"))


def test_versions_and_absence_are_told(tmp_path):
    opt, _ = make(None)
    with opt:
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            opt.load(tmp_path)
        manifest = opt.save(tmp_path, "x").result() / "manifest.json"
        with pytest.raises(CheckpointError, match=r"there are \['x'\]"):
            opt.load(tmp_path, "y")
        manifest.write_text(manifest.read_text().replace('"version":1', '"version":2'))
        with pytest.raises(CheckpointError, match="version 2"):
            opt.load(tmp_path, "x")
        with pytest.raises(ConfigError, match="tag"):
            opt.save(tmp_path, "../x")


@pytest.mark.parametrize("form", ["split", "separate"])
@pytest.mark.filterwarnings("ignore:parameter .* was changed outside")
def test_a_foreign_change_is_saved_as_the_next_step_would_see_it(tmp_path, form):
    opt, params = make(tmp_path / "a", "bfloat16", master=form)
    other, fresh = make(None, "bfloat16")
    with opt, other:
        train(opt, params, 1, 2)
        with torch.no_grad():
            params[2].data[1000:2000].mul_(2)
        opt.save(tmp_path / "c")
        other.load(tmp_path / "c")
        assert torch.equal(fresh[2], params[2])
        assert torch.equal(other.state[fresh[2]]["master"][1000:2000], params[2][1000:2000].float())
        train(opt, params, 3, 4)
        train(other, fresh, 3, 4)
        assert_same(everything(other, fresh), everything(opt, params))
