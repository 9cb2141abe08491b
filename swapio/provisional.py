# SPDX-License-Identifier: Apache-2.0
"""Updates that can be taken back until they are kept: the pipelined swapper with two more ends.

    begin_provisional -> chunks() ... mark_dirty -> keep_provisional   as if it was swapped out
                                                 -> drop_provisional   storage is the truth again

What is on storage is the state before, so nothing is copied. The new bytes wait in RAM while there
is room; beyond that they are written, but only into a slot that is not LIVE, which is sealed when
they are kept and given up when they are dropped.

Invariants:
- a sub-group with bytes that are not on storage is never updated provisionally;
- between begin and keep the LIVE slot is neither written nor replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swapio.cache import Item, ItemState
from swapio.errors import SwapStateError
from swapio.pipeline import PipelinedSwapper
from swapio.store import Hold
from swapio.subgroup import SubGroup
from swapio.views import SubGroupView


@dataclass
class _Provisional:
    nbytes: int  # that wait in RAM
    hold: Hold | None  # of the LIVE slot, where another one is written


class ProvisionalSwapper(PipelinedSwapper):
    """A PipelinedSwapper whose updates can be taken back. Arguments and threads as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._provisional: dict[str, _Provisional] = {}
        limit = self._cache.limit_bytes
        self._waiting_max = max(0, limit - max(limit // 4, 3 * self._chunk_bytes))
        self._waiting_bytes = 0

    def begin_provisional(self, key: str) -> SubGroupView | None:
        """Start an update that may be taken back; None if there is no room for one.

        Blocks until the last write of the sub-group is complete. All its records must be swapped.
        Its chunks are to be used once, and kept or dropped before any other verb on `key`.
        """
        with self._lock:
            group = self._group(key)
            usable = bool(group.swapped) and not group.resident and key not in self._buffers
            if not usable or key in self._provisional or not group.is_uniform:
                return None
            self._fence(key)
            if any(item.state is ItemState.DIRTY for item in self._cache.of_key(key)):
                return None
            found = self._reserve(group)
            if found is None:
                return None
            self._provisional[key] = found
            self._waiting_bytes += found.nbytes
            return SubGroupView(self, group)

    def _reserve(self, group: SubGroup) -> _Provisional | None:
        nbytes = sum(self._geometry.of(group, i)[1] for i in range(group.num_chunks))
        if self._waiting_bytes + nbytes <= self._waiting_max:
            return _Provisional(nbytes, None)
        store = self._require_store()
        hold = store.hold([group.key])
        try:
            self._open[group.key] = store.begin_write(group.key, self._generation)
        except SwapStateError:  # no slot is free
            hold.release()
            return None
        self._written[group.key] = set()
        return _Provisional(0, hold)

    def keep_provisional(self, key: str) -> None:
        """Make the update count: it goes to storage as any other. Does not block on it."""
        with self._lock:
            found = self._provisional.pop(key)
            self._waiting_bytes -= found.nbytes
            for item in self._cache.of_key(key):
                item.in_use = False
                if item.state is ItemState.DIRTY and item not in self._queued:
                    item.keep = found.hold is None
                    self._queued.append(item)
            if sum(item.nbytes for item in self._queued) >= self._batch_bytes:
                self._flush_queue()
            self._end_transaction(key)
            if found.hold is not None:
                if key in self._open:
                    self._flush_queue()
                found.hold.release()

    def drop_provisional(self, key: str) -> None:
        """Take the update back: what storage holds is the state. Blocks until writes are done."""
        with self._lock:
            found = self._provisional.pop(key)
            self._waiting_bytes -= found.nbytes
            self._queued = [item for item in self._queued if item.id[0] != key]
            for item in self._cache.of_key(key):
                item.in_use = False
                if item.state is ItemState.WRITING:
                    self._forget_write(item)
                # An update that failed has changed a chunk without a word; a read has not ended.
                if item.state is not ItemState.READING:
                    self._cache.drop(item)
            self._dirty[key].clear()
            transaction = self._open.pop(key, None)
            if transaction is not None:
                self._written.pop(key, None)
                self._ending.discard(key)
                transaction.abort()
            if found.hold is not None:
                found.hold.release()
            self._schedule.ahead = min(self._schedule.ahead, self._schedule.position)

    def _forget_write(self, item: Item) -> None:
        """Wait for a write whose bytes nobody wants, whether it succeeds or not."""
        self._writing.remove(item)
        if item.future is not None:
            item.future.exception()
        item.future = None
        item.state = ItemState.DIRTY

    def _finish(self, item: Item) -> None:
        found = self._provisional.get(item.id[0])
        if found is None or item.state is not ItemState.DIRTY:
            super()._finish(item)
        elif found.hold is None:
            item.keep = item.in_use = True  # neither written nor given up
        else:
            item.keep = False
            self._queued.append(item)
            if sum(queued.nbytes for queued in self._queued) >= self._batch_bytes:
                self._flush_queue()

    def _end_transaction(self, key: str) -> None:
        if key not in self._provisional:
            super()._end_transaction(key)

    def _abandon(self) -> None:
        for found in self._provisional.values():
            if found.hold is not None:
                found.hold.release()
        self._provisional.clear()
        super()._abandon()
