# SPDX-License-Identifier: Apache-2.0
"""A changed or missing byte anywhere is found: by a checksum, a field, or a length."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.blocking_engine import BlockingEngine
from support.stores import MIB, layouts, random_bytes, read, write
from swapio.commit import FILE_NAMES, Entry, decode_record, encode_record, encode_scalars
from swapio.errors import CheckpointError, CorruptionError
from swapio.filestore import FileStore
from swapio.manifest import read_manifest
from swapio.striping import lay_out
from swapio.tables import decode_table, encode_table

SIZE = 2 * MIB + 100


def flip(path, offset, mask=0x10):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("offset", [0, 1, MIB - 1, MIB, 2 * MIB + 99])
def test_a_flipped_byte_is_found_in_its_block_only(make_store, offset):
    store = make_store()
    store.add("layer.0", layouts(exp_avg=SIZE, other=10))
    store.allocate()
    array = random_bytes(SIZE)
    write(store, "layer.0", 3, {"exp_avg": array, "other": array[:10]})
    run = store.locate("layer.0").records["exp_avg"][0]
    flip(run.path, run.offset + offset)
    with pytest.raises(CorruptionError) as raised:
        read(store, "layer.0", "exp_avg", SIZE)
    start = offset // MIB * MIB
    for text in ("layer.0", "exp_avg", f"bytes {start} to", "slot0.bin", f"{run.offset + start}"):
        assert text in str(raised.value)
    for block in range(3):
        if block != offset // MIB:
            length = min(MIB, SIZE - block * MIB)
            got = read(store, "layer.0", "exp_avg", length, block * MIB)
            np.testing.assert_array_equal(got, array[block * MIB : block * MIB + length])
    # Written again, it is whole again.
    write(store, "layer.0", 4, {"exp_avg": array})
    np.testing.assert_array_equal(read(store, "layer.0", "exp_avg", SIZE), array)


def test_the_future_raises_at_each_call(make_store):
    store = make_store()
    store.add("g", layouts(x=100))
    store.allocate()
    write(store, "g", 1, {"x": random_bytes(100)})
    run = store.locate("g").records["x"][0]
    flip(run.path, run.offset)
    array = np.zeros(100, dtype=np.uint8)
    future = store.read("g", [("x", 0, 100, array.ctypes.data)], owner=array)
    assert isinstance(future.exception(), CorruptionError)
    with pytest.raises(CorruptionError):
        future.result()


def test_without_checksums_nothing_is_verified(make_store):
    store = make_store(checksum=False)
    store.add("g", layouts(x=100))
    store.allocate()
    array = random_bytes(100)
    write(store, "g", 1, {"x": array})
    run = store.locate("g").records["x"][0]
    flip(run.path, run.offset + 5, 0xFF)
    assert read(store, "g", "x", 100)[5] == array[5] ^ 0xFF
    assert store.stats().hash_seconds == 0


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_truncated_file_is_an_error_never_stale_bytes(make_store, cut):
    store = make_store(durability="step")
    store.add("g", layouts(x=8192))
    store.allocate()
    array = random_bytes(8192)
    write(store, "g", 1, {"x": array})
    store.commit(1).result()
    path = store.locate("g").records["x"][0].path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with pytest.raises((OSError, CorruptionError)):
        read(store, "g", "x", 8192)
    store.close()
    again = make_store(durability="step")
    with pytest.raises(CorruptionError, match="shorter than recorded"):
        again.recover()


@pytest.fixture
def committed(tmp_path):
    """A folder with commits of steps 1 and 2, and the content of both."""
    contents = {1: random_bytes(SIZE, 1), 2: random_bytes(SIZE, 2)}
    with (
        BlockingEngine() as engine,
        FileStore(tmp_path / "run", engine, durability="step") as store,
    ):
        store.add("g", layouts(x=SIZE), meta_bytes=20)
        store.allocate()
        for step, array in contents.items():
            write(store, "g", step, {"x": array}, b"meta")
            store.commit(step, b"payload", {"lr": step}).result()
    return tmp_path / "run", contents


def recover(path):
    """Return `(step, content)` of what a new process recovers."""
    with BlockingEngine() as engine, FileStore(path, engine, durability="step") as store:
        record = store.recover()
        return record.step, read(store, "g", "x", SIZE)


def damaged_copy(path, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(path, target)
    return target / "swapio-run"


def test_every_byte_of_the_newest_commit_record_counts(committed, tmp_path):
    path, contents = committed
    newest = path / "swapio-run" / FILE_NAMES[1]
    size = newest.stat().st_size
    for offset in range(size):
        data = bytearray(newest.read_bytes())
        data[offset] ^= 1
        with pytest.raises(CorruptionError):
            decode_record(bytes(data), "commit")
    for length in range(1, size):
        with pytest.raises(CorruptionError):
            decode_record(newest.read_bytes()[:length], "commit")
    folder = damaged_copy(path, tmp_path / "copy")
    flip(folder / FILE_NAMES[1], size // 2)
    step, array = recover(tmp_path / "copy")
    assert step == 1
    np.testing.assert_array_equal(array, contents[1])


@pytest.mark.parametrize("offset", [0, 9, 17, 25, 60, 64, 72, 90, 100, 2000, 4095])
def test_a_damaged_slot_table_falls_back_to_the_older_commit(committed, tmp_path, offset):
    path, contents = committed
    folder = damaged_copy(path, tmp_path / "copy")
    flip(folder / "slots" / "00000-g.slot1.bin", offset)
    step, array = recover(tmp_path / "copy")
    assert step == 1
    np.testing.assert_array_equal(array, contents[1])


def test_no_whole_commit_is_an_error_not_a_fresh_start(committed, tmp_path):
    path, _ = committed
    folder = damaged_copy(path, tmp_path / "copy")
    for slot in (0, 1):
        flip(folder / "slots" / f"00000-g.slot{slot}.bin", 30)
    with pytest.raises(CheckpointError, match="no commit is whole"):
        recover(tmp_path / "copy")
    # And it is still there afterwards.
    assert (folder / FILE_NAMES[0]).exists()


def test_damaged_data_is_found_when_it_is_read(committed, tmp_path):
    path, _ = committed
    folder = damaged_copy(path, tmp_path / "copy")
    flip(folder / "slots" / "00000-g.slot1.bin", 4096 + MIB + 5)
    with pytest.raises(CorruptionError, match="checksum"):
        recover(tmp_path / "copy")


@pytest.mark.parametrize("slot", [0, 1])
def test_a_missing_file(committed, tmp_path, slot):
    path, _ = committed
    folder = damaged_copy(path, tmp_path / "copy")
    (folder / "slots" / f"00000-g.slot{slot}.bin").unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        recover(tmp_path / "copy")


def test_a_changed_manifest_is_refused(committed, tmp_path):
    path, _ = committed
    folder = damaged_copy(path, tmp_path / "copy")
    text = (folder / "manifest.json").read_text()
    changes = [('"version": 1', '"version": 2'), (str(SIZE), str(SIZE + 1)), ("{", "[", 1)]
    for change in changes:
        (folder / "manifest.json").write_text(text.replace(*change))
        with pytest.raises(CorruptionError):
            read_manifest(folder)
    content = json.loads(text)
    content["num_paths"] = 7
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CorruptionError, match="hash differs"):
        read_manifest(folder)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_byte_of_a_slot_table_counts(data):
    sizes = {
        f"r{i}": n
        for i, n in enumerate(data.draw(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=4)))
    }
    layout = lay_out("key", layouts(**sizes), 30, (0,))
    hashes = np.array(
        data.draw(
            st.lists(
                st.integers(0, 2**64 - 1), min_size=layout.num_blocks, max_size=layout.num_blocks
            )
        ),
        dtype=np.uint64,
    )
    meta = data.draw(st.binary(max_size=30))
    generation = data.draw(st.integers(-(2**63), 2**63 - 1))
    table, table_hash = encode_table(layout, generation, hashes, meta, has_checksums=True)
    decoded = decode_table(layout, table, "here")
    assert (decoded.generation, decoded.meta, decoded.table_hash) == (generation, meta, table_hash)
    np.testing.assert_array_equal(decoded.hashes, hashes)
    changed = bytearray(table)
    changed[data.draw(st.integers(0, len(table) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError):
        decode_table(layout, bytes(changed), "here")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(-1, 2**62),
            st.integers(0, 2**64 - 1),
        )
    ),
    st.dictionaries(st.text(), st.floats(allow_nan=False)),
    st.binary(),
)
def test_commit_records_round_trip(entries, scalars, payload):
    entries = tuple(Entry(*entry) for entry in entries)
    data = encode_record(bytes(16), 5, 6, entries, encode_scalars(scalars), payload)
    record = decode_record(data + b"older and longer", "commit")
    assert (record.step, record.sequence, record.entries) == (5, 6, entries)
    assert (record.scalars, record.payload) == (scalars, payload)
    assert decode_record(b"", "commit") is None
    assert decode_record(bytes(500), "commit") is None


def test_verify_reads_tables_and_blocks(make_store):
    store = make_store()
    for key in ("a", "b"):
        store.add(key, layouts(x=9 * MIB + 1, y=10))
    store.add("unwritten", layouts(x=10))
    store.allocate()
    for key in ("a", "b"):
        write(store, key, 1, {"x": random_bytes(9 * MIB + 1), "y": random_bytes(10)})
    calls = []
    assert store.verify(progress=lambda done, total: calls.append((done, total))) == 2 * (
        9 * MIB + 11
    )
    assert calls[-1] == (2 * (9 * MIB + 11),) * 2
    assert store.host_bytes == 2 * (11 + 11 + 1) * 8 + (4 << 20)
    location = store.locate("b")
    flip(location.table.path, location.table.offset + 100)
    with pytest.raises(CorruptionError, match="slot table of 'b'"):
        store.verify()
    store.verify(["a"])
    flip(location.table.path, location.table.offset + 100)
    run = location.records["x"][0]
    flip(run.path, run.offset + 8 * MIB)
    with pytest.raises(CorruptionError, match=f"bytes {8 * MIB} to"):
        store.verify()
