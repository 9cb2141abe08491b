# SPDX-License-Identifier: Apache-2.0
"""What the chunk buffers save: the end of a sweep stays in them for the reversed next one. Pure.

The pipelined swapper keeps a chunk when the rest of the sweep fits in the stream buffers without
`RESERVE_CHUNKS`; the next sweep runs the other way and begins with it. A kept chunk is not read
again, and under durability "checkpoint" it is not written in between either, as if it were
resident.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from swapio.plan_forms import SubGroupSize
from swapio.plan_request import PlanRequest, chunk_bytes, step_bytes, untagged
from swapio.plan_staging import Staging

RESERVE_CHUNKS = 2
"""Buffers that a sweep needs beside what it keeps: one to update, one to read into."""


class Kept(NamedTuple):
    """Bytes that the buffers save in a step, on average over both directions of the sweep.

    Attributes:
        held: Bytes of the buffers that hold kept chunks after a step.
        read: Record bytes that are not read.
        written: Record bytes that are not written.
    """

    held: int
    read: int
    written: int


def kept_chunks(swapped: Sequence[SubGroupSize], staging: Staging, request: PlanRequest) -> Kept:
    """Return what is kept of the sub-groups that are swapped, given in the order of the sweep."""
    keep = staging.nbytes - RESERVE_CHUNKS * staging.buffer_bytes
    if not request.is_pipelined or not swapped or keep < 0:
        return Kept(0, 0, 0)
    ends = [_kept(order, staging.chunk_numel, keep, request) for order in (swapped, swapped[::-1])]
    return Kept(*(sum(values) // 2 for values in zip(*ends, strict=True)))


def _kept(
    order: Iterable[SubGroupSize], chunk_numel: int, keep: int, request: PlanRequest
) -> tuple[int, int, int]:
    held = read = written = 0
    for numel, group in _chunks(order, chunk_numel):
        if held > keep:
            break
        held += chunk_bytes(group, numel)
        moved = step_bytes(group._replace(numel=numel), False, request)
        read += moved[0]
        written += 0 if request.writes_through else moved[1]
    return held, read, written


def _chunks(order: Iterable[SubGroupSize], chunk_numel: int) -> Iterator[tuple[int, SubGroupSize]]:
    """Yield (elements, the untagged sub-group) of every chunk."""
    for full in order:
        group = untagged(full)
        step = group.numel if group.is_whole else chunk_numel
        for start in range(0, group.numel, max(1, step)):
            yield min(step, group.numel - start), group
