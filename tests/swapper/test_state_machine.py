# SPDX-License-Identifier: Apache-2.0
"""Random sequences of verbs on every swapper, against a dict of plain tensors."""

from __future__ import annotations

import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.swappers import KINDS, open_swapper, specs_of
from swapio.subgroup import SubGroupState

# Several chunks, one chunk, a chunk and a bit, and one that is too small to be swapped.
SIZES = {"a": (3 << 18) + 77, "b": 1 << 18, "c": (1 << 18) + 1, "d": 40}
RECORDS = ("exp_avg", "exp_avg_sq")
STREAM_MIB = [4, 7, 12, 60]

key = st.sampled_from(sorted(SIZES))
record = st.sampled_from(RECORDS)
share = st.floats(0, 1)


class SwapperMachine(RuleBasedStateMachine):
    """One swapper, and what each record must hold."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="swapper-machine-")
        self.opened = None

    @initialize(
        kind=st.sampled_from(KINDS),
        durability=st.sampled_from(["checkpoint", "step"]),
        stream_mib=st.sampled_from(STREAM_MIB),
    )
    def start(self, kind, durability, stream_mib):
        self.limit = None if kind == "partitioned" else stream_mib << 20
        self.context = open_swapper(
            self.folder,
            kind,
            pool_bytes=100 << 20,
            stream_bytes=stream_mib << 20,
            chunk_bytes=2 << 20,
            durability=durability,
        )
        self.opened = self.context.__enter__()
        self.expected, self.step = {}, 0
        for name, numel in SIZES.items():
            self.opened.add(name, specs_of(numel, RECORDS))
            for one in RECORDS:
                self.expected[name, one] = torch.zeros(numel)

    @property
    def swapper(self):
        return self.opened.swapper

    def _sweep(self, keys, records, number):
        self.swapper.set_order(keys)
        for name in keys:
            with self.swapper.swap_in(name) as view:
                for chunk in view.chunks():
                    for one in records:
                        for part in (
                            chunk[one],
                            self.expected[name, one][chunk.start : chunk.stop],
                        ):
                            part.mul_(0.5).add_(number)
                    chunk.mark_dirty(*records)

    @rule(
        keys=st.permutations(sorted(SIZES)),
        count=st.integers(1, 4),
        records=st.sets(record, min_size=1),
    )
    def sweep(self, keys, count, records):
        self.step += 1
        self._sweep(keys[:count], sorted(records), self.step)
        self.swapper.commit(self.step)

    @rule(name=key)
    def look_without_change(self, name):
        with self.swapper.swap_in(name) as view:
            for chunk in view.chunks():
                for one in RECORDS:
                    held = self.expected[name, one][chunk.start : chunk.stop]
                    assert torch.equal(chunk[one], held)

    @rule(name=key, one=record, at=share, size=share)
    def write_a_span(self, name, one, at, size):
        start = int(at * (SIZES[name] - 1))
        stop = start + 1 + int(size * (SIZES[name] - start - 1))
        value = torch.arange(start, stop, dtype=torch.float32)
        self.swapper.write(name, one, value, start=start)
        self.expected[name, one][start:stop] = value

    @rule(name=key, one=record, at=share, size=share)
    def read_a_span(self, name, one, at, size):
        start = int(at * (SIZES[name] - 1))
        out = torch.empty(1 + int(size * (SIZES[name] - start - 1)))
        self.swapper.read(name, one, out, start=start)
        assert torch.equal(out, self.expected[name, one][start : start + out.numel()])

    @rule(name=key, one=record)
    def change_a_whole_record(self, name, one):
        with self.swapper.swap_in(name) as view:
            view[one].add_(3)
            view.mark_dirty(one)
        self.expected[name, one].add_(3)

    @rule(name=key, one=record)
    def tag(self, name, one):
        self.swapper.tag_resident(name, one)

    @rule(name=key, one=record)
    def untag(self, name, one):
        self.swapper.untag_resident(name, one)

    @rule(keys=st.permutations(sorted(SIZES)))
    def read_ahead(self, keys):
        self.swapper.set_order(keys)
        self.swapper.prefetch(keys[0])
        self.swapper.poll()

    @rule(name=key)
    def write_back_and_release(self, name):
        self.swapper.swap_in(name)[RECORDS[0]]
        self.swapper.writeback(name, wait=True)
        self.swapper.release(name)
        state = self.swapper.state(name)
        assert state in (SubGroupState.OUT, SubGroupState.RESIDENT)

    @rule()
    def drain(self):
        self.swapper.drain()

    @rule()
    def flush(self):
        self.swapper.flush()
        dirty = [n for n in SIZES if self.swapper.state(n) is SubGroupState.DIRTY]
        assert not dirty

    @invariant()
    def buffers_stay_in_their_budget(self):
        if self.opened is not None and self.limit is not None:
            assert self.swapper._cache.used_bytes <= self.limit

    def teardown(self):
        try:
            if self.opened is not None:
                for (name, one), value in self.expected.items():
                    assert torch.equal(self.swapper.read(name, one), value), (name, one)
        finally:
            if self.opened is not None:
                self.context.__exit__(None, None, None)
            shutil.rmtree(self.folder)


FEW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_verbs_agree_with_plain_tensors():
    run_machine(max_examples=10, stateful_step_count=12)


@pytest.mark.slow
def test_many_verbs_agree_with_plain_tensors():
    run_machine(max_examples=600, stateful_step_count=40)


def run_machine(**limits):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(SwapperMachine, settings=settings(**FEW, **limits))
