# SPDX-License-Identifier: Apache-2.0
"""Chunks in RAM: the buffers of the pipelined swapper and the order in which they are needed.

    absent -> READING -> CLEAN -> DIRTY -> WRITING -> CLEAN | absent

Invariants:
- the bytes leased for chunks never exceed `limit_bytes`;
- a chunk whose bytes are not on storage is never dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from swapio.store import TransferFuture
from swapio.subgroup import Placement, RecordBuffer, SubGroup, place

ChunkId = tuple[str, int]


class ItemState(enum.Enum):
    """Where the truth of a chunk is."""

    READING = "reading"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"


class Item:
    """One chunk of a sub-group in RAM.

    Attributes:
        in_use: It is handed out by `chunks()`: neither written nor given up meanwhile.
    """

    __slots__ = ("buffer", "dirty", "future", "id", "in_use", "keep", "nbytes", "state")

    def __init__(self, chunk_id: ChunkId, buffer: RecordBuffer, nbytes: int) -> None:
        self.id = chunk_id
        self.buffer = buffer
        self.nbytes = nbytes
        self.state = ItemState.READING
        self.dirty: set[str] = set()
        self.future: TransferFuture | None = None
        self.keep = False
        self.in_use = False


class Schedule:
    """The chunks of a sweep in the order of their use, and how far the sweep has come.

    Attributes:
        position: Index of the chunk that is used next.
        ahead: Index of the first chunk whose read has not been considered.
    """

    def __init__(self) -> None:
        self.chunks: list[ChunkId] = []
        self.sizes: list[int] = []
        self.position = 0
        self.ahead = 0
        self._left: list[int] = [0]
        self._index: dict[ChunkId, int] = {}

    def replace(self, chunks: Sequence[ChunkId], sizes: Sequence[int]) -> None:
        """Begin a new sweep."""
        self.chunks, self.sizes = list(chunks), list(sizes)
        self.position = self.ahead = 0
        self._left = [0] * (len(self.chunks) + 1)
        for i in range(len(self.chunks) - 1, -1, -1):
            self._left[i] = self._left[i + 1] + self.sizes[i]
        self._index = {chunk: i for i, chunk in enumerate(self.chunks)}

    def bytes_after(self, position: int) -> int:
        """Bytes of the chunks from `position` to the end of the sweep."""
        return self._left[min(position, len(self.chunks))]

    def next_use(self, chunk: ChunkId) -> int:
        """When a chunk is used next; a large number when not in the rest of this sweep."""
        index = self._index.get(chunk, -1)
        return index if index >= self.position else 1 << 60

    def run_of(self, key: str) -> list[int] | None:
        """Chunk indices of `key` if the sweep stands at its first chunk, else None."""
        run = []
        for name, index in self.chunks[self.position :]:
            if name != key:
                break
            run.append(index)
        return run or None


class Geometry:
    """Placements and bytes of every chunk, worked out once."""

    def __init__(self) -> None:
        self._known: dict[ChunkId, tuple[tuple[Placement, ...], int]] = {}

    def of(self, group: SubGroup, index: int) -> tuple[tuple[Placement, ...], int]:
        """Return (placements, nbytes) of the swapped records of one chunk."""
        chunk = (group.key, index)
        if chunk not in self._known:
            self._known[chunk] = place(group.specs, group.swapped, *group.chunk_bounds(index))
        return self._known[chunk]

    def forget(self, key: str) -> None:
        """Drop what is known of a sub-group whose layout changed."""
        for chunk in [chunk for chunk in self._known if chunk[0] == key]:
            del self._known[chunk]


class ChunkCache:
    """The chunks that are in RAM, by id."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._items: dict[ChunkId, Item] = {}

    def get(self, chunk: ChunkId) -> Item | None:
        """The item of a chunk, or None when it is absent."""
        return self._items.get(chunk)

    def add(self, item: Item) -> None:
        """Account for a new item."""
        self._items[item.id] = item
        self.used_bytes += item.nbytes

    def drop(self, item: Item, error: BaseException | None = None) -> None:
        """Give up an item's memory. Its bytes must be on storage, or worthless.

        Args:
            item: What is dropped.
            error: Why, if it may be in transfer; see `Lease.release_after`.
        """
        del self._items[item.id]
        self.used_bytes -= item.nbytes
        item.buffer.lease.release_after(error)

    def of_key(self, key: str) -> list[Item]:
        """The items of one sub-group."""
        return [item for item in self._items.values() if item.id[0] == key]

    def idle(self, *states: ItemState) -> list[Item]:
        """The items in one of these states that nobody is using."""
        return [i for i in self._items.values() if i.state in states and not i.in_use]

    def __iter__(self) -> Iterator[Item]:
        """Iterate over a copy of the items."""
        return iter(list(self._items.values()))

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit under the limit."""
        return self.used_bytes + nbytes <= self.limit_bytes
