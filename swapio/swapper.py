# SPDX-License-Identifier: Apache-2.0
"""The swappers' common lifecycle, and the blocking swapper.

    OUT -> READING -> CLEAN -> DIRTY -> WRITING -> CLEAN -> OUT          RESIDENT (nothing swapped)

`PartitionedSwapper` holds at most the sub-groups that the caller swapped in, whole, and every
transfer blocks: it is the obvious one, and the oracle for the pipelined swapper.

Invariants:
- a sub-group has one caller at a time; different sub-groups may be used from different threads;
- bytes that are not yet on storage are never dropped: after a failed write the buffer stays, one
  rewrite is tried, and then the swapper is FAILED and every verb raises the first error;
- `store=None` means that everything is RESIDENT.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swapio.access import RecordAccess
from swapio.errors import AioError, PoolExhaustedError, SwapStateError
from swapio.store import WriteTransaction
from swapio.subgroup import RecordBuffer, RecordSpec, SubGroup, SubGroupState, place
from swapio.views import Chunk, SubGroupView, TransferHandle

__all__ = ["PartitionedSwapper", "RecordSpec", "SubGroup", "SubGroupState"]


# Elements of a chunk that needs no transfer.
_RESIDENT_NUMEL = 1 << 24


class PartitionedSwapper(RecordAccess):
    """Swap whole sub-groups in and out, blocking.

    Args:
        store: Where records live; None keeps everything in RAM.
        pool: Memory for buffers and resident records. Owned by the caller.
        chunk_bytes: Upper bound of what `view.chunks()` hands out at a time, in bytes.
        min_swap_bytes: A sub-group with fewer bytes stays in RAM.
        swap_gradients: Whether large gradient fragments go to storage.

    Thread-safety: one caller thread for each sub-group; different sub-groups from different
    threads. After fork every verb raises ClosedError in the child.
    """

    # -- the verbs ---------------------------------------------------------------------------

    def set_order(self, keys: Sequence[str]) -> None:
        """Declare in which order the next sweep will use the sub-groups (a hint)."""
        self._check()
        for key in keys:
            self._group(key)

    def prefetch(self, key: str) -> None:
        """Start to read a sub-group ahead; the blocking swapper reads it at once."""
        if self.state(key) is SubGroupState.OUT:
            self._load(self._group(key))

    def poll(self) -> None:
        """Let transfers in the background go on; for use within long updates. Never blocks."""

    def swap_in(self, key: str, records: Iterable[str] | None = None) -> SubGroupView:
        """Bring a sub-group (or some of its records) into RAM and return a view of it.

        Blocks until the bytes are there and their checksums verified. The view's tensors lie over
        the I/O buffer: they are valid until the next verb on `key`.

        Raises:
            SwapStateError: A transfer of the sub-group is in progress elsewhere.
            AioError, CorruptionError: The read failed; the swapper is FAILED then.
            PoolExhaustedError: The memory budget has no room; nothing changed.
        """
        group = self._group(key)
        state = self._states[key]
        if state in (SubGroupState.READING, SubGroupState.WRITING):
            raise SwapStateError(f"swap_in of sub-group {key!r} while it is {state.value}")
        if state is SubGroupState.OUT:
            self._load(group, records)
        return SubGroupView(self, group)

    def writeback(self, key: str, wait: bool = True) -> TransferHandle:
        """Write what changed to storage; the sub-group stays in RAM.

        Blocks in this swapper. With everything clean, or resident, nothing is written.
        """
        group = self._group(key)
        if self._states[key] is SubGroupState.DIRTY:
            self._store_buffer(group)
        elif self._states[key] is SubGroupState.RESIDENT and self._dirty[key]:
            self._write_through(group)
        elif self._states[key] is SubGroupState.OUT:
            raise SwapStateError(f"writeback of sub-group {key!r}, which is not in RAM (state out)")
        handle = TransferHandle()
        if wait:
            handle.result()
        return handle

    def swap_out(self, key: str) -> None:
        """Write the sub-group back if it is dirty and give up its RAM."""
        if self.state(key) is SubGroupState.OUT:
            raise SwapStateError(f"swap_out of sub-group {key!r}, which is out already")
        self.writeback(key)
        if self._states[key] is SubGroupState.CLEAN:
            self.release(key)

    def release(self, key: str) -> None:
        """Give up a clean copy in RAM.

        Raises:
            SwapStateError: The copy is dirty: write it back first.
        """
        state = self.state(key)
        if state is SubGroupState.RESIDENT:
            return
        if state is not SubGroupState.CLEAN:
            raise SwapStateError(
                f"release of sub-group {key!r} in state {state.value}: only a clean copy can be "
                "given up; call writeback or swap_out first"
            )
        self._buffers.pop(key).lease.release()
        self._states[key] = SubGroupState.OUT

    def state(self, key: str) -> SubGroupState:
        """The sub-group's ownership state."""
        self._group(key)
        return self._states[key]

    def commit(self, step: int, payload: bytes = b"", **scalars: Any) -> TransferHandle:
        """Declare step `step` complete; makes it durable under durability "step" and "power".

        Returns a handle; its `result()` blocks until the commit record is on storage.
        """
        self._check()
        self._generation = step + 1
        if self._store is None or not self._writes_through:
            return TransferHandle()
        for key, group in self._groups.items():
            if self._dirty[key] & group.resident:
                self._write_through(group)
        return TransferHandle([self._store.commit(step, payload, scalars)])

    def drain(self) -> None:
        """Block until every transfer is complete; raise the first error of any of them."""
        self._check()
        if self._store is not None:
            self._store.drain()

    def flush(self) -> None:
        """Write everything that differs from storage, and drain; it stays in RAM."""
        for key, state in list(self._states.items()):
            if state is SubGroupState.DIRTY:
                self._store_buffer(self._group(key))
        self.drain()

    # -- what views call

    def mark_dirty(self, key: str, records: Iterable[str] = ()) -> None:
        """Say that records (default: all) were changed through a view."""
        group = self._group(key)
        names = list(records) or list(group.specs)
        for name in names:
            self._spec(group, name)
        touches_swapped = not group.resident.issuperset(names)
        if self._states[key] is SubGroupState.OUT and touches_swapped:
            raise SwapStateError(f"mark_dirty of sub-group {key!r}, which is not in RAM")
        self._dirty[key].update(names)
        if self._states[key] is SubGroupState.CLEAN and touches_swapped:
            self._states[key] = SubGroupState.DIRTY

    def whole(self, group: SubGroup) -> Sequence[RecordBuffer]:
        """The buffers that hold the records of `group` that are in RAM."""
        self._check()
        found = (self._home.get(group.key), self._buffers.get(group.key))
        return [buffer for buffer in found if buffer is not None]

    def iterate(self, group: SubGroup) -> Iterator[Chunk]:
        """Yield the chunks of a sub-group that is in RAM, in ascending order."""
        group.check_chunkable()
        buffers = self.whole(group)
        step = group.chunk_numel if group.streamed else 0
        step = step or max(1, group.numel)
        if not group.swapped:  # no transfer to overlap with: fewer calls of the kernels
            step *= max(1, _RESIDENT_NUMEL // step)
        for start in range(0, group.numel, step):
            chunk = Chunk(group, start, min(group.numel, start + step), buffers)
            self._stats.num_chunks += 1
            yield chunk
            if chunk.dirty:
                self.mark_dirty(group.key, chunk.dirty)

    def home(self, key: str) -> RecordBuffer | None:
        """The buffer of the records that stay in RAM; None if there are none."""
        self._group(key)
        return self._home.get(key)

    def exchange_home(self, key: str, buffer: RecordBuffer) -> RecordBuffer:
        """Make `buffer` hold the resident records; return the one that did. All become dirty.

        For a caller that steps into other memory and keeps or drops the result. May block until
        the old buffer is not being written any more.

        Raises:
            SwapStateError: It is laid out differently.
        """
        group = self._group(key)
        old = self._home.get(key)
        if old is None or old.placements != buffer.placements:
            raise SwapStateError(f"sub-group {key!r} has no resident records laid out like that")
        self._release_home(key)
        self._home[key] = buffer
        self._dirty[key].update(group.resident)
        return old

    def _release_home(self, key: str) -> None:
        """Wait until nothing reads the buffer of the resident records any more."""

    # -- transfers ---------------------------------------------------------------------------

    def _settle(self, group: SubGroup) -> None:
        if self.state(group.key) not in (SubGroupState.OUT, SubGroupState.RESIDENT):
            self.swap_out(group.key)

    def _load(self, group: SubGroup, records: Iterable[str] | None = None) -> None:
        wanted = [n for n in group.swapped if records is None or n in set(records)]
        placements, nbytes = place(group.specs, wanted, 0, None)
        try:
            lease = self._lease(nbytes)
        except PoolExhaustedError as error:
            raise PoolExhaustedError(
                f"sub-group {group.key!r} needs {nbytes} bytes in one piece: {error}"
            ) from error
        buffer = RecordBuffer(lease, placements)
        self._states[group.key] = SubGroupState.READING
        try:
            self._read_pieces(group, buffer, group.readable)
        except BaseException as error:
            lease.release_after(error)
            self._states[group.key] = SubGroupState.OUT
            raise
        self._buffers[group.key] = buffer
        self._dirty[group.key] &= group.resident
        self._states[group.key] = SubGroupState.CLEAN

    def _store_buffer(self, group: SubGroup) -> None:
        buffer = self._buffers[group.key]
        self._states[group.key] = SubGroupState.WRITING
        try:
            names = self._dirty[group.key] & set(buffer.placements)
            if self._writes_through:
                self._write_sealed(group, buffer, names, self._home.get(group.key))
            else:
                self._write_sealed(group, buffer, names, None)
        except BaseException:
            self._states[group.key] = SubGroupState.DIRTY
            raise
        self._dirty[group.key].clear()
        self._states[group.key] = SubGroupState.CLEAN

    def _write_through(self, group: SubGroup) -> None:
        """Copy changed resident records to storage (durability "step" and "power")."""
        store = self._store
        if store is None or not self._writes_through:
            self._dirty[group.key].clear()
            return
        names = self._dirty[group.key] & group.resident
        self._write_sealed(group, self._home[group.key], names, None)
        self._dirty[group.key] -= names

    def _write_sealed(
        self,
        group: SubGroup,
        buffer: RecordBuffer,
        names: set[str],
        home: RecordBuffer | None,
    ) -> None:
        """Write and seal, and once more if that fails; the second failure makes FAILED."""
        began = time.perf_counter()
        for attempt in (0, 1):
            transaction: WriteTransaction | None = None
            try:
                transaction = self._require_store().begin_write(group.key, self._generation)
                written = transaction.write(buffer.pieces(names), owner=buffer).result()
                if home is not None:
                    written += transaction.write(home.pieces(), owner=home).result()
                transaction.seal(self._meta.get(group.key, b"")).result()
                self._stats.write_bytes += written
                break
            except AioError as error:
                if transaction is not None:
                    transaction.abort()
                if attempt:
                    self._fail(error)
                    raise
            except BaseException:
                if transaction is not None:
                    transaction.abort()
                raise
        self._stats.stall_seconds += time.perf_counter() - began
