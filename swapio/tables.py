# SPDX-License-Identifier: Apache-2.0
"""The slot table: what a slot holds, written next to its records (docs/format.md, "Slot table").

Invariant: the checksum covers every byte of the table, so equality of checksums means equality of
key, declaration, generation, block checksums and blob.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from swapio.align import PAGE_BYTES, round_up
from swapio.checksum import Hashes, hash_bytes
from swapio.errors import CorruptionError
from swapio.striping import TABLE_HEADER_BYTES, SubGroupLayout

MAGIC = b"SWAPSLOT"
FORMAT_VERSION = 1
FLAG_CHECKSUMS = 1
# magic, version, header bytes, identity, generation, records, blocks, meta bytes, flags, used
# bytes, checksum of the table with this field zero
_HEADER = struct.Struct("<8sIIQqIIIIQQ")
_CHECKSUM_OFFSET = _HEADER.size - 8
if _HEADER.size != TABLE_HEADER_BYTES:
    raise RuntimeError(f"the slot table's header has {_HEADER.size} bytes")


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The decoded table of a slot.

    Attributes:
        generation: The step whose state the slot holds.
        hashes: xxh3-64 of each block, records in order; zeros without checksums.
        has_checksums: Whether `hashes` mean anything.
        meta: The blob given to `seal`.
        table_hash: The table's own checksum.
    """

    generation: int
    hashes: Hashes
    has_checksums: bool
    meta: bytes
    table_hash: int


def encode_table(
    layout: SubGroupLayout, generation: int, hashes: Hashes, meta: bytes, *, has_checksums: bool
) -> tuple[bytes, int]:
    """Return the used pages of the table region, padded with zeros, and the table's checksum.

    The region keeps room for the largest blob; what lies behind the used pages is never written.
    """
    lengths = np.array([record.nbytes for record in layout.layouts], dtype="<u8")
    body = lengths.tobytes() + hashes.astype("<u8", copy=False).tobytes() + meta
    header = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        _HEADER.size,
        layout.identity,
        generation,
        len(layout.layouts),
        layout.num_blocks,
        len(meta),
        FLAG_CHECKSUMS if has_checksums else 0,
        _HEADER.size + len(body),
        0,
    )
    table_hash = hash_bytes(header + body)
    data = header[:_CHECKSUM_OFFSET] + struct.pack("<Q", table_hash) + body
    return data.ljust(round_up(len(data), PAGE_BYTES), b"\0"), table_hash


def used_table_bytes(layout: SubGroupLayout, first_page: bytes) -> int:
    """Return how much of a table region must be read, from its first page; nothing is trusted."""
    used = _HEADER.unpack_from(first_page)[9]
    return min(layout.table_bytes, max(PAGE_BYTES, round_up(used, PAGE_BYTES)))


def decode_table(layout: SubGroupLayout, data: bytes, where: str) -> SlotTable:
    """Check every field of the used pages of a table region and return what it says.

    Raises:
        CorruptionError: If a field is not what the layout and the checksum say; names it.
    """
    if len(data) < _HEADER.size:
        raise CorruptionError(f"{where}: a slot table of {len(data)} bytes is cut short")
    (magic, version, header_bytes, identity, generation, num_records, blocks, meta_bytes, flags,
     used, table_hash) = _HEADER.unpack_from(data)  # fmt: skip
    expected_used = _HEADER.size + 8 * len(layout.layouts) + 8 * layout.num_blocks + meta_bytes
    checks = (
        ("magic", magic, MAGIC),
        ("format version", version, FORMAT_VERSION),
        ("header length", header_bytes, _HEADER.size),
        ("identity", identity, layout.identity),
        ("number of records", num_records, len(layout.layouts)),
        ("number of blocks", blocks, layout.num_blocks),
        ("length", used, expected_used),
        ("flags", flags & ~FLAG_CHECKSUMS, 0),
    )
    for name, got, wanted in checks:
        if got != wanted:
            raise CorruptionError(
                f"{where}: slot table of {layout.key!r}: {name} is {got!r}, expected {wanted!r}"
            )
    if used > min(layout.table_bytes, len(data)):
        raise CorruptionError(f"{where}: slot table of {layout.key!r}: it ends at {len(data)}")
    if any(data[used : round_up(used, PAGE_BYTES)]):
        raise CorruptionError(f"{where}: slot table of {layout.key!r}: bytes after its end")
    zeroed = data[:_CHECKSUM_OFFSET] + bytes(8) + data[_CHECKSUM_OFFSET + 8 : used]
    if hash_bytes(zeroed) != table_hash:
        raise CorruptionError(f"{where}: slot table of {layout.key!r}: the checksum differs")
    lengths_end = _HEADER.size + 8 * num_records
    lengths = np.frombuffer(data[_HEADER.size : lengths_end], dtype="<u8").tolist()
    if lengths != [record.nbytes for record in layout.layouts]:
        raise CorruptionError(f"{where}: slot table of {layout.key!r}: record lengths {lengths}")
    hashes_end = lengths_end + 8 * blocks
    hashes = np.frombuffer(data[lengths_end:hashes_end], dtype="<u8").astype(np.uint64)
    has_checksums = bool(flags & FLAG_CHECKSUMS)
    return SlotTable(generation, hashes, has_checksums, data[hashes_end:used], table_hash)
