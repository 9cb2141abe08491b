# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of aligned sizes and blocks. Pure; standard library only.

Invariant: BLOCK_BYTES is part of the on-disk format: one checksum covers one block of a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BLOCK_BYTES = 1 << 20
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
STAGGER_BYTES = 5 * PAGE_BYTES
"""Between the records of a buffer: arrays that start at the same offset of their 2 MiB pages
compete for the same cache sets. An odd number of pages; measured on the Adam kernel only."""


class Extent(NamedTuple):
    """A contiguous byte range of a file or record."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after the extent."""
        return self.offset + self.length


def round_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `value` (both non-negative)."""
    return -(-value // alignment) * alignment


def round_down(value: int, alignment: int) -> int:
    """Return the largest multiple of `alignment` that is at most `value`."""
    return value // alignment * alignment


def num_blocks(nbytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return how many blocks `nbytes` occupy, the last one possibly short."""
    return -(-nbytes // block_bytes)


def placed_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a buffer that holds records of these sizes, each at a page, staggered."""
    total = 0
    for size in sizes:
        total = round_up(total + size, PAGE_BYTES) + STAGGER_BYTES
    return max(PAGE_BYTES, total - STAGGER_BYTES)


def split_extent(extent: Extent, piece_bytes: int) -> Iterator[Extent]:
    """Cut an extent at multiples of `piece_bytes` of its own start."""
    for start in range(extent.offset, extent.end, piece_bytes):
        yield Extent(start, min(piece_bytes, extent.end - start))
