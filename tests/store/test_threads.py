# SPDX-License-Identifier: Apache-2.0
"""Several threads on different sub-groups of one store, and the GIL while it waits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys

import numpy as np
import pytest

from support.stores import MIB, layouts, random_bytes, read, write
from swapio.errors import SwapStateError


@pytest.fixture(autouse=True)
def _switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_different_sub_groups_from_different_threads(make_store, durability):
    store = make_store(durability=durability)
    for key in range(4):
        store.add(str(key), layouts(x=MIB + 10))
    store.allocate()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, store, key) for key in range(4)]
        while not all(future.done() for future in futures):
            with contextlib.suppress(SwapStateError):  # one is being written in place
                check_held(store)
        for future in futures:
            future.result()


def work(store, key):
    for step in range(1, 15):
        array = content(key, step)
        transaction = store.begin_write(str(key), step)
        transaction.write([("x", 0, array.nbytes, array.ctypes.data)], owner=array)
        future = transaction.seal()
        if step % 2:
            future.result()
        np.testing.assert_array_equal(read(store, str(key), "x", array.nbytes), array)


def check_held(store):
    with store.hold() as hold:
        for key in hold.keys:
            expected = content(int(key), hold.locate(key).generation)
            np.testing.assert_array_equal(read(hold, key, "x", MIB + 10), expected)


def content(key, step):
    return random_bytes(MIB + 10, 100 * key + step)


def test_steps_go_on_while_commits_are_written(make_store):
    store = make_store(durability="step", spare_slots=0)
    for key in "ab":
        store.add(key, layouts(x=MIB))
    store.allocate()
    futures = []
    for step in range(1, 30):
        for key in "ab":
            write(store, key, step, {"x": np.full(MIB, step, dtype=np.uint8)})
        futures.append(store.commit(step))
    for future in futures:
        assert future.result() > 0
    assert store.stats().num_commits == 29
    store.close()
    again = make_store(durability="step", spare_slots=0)
    assert again.recover().step == 29
    assert (read(again, "b", "x", MIB) == 29).all()


def test_a_result_with_a_timeout(make_store):
    store = make_store()
    store.add("a", layouts(x=MIB))
    store.allocate()
    transaction = store.begin_write("a", 1)
    array = random_bytes(MIB)
    assert transaction.write([("x", 0, MIB, array.ctypes.data)], owner=array).result(10) == MIB
    seal = transaction.seal()
    assert seal.result(10) == MIB
    assert seal.exception(0) is None
    assert seal.done()
