# SPDX-License-Identifier: Apache-2.0
"""Other processes: locks, kill -9 with writes in flight, what dead runs leave."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from support import store_child
from support.stores import layouts, read
from swapio.errors import StoreLockedError
from swapio.filestore import FileStore

SCRIPT = Path(store_child.__file__)


class Child:
    """A `store_child.py` process."""

    def __init__(self, mode, path, durability="checkpoint"):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), mode, str(path), durability],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self):
        return self.process.stdout.readline().split()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def finish(self):
        """Let it end and return the words of the lines it still told."""
        if not self.process.stdin.closed:
            self.process.stdin.close()
        lines = [line.split() for line in self.process.stdout]
        self.process.stdout.close()
        self.process.wait(60)
        return lines


def total_bytes(path):
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def test_a_running_owner_keeps_others_out(engine, tmp_path, caplog):
    child = Child("hold", tmp_path)
    assert child.line() == ["ready", "0"]
    with pytest.raises(StoreLockedError) as raised:
        FileStore(tmp_path, engine, lock_timeout=0.3)
    assert f"process {child.process.pid}" in str(raised.value)
    assert "lock_timeout" in str(raised.value)
    assert "waiting up to 0.3 s" in caplog.text
    # Other ranks of the same folder are no others.
    with FileStore(tmp_path, engine, namespace="rank1") as store:
        store.add("g", layouts(x=10))
        store.allocate()
    child.finish()
    with FileStore(tmp_path, engine, lock_timeout=10):
        pass
    assert list(tmp_path.iterdir()) == []


def test_it_waits_for_an_owner_that_ends(engine, tmp_path):
    child = Child("hold", tmp_path)
    child.line()
    threading.Timer(0.3, child.process.stdin.close).start()
    with FileStore(tmp_path, engine, lock_timeout=30) as store:
        assert store.previous is None
    child.finish()


def test_kill_with_writes_in_flight(engine, tmp_path, caplog):
    # The kernel still writes what was queued: those files stay locked until that has landed.
    child = Child("flood", tmp_path)
    assert child.line()[0] == "ready"
    assert child.line()[0] == "writing"
    child.kill()
    caplog.set_level(logging.WARNING)
    with FileStore(tmp_path, engine, lock_timeout=30) as store:
        assert not store.previous.was_closed
        assert store.previous.pid == child.process.pid
        for key in ("a", "b", "c", "d"):
            store.add(key, layouts(x=64 << 20))
        before = total_bytes(tmp_path)
        store.allocate()
        assert store.stats().bytes_allocated == 0
        assert total_bytes(tmp_path) <= before + (1 << 20)
        assert "reusing 8, removed 0" in caplog.text
        for key in store.keys:
            assert not store.is_written(key)
    child.finish()
    assert list(tmp_path.iterdir()) == []


def test_three_runs_in_one_folder_with_one_killed(tmp_path):
    need = 0
    for mode in ("once", "flood", "once"):
        child = Child(mode, tmp_path)
        assert child.line()[0] == "ready"
        need = max(need, total_bytes(tmp_path))
        if mode == "flood":
            child.line()
            child.kill()
            child.finish()
            assert total_bytes(tmp_path) <= 8 * (65 << 20)
        else:
            child.finish()
            assert child.process.returncode == 0
            assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_ranks_are_swept_but_no_commits(engine, tmp_path, caplog):
    for name, durability in (("rank1", "step"), ("rank0", "checkpoint")):
        child = os.fork()
        if child == 0:
            from swapio.aio import Engine

            store = FileStore(tmp_path, Engine(), durability=durability, namespace=name)
            store_child.declare(store)
            store.allocate()
            store_child.write_step(store, 1)
            if durability == "step":
                store.commit(1).result()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    expected = {"swapio-other", "swapio-rank1"}
    found = set()
    deadline = time.monotonic() + 10
    while found != expected and time.monotonic() < deadline:  # its last writes may still land
        with FileStore(tmp_path, engine, namespace="other"):
            found = {path.name for path in tmp_path.iterdir()}
    assert found == expected
    assert "removed" in caplog.text
    assert "swapio-rank0" in caplog.text
    with FileStore(tmp_path, engine, durability="step", namespace="rank1") as store:
        assert store.recover().step == 1
        store.close(remove=True)


def check_recovery(engine, path, acknowledged):
    with FileStore(path, engine, durability="step", lock_timeout=30) as store:
        record = store.recover()
        if record is None:
            assert acknowledged == 0
            return
        assert record.step >= acknowledged
        assert record.payload == str(record.step).encode()
        for key, size in store_child.SIZES.items():
            expected = store_child.content(record.step, key)
            np.testing.assert_array_equal(read(store, key, "x", size), expected)


def kill_at_random_points(engine, path, rounds, seed):
    generator = random.Random(seed)
    acknowledged = 0
    for _ in range(rounds):
        child = Child("commit", path, "step")
        assert child.line()[0] == "ready"
        time.sleep(generator.uniform(0.0, 0.3))
        child.kill()
        lines = child.finish()
        acknowledged = max([acknowledged, *(int(line[1]) for line in lines if len(line) == 2)])
        check_recovery(engine, path, acknowledged)


def test_kill_at_random_points_of_step_and_commit(engine, tmp_path):
    kill_at_random_points(engine, tmp_path, 4, 11)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_at_many_random_points(engine, tmp_path):
    kill_at_random_points(engine, tmp_path, 150, time.time_ns())
