# SPDX-License-Identifier: Apache-2.0
"""The write transaction of a sub-group: write, then seal or abort.

    begin_write -> write ... write -> seal:  wait for the writes
                                             carry unwritten blocks from the LIVE slot, except
                                               those that are left out
                                             write the slot table
                                             the target becomes LIVE
                                   -> abort: wait for the writes; the LIVE slot stays

Invariants: the target becomes LIVE only when data and table are written whole; a failure leaves
the LIVE slot as it was, except for the blocks that were overwritten in place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from swapio.aio import OP_READ, OP_WRITE, File, Request
from swapio.align import BLOCK_BYTES, PAGE_BYTES
from swapio.buffers import BufferPool, Lease
from swapio.errors import ConfigError, SwapStateError
from swapio.persistent import PersistentIO
from swapio.slots import Slot, SubGroup
from swapio.store import Piece, TransferFuture, WriteTransaction
from swapio.tables import SlotTable, decode_table, encode_table, used_table_bytes
from swapio.tasks import Task, TaskQueue
from swapio.transfer import Counters, Mover, WriteTransfer

SCRATCH_BYTES = 4 << 20


class Scratch:
    """One aligned buffer that seals and recovery share; made when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lease: Lease | None = None

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[Lease]:
        """Lend a buffer of at least `nbytes` to one user at a time."""
        with self._lock:
            if self._lease is None or self._lease.nbytes < nbytes:
                size = max(nbytes, SCRATCH_BYTES)
                self._lease = BufferPool(size, name="scratch", pin=False).lease(size)
            try:
                yield self._lease
            except BaseException:
                # A transfer may still be on its way into it: the next user gets another one.
                self._lease = None
                raise

    @property
    def nbytes(self) -> int:
        """Its size; 0 while nobody has needed it."""
        lease = self._lease
        return 0 if lease is None else lease.nbytes

    def close(self) -> None:
        """Give the memory up."""
        with self._lock:
            self._lease = None


class Shared:
    """What all transactions of a store use together."""

    def __init__(self, mover: Mover, counters: Counters, queue: TaskQueue) -> None:
        self.mover = mover
        self.counters = counters
        self.queue = queue
        self.lock = threading.RLock()
        self.scratch = Scratch()
        self.dirty: dict[int, File] = {}  # written since the last fdatasync, by descriptor


class FileTransaction(WriteTransaction):
    """The transaction of a `FileStore`; made by `FileStore.begin_write`."""

    def __init__(self, shared: Shared, sub_group: SubGroup, slot: Slot, generation: int) -> None:
        self.key = sub_group.key
        self.generation = generation
        self.slot_index = slot.index
        self.is_in_place = slot is sub_group.live
        self._shared = shared
        self._sub_group = sub_group
        self._slot = slot
        self._meta = b""
        self._is_open = True
        self._transfers: list[WriteTransfer] = []
        self._is_written = np.zeros(sub_group.layout.num_blocks, dtype=np.bool_)
        self._is_left_out = np.zeros_like(self._is_written)

    def write(self, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Hash and start to write blocks; see `WriteTransaction.write`."""
        self._require_open()
        transfer = self._shared.mover.write(self._sub_group, self._slot, pieces, owner, self.settle)
        for first, end in transfer.blocks:
            self._is_written[first:end] = True
        self._transfers.append(transfer)
        self._shared.counters.add(bytes_written=transfer.nbytes, num_writes=1)
        return transfer

    def settle(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Wait for the writes of any of `blocks` that are on their way; their errors stay theirs.

        The engine would order what overlaps, but not the second try of a write that fails.
        """
        if not any(self._is_written[first:end].any() for first, end in blocks):
            return
        for transfer in self._transfers:
            if any(
                first < its_end and its_first < end
                for its_first, its_end in transfer.blocks
                for first, end in blocks
            ):
                transfer.exception()

    def leave_out(self, pieces: Sequence[Piece]) -> None:
        """Leave blocks for later; see `WriteTransaction.leave_out`."""
        self._require_open()
        if not self.is_in_place:
            for first, end in self._shared.mover.blocks(self._sub_group, self._slot, pieces):
                self._is_left_out[first:end] = True

    def seal(self, meta: bytes = b"") -> TransferFuture:
        """Make the content LIVE; see `WriteTransaction.seal`.

        Raises:
            ConfigError: If `meta` is longer than the sub-group declared.
        """
        self._require_open()
        if len(meta) > self._sub_group.layout.meta_bytes:
            raise ConfigError(
                f"sub-group {self.key!r} reserved {self._sub_group.layout.meta_bytes} bytes for "
                f"its blob and got {len(meta)}"
            )
        self._meta = bytes(meta)
        task = Task(self._run_seal)
        with self._shared.lock:
            self._is_open = False
            self._sub_group.has_transaction = False
            self._sub_group.pending = task
            self._sub_group.pending_slot = self._slot
        self._shared.queue.put(task)
        return task

    def abort(self) -> None:
        """Drop the transaction; see `WriteTransaction.abort`."""
        if not self._is_open:
            return
        for transfer in self._transfers:
            transfer.exception()
        if self.is_in_place:
            reason = SwapStateError(f"the write of generation {self.generation} was aborted")
            for block in np.flatnonzero(self._is_written).tolist():
                self._slot.bad.setdefault(block, reason)
        with self._shared.lock:
            self._is_open = False
            self._slot.is_target = False
            self._slot.has_failed |= self.is_in_place and bool(self._is_written.any())
            self._sub_group.has_transaction = False

    def _require_open(self) -> None:
        if not self._is_open:
            raise SwapStateError(f"the transaction of {self.key!r} was sealed or aborted")

    def _run_seal(self) -> int:
        try:
            self._wait_for_writes()
            if self._slot is not self._sub_group.live:
                self._leave_out_the_same()
                self._carry_unwritten()
            table_hash = self._write_table()
        except Exception as error:
            with self._shared.lock:
                self._slot.has_failed = True
                self._slot.is_target = False
                self._sub_group.failure = error
                self._sub_group.pending_slot = None
            raise
        with self._shared.lock:
            slot = self._slot
            slot.generation = self.generation
            slot.table_hash = table_hash
            slot.meta = self._meta
            slot.is_target = slot.has_failed = False
            slot.left_out.update(np.flatnonzero(self._is_left_out).tolist())
            self._sub_group.live = slot
            self._sub_group.failure = None
            self._sub_group.pending_slot = None
            self._shared.dirty.update((f.fd, f) for f in slot.files if f is not None)
        return sum(transfer.nbytes for transfer in self._transfers)

    def _wait_for_writes(self) -> None:
        first: Exception | None = None
        for transfer in self._transfers:
            try:
                transfer.result()
            except Exception as error:
                first = first or error
        if first is not None and self._slot.bad:
            live = self._sub_group.live
            state = "has lost the blocks that failed" if self.is_in_place else "is still whole"
            if live is not None:
                first.add_note(
                    f"sub-group {self.key!r}: generation {live.generation} in slot {live.index} "
                    f"{state}; write again, another slot is used if one is free"
                )
            raise first

    def _leave_out_the_same(self) -> None:
        live = self._sub_group.live
        if live is not None and live.left_out:
            self._is_left_out[sorted(live.left_out)] = True
        self._is_left_out &= ~self._is_written

    def _carry_unwritten(self) -> None:
        if (self._is_written | self._is_left_out).all():
            return
        with self._shared.scratch.borrow(SCRATCH_BYTES) as lease:
            if self._sub_group.live is None:
                np.frombuffer(lease.memory, dtype=np.uint8)[:] = 0
            for record, start, nbytes in self._unwritten_ranges():
                self._carry(Piece(record, start, nbytes, lease.address), lease)
                self._shared.counters.add(bytes_copied=nbytes)

    def _carry(self, piece: Piece, owner: Lease) -> None:
        mover = self._shared.mover
        live = self._sub_group.live
        if live is not None:
            mover.read(self._sub_group, live, [piece], owner).result()
        mover.write(self._sub_group, self._slot, [piece], owner).result()

    def _unwritten_ranges(self) -> list[tuple[str, int, int]]:
        ranges = []
        step = SCRATCH_BYTES // BLOCK_BYTES
        for place in self._sub_group.layout.places.values():
            count = -(-place.nbytes // BLOCK_BYTES)
            blocks = slice(place.first_block, place.first_block + count)
            missing = ~(self._is_written[blocks] | self._is_left_out[blocks])
            block = 0
            while block < count:
                if not missing[block]:
                    block += 1
                    continue
                end = block
                while end < count and missing[end] and end - block < step:
                    end += 1
                start = block * BLOCK_BYTES
                ranges.append((place.name, start, min(end * BLOCK_BYTES, place.nbytes) - start))
                block = end
        return ranges

    def _write_table(self) -> int:
        mover = self._shared.mover
        layout = self._sub_group.layout
        data, table_hash = encode_table(
            layout,
            self.generation,
            self._slot.hashes,
            self._meta,
            has_checksums=mover.has_checksums,
        )
        write_table(self._shared, self._slot, data)
        self._shared.counters.add(bytes_tables=len(data))
        return table_hash


def write_table(shared: Shared, slot: Slot, data: bytes) -> None:
    """Write the used pages of a slot's table; blocks."""
    with shared.scratch.borrow(len(data)) as lease:
        lease.memory[: len(data)] = data
        _move(shared, slot, OP_WRITE, lease, len(data))


def read_table(shared: Shared, sub_group: SubGroup, slot: Slot) -> SlotTable:
    """Read and check a slot's table; blocks.

    Raises:
        CorruptionError: If it is not whole, or another sub-group's.
    """
    layout = sub_group.layout
    with shared.scratch.borrow(layout.table_bytes) as lease:
        _move(shared, slot, OP_READ, lease, PAGE_BYTES)
        nbytes = used_table_bytes(layout, bytes(lease.memory[:PAGE_BYTES]))
        _move(shared, slot, OP_READ, lease, nbytes)
        data = bytes(lease.memory[:nbytes])
    file = slot.files[0]
    return decode_table(layout, data, f"{file and file.path} at offset {slot.bases[0]}")


def _move(shared: Shared, slot: Slot, op: int, lease: Lease, nbytes: int) -> None:
    file = slot.files[0]
    if file is None:
        raise SwapStateError("the sub-group has no file on the first path")
    request = Request(op, file, lease.address, nbytes, slot.bases[0])
    PersistentIO(shared.mover.engine, [request], lease).result()
