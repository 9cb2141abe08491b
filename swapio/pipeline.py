# SPDX-License-Identifier: Apache-2.0
"""The pipelined swapper: read chunk k+1, update chunk k, write chunk k-1.

    reads    |k+1|k+2|....          |k+3|k+4|
    updates      |k  |k+1|k+2|              |k+3|
    writes                   |k |k+1|            ...      (in batches: disks like one direction)

Facts about this kind of storage, and what follows from them:
- many drives are half duplex in effect: mixing directions moves no more than one after the other,
  so reads and writes are submitted in batches of `batch_bytes`;
- what the buffers hold at the end of a sweep is the cheapest thing to start the next one with: a
  chunk stays in RAM (dirty, under durability "checkpoint") if the rest of the sweep fits beside
  it, and the next sweep begins there when its order is reversed.

Invariants:
- at most `stream_bytes` of the pool hold chunks;
- a chunk is not read before the last write of it is complete and sealed; the sub-group's other
  chunks may be on their way to storage meanwhile;
- no transfer is started after the first failure; chunks with unsaved bytes stay in RAM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swapio.buffers import BufferPool
from swapio.cache import ChunkId, Geometry, Item, ItemState, Schedule
from swapio.errors import AioError, CorruptionError, PoolExhaustedError, SwapStateError
from swapio.store import SwapStore
from swapio.subgroup import RecordBuffer, SubGroup, SubGroupState
from swapio.views import Chunk, SubGroupView, TransferHandle
from swapio.writebehind import WriteBehind

_BATCH_BYTES_MAX = 64 << 20  # four times what keeps the measured disks busy


class PipelinedSwapper(WriteBehind):
    """Overlap reads, updates and writes, chunk by chunk. Same verbs as PartitionedSwapper.

    Args:
        store: Where records live; None keeps everything in RAM.
        pool: Memory for buffers and resident records. Owned by the caller.
        stream_bytes: How many bytes of the pool may hold chunks.
        pipeline_read: Read ahead in the order of `set_order`.
        pipeline_write: Let writes go on while the next chunks are updated, also after the sweep.
        alternating: The caller reverses the order of every second sweep.
        chunk_bytes, min_swap_bytes, swap_gradients, writes_through: As in PartitionedSwapper.

    Thread-safety: as PartitionedSwapper. `swap_out` and `prefetch` do not block.
    """

    def __init__(
        self,
        store: SwapStore | None,
        pool: BufferPool,
        *,
        stream_bytes: int,
        pipeline_read: bool = True,
        pipeline_write: bool = True,
        alternating: bool = True,
        chunk_bytes: int = 10 << 20,
        min_swap_bytes: int = 1 << 20,
        swap_gradients: bool = False,
        writes_through: bool = False,
    ) -> None:
        super().__init__(
            store,
            pool,
            stream_bytes=stream_bytes,
            pipeline_write=pipeline_write,
            chunk_bytes=chunk_bytes,
            min_swap_bytes=min_swap_bytes,
            swap_gradients=swap_gradients,
            writes_through=writes_through,
        )
        self._pipeline_read = pipeline_read
        self._schedule = Schedule()
        self._geometry = Geometry()
        self._batch_bytes = min(_BATCH_BYTES_MAX, max(chunk_bytes, stream_bytes // 4))
        reserve = 2 * chunk_bytes if alternating else max(stream_bytes // 2, 6 * chunk_bytes)
        self._keep_bytes = max(0, stream_bytes - reserve)

    # -- the verbs ---------------------------------------------------------------------------

    def set_order(self, keys: Sequence[str]) -> None:
        """Declare the order of the next sweep and start to read ahead. Does not block."""
        with self._lock:
            chunks: list[ChunkId] = []
            sizes: list[int] = []
            for key in keys:
                group = self._group(key)
                if not group.swapped or key in self._buffers:
                    continue
                for index in self._chunk_order(group):
                    chunks.append((key, index))
                    sizes.append(self._geometry.of(group, index)[1])
            self._schedule.replace(chunks, sizes)
            self._pump()

    def prefetch(self, key: str) -> None:
        """Let read-ahead go on as far as there is room; starts a sweep of `key` if none runs."""
        with self._lock:
            group = self._group(key)
            if not group.swapped or key in self._buffers:
                return
            if self._schedule.position >= len(self._schedule.chunks):
                self.set_order([key])
            else:
                self._pump()

    def poll(self) -> None:
        """Start the reads that completed writes have made room for; see PartitionedSwapper."""
        with self._lock:
            self._pump()

    def swap_in(self, key: str, records: Iterable[str] | None = None) -> SubGroupView:
        """Return a view of a sub-group; its chunks are read as the view is iterated.

        Does not block; `view[record]` and `view.chunks()` do, until the bytes are there.
        """
        with self._lock:
            if records is not None:
                self._settle(self._group(key))
                return super().swap_in(key, records)
            return SubGroupView(self, self._group(key))

    def writeback(self, key: str, wait: bool = False) -> TransferHandle:
        """Start to write what changed; it stays in RAM. Blocks only with `wait=True`."""
        with self._lock:
            group = self._group(key)
            if key in self._buffers or not group.swapped:
                return super().writeback(key, wait)
            items = self._cache.of_key(key)
            if not items:
                raise SwapStateError(f"writeback of sub-group {key!r}, which is not in RAM")
            for item in items:
                if item.state is ItemState.DIRTY and item not in self._queued:
                    item.keep = True
                    self._queued.append(item)
            self._flush_queue()
            self._end_transaction(key)
            handle = TransferHandle([i.future for i in items if i.future is not None])
        if wait:
            self._fence(key)
        return handle

    def swap_out(self, key: str) -> None:
        """End the sub-group's part of the sweep: dirty chunks are written, or kept for the next.

        Does not block with `pipeline_write=True`.
        """
        with self._lock:
            group = self._group(key)
            if key in self._buffers or not group.swapped:
                super().swap_out(key)
                return
            self._end_transaction(key)
            if self._schedule.position >= len(self._schedule.chunks):
                self._flush_queue()
            if not self._pipeline_write:
                self._fence(key)

    def release(self, key: str) -> None:
        """Give up the clean chunks of a sub-group.

        Raises:
            SwapStateError: A chunk is dirty or in transfer.
        """
        with self._lock:
            if key in self._buffers or not self._group(key).swapped:
                super().release(key)
                return
            self._reap()
            state = self.state(key)
            if state not in (SubGroupState.CLEAN, SubGroupState.OUT):
                raise SwapStateError(f"release of sub-group {key!r} in state {state.value}")
            for item in self._cache.of_key(key):
                self._cache.drop(item)

    def state(self, key: str) -> SubGroupState:
        """The sub-group's state: of its chunks in RAM, the one that binds most."""
        with self._lock:
            group = self._group(key)
            if key in self._buffers or not group.swapped:
                return self._states[key]
            self._reap()
            states = {item.state for item in self._cache.of_key(key)}
            for state in (ItemState.WRITING, ItemState.READING, ItemState.DIRTY, ItemState.CLEAN):
                if state in states:
                    return SubGroupState(state.value)
            return SubGroupState.OUT

    def commit(self, step: int, payload: bytes = b"", **scalars: Any) -> TransferHandle:
        """Declare step `step` complete; as PartitionedSwapper.commit, without blocking."""
        with self._lock:
            self._check()
            if self._writes_through:
                self._end_all()
            return super().commit(step, payload, **scalars)

    def drain(self) -> None:
        """Block until everything that was started is on storage; raise the first error."""
        with self._lock:
            self._check()
            self._end_all()
            while self._writing:
                self._wait_writing(self._writing[0])
            for key in list(self._seals):
                self._fence(key)
            super().drain()

    # -- what views call ---------------------------------------------------------------------

    def whole(self, group: SubGroup) -> Sequence[RecordBuffer]:
        """The whole records of a sub-group; loads them, which blocks."""
        with self._lock:
            self._settle_home(group.key)
            if group.swapped and group.key not in self._buffers:
                if group.num_chunks == 1:
                    item = self._obtain(group, 0)
                    home = self._home.get(group.key)
                    return [item.buffer] if home is None else [home, item.buffer]
                self._settle(group)
                self._load(group)
            return super().whole(group)

    def mark_dirty(self, key: str, records: Iterable[str] = ()) -> None:
        """Say that records (default: all) were changed through `view[record]`."""
        with self._lock:
            item = self._cache.get((key, 0))
            group = self._group(key)
            if group.num_chunks == 1 and item is not None and key not in self._buffers:
                names = list(records) or list(group.specs)
                self._dirty[key].update(set(names) & group.resident)
                self._taint(item, names)
            else:
                super().mark_dirty(key, records)

    def iterate(self, group: SubGroup) -> Iterator[Chunk]:
        """Yield the chunks of a sub-group in the order of the sweep, reading ahead."""
        if group.key in self._buffers or not group.swapped:
            yield from super().iterate(group)
            return
        group.check_chunkable()
        with self._lock:
            order = self._enter(group)
        home = self._home.get(group.key)
        self._settle_home(group.key)
        for index in order:
            with self._lock:
                item = self._obtain(group, index)
                item.in_use = True  # before anybody else looks for memory
            try:
                buffers = [item.buffer] if home is None else [item.buffer, home]
                start, stop = group.chunk_bounds(index)
                chunk = Chunk(group, start, group.numel if stop is None else stop, buffers)
                self._stats.num_chunks += 1
                yield chunk
            finally:
                item.in_use = False
            with self._lock:
                if chunk.dirty:
                    self._dirty[group.key].update(chunk.dirty & group.resident)
                    self._taint(item, chunk.dirty)
                self._schedule.position += 1
                self._finish(item)
                self._pump()

    # -- the sweep ---------------------------------------------------------------------------

    def _chunk_order(self, group: SubGroup) -> Iterable[int]:
        """Ascending, unless what is cached lies at the end."""
        last = group.num_chunks - 1
        cached_last = self._cache.get((group.key, last)) is not None
        if cached_last and last and self._cache.get((group.key, 0)) is None:
            return range(last, -1, -1)
        return range(last + 1)

    def _enter(self, group: SubGroup) -> list[int]:
        """Chunk indices of `group` in sweep order; a new sweep if it is not its turn."""
        self._check()
        order = self._schedule.run_of(group.key)
        if order is None or len(order) != group.num_chunks:
            rest = self._schedule.chunks[self._schedule.position :]
            later = list(dict.fromkeys(key for key, _ in rest if key != group.key))
            self.set_order([group.key, *later])
            order = self._schedule.run_of(group.key) or []
        return order

    def _pump(self) -> None:
        """Start reads of the chunks to come, as far as there is room; never blocks."""
        if not self._pipeline_read or self._failure is not None:
            return
        schedule = self._schedule
        self._reap()
        if not self._worth_reading():
            return
        while schedule.ahead < len(schedule.chunks):
            key, index = schedule.chunks[schedule.ahead]
            if schedule.ahead >= schedule.position and self._cache.get((key, index)) is None:
                group = self._groups[key]
                if self._must_seal(key, index) or not self._sealed(key):
                    return
                if not self._cache.has_room(self._geometry.of(group, index)[1]):
                    return
                try:
                    self._start_read(group, index)
                except PoolExhaustedError:  # room enough, but no hole is large enough
                    return
            schedule.ahead += 1

    def _worth_reading(self) -> bool:
        """Read in batches: wait for room for one, unless the next chunk is missing already."""
        schedule = self._schedule
        if schedule.ahead <= schedule.position + 1:
            return True
        want = min(self._batch_bytes, schedule.bytes_after(schedule.ahead))
        return self._cache.has_room(want)

    def _start_read(self, group: SubGroup, index: int, *, may_block: bool = False) -> Item:
        placements, nbytes = self._geometry.of(group, index)
        lease = self._lease if may_block else self._pool.lease
        buffer = RecordBuffer(lease(nbytes), placements)
        item = Item((group.key, index), buffer, nbytes)
        self._cache.add(item)
        try:
            item.future = self._require_store().read(
                group.key, buffer.pieces(group.readable), owner=buffer
            )
        except BaseException as error:
            self._cache.drop(item, error)
            raise
        return item

    def _obtain(self, group: SubGroup, index: int) -> Item:
        """Return the chunk with its bytes verified and nothing in flight; blocks."""
        self._check()
        item = self._cache.get((group.key, index))
        if item is None:
            if self._must_seal(group.key, index) or group.key not in self._open:
                self._fence(group.key)
            self._make_room(self._geometry.of(group, index)[1])
            item = self._start_read(group, index, may_block=True)
        elif item.state is not ItemState.READING:
            self._stats.num_cached_chunks += 1
        if item.state is ItemState.WRITING:
            item.keep = True
            self._wait_writing(item)
        if item in self._queued:
            self._queued.remove(item)
        if item.state is ItemState.READING:
            self._complete_read(item)
        return item

    def _complete_read(self, item: Item) -> None:
        began = time.perf_counter()
        try:
            if item.future is not None:
                self._stats.read_bytes += item.future.result()
        except (AioError, CorruptionError) as error:
            self._cache.drop(item)
            self._fail(error)
            raise
        finally:
            self._stats.stall_seconds += time.perf_counter() - began
        item.future = None
        item.state = ItemState.CLEAN

    def _make_room(self, nbytes: int) -> None:
        """Free memory for a chunk that is needed now: blocks on writes if it must."""
        if nbytes > (limit := self._cache.limit_bytes):
            raise PoolExhaustedError(
                f"a chunk of {nbytes} bytes is larger than all buffers ({limit}): raise host_memory"
            )
        while not self._cache.has_room(nbytes):
            self._reap()
            if not self._cache.has_room(nbytes):
                self._free_some()

    def _give_way(self) -> bool:
        with self._lock:
            if self._failure is None and self._cache.used_bytes:
                self._free_some()
                return True
            return self._evict_clean()

    def _free_some(self) -> None:
        """Free the memory of a chunk, or come closer to it; blocks on writes if it must."""
        if self._evict_clean():
            return
        if self._queued:
            self._flush_queue()
        elif self._writing:
            self._wait_writing(self._writing[0])
        else:
            self._queue_farthest()

    def _evict_clean(self) -> bool:
        if not (clean := self._cache.idle(ItemState.CLEAN)):
            return False
        self._cache.drop(max(clean, key=lambda item: self._schedule.next_use(item.id)))
        self._schedule.ahead = min(self._schedule.ahead, self._schedule.position)
        return True

    def _queue_farthest(self) -> None:
        """Write the kept chunk that is needed last; a read ahead of need is given up for it."""
        candidates = self._cache.idle(ItemState.DIRTY, ItemState.READING)
        if not candidates:
            raise PoolExhaustedError("all buffers are in use at once: raise host_memory")
        item = max(candidates, key=lambda i: self._schedule.next_use(i.id))
        if item.state is ItemState.READING:
            self._complete_read(item)
            return
        item.keep = False
        self._queued.append(item)

    def _finish(self, item: Item) -> None:
        """Decide what becomes of a chunk after its update."""
        item.keep = self._schedule.bytes_after(self._schedule.position) <= self._keep_bytes
        if item.state is ItemState.DIRTY:
            if self._writes_through or not item.keep:
                self._queued.append(item)
        elif not item.keep:
            self._cache.drop(item)
        queued_bytes = sum(queued.nbytes for queued in self._queued)
        if not self._pipeline_write or queued_bytes >= self._batch_bytes:
            self._flush_queue()

    # -- settling ----------------------------------------------------------------------------

    def _settle(self, group: SubGroup) -> None:
        """Write and drop everything of a sub-group that is in RAM; blocks."""
        with self._lock:
            if group.key in self._buffers or not group.swapped:
                super()._settle(group)
                return
            for item in self._cache.of_key(group.key):
                if item.state is ItemState.READING:
                    self._complete_read(item)
                if item.state is ItemState.DIRTY:
                    item.keep = False
                    if item not in self._queued:
                        self._queued.append(item)
            self._flush_queue()
            self._end_transaction(group.key)
            self._fence(group.key)
            for item in self._cache.of_key(group.key):
                self._cache.drop(item)
            self._geometry.forget(group.key)
            self._schedule.ahead = self._schedule.position

    def _held(self, group: SubGroup, record: str, element: int) -> RecordBuffer | None:
        self._settle_home(group.key)
        held = super()._held(group, record, element)
        if held is not None or record in group.resident:
            return held
        index = element // group.chunk_numel if group.num_chunks > 1 else 0
        item = self._cache.get((group.key, index))
        if self._failure is not None:
            # Nothing is started any more: what is in RAM is the truth, else storage is.
            known = item is not None and item.state is not ItemState.READING
            return item.buffer if item is not None and known else None
        if item is None:
            self._fence(group.key)
            return None
        if item.state is ItemState.READING:
            self._complete_read(item)
        if item.state is ItemState.WRITING:
            item.keep = True
            self._wait_writing(item)
        return item.buffer

    def _touch(self, group: SubGroup, record: str, element: int) -> None:
        index = element // group.chunk_numel if group.num_chunks > 1 else 0
        item = self._cache.get((group.key, index))
        if item is None or group.key in self._buffers or record in group.resident:
            super()._touch(group, record, element)
        else:
            self._taint(item, [record])
