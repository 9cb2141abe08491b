# SPDX-License-Identifier: Apache-2.0
"""Checksums of blocks: native, by the xxhash wheel, and by the wheel's own one-shot function."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from swapio import _kernels, checksum
from swapio.align import BLOCK_BYTES

LENGTHS = [1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77]


@pytest.fixture
def memory():
    return np.random.default_rng(3).integers(0, 256, 4 * BLOCK_BYTES, dtype=np.uint8)


def expected(memory, start, nbytes):
    data = memory[start : start + nbytes].tobytes()
    cuts = range(0, nbytes, BLOCK_BYTES)
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in cuts]


@pytest.mark.parametrize("way", ["as built", "by the wheel"])
def test_ranges_are_cut_in_blocks_and_hashed_in_order(memory, monkeypatch, way):
    if way == "by the wheel":
        monkeypatch.setattr(checksum, "_hash_spans", checksum._hash_spans_in_python)
        monkeypatch.setattr(checksum, "_hash_blocks", checksum._hash_blocks_as_spans)
    starts = [13 * number for number in range(len(LENGTHS))]
    ranges = [(memory.ctypes.data + s, n) for s, n in zip(starts, LENGTHS, strict=True)]
    wanted = [h for s, n in zip(starts, LENGTHS, strict=True) for h in expected(memory, s, n)]
    assert checksum.range_hashes(ranges).tolist() == wanted
    assert checksum.range_hashes([]).tolist() == []
    assert checksum.block_hashes(memory.ctypes.data, 0).tolist() == []
    addresses = memory.ctypes.data + np.array(starts, np.uint64)
    spans = checksum.span_hashes(addresses, np.array(LENGTHS, np.int64))
    assert spans.tolist() == [
        xxhash.xxh3_64_intdigest(memory[s : s + n].tobytes())
        for s, n in zip(starts, LENGTHS, strict=True)
    ]
    assert checksum.span_hashes(addresses[:0], np.empty(0, np.int64)).tolist() == []


def test_a_build_without_xxhash_takes_the_wheel(monkeypatch):
    """The native function is there in such a build, and raises."""
    assert checksum._native("hash_blocks") is (_kernels.hash_blocks if _kernels.has_xxh3 else None)
    monkeypatch.setattr(_kernels, "has_xxh3", False)
    assert checksum._native("hash_blocks") is None


@pytest.mark.skipif(not _kernels.has_xxh3, reason="built without xxhash.h")
@pytest.mark.parametrize(
    ("ranges", "block_bytes", "message"),
    [([(0, 1)], 4096, "null"), ([(64, -1)], 4096, "negative"), ([], 0, "block_bytes")],
)
def test_bad_ranges_are_refused(ranges, block_bytes, message):
    with pytest.raises(ValueError, match=message):
        _kernels.hash_blocks(ranges, block_bytes)
