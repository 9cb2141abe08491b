# SPDX-License-Identifier: Apache-2.0
"""Which elements of a whole parameter the part that this rank has consists of.

A checkpoint knows whole parameters only. A rank that keeps a part of one (a shard of ZeRO, the
local tensor of a DTensor) says by a Placement where its elements belong, and saves and loads
exactly those.

Invariants: elements are counted in memory order, of the whole and of the part; runs ascend in the
part and cover it; no two of them overlap in the whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple


class PlacedRun(NamedTuple):
    """Elements of the part from `local` on are those of the whole from `offset` on."""

    offset: int
    local: int
    numel: int


class Placement(NamedTuple):
    """Where a part belongs.

    Attributes:
        shape: Logical shape of the whole parameter.
        order: Dimensions of the whole from the slowest to the fastest in memory.
        runs: The part's elements, in order.
        is_saved: False if another rank saves the same elements.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    runs: tuple[PlacedRun, ...]
    is_saved: bool = True

    def find(self, local: int, numel: int) -> Iterator[PlacedRun]:
        """Yield the runs, cut to the elements `local:local + numel` of the part."""
        # A column of a matrix has a run for each row: they are not looked through one by one.
        at = max(0, bisect_right(self.runs, local, key=_first_of) - 1)
        while at < len(self.runs) and self.runs[at].local < local + numel:
            run = self.runs[at]
            at += 1
            first = max(local, run.local)
            stop = min(local + numel, run.local + run.numel)
            if first < stop:
                yield PlacedRun(run.offset + first - run.local, first, stop - first)


_first_of = attrgetter("local")


def whole(shape: Sequence[int], order: Sequence[int]) -> Placement:
    """Return the placement of a part that is the whole parameter."""
    numel = math.prod(shape)
    return Placement(tuple(shape), tuple(order), (PlacedRun(0, 0, numel),) if numel else ())


def box_placement(
    shape: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    *,
    is_saved: bool = True,
) -> Placement:
    """Return the placement of a box of a contiguous parameter, itself contiguous.

    Args:
        shape: Of the whole.
        starts: First index of the box in each dimension.
        sizes: Its length in each dimension.
        is_saved: See Placement.

    Raises:
        ValueError: The box leaves the parameter.
    """
    box = list(zip(shape, starts, sizes, strict=True))
    if any(start < 0 or size < 0 or start + size > length for length, start, size in box):
        raise ValueError(f"a box of {tuple(sizes)} at {tuple(starts)} leaves {tuple(shape)}")
    order = tuple(range(len(box)))
    if math.prod(sizes) == 0:
        return Placement(tuple(shape), order, (), is_saved)
    # Trailing dimensions that the box takes whole, and one more, are contiguous.
    cut = len(box)
    while cut > 0 and box[cut - 1][2] == box[cut - 1][0]:
        cut -= 1
    cut = max(cut - 1, 0)
    count = math.prod(sizes[cut:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(box))]
    base = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    runs = []
    for row in range(math.prod(sizes[:cut])):
        offset, rest = base, row
        for dim in reversed(range(cut)):
            rest, index = divmod(rest, sizes[dim])
            offset += index * strides[dim]
        runs.append(PlacedRun(offset, row * count, count))
    return Placement(tuple(shape), order, tuple(runs), is_saved)
