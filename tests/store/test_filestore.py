# SPDX-License-Identifier: Apache-2.0
"""FileStore: content, transactions, slots, holds and commits in one process."""

from __future__ import annotations

import os

import numpy as np
import pytest

from support.stores import MIB, layouts, piece, random_bytes, read, write
from swapio.errors import CheckpointError, ClosedError, ConfigError, SwapStateError
from swapio.filestore import FileStore

SIZES = [1, 511, 512, 513, 4095, 4096, 4097, MIB - 2, MIB, MIB + 2, 28_824_000]


def test_round_trip_of_odd_sizes(any_engine, tmp_path):
    # The right number of bytes comes back although every size is padded on storage.
    contents = {f"r{size}": random_bytes(size, size) for size in SIZES}
    with FileStore(tmp_path, any_engine) as store:
        store.add("g", layouts(**{name: array.nbytes for name, array in contents.items()}))
        store.allocate()
        write(store, "g", 1, contents)
        for name, array in contents.items():
            np.testing.assert_array_equal(read(store, "g", name, array.nbytes), array)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weights", [(1, 1), (3, 1, 2)])
def test_several_paths(engine, tmp_path, weights):
    paths = [tmp_path / str(index) for index in range(len(weights))]
    contents = {"x": random_bytes(13 * MIB + 77, 1), "y": random_bytes(2 * MIB, 2)}
    with FileStore(paths, engine, weights=weights) as store:
        store.add("g", layouts(x=13 * MIB + 77, y=2 * MIB))
        store.add("h", layouts(x=100))
        store.allocate()
        write(store, "g", 1, contents)
        write(store, "h", 1, {"x": contents["x"][:100]})
        for name, array in contents.items():
            np.testing.assert_array_equal(read(store, "g", name, array.nbytes), array)
        part = read(store, "g", "x", 3 * MIB, 5 * MIB)
        np.testing.assert_array_equal(part, contents["x"][5 * MIB : 8 * MIB])
        location = store.locate("g")
        whole = b"".join(
            run.path.read_bytes()[run.offset : run.offset + run.nbytes]
            for run in location.records["x"]
        )
        assert whole == contents["x"].tobytes()
        used = [
            sum(p.nbytes for p in location.records["x"] if path in p.path.parents) for path in paths
        ]
        assert used[0] >= max(used[1:])


def test_unwritten_blocks_are_carried_to_the_new_slot(make_store):
    store = make_store(durability="step")
    store.add("g", layouts(x=3 * MIB + 5, y=10))
    store.allocate()
    old = random_bytes(3 * MIB + 5, 1)
    write(store, "g", 1, {"x": old, "y": old[:10]})
    new = random_bytes(MIB, 2)
    write(store, "g", 2, {"x": (MIB, new)})
    expected = old.copy()
    expected[MIB : 2 * MIB] = new
    np.testing.assert_array_equal(read(store, "g", "x", old.nbytes), expected)
    np.testing.assert_array_equal(read(store, "g", "y", 10), old[:10])
    assert store.stats().bytes_copied == 2 * MIB + 5 + 10


def test_blocks_that_were_never_written_are_zero(make_store):
    store = make_store()
    store.add("g", layouts(x=2 * MIB, y=10))
    store.allocate()
    write(store, "g", 1, {"x": (MIB, random_bytes(MIB))})
    assert not read(store, "g", "x", MIB).any()
    assert not read(store, "g", "y", 10).any()


def test_in_place_only_under_checkpoint_and_without_hold(make_store):
    store = make_store()
    store.add("g", layouts(x=100))
    store.allocate()
    first, second = random_bytes(100, 1), random_bytes(100, 2)
    write(store, "g", 1, {"x": first})
    slot = store.locate("g").slot_index
    write(store, "g", 2, {"x": second})
    assert store.locate("g").slot_index == slot
    with store.hold() as hold:
        write(store, "g", 3, {"x": first})
        assert store.locate("g").slot_index != slot
        write(store, "g", 4, {"x": first})
        np.testing.assert_array_equal(read(hold, "g", "x", 100), second)
        assert hold.locate("g").generation == 2
        with store.hold(), pytest.raises(SwapStateError, match="no slot to write to"):
            store.begin_write("g", 5)
    assert store.num_free_slots("g") == 2


def test_abort_in_another_slot_is_exact(make_store):
    store = make_store(durability="step")
    store.add("g", layouts(x=MIB + 3), meta_bytes=8)
    store.allocate()
    old = random_bytes(MIB + 3, 1)
    write(store, "g", 1, {"x": old}, b"old")
    transaction = store.begin_write("g", 2)
    transaction.write([piece("x", random_bytes(MIB + 3, 2))]).result()
    transaction.abort()
    np.testing.assert_array_equal(read(store, "g", "x", old.nbytes), old)
    assert (store.generation("g"), store.meta("g")) == (1, b"old")
    with pytest.raises(SwapStateError, match="sealed or aborted"):
        transaction.seal()


def test_abort_in_place_poisons_what_was_overwritten(make_store):
    store = make_store()
    store.add("g", layouts(x=2 * MIB, y=5))
    store.allocate()
    old = random_bytes(2 * MIB, 1)
    write(store, "g", 1, {"x": old, "y": old[:5]})
    transaction = store.begin_write("g", 2)
    new = random_bytes(MIB, 2)
    transaction.write([piece("x", new)])
    transaction.abort()
    with pytest.raises(SwapStateError, match="aborted"):
        read(store, "g", "x", MIB)
    np.testing.assert_array_equal(read(store, "g", "x", MIB, MIB), old[MIB:])
    np.testing.assert_array_equal(read(store, "g", "y", 5), old[:5])
    with pytest.raises(SwapStateError, match="cannot be held"):
        store.hold()
    write(store, "g", 2, {"x": old, "y": old[:5]})
    np.testing.assert_array_equal(read(store, "g", "x", MIB), old[:MIB])


def test_what_is_left_out_is_neither_copied_nor_read_nor_held_until_it_is_written(make_store):
    store = make_store()
    store.add("g", layouts(x=3 * MIB, y=5))
    store.allocate()
    old, new = random_bytes(3 * MIB, 1), random_bytes(3 * MIB, 2)
    write(store, "g", 1, {"x": old, "y": old[:5]})
    hold = store.hold()

    def left_out(generation, block):
        transaction = store.begin_write("g", generation)
        transaction.leave_out([piece("x", new[MIB : 2 * MIB], MIB)])
        at = slice(block * MIB, (block + 1) * MIB)
        transaction.write([piece("x", new[at], at.start)], owner=new)
        transaction.seal().result()

    before = store.stats()
    left_out(2, 0)
    after = store.stats()
    assert after.bytes_written - before.bytes_written == MIB
    assert after.bytes_copied - before.bytes_copied == MIB + 5
    with pytest.raises(SwapStateError, match="in memory and were not written"):
        read(store, "g", "x", MIB, MIB)
    with pytest.raises(SwapStateError, match="in memory only; flush"):
        store.hold()
    left_out(3, 2)  # in place now: nothing is lost that was there
    assert store.stats().bytes_copied == after.bytes_copied
    with pytest.raises(SwapStateError, match="in memory and were not written"):
        read(store, "g", "x", MIB, MIB)
    np.testing.assert_array_equal(read(hold, "g", "x", 3 * MIB), old)
    write(store, "g", 4, {"x": (MIB, new[MIB : 2 * MIB])})
    np.testing.assert_array_equal(read(store, "g", "x", 3 * MIB), new)
    np.testing.assert_array_equal(read(store, "g", "y", 5), old[:5])
    store.hold().release()


def test_what_was_left_out_stays_so_in_the_next_slot(make_store):
    store = make_store()
    store.add("g", layouts(x=2 * MIB))
    store.allocate()
    old, new = random_bytes(2 * MIB, 1), random_bytes(2 * MIB, 2)
    write(store, "g", 1, {"x": old})
    with store.hold():
        transaction = store.begin_write("g", 2)
        transaction.leave_out([piece("x", new[:MIB])])
        transaction.seal().result()
    second = store.locate("g").slot_index
    store._catalog.sub_groups["g"].live.has_failed = True  # another one is preferred
    write(store, "g", 3, {"x": (MIB, new[MIB:])})
    assert store.locate("g").slot_index != second
    with pytest.raises(SwapStateError, match="in memory and were not written"):
        read(store, "g", "x", MIB)
    write(store, "g", 4, {"x": new[:MIB]})
    np.testing.assert_array_equal(read(store, "g", "x", 2 * MIB), new)


def test_verbs_that_do_not_fit(make_store):
    store = make_store()
    store.add("g", layouts(x=2 * MIB + 7), meta_bytes=2)
    with pytest.raises(ConfigError, match="added before"):
        store.add("g", layouts(x=1))
    with pytest.raises(SwapStateError, match="allocate or recover first"):
        store.begin_write("g", 1)
    store.allocate()
    with pytest.raises(SwapStateError, match="never written"):
        read(store, "g", "x", MIB)
    with pytest.raises(SwapStateError, match='durability="checkpoint"'):
        store.commit(1)
    transaction = store.begin_write("g", 1)
    with pytest.raises(SwapStateError, match="open transaction"):
        store.begin_write("g", 1)
    array = random_bytes(4 * MIB)
    for bad in [("x", 1, 10), ("x", 0, 10), ("x", 0, 3 * MIB), ("x", 2 * MIB, 8), ("z", 0, 1)]:
        with pytest.raises(ConfigError):
            transaction.write([(*bad, array.ctypes.data)])
    with pytest.raises(ConfigError, match="reserved 2 bytes"):
        transaction.seal(b"123")
    transaction.seal(b"12").result()
    store.close()
    with pytest.raises(ClosedError, match="was closed"):
        store.is_written("g")


def test_commit_and_recover(make_store, tmp_path):
    old, new = random_bytes(2 * MIB + 9, 1), random_bytes(2 * MIB + 9, 2)
    store = make_store(durability="step")
    store.add("g", layouts(x=old.nbytes), meta_bytes=4)
    store.add("unused", layouts(x=3))
    store.allocate()
    write(store, "g", 1, {"x": old}, b"one")
    scalars = {"lr": 0.1 + 0.2, "betas": [0.9, float("inf")]}
    store.commit(1, b"payload", scalars).result()
    write(store, "g", 2, {"x": new})
    store.close()

    again = make_store(durability="step")
    assert again.previous.was_closed
    assert again.previous.steps == (1,)
    again.add("g", layouts(x=old.nbytes), meta_bytes=4)
    again.add("unused", layouts(x=3))
    record = again.recover()
    assert (record.step, record.payload, record.scalars) == (1, b"payload", scalars)
    np.testing.assert_array_equal(read(again, "g", "x", old.nbytes), old)
    assert (again.meta("g"), again.is_written("unused")) == (b"one", False)
    for step in range(2, 6):
        write(again, "g", step, {"x": new})
        again.commit(step).result()
    again.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_commit_protects_its_slots_until_it_is_superseded(make_store):
    store = make_store(durability="step", spare_slots=0, confirm_commits=True)
    store.add("g", layouts(x=10))
    store.allocate()
    array = random_bytes(10)
    for step in (1, 2):
        write(store, "g", step, {"x": array})
        store.commit(step).result()
    with pytest.raises(SwapStateError, match="confirm the last commit"):
        store.begin_write("g", 3)
    store.confirm(2)
    write(store, "g", 3, {"x": array})


def test_add_after_allocate(make_store):
    store = make_store(durability="step")
    store.add("a", layouts(x=10))
    store.allocate()
    write(store, "a", 1, {"x": random_bytes(10)})
    store.commit(1).result()
    store.add("b", layouts(x=20))
    store.allocate()
    write(store, "b", 2, {"x": random_bytes(20)})
    store.commit(2).result()
    store.close()
    again = make_store(durability="step")
    assert again.recover().step == 2
    np.testing.assert_array_equal(read(again, "a", "x", 10), random_bytes(10))
    np.testing.assert_array_equal(read(again, "b", "x", 20), random_bytes(20))


def test_small_sub_groups_share_files(make_store):
    store = make_store()
    for index in range(100):
        store.add(f"g{index}", layouts(x=4096, y=100))
    store.add("large", layouts(x=33 * MIB))
    store.allocate()
    files = list((store.folders[0] / "slots").iterdir())
    assert len(files) == 2 * store.num_slots
    for index in range(100):
        write(store, f"g{index}", 1, {"x": random_bytes(4096, index)})
    for index in range(100):
        np.testing.assert_array_equal(
            read(store, f"g{index}", "x", 4096), random_bytes(4096, index)
        )


def test_add_slots(make_store):
    store = make_store(spare_slots=0)
    store.add("g", layouts(x=100))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(100)})
    with store.hold():
        with pytest.raises(SwapStateError):
            store.begin_write("g", 2)
        store.add_slots(["g"])
        write(store, "g", 2, {"x": random_bytes(100, 2)})


def test_two_stores_of_one_process_get_their_own_folders(make_store):
    first, second = make_store(), make_store()
    assert first.folders != second.folders
    for store in (first, second):
        store.add("g", layouts(x=10))
        store.allocate()
    write(first, "g", 1, {"x": random_bytes(10, 1)})
    write(second, "g", 1, {"x": random_bytes(10, 2)})
    np.testing.assert_array_equal(read(first, "g", "x", 10), random_bytes(10, 1))


def test_a_forked_child_is_refused_and_cannot_harm(make_store):
    store = make_store()
    store.add("g", layouts(x=10))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(10)})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.read("g", [])
        except ClosedError:
            store.close()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(read(store, "g", "x", 10), random_bytes(10))


@pytest.mark.parametrize(
    "options", [{"durability": "never"}, {"spare_slots": -1}, {"weights": [1, 2]}, {"weights": [0]}]
)
def test_bad_options(make_store, options):
    with pytest.raises(ConfigError):
        make_store(**options)


def test_slots_that_a_checkpoint_links_are_never_written_again(make_store, tmp_path):
    def link(store, name):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        [path] = store.locate("g").files
        (folder / "g.bin").hardlink_to(path)
        return (folder / "g.bin"), (folder / "g.bin").read_bytes()

    path = tmp_path / "run"
    store = make_store(path, durability="step", spare_slots=0)
    store.add("g", layouts(x=5000))
    store.allocate()
    links = []
    for step in (1, 2):
        write(store, "g", step, {"x": random_bytes(5000, step)})
        store.commit(step).result()
        links.append(link(store, str(step)))
    store.close()

    # Both slots have a second name: recovery makes another one, and leaves them alone.
    store = make_store(path, durability="step", spare_slots=0)
    assert store.recover().step == 2
    for step in (3, 4, 5):
        if step == 4:
            links.pop(0)[0].unlink()  # the oldest checkpoint is given up: its slot is free again
        write(store, "g", step, {"x": random_bytes(5000, step)})
        store.commit(step).result()
    [(linked, content)] = links
    assert linked.read_bytes() == content
    store.close()

    # A fresh start does not reuse them either.
    store = make_store(path, durability="step", spare_slots=0)
    store.add("g", layouts(x=5000))
    store.allocate()
    write(store, "g", 9, {"x": random_bytes(5000, 9)})
    store.close(remove=True)
    assert linked.read_bytes() == content


def test_paths_in_another_order_are_refused_by_recover(make_store, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    store = make_store(*paths, durability="step")
    store.add("g", layouts(x=3 * MIB))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(3 * MIB)})
    store.commit(1).result()
    store.close()
    store = make_store(*reversed(paths), durability="step")
    assert store.previous.steps == (1,)
    with pytest.raises(CheckpointError, match="same order"):
        store.recover()
    store.close()
    store = make_store(*paths, durability="step")
    assert store.recover().step == 1
    store.close()
    # A fresh start takes them in any order, and leaves nothing behind.
    store = make_store(*reversed(paths), durability="step")
    store.add("g", layouts(x=3 * MIB))
    store.allocate()
    store.close()
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_an_engine_that_was_closed_first(tmp_path, any_engine):
    store = FileStore(tmp_path, any_engine)
    store.add("g", layouts(x=10))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(10)})
    any_engine.close()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_recover_needs_the_same_sub_groups(make_store):
    store = make_store(durability="step")
    store.add("g", layouts(x=10))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(10)})
    store.commit(1).result()
    store.close()
    for key, size in (("g", 11), ("h", 10)):
        store = make_store(durability="step")
        store.add(key, layouts(x=size))
        with pytest.raises(CheckpointError, match="other sub-groups"):
            store.recover()
        store.close()
    store = make_store(durability="step")
    with pytest.raises(CheckpointError, match="no commit of step 7"):
        store.recover(7)
    assert store.recover(1).step == 1


def test_a_commit_takes_the_seals_that_are_on_their_way(make_store, monkeypatch):
    # The background thread sleeps: only who asks for a result does the work.
    store = make_store(durability="step")
    store.add("g", layouts(x=100))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(100, 1)})
    store.commit(1).result()
    monkeypatch.setattr(store._shared.queue, "put", lambda _: None)
    transaction = store.begin_write("g", 2)
    array = random_bytes(100, 2)
    transaction.write([piece("x", array)], owner=array)
    seal = transaction.seal()
    commit = store.commit(2)
    assert not seal.done()
    # Step 3 goes to the one slot that neither commit needs, while commit 2 is on its way.
    transaction = store.begin_write("g", 3)
    assert transaction.slot_index == 2
    commit.result()
    transaction.abort()
    store.close()
    again = make_store(durability="step")
    assert again.recover().step == 2
    np.testing.assert_array_equal(read(again, "g", "x", 100), array)
