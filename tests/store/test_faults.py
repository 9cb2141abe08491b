# SPDX-License-Identifier: Apache-2.0
"""A fault at each transfer of a step: what is good stays good, what failed says so."""

from __future__ import annotations

import contextlib
import errno
import sys

import numpy as np
import pytest

from support.faulty import FailingEngine, FaultyStore
from support.stores import MIB, layouts, piece, random_bytes, read, write
from swapio.errors import AioError, CorruptionError, SwapStateError
from swapio.filestore import FileStore

SIZE = 2 * MIB + 10


@pytest.fixture
def failing():
    with FailingEngine() as engine:
        yield engine


def start(make_store, engine, **options):
    store = make_store(engine=engine, **options)
    store.add("g", layouts(x=SIZE, y=100))
    store.allocate()
    old = {"x": random_bytes(SIZE, 1), "y": random_bytes(100, 2)}
    write(store, "g", 1, old)
    return store, old


def write_step(store, new):
    """One step: two writes and a seal, which carries nothing, so three transfers."""
    transaction = store.begin_write("g", 2)
    try:
        for name, array in new.items():
            transaction.write([piece(name, array)], owner=array).result()
        transaction.seal().result()
    except AioError:
        transaction.abort()
        raise


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_leaves_the_live_slot(make_store, failing, number, code):
    store, old = start(make_store, failing, durability="step")
    store.commit(1).result()
    new = {"x": random_bytes(SIZE, 3), "y": random_bytes(100, 4)}
    failing.arm(number, code=code)
    with pytest.raises(AioError) as raised:
        write_step(store, new)
    assert raised.value.errno == code
    assert "slot" in str(raised.value)
    failing.disarm()
    for name, array in old.items():
        np.testing.assert_array_equal(read(store, "g", name, array.nbytes), array)
    # One rewrite, into the other free slot.
    failed_slot = 1
    transaction = store.begin_write("g", 2)
    assert transaction.slot_index not in (failed_slot, store.locate("g").slot_index)
    transaction.abort()
    write_step(store, new)
    for name, array in new.items():
        np.testing.assert_array_equal(read(store, "g", name, array.nbytes), array)
    store.commit(2).result()


def test_a_failed_write_in_place_poisons_its_blocks_until_they_are_rewritten(make_store, failing):
    store, old = start(make_store, failing)
    new = random_bytes(MIB, 3)
    transaction = store.begin_write("g", 2)
    failing.arm(0)
    transaction.write([piece("x", new)], owner=new)
    with pytest.raises(AioError, match="Input/output error") as raised:
        transaction.seal().result()
    assert any("lost the blocks" in note for note in raised.value.__notes__)
    with pytest.raises(SwapStateError, match="must be written again"):
        read(store, "g", "x", MIB)
    np.testing.assert_array_equal(read(store, "g", "x", MIB, MIB), old["x"][MIB : 2 * MIB])
    with pytest.raises(SwapStateError, match="cannot be held"):
        store.hold()
    failing.disarm()
    # The spare slot is taken for the rewrite; only what is rewritten can be lost.
    write(store, "g", 2, {"x": new})
    assert store.locate("g").slot_index == 1
    expected = old["x"].copy()
    expected[:MIB] = new
    np.testing.assert_array_equal(read(store, "g", "x", SIZE), expected)
    store.hold().release()


def test_a_lost_block_that_is_not_rewritten_stays_lost(make_store, failing):
    store, old = start(make_store, failing)
    transaction = store.begin_write("g", 2)
    failing.arm(0)
    transaction.write([piece("x", old["x"][:MIB])])
    with pytest.raises(AioError):
        transaction.seal().result()
    with pytest.raises(SwapStateError, match="must be written again"):
        write(store, "g", 2, {"y": old["y"]})


def test_a_retry_in_the_same_transaction_heals(make_store, failing):
    store, _ = start(make_store, failing)
    new = random_bytes(SIZE, 3)
    transaction = store.begin_write("g", 2)
    failing.arm(0)
    with pytest.raises(AioError):
        transaction.write([piece("x", new)], owner=new).result()
    failing.disarm()
    transaction.write([piece("x", new)], owner=new).result()
    transaction.seal().result()
    np.testing.assert_array_equal(read(store, "g", "x", SIZE), new)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_fault_that_does_not_repeat_is_survived(make_store, failing, number, caplog):
    """Writes, the slot table, and reads: each transfer is tried once more, to the same place."""
    store, _ = start(make_store, failing, durability="step")
    new = {"x": random_bytes(SIZE, 3), "y": random_bytes(100, 4)}
    failing.arm(number, is_transient=True)
    write_step(store, new)
    store.commit(2).result()
    failing.arm(0, is_transient=True)
    for name, array in new.items():
        np.testing.assert_array_equal(read(store, "g", name, array.nbytes), array)
    assert failing.count > 1
    told = [record.message for record in caplog.records if "once more" in record.message]
    assert len(told) == 2
    assert all("Input/output error" in message for message in told)


def test_a_second_try_does_not_come_after_a_later_write(make_store, failing):
    store, _ = start(make_store, failing)
    one, two = random_bytes(SIZE, 3), random_bytes(SIZE, 4)
    transaction = store.begin_write("g", 2)
    failing.arm(0, is_transient=True)
    transaction.write([piece("x", one)], owner=one)
    transaction.write([piece("x", two)], owner=two)
    transaction.seal().result()
    np.testing.assert_array_equal(read(store, "g", "x", SIZE), two)


def test_a_read_of_blocks_on_their_way_waits_for_the_second_try(make_store, failing):
    store, old = start(make_store, failing)
    new = random_bytes(MIB, 3)
    transaction = store.begin_write("g", 2)
    assert transaction.is_in_place
    failing.arm(0, is_transient=True)
    transaction.write([piece("x", new)], owner=new)
    np.testing.assert_array_equal(read(store, "g", "x", MIB), new)
    failing.arm(0)
    transaction.write([piece("x", old["x"][MIB:], MIB)], owner=old)
    with pytest.raises(SwapStateError, match="must be written again"):
        read(store, "g", "x", MIB, MIB)
    failing.disarm()
    transaction.write([piece("x", old["x"][MIB:], MIB)], owner=old)
    np.testing.assert_array_equal(read(store, "g", "x", MIB, MIB), old["x"][MIB : 2 * MIB])
    transaction.seal().result()


def test_memory_is_held_until_the_second_try(make_store, failing):
    store, _ = start(make_store, failing)
    array = random_bytes(SIZE, 3)
    content, before = array.copy(), sys.getrefcount(array)
    transaction = store.begin_write("g", 2)
    failing.arm(0, is_transient=True)
    transfer = transaction.write([piece("x", array)], owner=array)
    assert sys.getrefcount(array) > before
    while not transfer.done():
        pass
    assert transfer.result() == SIZE
    assert sys.getrefcount(array) == before
    transaction.seal().result()
    np.testing.assert_array_equal(read(store, "g", "x", SIZE), content)


def test_a_failed_seal_surfaces_at_the_next_verb_and_stops_the_commit(make_store, failing):
    store, old = start(make_store, failing, durability="step")
    transaction = store.begin_write("g", 2)
    failing.arm(0)
    transaction.write([piece("x", old["x"])])
    transaction.seal()
    with pytest.raises(AioError):
        store.generation("g")
    assert store.generation("g") == 1
    with pytest.raises(SwapStateError, match="last write of sub-group 'g' failed"):
        store.commit(2)
    write(store, "g", 2, old)
    store.commit(2).result()


def test_a_failed_seal_surfaces_at_drain_once(make_store, failing):
    store, old = start(make_store, failing, durability="step")
    transaction = store.begin_write("g", 2)
    failing.arm(0)
    transaction.write([piece("x", old["x"])])
    transaction.seal()
    with pytest.raises(AioError):
        store.drain()
    store.drain()


def test_a_commit_of_a_seal_that_fails_later_is_not_written(make_store, failing):
    store, old = start(make_store, failing, durability="step")
    store.commit(1).result()
    transaction = store.begin_write("g", 2)
    failing.arm(0)
    transaction.write([piece("x", old["x"])])
    transaction.seal()
    failing_commit = None
    with contextlib.suppress(SwapStateError):  # when the seal has failed by now
        failing_commit = store.commit(2)
    if failing_commit is not None:
        assert isinstance(failing_commit.exception(), AioError)
    failing.disarm()
    store.close()
    again = make_store(engine=failing, durability="step")
    assert again.recover().step == 1


def test_a_failed_commit_record_leaves_the_one_before(make_store, failing):
    store, old = start(make_store, failing, durability="step")
    store.commit(1, b"one").result()
    write(store, "g", 2, old)
    failing.arm(0, code=errno.ENOSPC)
    with pytest.raises(AioError):
        store.commit(2).result()
    failing.disarm()
    for step in (3, 4):
        write(store, "g", step, old)
        store.commit(step, b"later").result()
    store.close()
    again = make_store(engine=failing, durability="step")
    assert again.recover().step == 4


@pytest.mark.parametrize("number", range(8))
def test_a_fault_while_slots_are_made_leaves_nothing(make_store, failing, number, tmp_path):
    store = make_store(engine=failing)
    store.add("g", layouts(x=60 * MIB))
    failing.arm(number, code=errno.ENOSPC)
    if number < 4:
        with pytest.raises(AioError):
            store.allocate()
        assert list((store.folders[0] / "slots").iterdir()) == []
    failing.disarm()
    store.allocate()
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(12))
def test_faulty_store_never_gives_wrong_bytes(make_store, seed):
    inner = make_store(durability="step" if seed % 2 else "checkpoint")
    store = FaultyStore(inner, seed, eio=0.1, enospc=0.1, short=0.1, torn=0.1, delay=0.001)
    store.add("g", layouts(x=MIB + 10))
    store.allocate()
    content = None
    errors = []
    for step in range(25):
        new = random_bytes(MIB + 10, 100 * seed + step)
        transaction = store.begin_write("g", step)
        try:
            transaction.write([piece("x", new)], owner=new).result()
            transaction.seal().result()
            content = new
        except AioError as error:
            errors.append(str(error))
            transaction.abort()
            if transaction.is_in_place:
                content = None
        try:
            got = read(store, "g", "x", MIB + 10)
        except (AioError, CorruptionError):
            continue
        except SwapStateError:
            assert content is None
            continue
        np.testing.assert_array_equal(got, content, err_msg=f"seed {seed}, step {step}")
    assert store.faults.num_injected > 3
    assert all(f"seed {seed}" in error for error in errors)


def test_a_torn_write_is_found_by_its_checksum(make_store):
    store = FaultyStore(make_store(), 1, torn=1.0)
    store.add("g", layouts(x=2 * MIB + 10))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(2 * MIB + 10)})
    with pytest.raises(CorruptionError, match=f"bytes {2 * MIB} to"):
        read(store, "g", "x", 2 * MIB + 10)


def test_interrupt_while_a_seal_waits(make_store, failing, monkeypatch):
    # An interrupt in the middle of a seal leaves it to be done by the next who needs it.
    store, _ = start(make_store, failing)
    new = random_bytes(SIZE, 3)
    monkeypatch.setattr(store._shared.queue, "put", lambda _: None)
    transaction = store.begin_write("g", 2)
    transaction.write([piece("x", new)], owner=new)
    seal = transaction.seal()
    original = failing.submit

    def interrupted(requests, *, owner=None):
        failing.submit = original
        original(requests, owner=owner)
        raise KeyboardInterrupt

    failing.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        seal.result()
    assert not seal.done()
    np.testing.assert_array_equal(read(store, "g", "x", SIZE), new)
    assert seal.done()


def test_isinstance_of_the_seam(make_store):
    assert isinstance(make_store(), FileStore)
