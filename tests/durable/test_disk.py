# SPDX-License-Identifier: Apache-2.0
"""Full disks at every point of a save, the order of syncs and renames, damage anywhere, leaks."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from pathlib import Path

import psutil
import pytest
import torch

from support.storage import small_disk
from support.trainer import assert_same, reference
from support.trainer_child import everything, make_params, train
from swapio.aio import Engine
from swapio.checkpoint import find_checkpoint, list_checkpoints, verify_checkpoint
from swapio.errors import AioError, CorruptionError
from swapio.optim import AdamW

SIZES = [(300, 1000), (1_500_000,), (64, 64)]
SWAP = {
    "sub_group_numel": 1 << 19,
    "min_swap_bytes": 0,
    "host_memory": "11MiB",
    "cpu_threads": 1,
    "chunk_numel": 1 << 18,
}


def make(path, **more):
    params = make_params(SIZES, torch.float32)
    swap = None if path is None else {"path": str(path), **SWAP, **more}
    return AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0, swap=swap), params


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.root
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    with small_disk(tmp_path, 40 << 20) as disk:
        opt, params = make(tmp_path / "swap")
        with opt:
            train(opt, params, 1, 1)
            opt.save(disk / "c", "first")
            before = files_below(disk)
            train(opt, params, 2, 2)
            for _ in range(3):
                with pytest.raises(AioError) as caught:
                    opt.save(disk / "c", "second")
                assert caught.value.errno == errno.ENOSPC
                assert files_below(disk) == before
            train(opt, params, 3, 3)
            assert opt.load(disk / "c").step == 1
            assert_same(everything(opt, params), reference(SIZES, "float32", 1, "param"))


class Failing:
    """Lets one operation of a save fail: the one that is number `at`."""

    def __init__(self, monkeypatch):
        self.at = None
        self.count = 0
        for owner, name in ((os, "link"), (Path, "mkdir"), (Path, "rename"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name), OSError))
        for name in ("pwrite", "fsync"):
            monkeypatch.setattr(Engine, name, self._wrap(getattr(Engine, name), AioError))

    def _wrap(self, inner, kind):
        def wrapped(*args, **kwargs):
            number, self.count = self.count, self.count + 1
            if number == self.at:
                raise kind(errno.ENOSPC, "no space", "a disk")
            return inner(*args, **kwargs)

        return wrapped


def test_a_disk_that_fills_up_at_any_point_of_a_save(tmp_path, monkeypatch):
    """Every operation of a save fails in turn; nothing is left, training goes on."""
    opt, params = make(tmp_path / "swap")
    with opt:
        train(opt, params, 1, 1)
        opt.save(tmp_path / "c", "first")
        before = files_below(tmp_path / "c")
        failing = Failing(monkeypatch)
        for number in range(200):
            failing.at, failing.count = number, 0
            try:
                opt.save(tmp_path / "c", "second")
            except AioError:
                if [m.tag for _, m in list_checkpoints(tmp_path / "c")] == ["first", "second"]:
                    continue  # what failed came after the manifest: the checkpoint is whole
                assert files_below(tmp_path / "c") == before
                assert not (tmp_path / "c" / "second").exists()
            else:
                break
        assert number > 10
        failing.at = None
        train(opt, params, 2, 3)
        opt.save(tmp_path / "c", "third")
        for tag, step in (("first", 1), ("second", 1), ("third", 3)):
            opt.load(tmp_path / "c", tag)
            assert_same(everything(opt, params), reference(SIZES, "float32", step, "param"))


def test_order_of_writes_syncs_and_renames(tmp_path, monkeypatch):
    """Data before its sync, syncs before the manifest's rename, the folders' sync at the end."""
    events = []

    def note(owner, name, label):
        inner = getattr(owner, name)

        def wrapped(*args, **kwargs):
            events.append((name, label(*args)))
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    opt, params = make(tmp_path / "swap")
    with opt:
        train(opt, params, 1, 2)
        note(os, "link", lambda *paths: str(paths[1]))
        note(os, "fsync", lambda fd: str(Path(f"/proc/self/fd/{fd}").readlink()))
        note(Path, "rename", lambda *paths: str(paths[1]))
        note(Engine, "fsync", lambda *args: str(args[1].path))
        note(Engine, "pwrite", lambda *args: str(args[1].path))
        folder = opt.save(tmp_path / "c", "x").result()
        names = [(name, label.rpartition("/")[2]) for name, label in events]
        rename = next(
            i for i, e in enumerate(events) if e == ("rename", str(folder / "manifest.json"))
        )
        last_write = max(i for i, e in enumerate(events) if e[0] == "pwrite")
        data_sync = next(i for i, e in enumerate(names) if e == ("fsync", "rank0-data.bin"))
        assert last_write < data_sync < rename
        slots = {label for name, label in events if name == "link"}
        synced = {label for name, label in events[:rename] if name == "fsync"}
        assert slots
        inodes = {Path(path).stat().st_ino for path in synced if Path(path).is_file()}
        assert {Path(path).stat().st_ino for path in slots} <= inodes
        data = next(folder.glob("data-*"))
        assert str(data) in synced
        assert events[rename - 1][0] == "fsync"
        # The folder's name is on storage before the manifest is, the manifest's name after.
        assert str(folder.parent) in synced
        after = [label for name, label in events[rename + 1 :] if name == "fsync"]
        assert after[0] == str(folder)


def test_damage_in_any_file_is_found(tmp_path):
    opt, params = make(tmp_path / "swap")
    with opt:
        train(opt, params, 1, 1)
        opt.save(tmp_path / "c", "x")
        path, manifest = find_checkpoint(tmp_path / "c")
        generator = random.Random(3)
        with Engine() as engine:
            assert verify_checkpoint(path, manifest, engine) == []
            for pack in manifest.packs:
                for record in pack.records.values():
                    for piece in record.pieces:
                        name = manifest.files[piece.file][0]
                        at = piece.offset + generator.randrange(piece.nbytes)
                        with (path / manifest.data / name).open("r+b") as file:
                            flip(file, at)
                            assert len(verify_checkpoint(path, manifest, engine)) == 1
                            flip(file, at)
            assert verify_checkpoint(path, manifest, engine) == []
        (path / manifest.data / manifest.files[0][0]).unlink()
        with pytest.raises(CorruptionError, match="is missing"):
            opt.load(tmp_path / "c")


def flip(file, at):
    file.seek(at)
    byte = file.read(1)[0]
    file.seek(at)
    file.write(bytes([byte ^ 0x10]))
    file.flush()
    os.fsync(file.fileno())


def test_twenty_saves_leak_nothing(tmp_path):
    opt, params = make(tmp_path / "swap")
    with opt:
        train(opt, params, 1, 1)
        opt.save(tmp_path / "c", keep_last=1)
        gc.collect()
        process = psutil.Process()
        descriptors, memory = process.num_fds(), process.memory_info().rss
        threads = threading.active_count()
        for step in range(2, 22):
            train(opt, params, step, step)
            opt.save(tmp_path / "c", keep_last=1, wait=step % 2 == 0)
        opt.save(tmp_path / "c", keep_last=1)
        gc.collect()
        assert process.num_fds() <= descriptors
        assert threading.active_count() <= threads
        assert process.memory_info().rss - memory < 24 << 20


def anonymous():
    text = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


class Peak:
    """The largest growth of anonymous memory while a block runs."""

    def __enter__(self):
        gc.collect()
        self._before, self.growth = anonymous(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.002):
            self.growth = max(self.growth, anonymous() - self._before)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("state_bytes", [144 << 20, pytest.param(4 << 30, marks=pytest.mark.slow)])
def test_a_save_and_a_load_take_one_buffer(tmp_path, state_bytes):
    """Growth of anonymous memory while much more state than that is saved, and loaded."""
    numel = state_bytes // 12 // 2
    budget = {"path": str(tmp_path / "swap"), "host_memory": "40MiB", "min_swap_bytes": 0}
    params = [torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for _ in range(2)]
    # Everything is on storage: the masters too.
    swap = {**budget, "master": "separate", "cpu_threads": 2}
    with AdamW([(f"p{i}", p) for i, p in enumerate(params)], swap=swap) as opt:
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        with Peak() as saving:
            saved = opt.save(tmp_path / "c")
        assert saved.stats.linked_bytes >= 0.99 * state_bytes
        assert saving.growth <= opt.plan.buffer_bytes
        with Peak() as loading:
            found = opt.load(tmp_path / "c")
        assert found.bytes_read >= 0.99 * state_bytes
        assert loading.growth <= opt.plan.buffer_bytes + (32 << 20)


def test_a_crash_is_told_and_names_the_checkpoint(tmp_path, caplog):
    opt, params = make(tmp_path / "swap")
    train(opt, params, 1, 1)
    folder = opt.save(tmp_path / "c").result()
    # What is left after a kill is what is there now; a copy of it is not locked.
    copied = tmp_path / "copied"
    os.system(f"cp -r {tmp_path / 'swap'} {copied}")
    opt.close()
    with caplog.at_level("WARNING", "swapio"):
        other, _ = make(copied)
        other.close()
    assert "ended without close()" in caplog.text
    assert str(folder) in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "swapio"):
        other, _ = make(copied)
        other.close()
    assert caplog.text == ""
