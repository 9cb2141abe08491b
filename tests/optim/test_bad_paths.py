# SPDX-License-Identifier: Apache-2.0
"""Folders of every odd kind, damaged files and full disks, as a user meets them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.storage import small_disk
from support.training import assert_same, make_parameters, set_gradients, snapshot, swap_of, train
from swapio.config import SwapConfig
from swapio.errors import (
    AioError,
    ConfigError,
    CorruptionError,
    SwapioError,
)
from swapio.optim import AdamW

N = 1_100_000


@pytest.fixture(params=[pytest.param("partitioned", marks=pytest.mark.slow), "pipelined"])
def mode(request):
    return request.param


def fill_up(disk):
    with (disk / "filler").open("wb", buffering=0) as file:
        while shutil.disk_usage(disk).free >= 1 << 20:
            file.write(bytes(1 << 20))


def works_in(path, mode="pipelined"):
    params, twins = make_parameters([N]), make_parameters([N])
    opt, twin = AdamW(params, swap=swap_of(mode, path)), AdamW(twins)
    train(opt, params, 2)
    train(twin, twins, 2)
    assert_same(snapshot(opt, params), snapshot(twin, twins))
    opt.close()


def test_a_missing_folder_is_made(tmp_path, mode):
    works_in(tmp_path / "a" / "b", mode)
    assert not any((tmp_path / "a" / "b").iterdir())


def test_relative_home_and_foreign_names(tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)
    works_in("relative", mode)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    works_in("~/swap", mode)
    assert (tmp_path / "home" / "swap").is_dir()
    works_in(tmp_path / "größe ⚙ 数据 with spaces", mode)
    assert (tmp_path / "relative").is_dir()


def test_a_relative_folder_is_found_again_after_chdir(tmp_path, monkeypatch, mode):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    params = make_parameters([N])
    with AdamW(params, swap=swap_of(mode, "relative")) as opt:
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(opt, params, 2)
        opt.add_param_group({"params": make_parameters([5])})
    assert not any((tmp_path / "relative").iterdir())
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_file_in_place_of_the_folder_is_named(tmp_path, mode):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SwapioError, match=rf"{tmp_path}/file"):
        AdamW(make_parameters([N]), swap=swap_of(mode, tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_folder_is_named(tmp_path, mode):
    folder = tmp_path / "ro"
    folder.mkdir()
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)), capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not possible here")
    try:
        with pytest.raises(SwapioError, match=rf"{folder}.*[Rr]ead-only"):
            AdamW(make_parameters([N]), swap=swap_of(mode, folder))
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=False)


@pytest.mark.parametrize("mode", ["pipelined"])
def test_a_disk_too_small_is_refused_at_construction(tmp_path, mode):
    with (
        small_disk(tmp_path, 16 << 20) as disk,
        pytest.raises(SwapioError, match=rf"{disk}.*(free|space)"),
    ):
        AdamW(make_parameters([4 * N]), swap=swap_of(mode, disk))


def test_a_disk_that_fills_up_does_not_stop_a_run(tmp_path, mode):
    """Slots are written once at construction: a step needs no new block."""
    with small_disk(tmp_path, 64 << 20) as disk:
        params, twins = make_parameters([N]), make_parameters([N])
        opt, twin = AdamW(params, swap=swap_of(mode, disk)), AdamW(twins)
        train(opt, params, 1)
        train(twin, twins, 1)
        fill_up(disk)
        train(opt, params, 2, first=2)
        train(twin, twins, 2, first=2)
        before = snapshot(opt, params)
        with pytest.raises(SwapioError, match=rf"{disk}|host_memory"):
            opt.add_param_group({"params": make_parameters([4 * N])})
        assert_same(before, snapshot(opt, params))
        train(opt, params, 1, first=4)
        train(twin, twins, 1, first=4)
        assert_same(snapshot(opt, params), snapshot(twin, twins))
        opt.close()


_OTHER = """
import sys, torch
from swapio.optim import AdamW
from swapio.errors import StoreLockedError
try:
    AdamW([torch.nn.Parameter(torch.zeros(1_100_000))],
          swap={"path": sys.argv[1], "host_memory": "7MiB", "lock_timeout": 0.2})
except StoreLockedError as error:
    print(error)
    sys.exit(7)
"""


def test_two_runs_in_one_folder_exclude_each_other(tmp_path, mode):
    params = make_parameters([N])
    with AdamW(params, swap=swap_of(mode, tmp_path)) as opt:
        train(opt, params, 1)
        before = snapshot(opt, params)
        other = subprocess.run(
            (sys.executable, "-c", _OTHER, str(tmp_path)),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert other.returncode == 7, other.stderr
        assert str(tmp_path) in other.stdout
        assert str(os.getpid()) in other.stdout
        assert_same(before, snapshot(opt, params))
    works_in(tmp_path, mode)


def test_two_optimizers_of_a_process_share_a_folder(tmp_path, mode):
    one, other, twins = (make_parameters([N]) for _ in range(3))
    first = AdamW(one, swap=swap_of(mode, tmp_path))
    second = AdamW(other, swap=swap_of(mode, tmp_path))
    twin = AdamW(twins)
    for step in range(1, 4):
        for opt, params in ((first, one), (second, other), (twin, twins)):
            train(opt, params, 1, first=step)
    assert_same(snapshot(first, one), snapshot(twin, twins))
    assert_same(snapshot(second, other), snapshot(twin, twins))
    first.close()
    train(second, other, 1, first=4)
    second.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "hint"),
    [({"queue_dept": 3}, "queue_depth"), ({"host_memroy": "1GiB"}, "host_memory")],
)
def test_unknown_settings_name_the_nearest_known_one(tmp_path, setting, hint):
    with pytest.raises(ConfigError, match=rf"{next(iter(setting))}.*{hint}"):
        AdamW(make_parameters([5]), swap={"path": tmp_path, **setting})


@pytest.mark.parametrize("bad", [3, 2.5, b"x"])
def test_a_swap_argument_of_a_wrong_type_is_refused(bad):
    with pytest.raises((ConfigError, TypeError), match=r"swap|SwapConfig"):
        AdamW(make_parameters([5]), swap=bad)
    assert SwapConfig.coerce(None).path is None


def slot_files(path):
    return [p for p in Path(path).rglob("*") if p.is_file() and p.stat().st_size > 1 << 20]


def damage(path, kind):
    """Every slot file, both copies of the state: flip one bit in each page, or cut in half."""
    for file in slot_files(path):
        size = file.stat().st_size
        if kind == "truncated":
            os.truncate(file, size // 2 + 100)
            continue
        with file.open("r+b") as stream:
            for offset in range(64 << 10, size, 256 << 10):
                stream.seek(offset)
                byte = stream.read(1)
                stream.seek(offset)
                stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("kind", ["flipped", "truncated"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_damaged_files_are_noticed_before_a_kernel_reads_them(tmp_path, mode, kind, direct):
    params = make_parameters([N, N])
    opt = AdamW(params, swap=swap_of(mode, tmp_path, direct=direct))
    train(opt, params, 2)
    opt.synchronize()
    damage(tmp_path, kind)
    set_gradients(params, 3)
    with pytest.raises((CorruptionError, AioError), match=rf"{tmp_path}.*slot"):
        opt.step()
    with pytest.raises(SwapioError, match=r"failed earlier.*checkpoint"):
        opt.step()
    with pytest.raises(SwapioError, match="failed earlier"):
        opt.synchronize()
    assert opt.stats()["num_steps"] == 2
    assert int(opt.state[params[0]]["step"]) == 2
    opt.close()
    works_in(tmp_path, mode)


def test_after_close_the_model_is_free(tmp_path, mode):
    """prime-rl#3234: hooks and threads of an offloading optimizer stayed behind."""
    params = make_parameters([N, 7])
    opt = AdamW(params, swap=swap_of(mode, tmp_path))
    train(opt, params, 2)
    opt.close()
    opt.close()
    for call in (opt.step, opt.synchronize, opt.state_dict):
        with pytest.raises(SwapioError, match="closed"):
            call()
    assert all(not param._backward_hooks for param in params)
    assert all(not param._post_accumulate_grad_hooks for param in params)
    assert not any(tmp_path.iterdir())
    reference = torch.optim.AdamW(params, lr=0.1)
    before = params[0].detach().clone()
    sum(param.sum() for param in params).backward()
    reference.step()
    assert not torch.equal(params[0], before)
