# SPDX-License-Identifier: Apache-2.0
"""docs/format.md is enough to read a store: a reader that shares no code with the store."""

from __future__ import annotations

import json
import struct

import numpy as np
import xxhash

from support.stores import MIB, layouts, random_bytes, write
from swapio.filestore import FileStore


def xxh3(data):
    return xxhash.xxh3_64_intdigest(bytes(data))


def read_manifest(folder):
    content = json.loads((folder / "manifest.json").read_text())
    stated = content.pop("hash")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert stated == f"{xxh3(text.encode()):016x}"
    assert (content["format"], content["version"]) == ("swapio-store", 1)
    assert content["block_bytes"] == 2**20
    return content


def read_commit(folder, store_id):
    """Return step, entries, scalars and payload of the newest record."""
    found = []
    for name in ("commit-0.bin", "commit-1.bin"):
        data = (folder / name).read_bytes()
        assert data[:8] == b"SWAPCMIT"
        version, header = struct.unpack_from("<II", data, 8)
        step, sequence, entries, scalars, payload, total = struct.unpack_from("<qQQQQQ", data, 32)
        checksum = struct.unpack_from("<Q", data, 80)[0]
        assert (version, header) == (1, 88)
        assert data[16:32].hex() == store_id
        assert xxh3(data[:80] + bytes(8) + data[88:total]) == checksum
        table = [struct.unpack_from("<QqQII", data, 88 + 32 * index) for index in range(entries)]
        end = 88 + 32 * entries
        text = json.loads(data[end : end + scalars])
        found.append((sequence, step, table, text, data[end + scalars : total]))
        assert total == end + scalars + payload
    return max(found)[1:]


def place(manifest, sub_group):
    """Return `{(record, block): (path, offset in region, nbytes)}` by the rules of the page."""
    pattern = manifest["pattern"]
    ends = [0] * manifest["num_paths"]
    ends[0] = sub_group["table_bytes"]
    places = {}
    number = 0
    for name, length in sub_group["records"]:
        for start in range(0, length, MIB):
            nbytes = min(MIB, length - start)
            path = pattern[(number + sub_group["phase"]) % len(pattern)]
            places[name, start // MIB] = (path, ends[path], nbytes)
            ends[path] += -(-nbytes // 4096) * 4096
            number += 1
    assert ends == sub_group["region_bytes"]
    return places


def read_table(data, sub_group):
    """Return generation, checksum, block checksums and blob of a slot table."""
    assert data[:8] == b"SWAPSLOT"
    version, header, identity, generation, records, blocks, meta, flags, used, checksum = (
        struct.unpack_from("<IIQqIIIIQQ", data, 8)
    )
    declaration = [sub_group["key"], sub_group["records"], sub_group["meta_bytes"]]
    assert identity == xxh3(json.dumps(declaration, separators=(",", ":")).encode())
    assert (version, header, flags, records) == (1, 64, 1, len(sub_group["records"]))
    assert xxh3(data[:56] + bytes(8) + data[64:used]) == checksum
    assert not any(data[used : -(-used // 4096) * 4096])
    lengths = struct.unpack_from(f"<{records}Q", data, 64)
    assert list(lengths) == [length for _, length in sub_group["records"]]
    end = 64 + 8 * records
    hashes = struct.unpack_from(f"<{blocks}Q", data, end)
    assert used == end + 8 * blocks + meta
    assert len(data) == -(-(end + 8 * blocks + sub_group["meta_bytes"]) // 4096) * 4096
    return generation, checksum, hashes, data[end + 8 * blocks : used]


def test_the_page_is_enough_to_read_a_store(engine, tmp_path):
    paths = [tmp_path / name for name in "abc"]
    contents = {
        "größe": {"x": random_bytes(7 * MIB + 13, 1), "y": random_bytes(9, 2)},
        "large": {"x": random_bytes(40 * MIB, 3)},
        "tail": {"x": random_bytes(4096, 4)},
    }
    with FileStore(paths, engine, durability="step", weights=[2, 1, 1]) as store:
        for key, records in contents.items():
            sizes = {name: array.nbytes for name, array in records.items()}
            store.add(key, layouts(**sizes), meta_bytes=7)
        store.allocate()
        for step in (1, 2, 3):
            for key, records in contents.items():
                write(store, key, step, records, key[:3].encode())
            store.commit(step, b"blob", {"lr": 0.5 / step}).result()

    folders = [path / "swapio-run" for path in paths]
    manifest = read_manifest(folders[0])
    assert [read_manifest(folder)["path_index"] for folder in folders] == [0, 1, 2]
    step, entries, scalars, payload = read_commit(folders[0], manifest["store_id"])
    assert (step, scalars, payload) == (3, {"lr": 0.5 / 3}, b"blob")
    position = 0
    for group in manifest["groups"]:
        for sub_group in group["sub_groups"]:
            _, generation, table_hash, slot, reserved = entries[position]
            position += 1
            files = [
                (folder / "slots" / f"{group['name']}.slot{slot}.bin").read_bytes() if size else b""
                for folder, size in zip(folders, group["file_bytes"], strict=True)
            ]
            assert [len(data) for data in files] == group["file_bytes"]
            bases = sub_group["region_offsets"]
            table = files[0][bases[0] :][: sub_group["table_bytes"]]
            found, checksum, hashes, meta = read_table(table, sub_group)
            assert (found, checksum, reserved) == (generation, table_hash, 0)
            assert meta == sub_group["key"][:3].encode()
            expected = contents[sub_group["key"]]
            for number, ((name, block), (path, offset, nbytes)) in enumerate(
                place(manifest, sub_group).items()
            ):
                data = files[path][bases[path] + offset :][:nbytes]
                assert xxh3(data) == hashes[number]
                wanted = expected[name][block * MIB :][:nbytes]
                np.testing.assert_array_equal(np.frombuffer(data, dtype=np.uint8), wanted)
    assert position == len(contents)
