# SPDX-License-Identifier: Apache-2.0
"""How much RAM streaming takes: chunk size and buffers, from generous to the least. Pure.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swapio.align import BLOCK_BYTES, round_up
from swapio.plan_forms import SubGroupSize, block_numel
from swapio.plan_request import PlanRequest, chunk_bytes, untagged

CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 8 << 20, 32 << 20
"""Least bytes of a chunk's records together when the budget allows, and when it is large: chunks of
8 to 64 MiB keep a drive busy (16 MiB in flight is the best of a sweep) without holding much RAM.
The work in Python is the same for a chunk of any size."""

_CHUNKS_OF_BUDGET = 64

STREAM_BYTES_GOOD = 256 << 20
"""Buffers beyond which whole resident sub-groups do as much good: four batches of 64 MiB, in which
drives that are half duplex in effect are read and written in turns. Of a large budget a quarter,
whose chunks are larger."""

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
        """Bytes of all buffers."""
        return self.num_buffers * self.buffer_bytes


NO_STAGING = Staging(0, 0, 0, 0)


def stagings(groups: Sequence[SubGroupSize], request: PlanRequest) -> Iterator[Staging]:
    """Yield ways to stream, the best first, the smallest last."""
    kinds = set(groups)  # of tens of thousands of sub-groups, nearly all alike
    whole_bytes = max((chunk_bytes(untagged(g), g.numel) for g in kinds if g.is_whole), default=0)
    cut = [group for group in kinds if not group.is_whole]
    # Tagged records are cut at the same elements, so that their blocks count too.
    unit = max((block_numel(group.records) for group in cut), default=BLOCK_BYTES // 4)
    elementwise = [untagged(group) for group in cut]
    longest = round_up(max((group.numel for group in elementwise), default=1), unit)
    if request.chunk_numel == "auto":
        chunk = unit
        wanted = request.host_memory // _CHUNKS_OF_BUDGET
        wanted = min(max(wanted, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
        while chunk < longest and _largest(elementwise, chunk) < wanted:
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


def grow(
    staging: Staging, swapped: Sequence[SubGroupSize], request: PlanRequest, room: int
) -> Staging:
    """Return staging with as much read-ahead as `room` bytes for all of it allow.

    Buffers beyond all chunks of `swapped` and those in use would stay empty.
    """
    if not staging.buffer_bytes or not request.is_pipelined:
        return staging
    chunks = sum(1 if g.is_whole else -(-g.numel // staging.chunk_numel) for g in swapped)
    most = min(chunks + 2, max(0, room) // staging.buffer_bytes)
    more = max(0, most - staging.num_buffers)
    if not request.pipeline_read:
        return dataclasses.replace(staging, writing=staging.writing + more)
    return dataclasses.replace(staging, read_ahead=staging.read_ahead + more)
