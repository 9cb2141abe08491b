# SPDX-License-Identifier: Apache-2.0
"""Paths and file systems: unusable folders, full disks, no O_DIRECT, limits of the process."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.stores import MIB, layouts, random_bytes, read, write
from swapio.aio import filesystem_of
from swapio.errors import AioError, ConfigError
from swapio.filestore import FileStore

IS_ROOT = os.geteuid() == 0


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def small_disk(tmp_path):
    """An ext4 of 64 MiB."""
    if not IS_ROOT or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4 for a loop device")
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    run("mkfs.ext4", "-qF", str(image))
    mounted = run("mount", "-o", "loop", str(image), str(folder))
    if mounted.returncode:
        pytest.skip(f"no loop mounts here: {mounted.stderr.strip()}")
    yield folder
    run("umount", str(folder))


@pytest.mark.root
def test_too_little_space_is_told_before_anything_is_written(engine, small_disk):
    with FileStore(small_disk, engine) as store:
        store.add("g", layouts(x=40 * MIB))
        with pytest.raises(ConfigError) as raised:
            store.allocate()
        for text in (str(2 * (40 * MIB + 4096)), "bytes are free", "spare_slots", str(small_disk)):
            assert text in str(raised.value)
        assert not list((store.folders[0] / "slots").iterdir())
    assert [path.name for path in small_disk.iterdir()] == ["lost+found"]


@pytest.mark.root
def test_a_disk_that_fills_up_while_slots_are_made(engine, small_disk, monkeypatch):
    monkeypatch.setattr("swapio.provision.check_space", lambda _: None)
    with FileStore(small_disk, engine) as store:
        store.add("g", layouts(x=40 * MIB))
        with pytest.raises(AioError) as raised:
            store.allocate()
        assert raised.value.errno == errno.ENOSPC
        assert not list((store.folders[0] / "slots").iterdir())


@pytest.mark.root
def test_a_full_disk_stops_a_commit_and_nothing_else(engine, small_disk):
    # Slots are reserved: only what grows can fail, and the committed state stays.
    array = random_bytes(4 * MIB)
    with FileStore(small_disk, engine, durability="step") as store:
        store.add("g", layouts(x=4 * MIB))
        store.allocate()
        write(store, "g", 1, {"x": array})
        store.commit(1, b"small").result()
        with (small_disk / "other").open("wb", buffering=0) as file:
            for size in (MIB, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        write(store, "g", 2, {"x": array[::-1].copy()})
        with pytest.raises(AioError) as raised:
            store.commit(2, bytes(8 * MIB)).result()
        assert raised.value.errno == errno.ENOSPC
        (small_disk / "other").unlink()
    with FileStore(small_disk, engine, durability="step") as store:
        assert store.recover().step == 1
        np.testing.assert_array_equal(read(store, "g", "x", 4 * MIB), array)
        store.commit(3, bytes(8 * MIB)).result()


@pytest.mark.root
def test_a_file_system_without_direct_io(engine, tmp_path, caplog):
    if not IS_ROOT:
        pytest.skip("needs root to mount a ramfs")
    folder = tmp_path / "ram"
    folder.mkdir()
    if run("mount", "-t", "ramfs", "r", str(folder)).returncode:
        pytest.skip("no ramfs mounts here")
    try:
        array = random_bytes(MIB + 5)
        with FileStore(folder, engine) as store:
            store.add("g", layouts(x=array.nbytes))
            store.allocate()
            write(store, "g", 1, {"x": array})
            np.testing.assert_array_equal(read(store, "g", "x", array.nbytes), array)
        assert "keeps its files in RAM" in caplog.text
    finally:
        run("umount", str(folder))


def test_tmpfs_is_warned_about_once(engine, caplog):
    shared = Path("/dev/shm")
    if not shared.is_dir() or filesystem_of(shared) != "tmpfs":
        pytest.skip("there is no tmpfs at /dev/shm")
    folder = shared / f"swapio-test-{os.getpid()}"
    caplog.set_level(logging.WARNING)
    try:
        for _ in range(3):
            with FileStore(folder, engine):
                pass
        assert caplog.text.count("keeps its files in RAM") == 1
    finally:
        shutil.rmtree(folder)


def test_paths_of_all_kinds(make_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path, expected in [
        ("relative/deep", tmp_path / "relative" / "deep"),
        ("~/state", tmp_path / "home" / "state"),
        ("Zustände-状态", tmp_path / "Zustände-状态"),
    ]:
        store = make_store(path)
        store.add("größe/∂", layouts(x=10))
        store.allocate()
        write(store, "größe/∂", 1, {"x": random_bytes(10)})
        assert store.folders[0].parent == expected


def test_unusable_paths_are_named(make_store, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            make_store(path)
    with pytest.raises(ConfigError, match="different folders"):
        make_store(tmp_path / "a", tmp_path / "b" / ".." / "a")
    with pytest.raises(ConfigError, match="cannot create"):
        make_store("/proc/nothing/here")


def test_namespaces_with_any_characters(make_store, tmp_path):
    first, second = make_store(namespace="rank/0"), make_store(namespace="rank:0")
    assert first.folders[0] != second.folders[0]
    assert first.folders[0].parent == second.folders[0].parent == tmp_path


def test_the_limit_of_open_files_is_raised(make_store, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        store = make_store()
        for index in range(12):
            store.add(f"g{index}", layouts(x=32 * MIB))
        monkeypatch.setattr(store._folders.files, "write_once", lambda *_: 0)  # saves the time
        store.allocate()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > used + 40
    finally:
        store.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_progress_reaches_the_total(make_store):
    store = make_store()
    store.add("g", layouts(x=70 * MIB))
    calls = []
    store.allocate(lambda done, total: calls.append((done, total)))
    total = 2 * (70 * MIB + 4096)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert store.stats().bytes_allocated == total


def test_slots_are_written_once_and_not_sparse(make_store):
    store = make_store()
    store.add("g", layouts(x=5 * MIB))
    store.allocate()
    for path in (store.folders[0] / "slots").iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size


NO_CLOSE = """
import sys
import numpy as np
from swapio.aio import Engine
from swapio.filestore import FileStore
store = FileStore(sys.argv[1], Engine(), durability=sys.argv[2])
store.add("g", [("x", 1 << 20)])
store.allocate()
array = np.ones(1 << 20, dtype=np.uint8)
transaction = store.begin_write("g", 1)
transaction.write([("x", 0, 1 << 20, array.ctypes.data)], owner=array)
transaction.seal()
if sys.argv[2] == "step":
    store.commit(1).result()
"""


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_exit_without_close(engine, tmp_path, durability):
    command = [sys.executable, "-c", NO_CLOSE, str(tmp_path), durability]
    ended = run(*command)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert bool(list(tmp_path.rglob("*.bin"))) == (durability == "step")
    with FileStore(tmp_path, engine, durability="step") as store:
        if durability == "checkpoint":
            assert store.previous is None
        else:
            assert not store.previous.was_closed
        record = store.recover()
        assert record is None if durability == "checkpoint" else record.step == 1
        store.close(remove=True)
    assert list(tmp_path.iterdir()) == []
