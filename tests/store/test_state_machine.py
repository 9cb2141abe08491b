# SPDX-License-Identifier: Apache-2.0
"""A store against a dict: any order of writes, aborts, holds, commits, reopening and crashes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.blocking_engine import BlockingEngine
from support.stores import MIB, layouts, piece, read
from swapio.aio import Engine
from swapio.errors import SwapStateError
from swapio.filestore import FileStore

SIZES = {"a": {"x": 2 * MIB + 10, "y": 5}, "b": {"x": MIB, "z": 4097}, "c": {"x": 17}}
KEYS = st.sampled_from(sorted(SIZES))


class StoreMachine(RuleBasedStateMachine):
    durability = "checkpoint"
    num_paths = 1

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="swapio-machine-"))
        self.engine = self.make_engine()
        self.paths = [self.root / str(index) for index in range(self.num_paths)]
        self.step = 0
        self.content = {}  # key -> (generation, meta, {record: array})
        self.committed = None
        self.holds = []
        self.open_store()
        self.store.allocate()

    def make_engine(self):
        return BlockingEngine()

    def open_store(self):
        self.store = FileStore(
            self.paths, self.engine, durability=self.durability, lock_timeout=2.0
        )
        for key, sizes in SIZES.items():
            self.store.add(key, layouts(**sizes), meta_bytes=6)

    def teardown(self):
        self.store.close(remove=True)
        left = [path for folder in self.paths for path in folder.iterdir()]
        self.engine.close()
        shutil.rmtree(self.root)
        assert left == []

    def has_free_slot(self, key):
        if not self.store.num_free_slots(key):
            self.store.drain()  # a commit on its way gives slots back
        return self.store.num_free_slots(key) > 0

    def write(self, key, data):
        """Write some ranges of blocks; return the transaction and the content it makes."""
        _, _, old = self.content.get(key, (0, b"", {}))
        new = {
            name: old[name].copy() if name in old else np.zeros(size, dtype=np.uint8)
            for name, size in SIZES[key].items()
        }
        transaction = self.store.begin_write(key, self.step)
        for name in data.draw(st.lists(st.sampled_from(sorted(SIZES[key])), max_size=2)):
            size = SIZES[key][name]
            last = (size - 1) // MIB
            first = data.draw(st.integers(0, last))
            end = min(size, (data.draw(st.integers(first, last)) + 1) * MIB)
            array = np.full(end - first * MIB, data.draw(st.integers(0, 255)), dtype=np.uint8)
            transaction.write([piece(name, array, first * MIB)], owner=array)
            new[name][first * MIB : end] = array
        return transaction, new

    @rule(key=KEYS, data=st.data(), meta=st.binary(max_size=6))
    def seal(self, key, data, meta):
        if not self.has_free_slot(key):
            with pytest.raises(SwapStateError):
                self.store.begin_write(key, self.step)
            return
        self.step += 1
        transaction, new = self.write(key, data)
        future = transaction.seal(meta)
        if data.draw(st.booleans()):
            future.result()
        self.content[key] = (self.step, meta, new)

    @rule(key=KEYS, data=st.data())
    def abort(self, key, data):
        if not self.has_free_slot(key):
            return
        transaction, _ = self.write(key, data)
        was_in_place = transaction.is_in_place
        transaction.abort()
        if was_in_place and transaction._is_written.any():
            # What was overwritten is lost, and has to be written again.
            transaction = self.store.begin_write(key, self.step)
            _, meta, old = self.content[key]
            for name, array in old.items():
                transaction.write([piece(name, array)], owner=array)
            transaction.seal(meta).result()
            self.content[key] = (self.step, meta, old)

    @rule(key=KEYS)
    def check(self, key):
        if key not in self.content:
            assert not self.store.is_written(key)
            return
        generation, meta, content = self.content[key]
        assert (self.store.generation(key), self.store.meta(key)) == (generation, meta)
        for name, array in content.items():
            np.testing.assert_array_equal(read(self.store, key, name, array.nbytes), array)

    @precondition(lambda self: len(self.holds) < 2)
    @rule()
    def hold(self):
        self.holds.append((self.store.hold(), dict(self.content)))

    @precondition(lambda self: self.holds)
    @rule(is_released=st.booleans())
    def check_hold(self, is_released):
        hold, content = self.holds[0]
        assert set(hold.keys) == set(content)
        for key, (generation, meta, records) in content.items():
            assert (hold.locate(key).generation, hold.meta(key)) == (generation, meta)
            for name, array in records.items():
                np.testing.assert_array_equal(read(hold, key, name, array.nbytes), array)
        if is_released:
            self.holds.pop(0)[0].release()

    @precondition(lambda self: self.durability != "checkpoint")
    @rule(payload=st.binary(max_size=20), is_awaited=st.booleans())
    def commit(self, payload, is_awaited):
        self.step += 1
        future = self.store.commit(self.step, payload, {"step": self.step})
        if is_awaited:
            future.result()
        self.committed = (self.step, payload, dict(self.content))

    @precondition(lambda self: self.durability != "checkpoint")
    @rule(is_crash=st.booleans())
    def reopen(self, is_crash):
        self.holds.clear()
        self.store.drain()
        if is_crash:
            # What is in the files at this moment is what a new process finds after kill -9.
            copies = [path.with_name(path.name + "x") for path in self.paths]
            for path, copy in zip(self.paths, copies, strict=True):
                shutil.copytree(path, copy)
            self.store.close(remove=True)
            for path, copy in zip(self.paths, copies, strict=True):
                path.rmdir()
                copy.rename(path)
        else:
            self.store.close()
        self.open_store()
        record = self.store.recover()
        if self.committed is None:
            assert record is None
            self.content = {}
            self.store.allocate()
        else:
            step, payload, content = self.committed
            assert (record.step, record.payload) == (step, payload)
            assert record.scalars == {"step": step}
            self.content = dict(content)

    @invariant()
    def one_live_slot(self):
        for sub_group in self.store._catalog.sub_groups.values():
            assert sum(slot is sub_group.live for slot in sub_group.slots) <= 1


class StepMachine(StoreMachine):
    durability = "step"


class PowerMachine(StoreMachine):
    durability = "power"
    num_paths = 2


class EngineMachine(StepMachine):
    num_paths = 3

    def make_engine(self):
        return Engine()


LEAN = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCheckpoint = StoreMachine.TestCase
TestStep = StepMachine.TestCase
TestPower = PowerMachine.TestCase
TestEngine = EngineMachine.TestCase
TestCheckpoint.settings = TestStep.settings = LEAN
TestPower.settings = settings(LEAN, max_examples=6)
TestEngine.settings = settings(LEAN, max_examples=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [StoreMachine, StepMachine, PowerMachine, EngineMachine])
def test_many_more(machine):
    machine.TestCase.settings = settings(LEAN, max_examples=200, stateful_step_count=50)
    machine.TestCase().runTest()
