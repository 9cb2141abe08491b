# SPDX-License-Identifier: Apache-2.0
"""The write side of the pipelined swapper: batches, transactions, retries.

    queued -> submitted (WRITING) -> CLEAN, and the transaction of the sub-group is sealed

Invariants:
- a sub-group's transaction is sealed once, after all its writes of the sweep were submitted;
- a chunk whose write failed stays in RAM; one rewrite is tried, then the swapper is FAILED.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable

from swapio.buffers import BufferPool
from swapio.cache import ChunkCache, Item, ItemState
from swapio.errors import AioError, SwapStateError
from swapio.store import SwapStore, WriteTransaction
from swapio.subgroup import SubGroup
from swapio.swapper import PartitionedSwapper
from swapio.views import TransferHandle


class WriteBehind(PartitionedSwapper):
    """A swapper that writes chunks in the background. See PipelinedSwapper for the arguments."""

    def __init__(
        self,
        store: SwapStore | None,
        pool: BufferPool,
        *,
        stream_bytes: int,
        pipeline_write: bool,
        chunk_bytes: int,
        min_swap_bytes: int,
        swap_gradients: bool,
        writes_through: bool,
    ) -> None:
        super().__init__(
            store,
            pool,
            chunk_bytes=chunk_bytes,
            min_swap_bytes=min_swap_bytes,
            swap_gradients=swap_gradients,
            writes_through=writes_through,
        )
        self._pipeline_write = pipeline_write
        self._cache = ChunkCache(stream_bytes)
        self._queued: list[Item] = []
        self._writing: deque[Item] = deque()
        self._open: dict[str, WriteTransaction] = {}
        self._ending: set[str] = set()
        self._seals: dict[str, TransferHandle] = {}
        self._in_place: dict[str, bool] = {}  # whether the last sealed one overwrote its slot
        self._written: dict[str, set[int]] = {}  # chunks in the open transaction
        self._home_writes: dict[str, TransferHandle] = {}

    @property
    def cached_bytes(self) -> int:
        """Bytes of RAM that hold sub-groups, or chunks of them, which are not resident."""
        return super().cached_bytes + self._cache.used_bytes

    def _taint(self, item: Item, names: Iterable[str]) -> None:
        changed = set(names) & set(item.buffer.placements)
        if changed:
            item.dirty |= changed
            item.state = ItemState.DIRTY

    def _flush_queue(self) -> None:
        """Submit the writes of all queued chunks."""
        queued, self._queued = self._queued, []
        for item in queued:
            self._submit_write(item)
        # Only now: an earlier seal would leave the rest of a sub-group for another transaction.
        for key in list(self._ending):
            self._end_transaction(key)
        if not self._pipeline_write:
            while self._writing:
                self._wait_writing(self._writing[0])

    def _submit_write(self, item: Item) -> None:
        key = item.id[0]
        if key not in self._open:
            self._fence(key)
            self._open[key] = self._require_store().begin_write(key, self._generation)
            self._written[key] = set()
        self._written[key].add(item.id[1])
        pieces = item.buffer.pieces(item.dirty)
        item.future = self._open[key].write(pieces, owner=item.buffer)
        item.state = ItemState.WRITING
        self._writing.append(item)

    def _reap(self) -> None:
        """Take note of completed writes; never blocks."""
        while self._writing:
            future = self._writing[0].future
            if future is not None and not future.done():
                break
            self._complete_write(self._writing[0])

    def _wait_writing(self, item: Item) -> None:
        began = time.perf_counter()
        while item.state is ItemState.WRITING:
            self._complete_write(self._writing[0])
        self._stats.stall_seconds += time.perf_counter() - began

    def _complete_write(self, item: Item) -> None:
        """Wait for the write of a chunk; if it failed try once more, then be FAILED."""
        try:
            if item.future is not None:
                self._stats.write_bytes += item.future.result()
            self._writing.remove(item)
        except AioError as error:
            self._writing.remove(item)
            item.future = None
            item.state = ItemState.DIRTY
            self._rewrite(item, error)
        item.future = None
        item.dirty.clear()
        item.state = ItemState.CLEAN
        if not item.keep:
            self._cache.drop(item)

    def _rewrite(self, item: Item, error: AioError) -> None:
        """Write a chunk again whose write failed, blocking.

        Within its transaction while that is open; in a new one if that was sealed in vain, which
        cannot bring back other chunks of a slot that was given up: then the swapper is FAILED.
        """
        key = item.id[0]
        pieces = item.buffer.pieces(item.dirty)
        try:
            if key in self._open:
                self._open[key].write(pieces, owner=item.buffer).result()
                return
            handle = self._seals.pop(key, None)
            if handle is not None:
                handle.exception()
            is_alone = self._groups[key].num_chunks == 1 and key not in self._home
            if not is_alone and not self._in_place.get(key, False):
                raise error  # what was given up after its write lies in the slot that is lost
            self._transfer(self._groups[key], item.buffer, item.dirty)
        except (AioError, SwapStateError) as second:
            self._fail(error)
            raise second from error

    def _end_transaction(self, key: str) -> None:
        """Seal the sub-group's transaction once all its writes are submitted; does not block.

        Into another slot than the LIVE one the store copies what is missing there. Not so what is
        kept in RAM for the next sweep: it is newer, and is left out until it is written, unless
        this transaction is about to be committed.
        """
        if key not in self._open:
            return
        self._ending.add(key)
        if not self._open[key].is_in_place:
            for item in self._cache.of_key(key):
                if item.state is not ItemState.DIRTY or item in self._queued:
                    continue
                if self._writes_through:
                    item.keep = True
                    self._queued.append(item)
                else:
                    self._open[key].leave_out(item.buffer.pieces(item.dirty))
        if any(item.id[0] == key for item in self._queued):
            return
        self._ending.discard(key)
        transaction = self._open.pop(key)
        self._in_place[key] = transaction.is_in_place
        del self._written[key]
        self._seal_with_home(key, transaction)

    def _seal_with_home(self, key: str, transaction: WriteTransaction) -> None:
        """Write changed resident records through, if that is asked for, and seal."""
        names = self._dirty[key] & self._groups[key].resident
        if names and self._writes_through:
            home = self._home[key]
            write = transaction.write(home.pieces(names), owner=home)
            self._home_writes[key] = TransferHandle([write])
            self._stats.write_bytes += write.nbytes
            self._dirty[key] -= names
        self._seals[key] = TransferHandle([transaction.seal(self._meta.get(key, b""))])

    def _release_home(self, key: str) -> None:
        self._settle_home(key)

    def _settle_home(self, key: str) -> None:
        """Wait until resident records are no longer read by a write: they are about to change."""
        handle = self._home_writes.pop(key, None)
        if handle is None:
            return
        began = time.perf_counter()
        try:
            handle.result()
        except AioError as error:
            self._fail(error)
            raise
        finally:
            self._stats.stall_seconds += time.perf_counter() - began

    def _write_through(self, group: SubGroup) -> None:
        """Start to copy changed resident records to storage; does not block."""
        if not self._pipeline_write or not self._writes_through:
            super()._write_through(group)
            return
        self._fence(group.key)
        transaction = self._require_store().begin_write(group.key, self._generation)
        self._seal_with_home(group.key, transaction)

    def _must_seal(self, key: str, index: int) -> bool:
        """Whether chunk `index` must be sealed before it can be read."""
        return index in self._written.get(key, ())

    def _sealed(self, key: str) -> bool:
        """Whether the last transaction of `key` is sealed; never blocks."""
        handle = self._seals.get(key)
        if handle is None:
            return True
        if key in self._open:
            return True  # that seal was waited for when the transaction was opened
        if not handle.done():
            return False
        self._fence(key)
        return True

    def _end_all(self) -> None:
        """Submit everything that is queued and seal every open transaction; does not block."""
        self._flush_queue()
        for key in list(self._open):
            self._end_transaction(key)
        self._flush_queue()

    def _fence(self, key: str) -> None:
        """Wait until the last write of a sub-group is complete and sealed."""
        self._end_transaction(key)
        if key in self._open:
            self._flush_queue()
        while any(item.id[0] == key for item in self._writing):
            self._complete_write(self._writing[0])
        handle = self._seals.pop(key, None)
        if handle is not None:
            try:
                handle.result()
            except AioError as error:
                self._fail(error)
                raise

    def flush(self) -> None:
        """Write every dirty chunk, also those kept for the next sweep, and drain."""
        with self._lock:
            for item in self._cache:
                if item.state is ItemState.DIRTY and item not in self._queued:
                    item.keep = True
                    self._queued.append(item)
            self._flush_queue()
            super().flush()

    def close(self) -> None:
        """Give up all memory; unsaved chunks are lost (drain or flush before)."""
        if not self._closed and os.getpid() == self._pid:
            self._abandon()
        super().close()

    def _abandon(self) -> None:
        """Wait for transfers in flight without looking at their results, then drop all chunks."""
        for item in self._cache:
            if item.future is not None:
                item.future.exception()
            self._cache.drop(item)
        for handle in self._seals.values():
            handle.exception()
