# SPDX-License-Identifier: Apache-2.0
"""The commit record: which slots are step N (docs/format.md, "Commit record").

Two files take turns, so that a record torn by a crash leaves the one before it whole; three in a
run of several ranks, where one may have committed a step more than another. A record is valid only
together with the slot tables it names: their checksums are in it.

Invariant: record N is written when every byte it vouches for has been written, and the slots of
record N-1 are overwritten only after record N is whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swapio.checksum import hash_bytes
from swapio.errors import CorruptionError

MAGIC = b"SWAPCMIT"
FORMAT_VERSION = 1
FILE_NAMES = ("commit-0.bin", "commit-1.bin", "commit-2.bin")
UNWRITTEN = 0xFFFFFFFF
# magic, version, header bytes, store id, step, sequence, entries, scalar bytes, payload bytes,
# total bytes, checksum of the record with this field zero
_HEADER = struct.Struct("<8sII16sqQQQQQQ")
_CHECKSUM_OFFSET = _HEADER.size - 8
_ENTRY = np.dtype(
    [
        ("identity", "<u8"),
        ("generation", "<i8"),
        ("table_hash", "<u8"),
        ("slot", "<u4"),
        ("reserved", "<u4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Entry:
    """The committed slot of one sub-group; `slot` is UNWRITTEN when it has none."""

    identity: int
    slot: int
    generation: int
    table_hash: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A decoded commit record; the entries are in the order of the manifest's sub-groups."""

    store_id: bytes
    step: int
    sequence: int
    entries: tuple[Entry, ...]
    scalars: dict[str, Any]
    payload: bytes


def encode_scalars(scalars: Any) -> bytes:
    """Return the JSON form of the scalars; floats keep every bit (also nan and infinities)."""
    return json.dumps(scalars, separators=(",", ":"), ensure_ascii=False).encode()


def encode_record(
    store_id: bytes,
    step: int,
    sequence: int,
    entries: Sequence[Entry],
    scalars: bytes,
    payload: bytes,
) -> bytes:
    """Return the bytes of a commit file."""
    table = np.zeros(len(entries), dtype=_ENTRY)
    for name in ("identity", "generation", "table_hash", "slot"):
        table[name] = [getattr(entry, name) for entry in entries]
    total = _HEADER.size + table.nbytes + len(scalars) + len(payload)
    fields = (MAGIC, FORMAT_VERSION, _HEADER.size, store_id, step, sequence, len(entries))
    header = _HEADER.pack(*fields, len(scalars), len(payload), total, 0)
    body = table.tobytes() + scalars + payload
    checksum = struct.pack("<Q", hash_bytes(header + body))
    return header[:_CHECKSUM_OFFSET] + checksum + body


def decode_record(data: bytes, where: str) -> StepRecord | None:
    """Check every field of a commit file; bytes after the record are ignored.

    Returns:
        None for a file that was never written (empty, or zeros).

    Raises:
        CorruptionError: If the record is torn or changed; names the field.
    """
    if not any(data[: _HEADER.size]):
        return None
    if len(data) < _HEADER.size:
        raise CorruptionError(f"{where}: a commit record of {len(data)} bytes is cut short")
    (magic, version, header_bytes, store_id, step, sequence, num_entries, scalar_bytes,
     payload_bytes, total, checksum) = _HEADER.unpack_from(data)  # fmt: skip
    expected = _HEADER.size + num_entries * _ENTRY.itemsize + scalar_bytes + payload_bytes
    checks = (
        ("magic", magic, MAGIC),
        ("format version", version, FORMAT_VERSION),
        ("header length", header_bytes, _HEADER.size),
        ("length", total, expected),
    )
    for name, got, wanted in checks:
        if got != wanted:
            raise CorruptionError(f"{where}: commit record: {name} is {got!r}, expected {wanted!r}")
    if len(data) < total:
        raise CorruptionError(f"{where}: a commit record of {total} bytes ends at {len(data)}")
    body = data[_HEADER.size : total]
    if hash_bytes(data[:_CHECKSUM_OFFSET] + bytes(8) + body) != checksum:
        raise CorruptionError(f"{where}: the checksum of the commit record of step {step} differs")
    entries_end = num_entries * _ENTRY.itemsize
    table = np.frombuffer(body[:entries_end], dtype=_ENTRY)
    entries = tuple(
        Entry(*fields)
        for fields in zip(
            *(table[name].tolist() for name in ("identity", "slot", "generation", "table_hash")),
            strict=True,
        )
    )
    scalars = json.loads(body[entries_end : entries_end + scalar_bytes] or b"{}")
    payload = body[entries_end + scalar_bytes :]
    return StepRecord(store_id, step, sequence, entries, scalars, payload)
