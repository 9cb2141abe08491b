# SPDX-License-Identifier: Apache-2.0
"""What a sub-group is: its records, its states, and how it is cut into chunks.

A sub-group is the unit of swapping: a few named tensors ("records") of the same or of different
lengths. When all records have the same number of elements it can be *streamed*: read, updated and
written in chunks, whole checksum blocks of every record at a time.

Invariants:
- chunk bounds are multiples of `chunk_unit_numel`, so that every record of a chunk starts and
  ends at a block of its file (or at the record's end);
- in a buffer, records start at page boundaries and are staggered, because arrays that start at
  the same offset of their 2 MiB pages compete for the same cache sets.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import torch

from swapio.align import BLOCK_BYTES, PAGE_BYTES, STAGGER_BYTES, round_up
from swapio.buffers import Lease
from swapio.errors import ConfigError, SwapStateError
from swapio.store import Piece, RecordLayout

RecordInit = float | torch.Tensor | Callable[[int, torch.Tensor], None]


class SubGroupState(enum.Enum):
    """Who owns a sub-group's bytes. RESIDENT: all records live in RAM and are never swapped."""

    OUT = "out"
    READING = "reading"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"
    RESIDENT = "resident"


@dataclass(frozen=True)
class RecordSpec:
    """One named tensor of a sub-group.

    Args:
        shape: Logical shape; the record is stored contiguously.
        dtype: Any torch dtype of 1, 2, 4 or 8 bytes.
        init: First content: a number, a tensor of the same numel, or `fill(start, out)` which
            writes elements `start:start + out.numel()` into the 1-D tensor `out`.
        is_read: False for a record that is only ever written: swapping in leaves its memory
            undefined, and whoever changes a chunk fills it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    init: RecordInit = 0.0
    is_read: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Write the initial elements `start:start + out.numel()` into the 1-D tensor `out`."""
        if isinstance(self.init, torch.Tensor):
            out.copy_(self.init.detach().reshape(-1)[start : start + out.numel()])
        elif callable(self.init):
            self.init(start, out)
        else:
            out.fill_(self.init)


class Placement(NamedTuple):
    """Where the part `[start, stop)` (elements) of one record lies in a buffer.

    Attributes:
        record: The record.
        dtype: Its dtype.
        start: First element.
        stop: Element after the last.
        byte_offset: Of the part in the buffer.
        byte_start: Of the part in the record.
        nbytes: Of the part.
    """

    record: str
    dtype: torch.dtype
    start: int
    stop: int
    byte_offset: int
    byte_start: int
    nbytes: int


def place(
    specs: Mapping[str, RecordSpec], records: Iterable[str], start: int, stop: int | None
) -> tuple[tuple[Placement, ...], int]:
    """Lay the elements `[start, stop)` of some records out in one buffer.

    `stop=None` means each record whole. Returns the placements and the bytes of the buffer.
    """
    placements = []
    offset = 0
    for record in records:
        spec = specs[record]
        end = spec.numel if stop is None else stop
        width = spec.dtype.itemsize
        nbytes = (end - start) * width
        placements.append(Placement(record, spec.dtype, start, end, offset, start * width, nbytes))
        offset = round_up(offset + nbytes, PAGE_BYTES) + STAGGER_BYTES
    return tuple(placements), max(PAGE_BYTES, round_up(offset - STAGGER_BYTES, PAGE_BYTES))


class RecordBuffer:
    """Some records, or a chunk of each, in leased memory."""

    __slots__ = ("_tensors", "lease", "placements")

    def __init__(self, lease: Lease, placements: Sequence[Placement]) -> None:
        self.lease = lease
        self.placements = {p.record: p for p in placements}
        self._tensors: dict[str, torch.Tensor] = {}

    def address(self, record: str) -> int:
        """Address in RAM of the first element held of `record`."""
        return self.lease.address + self.placements[record].byte_offset

    def tensor(self, record: str) -> torch.Tensor:
        """The elements held of `record`, as a 1-D tensor over the buffer."""
        if record not in self._tensors:
            p = self.placements[record]
            self._tensors[record] = self.lease.tensor(p.dtype, (p.stop - p.start,), p.byte_offset)
        return self._tensors[record]

    def __enter__(self) -> RecordBuffer:
        """Return self; the lease is given back at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lease; see `Lease.release_after`."""
        self.lease.release_after(error)

    def pieces(self, records: Iterable[str] | None = None) -> list[Piece]:
        """The transfers that move the buffer from or to storage."""
        base = self.lease.address
        return [
            Piece(p.record, p.byte_start, p.nbytes, base + p.byte_offset)
            for p in self.placements.values()
            if p.nbytes and (records is None or p.record in records)
        ]


@dataclass
class SubGroup:
    """A registered sub-group. Created by a swapper's `add_sub_group`; read-only to others."""

    key: str
    specs: dict[str, RecordSpec]
    fragments: tuple[Any, ...] = ()
    resident: set[str] = field(default_factory=set)
    streamed: bool = True
    chunk_numel: int = 0
    meta_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.specs:
            raise ConfigError(f"sub-group {self.key!r} has no records")
        if not self.is_uniform:
            self.streamed = False

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all records have the same number of elements."""
        return len({spec.numel for spec in self.specs.values()}) == 1

    @cached_property
    def numel(self) -> int:
        """Elements of the longest record."""
        return max(spec.numel for spec in self.specs.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def swapped(self) -> list[str]:
        """Names of the records that live on storage."""
        return [name for name in self.specs if name not in self.resident]

    @property
    def readable(self) -> list[str]:
        """Names of the records that swapping in reads, if they are swapped."""
        return [name for name, spec in self.specs.items() if spec.is_read]

    @property
    def swapped_nbytes(self) -> int:
        """Bytes of the records that live on storage."""
        return sum(self.specs[name].nbytes for name in self.swapped)

    @property
    def chunk_unit_numel(self) -> int:
        """Elements that fill whole checksum blocks of every record."""
        return BLOCK_BYTES // min(spec.dtype.itemsize for spec in self.specs.values())

    def set_chunk_bytes(self, chunk_bytes: int, chunk_numel: int | None = None) -> None:
        """Choose the largest chunk whose swapped records need at most about `chunk_bytes`.

        `chunk_numel` elements are taken instead where they are given, in whole blocks.
        """
        width = sum(self.specs[name].dtype.itemsize for name in self.swapped) or 1
        unit = self.chunk_unit_numel
        wanted = chunk_bytes // width if chunk_numel is None else chunk_numel
        self.chunk_numel = max(unit, wanted // unit * unit)

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 1 when the sub-group is not streamed."""
        if not self.streamed or not self.chunk_numel:
            return 1
        return max(1, -(-self.numel // self.chunk_numel))

    def chunk_bounds(self, index: int) -> tuple[int, int | None]:
        """Elements `[start, stop)` of chunk `index`; stop is None for a sub-group in one piece."""
        if not self.streamed or not self.chunk_numel:
            return 0, None
        start = index * self.chunk_numel
        return start, min(self.numel, start + self.chunk_numel)

    def check_chunkable(self) -> None:
        """Raise SwapStateError unless all records have the same number of elements."""
        if not self.is_uniform:
            raise SwapStateError(
                f"sub-group {self.key!r} has records of different lengths and cannot be cut in "
                "chunks; use view[record]"
            )

    def layouts(self) -> list[RecordLayout]:
        """What the store must know: every record, also resident ones (a save needs them)."""
        return [RecordLayout(name, spec.nbytes) for name, spec in self.specs.items()]
