# SPDX-License-Identifier: Apache-2.0
"""How much RAM streaming takes: chunk size and buffers, from generous to the least. Pure.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swapio.align import BLOCK_BYTES, HUGE_PAGE_BYTES, round_up
from swapio.plan_forms import SubGroupSize, block_numel
from swapio.plan_request import PlanRequest, chunk_bytes, must_stay, ram_bytes, untagged

CHUNK_BYTES_MIN = 8 << 20
"""Least bytes of a chunk's records together when the budget allows: chunks of 8 to 16 MiB keep a
drive busy (16 MiB in flight is the best of a sweep) without holding much RAM."""

_DEPTH_MAX = 8


@dataclass(frozen=True)
class Staging:
    """One way to stream: chunk size and buffers on either side of the one being updated."""

    chunk_numel: int
    buffer_bytes: int
    read_ahead: int
    writing: int

    @property
    def num_buffers(self) -> int:
        """Buffers in all; none when nothing is streamed."""
        return self.read_ahead + 1 + self.writing if self.buffer_bytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in whole huge pages."""
        return round_up(self.num_buffers * self.buffer_bytes, HUGE_PAGE_BYTES)


def stagings(groups: Sequence[SubGroupSize], request: PlanRequest) -> Iterator[Staging]:
    """Yield ways to stream, the best first, the smallest last."""
    kinds = set(groups)  # of tens of thousands of sub-groups, nearly all alike
    elementwise = [group for group in kinds if not group.is_whole]
    whole_bytes = max((chunk_bytes(g, g.numel) for g in kinds if g.is_whole), default=0)
    unit = max((block_numel(group.records) for group in elementwise), default=BLOCK_BYTES // 4)
    longest = round_up(max((group.numel for group in elementwise), default=1), unit)
    if request.chunk_numel == "auto":
        chunk = unit
        while chunk < longest and _largest(elementwise, chunk) < CHUNK_BYTES_MIN:
            chunk *= 2
        sizes = [chunk]
        while sizes[-1] > unit:
            sizes.append(round_up(sizes[-1] // 2, unit))
    else:
        sizes = [min(round_up(request.chunk_numel, unit), longest)]
    for size in sizes:
        nbytes = max(_largest(elementwise, size), whole_bytes)
        for depth in _depths(nbytes, request, is_smallest=size == sizes[-1]):
            reads = depth if request.pipeline_read else 0
            writes = depth if request.pipeline_write else 0
            yield Staging(size, nbytes, reads, writes)


def _depths(nbytes: int, request: PlanRequest, *, is_smallest: bool) -> range:
    """Return depths on either side, the best first: what is in flight and one to spare."""
    best = max(2, -(-request.in_flight_bytes // max(1, nbytes)) + 1)
    return range(min(best, _DEPTH_MAX), 0 if is_smallest else 1, -1)


def _largest(groups: Sequence[SubGroupSize], chunk_numel: int) -> int:
    return max((chunk_bytes(g, min(chunk_numel, g.numel)) for g in groups), default=0)


def grow(staging: Staging, resident: set[int], request: PlanRequest, room: int) -> Staging:
    """Return staging with read-ahead that uses the RAM left, or none where nothing is streamed.

    Args:
        staging: What was chosen so far.
        resident: Sub-groups that stay in RAM.
        request: What the planner was asked.
        room: RAM for staging and for the sub-groups in `resident` that need not stay there.
    """
    groups = request.sub_groups
    swapped = [untagged(group) for i, group in enumerate(groups) if i not in resident]
    if not swapped and not request.writes_through:
        return Staging(staging.chunk_numel, 0, 0, 0)
    if not staging.buffer_bytes or not request.pipeline_read:
        return staging
    chosen = [groups[i] for i in resident if not must_stay(groups[i], request)]
    room -= sum(ram_bytes(untagged(group)) for group in chosen)
    # More buffers than chunks to read would stay empty.
    most = sum(-(-group.numel // staging.chunk_numel) for group in swapped)
    while staging.read_ahead < most:
        wider = dataclasses.replace(staging, read_ahead=staging.read_ahead + 1)
        if wider.nbytes > room:
            break
        staging = wider
    return staging
