# SPDX-License-Identifier: Apache-2.0
"""What swap_in hands out: views of a sub-group, chunks of it, and handles of transfers.

Invariant: a view or chunk never owns memory; it is valid until the next verb on its sub-group
(a chunk: until the iteration moves on), and its tensors lie over the I/O buffers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch

from swapio.store import TransferFuture
from swapio.subgroup import RecordBuffer, SubGroup


class TransferHandle:
    """The completion of a verb's transfers, as in concurrent.futures.

    Attributes:
        futures: The store's futures, empty when nothing had to be moved.
    """

    def __init__(self, futures: Sequence[TransferFuture] = ()) -> None:
        self.futures = list(futures)

    def result(self, timeout: float | None = None) -> int:
        """Block until all transfers are complete; return the bytes moved or raise the error."""
        return sum(future.result(timeout) for future in self.futures)

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return all(future.done() for future in self.futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block as `result`; return the first error instead of raising it."""
        for future in self.futures:
            error = future.exception(timeout)
            if error is not None:
                return error
        return None


class Chunk:
    """Elements `[start, stop)` of all records of a sub-group, in RAM.

    Attributes:
        start: First element (multiple of the sub-group's `chunk_unit_numel`).
        stop: Element after the last.
    """

    __slots__ = ("_buffers", "dirty", "group", "start", "stop")

    def __init__(
        self, group: SubGroup, start: int, stop: int, buffers: Sequence[RecordBuffer]
    ) -> None:
        self.group = group
        self.start = start
        self.stop = stop
        self.dirty: set[str] = set()
        self._buffers = {name: b for b in buffers for name in b.placements}

    @property
    def numel(self) -> int:
        """Elements in each record of the chunk."""
        return self.stop - self.start

    def address(self, record: str) -> int:
        """Address in RAM of element `start` of a record."""
        buffer = self._buffers[record]
        placement = buffer.placements[record]
        return buffer.address(record) + (self.start - placement.start) * placement.dtype.itemsize

    def __getitem__(self, record: str) -> torch.Tensor:
        """The chunk of one record as a 1-D tensor over the I/O buffer."""
        buffer = self._buffers[record]
        offset = self.start - buffer.placements[record].start
        return buffer.tensor(record)[offset : offset + self.numel]

    def mark_dirty(self, *records: str) -> None:
        """Say that records (default: all) of this chunk were changed and must be written back."""
        self.dirty.update(records or self.group.specs)


class ViewOwner(Protocol):
    """The part of a swapper that its views need."""

    observe_chunks: Callable[[str, Iterator[Chunk]], Iterator[Chunk]] | None

    def mark_dirty(self, key: str, records: Iterable[str] = ()) -> None: ...  # noqa: D102
    def swap_out(self, key: str) -> None: ...  # noqa: D102
    def whole(self, group: SubGroup) -> Sequence[RecordBuffer]: ...  # noqa: D102
    def iterate(self, group: SubGroup) -> Iterator[Chunk]: ...  # noqa: D102


class SubGroupView:
    """A swapped-in sub-group. As a context manager it swaps the sub-group out at the end.

    After an exception inside the `with` block the sub-group stays as it is.
    """

    def __init__(self, owner: ViewOwner, group: SubGroup) -> None:
        self._owner = owner
        self.group = group

    def __getitem__(self, record: str) -> torch.Tensor:
        """A record in its logical shape, over the I/O buffer (loads the rest of it if streamed)."""
        for buffer in self._owner.whole(self.group):
            if record in buffer.placements:
                return buffer.tensor(record).view(self.group.specs[record].shape)
        raise KeyError(f"record {record!r} of sub-group {self.group.key!r} is not swapped in")

    def chunks(self) -> Iterator[Chunk]:
        """Yield the sub-group chunk by chunk, in whatever order storage likes best.

        All records must have the same numel. A chunk changed in place must be marked with
        `chunk.mark_dirty()`; it is valid until the next one is asked for.
        """
        chunks, observe = self._owner.iterate(self.group), self._owner.observe_chunks
        return chunks if observe is None else observe(self.group.key, chunks)

    def mark_dirty(self, *records: str) -> None:
        """Say that records (default: all) were changed through `view[record]`."""
        self._owner.mark_dirty(self.group.key, records)

    def __enter__(self) -> SubGroupView:
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Swap the sub-group out unless an exception passes."""
        if kind is None:
            self._owner.swap_out(self.group.key)
