# SPDX-License-Identifier: Apache-2.0
"""Transfers of pieces between memory and a slot: requests, checksums, and their futures.

One call of `read` or `write` is one submission to the engine. Checksums of what is written are
computed before it is submitted, those of what was read after it has arrived, by the caller who
waits for it.

Invariants: no block reaches a reader unverified; a block whose write failed raises that error to
readers until it is written again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swapio.aio import OP_READ, OP_WRITE, Engine, Request
from swapio.align import BLOCK_BYTES
from swapio.checksum import Hashes, range_hashes
from swapio.errors import ConfigError, CorruptionError, SwapStateError
from swapio.persistent import PersistentIO
from swapio.slots import Slot, SubGroup
from swapio.store import Piece, StoreStats, TransferFuture
from swapio.striping import RecordPlace

_BlockRange = tuple[int, int]  # (first, end) among the sub-group's blocks
_Settle = Callable[[Sequence[_BlockRange]], None]


class Counters:
    """The store's statistics; `add` is atomic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = dict(StoreStats()._asdict())

    def add(self, **amounts: float) -> None:
        """Add to the named counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def snapshot(self) -> StoreStats:
        """Return the values."""
        with self._lock:
            return StoreStats(**self._values)


class ReadTransfer(TransferFuture):
    """A read that is verified in `result`, by whoever calls it first."""

    def __init__(
        self, io: PersistentIO, spans: _Spans, expected: Hashes | None, owner: object
    ) -> None:
        self.nbytes = spans.nbytes
        self._io = io
        self._spans = spans
        self._expected = expected
        self._owner = owner
        self._lock = threading.Lock()
        self._error: CorruptionError | None = None

    def result(self, timeout: float | None = None) -> int:
        """Wait for the bytes and verify them; see `TransferFuture.result`."""
        _wait(self, self._io, timeout)
        with self._lock:
            if self._expected is not None:
                self._error = self._spans.verify(self._expected)
            self._expected = None
            self._owner = None
        if self._error is not None:
            raise self._error
        return self.nbytes

    def done(self) -> bool:
        """Return whether the bytes have arrived."""
        return self._io.done()


class WriteTransfer(TransferFuture):
    """A write; its end, good or bad, is noted once at the slot's blocks."""

    def __init__(
        self, io: PersistentIO, slot: Slot, blocks: list[_BlockRange], nbytes: int
    ) -> None:
        self.nbytes = nbytes
        self.blocks = blocks
        self._io = io
        self._slot = slot
        self._lock = threading.Lock()
        self._is_noted = False  # a later write of these blocks has the last word

    def result(self, timeout: float | None = None) -> int:
        """Wait for the bytes to be written; see `TransferFuture.result`."""
        try:
            _wait(self, self._io, timeout)
        except TimeoutError:
            raise
        except Exception as error:
            self._note(error)
            raise
        self._note(None)
        return self.nbytes

    def _note(self, error: Exception | None) -> None:
        with self._lock:
            if self._is_noted:
                return
            self._is_noted = True
            bad, left_out = self._slot.bad, self._slot.left_out
            if error is not None:
                self._slot.has_failed = True
                for first, end in self.blocks:
                    bad.update(dict.fromkeys(range(first, end), error))
            elif bad or left_out:
                for first, end in self.blocks:
                    left_out.difference_update(range(first, end))
                    for block in range(first, end):
                        bad.pop(block, None)

    def done(self) -> bool:
        """Return whether the write is over."""
        return self._io.done()


class Mover:
    """Moves pieces of slots.

    Args:
        engine: Where transfers are submitted.
        counters: Counts bytes and the time of checksums.
        has_checksums: Whether blocks are hashed at all.
    """

    def __init__(self, engine: Engine, counters: Counters, *, has_checksums: bool) -> None:
        self.engine = engine
        self.has_checksums = has_checksums
        self._counters = counters

    def read(
        self, sub_group: SubGroup, slot: Slot, pieces: Sequence[Piece], owner: object,
        settle: _Settle | None = None,
    ) -> ReadTransfer:  # fmt: skip
        """Start to read pieces of a slot; returns after queueing.

        `settle` is called with the blocks first, to wait for writes of them that are on their way.
        """
        requests, blocks = _plan(sub_group, slot, pieces, OP_READ)
        if settle is not None:
            settle(blocks)
        if slot.bad or slot.left_out:
            _raise_if_bad(sub_group, slot, blocks)
        spans = _Spans(self, sub_group, slot, pieces)
        expected = None
        if self.has_checksums:
            # Copied now: a transaction in place may write the same blocks before the result.
            expected = _concatenate([slot.hashes[first:end] for first, end in blocks])
        io = PersistentIO(self.engine, requests, owner)
        return ReadTransfer(io, spans, expected, owner)

    def write(
        self, sub_group: SubGroup, slot: Slot, pieces: Sequence[Piece], owner: object,
        settle: _Settle | None = None,
    ) -> WriteTransfer:  # fmt: skip
        """Hash pieces and start to write them; returns after queueing. `settle` as in `read`."""
        requests, blocks = _plan(sub_group, slot, pieces, OP_WRITE)
        if settle is not None:
            settle(blocks)
        nbytes = sum(piece[2] for piece in pieces)
        if self.has_checksums:
            hashes = self.hash(pieces)
            position = 0
            for first, end in blocks:
                slot.hashes[first:end] = hashes[position : position + end - first]
                position += end - first
        return WriteTransfer(PersistentIO(self.engine, requests, owner), slot, blocks, nbytes)

    def blocks(self, sub_group: SubGroup, slot: Slot, pieces: Sequence[Piece]) -> list[_BlockRange]:
        """The ranges of blocks that pieces are."""
        return _plan(sub_group, slot, pieces, OP_WRITE)[1]

    def hash(self, pieces: Sequence[Piece]) -> Hashes:
        """Return the checksums of the blocks of pieces, in order, and count the time."""
        started = time.perf_counter()
        hashes = range_hashes([(piece[3], piece[2]) for piece in pieces])
        self._counters.add(hash_seconds=time.perf_counter() - started)
        return hashes


class _Spans:
    """The memory of a read, and how to say what is wrong with it."""

    def __init__(
        self, mover: Mover, sub_group: SubGroup, slot: Slot, pieces: Sequence[Piece]
    ) -> None:
        self.nbytes = sum(piece[2] for piece in pieces)
        self._mover = mover
        self._sub_group = sub_group
        self._slot = slot
        self._pieces = pieces

    def verify(self, expected: Hashes) -> CorruptionError | None:
        found = self._mover.hash(self._pieces)
        different = np.flatnonzero(found != expected)
        if not len(different):
            return None
        position = index = int(different[0])
        for piece in self._pieces:
            count = -(-piece[2] // BLOCK_BYTES)
            if position < count:
                break
            position -= count
        start = piece[1] + position * BLOCK_BYTES
        path_index, offset, length = self._sub_group.layout.places[piece[0]].pieces(
            start, min(BLOCK_BYTES, piece[1] + piece[2] - start)
        )[0]
        file = self._slot.files[path_index]
        path = file.path if file is not None else "?"
        return CorruptionError(
            f"sub-group {self._sub_group.key!r}, record {piece[0]!r}, bytes {start} to "
            f"{start + length}: the checksum is {int(found[index]):016x}, written was "
            f"{int(expected[index]):016x} ({len(different)} of {len(found)} blocks differ; "
            f"{path} at offset {self._slot.bases[path_index] + offset}). The device or another "
            "process changed the file; resume from the last checkpoint or commit"
        )


def _wait(transfer: TransferFuture, io: PersistentIO, timeout: float | None) -> None:
    started = time.perf_counter()
    try:
        io.result(timeout)
    finally:
        transfer.wait_seconds += time.perf_counter() - started


def _concatenate(parts: list[Hashes]) -> Hashes:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _plan(
    sub_group: SubGroup, slot: Slot, pieces: Sequence[Piece], op: int
) -> tuple[list[Request], list[_BlockRange]]:
    places = sub_group.layout.places
    files = slot.files
    bases = slot.bases
    requests: list[Request] = []
    blocks: list[_BlockRange] = []
    for piece in pieces:
        name, start, nbytes, address = piece
        place = places.get(name)
        if place is None or start % BLOCK_BYTES or nbytes <= 0 or start < 0:
            raise _bad_piece(sub_group, place, piece)
        end = start + nbytes
        if end != place.nbytes and (end > place.nbytes or nbytes % BLOCK_BYTES):
            raise _bad_piece(sub_group, place, piece)
        first = place.first_block + start // BLOCK_BYTES
        blocks.append((first, first - (-nbytes // BLOCK_BYTES)))
        if len(place.runs) == 1 and (file := files[place.runs[0][0]]) is not None:
            path, offset = place.runs[0]
            requests.append(Request(op, file, address, nbytes, bases[path] + offset + start))
            continue
        for path, offset, length in place.pieces(start, nbytes):
            requests.append(Request(op, _file(files[path]), address, length, bases[path] + offset))
            address += length
    return requests, blocks


def _file(file: Any) -> Any:
    if file is None:
        raise SwapStateError("a run lies in a file that its layout gives no bytes")
    return file


def _bad_piece(sub_group: SubGroup, place: RecordPlace | None, piece: Piece) -> ConfigError:
    if place is None:
        known = ", ".join(sub_group.layout.places)
        return ConfigError(
            f"sub-group {sub_group.key!r} has no record {piece[0]!r}; it has {known}"
        )
    return ConfigError(
        f"sub-group {sub_group.key!r}, record {piece[0]!r} of {place.nbytes} bytes: a piece of "
        f"{piece[2]} bytes at {piece[1]} is not whole blocks of {BLOCK_BYTES} bytes inside it"
    )


def _raise_if_bad(sub_group: SubGroup, slot: Slot, blocks: list[_BlockRange]) -> None:
    for first, end in blocks:
        for block in range(first, end):
            if block in slot.left_out:
                raise SwapStateError(
                    f"sub-group {sub_group.key!r}: the newest bytes of block {block} are in memory "
                    "and were not written yet"
                )
            error = slot.bad.get(block)
            if error is not None:
                raise SwapStateError(
                    f"sub-group {sub_group.key!r}: block {block} was not written whole and must "
                    f"be written again before it is read: {error}"
                ) from error
