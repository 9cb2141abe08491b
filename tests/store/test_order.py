# SPDX-License-Identifier: Apache-2.0
"""The order of writes, syncs and renames, on which survival of power loss rests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.blocking_engine import BlockingEngine
from support.stores import MIB, layouts, random_bytes, write
from swapio.aio import OP_WRITE
from swapio.filestore import FileStore


class RecordingEngine(BlockingEngine):
    """Notes `(operation, file name)` of each write and sync."""

    def __init__(self):
        super().__init__()
        self.events = []

    def submit(self, requests, *, owner=None):
        for op, file, *_ in requests:
            if op == OP_WRITE:
                self.events.append(("write", Path(file.path).name))
        return super().submit(requests, owner=owner)

    def fsync(self, file, *, data_only=False):
        self.events.append(("sync", Path(file.path).name))
        return super().fsync(file, data_only=data_only)


@pytest.fixture
def recording():
    with RecordingEngine() as engine:
        yield engine


def last(events, event):
    return len(events) - 1 - events[::-1].index(event)


@pytest.mark.parametrize("durability", ["step", "power"])
def test_a_record_is_written_after_all_that_it_vouches_for(make_store, recording, durability):
    store = make_store(engine=recording, durability=durability)
    for key in "ab":
        store.add(key, layouts(x=33 * MIB))
    store.allocate()
    for step in (1, 2, 3):
        recording.events.clear()
        for key in "ab":
            write(store, key, step, {"x": random_bytes(33 * MIB, step)})
        store.commit(step).result()
        events = recording.events
        commit = f"commit-{(step - 1) % 2}.bin"
        record = events.index(("write", commit))
        data = {name for op, name in events if op == "write"} - {commit}
        assert len(data) == 2
        for name in data:
            assert last(events, ("write", name)) < record
            if durability == "power":
                assert last(events, ("write", name)) < events.index(("sync", name)) < record
        syncs = [name for op, name in events[record:] if op == "sync"]
        assert syncs == ([commit] if durability == "power" else [])
        assert durability == "power" or ("sync" not in {op for op, _ in events})


def test_a_table_is_written_after_its_data(make_store, recording):
    store = make_store(engine=recording, durability="step")
    store.add("a", layouts(x=MIB))
    store.allocate()
    offsets = []
    submit = recording.submit
    recording.submit = lambda requests, owner=None: (
        offsets.extend(request.offset for request in requests),
        submit(requests, owner=owner),
    )[1]
    write(store, "a", 1, {"x": random_bytes(MIB)})
    assert offsets == [4096, 0]


def test_the_manifest_is_renamed_when_synced_and_its_folder_after(recording, tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))  # noqa: PTH115
        fsync(descriptor)

    def note_rename(self, target):
        events.append(("rename", self.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    with FileStore(tmp_path, recording) as store:
        store.add("a", layouts(x=10))
        store.allocate()
    temporary = [name for op, name in events if op == "rename"]
    assert len(temporary) == len(set(temporary)) == 2
    for name in temporary:
        position = events.index(("rename", name))
        assert events[position - 1] == ("sync", name)
        assert events[position + 1] == ("sync", "swapio-run")
    # The second manifest says that the files are there: their names are synced before.
    second = events.index(("rename", temporary[1]))
    assert ("sync", "slots") in events[:second]
