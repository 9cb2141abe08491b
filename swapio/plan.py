# SPDX-License-Identifier: Apache-2.0
"""The planner: what stays in RAM, how the rest is streamed, and what a step will cost. Pure.

The budget is spent in this order: what cannot be avoided (checksum tables, lists of ties,
workspace, tagged state, sub-groups below min_swap_bytes), staging for one good pipeline, whole
sub-groups, and what is left goes to more read-ahead.

    why whole sub-groups come before still more buffers: both save the same bytes (buffers keep the
    end of a sweep for the next), but a resident sub-group does so in any order of steps.

Invariant: the parts of a Plan add up to host_memory, to the byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swapio.config_values import format_size
from swapio.errors import ConfigError
from swapio.plan_cache import kept_chunks
from swapio.plan_request import (
    PlanRequest,
    added_ram_bytes,
    must_stay,
    ram_bytes,
    slot_bytes,
    small_bytes,
    step_bytes,
    tagged,
)
from swapio.plan_staging import NO_STAGING, STREAM_BYTES_GOOD, Staging, grow, stagings
from swapio.plan_time import PlanTime, predict

__all__ = ["Plan", "PlanRequest", "evaluate_plan", "make_plan", "sweep_order"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided, and what it will cost.

    Attributes:
        resident: Indices of the sub-groups that stay in RAM whole, ascending.
        chunk_numel: Elements of a chunk.
        buffer_bytes: Bytes of one chunk buffer: the records of the largest chunk.
        read_ahead: Chunk buffers that hold chunks to come.
        writing: Chunk buffers that hold chunks being written.
        num_buffers: All chunk buffers: read_ahead, writing, and the one being updated.
        staging_bytes: The buffers together.
        kept_bytes: What of them holds the end of a sweep for the next one, as if it were resident.
        resident_bytes: Records that stay in RAM.
        small_bytes: Checksum tables and lists of ties.
        workspace_bytes: As requested.
        gradient_bytes: As requested.
        spare_bytes: What is left of host_memory.
        host_memory: The budget.
        minimum_host_memory: The least budget that would do.
        numel: Elements of all sub-groups.
        num_sub_groups: How many there are.
        num_slots: Slots of each sub-group on storage.
        disk_bytes: Bytes of all slots together.
        disk_free_bytes: As requested.
        read_bytes: Bytes read from storage in a step.
        write_bytes: Bytes written to storage in a step.
        time: Predicted seconds of a step.
        notes: Sentences worth saying.
    """

    resident: tuple[int, ...]
    chunk_numel: int
    buffer_bytes: int
    read_ahead: int
    writing: int
    num_buffers: int
    staging_bytes: int
    kept_bytes: int
    resident_bytes: int
    small_bytes: int
    workspace_bytes: int
    gradient_bytes: int
    spare_bytes: int
    host_memory: int
    minimum_host_memory: int
    numel: int
    num_sub_groups: int
    num_slots: int
    disk_bytes: int
    disk_free_bytes: int | None
    read_bytes: int
    write_bytes: int
    time: PlanTime
    notes: tuple[str, ...] = ()

    @property
    def read_bytes_per_param(self) -> float:
        """Bytes read per parameter and step."""
        return self.read_bytes / max(1, self.numel)

    @property
    def write_bytes_per_param(self) -> float:
        """Bytes written per parameter and step."""
        return self.write_bytes / max(1, self.numel)

    @property
    def disk_fits(self) -> bool:
        """Whether the slots fit in the free space; True when that is not known."""
        return self.disk_free_bytes is None or self.disk_bytes <= self.disk_free_bytes

    def write_bytes_per_day(self, steps_per_day: float) -> float:
        """Return the wear of the drives: bytes written in a day of that many steps."""
        return self.write_bytes * steps_per_day

    def exposed_seconds(self) -> float | None:
        """Return the I/O that long enough forward and backward cannot hide; None if not known."""
        return self.time.exposed_seconds(self.read_bytes, self.write_bytes, self.staging_bytes)

    def table(self, steps_per_day: float | None = None) -> str:
        """Return the plan as text for people."""
        from swapio.plan_table import render

        return render(self, steps_per_day)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and what follows from them as plain values, for --json."""
        found = dataclasses.asdict(self)
        found["read_bytes_per_param"] = self.read_bytes_per_param
        found["write_bytes_per_param"] = self.write_bytes_per_param
        found["disk_fits"] = self.disk_fits
        found["exposed_seconds"] = self.exposed_seconds()
        return found


def make_plan(request: PlanRequest) -> Plan:
    """Decide what stays in RAM and how the rest is streamed.

    Raises:
        ConfigError: The budget is too small; the message names the least that would do.
    """
    groups = request.sub_groups
    forced = {i for i, group in enumerate(groups) if must_stay(group, request)}
    free = [i for i in range(len(groups)) if i not in forced]
    fixed = _fixed_bytes(request, forced)
    everything = fixed + sum(added_ram_bytes(groups[i]) for i in free)
    ways: list[Staging] = []
    if free and request.has_storage:
        ways = list(stagings([groups[i] for i in free], request))
    least = _least_bytes(request, fixed, everything, ways)
    if request.host_memory < least:
        raise ConfigError(_too_small(request, least, everything, ways))
    room = request.host_memory - fixed
    through_buffers = request.writes_through and request.is_pipelined
    if everything <= request.host_memory and not through_buffers:
        return evaluate_plan(request, set(range(len(groups))), NO_STAGING, least)
    staging = next((way for way in ways if way.nbytes <= room), NO_STAGING)
    # What is written through is best kept in the buffers, from which writes need not be waited for.
    good = max(STREAM_BYTES_GOOD, request.host_memory // 4)
    good = room if through_buffers else min(room, good)
    staging = grow(staging, [groups[i] for i in free], request, good)
    resident = set(forced)
    if not through_buffers:
        resident.update(_choose_resident(free, room - staging.nbytes, request))
    room -= sum(added_ram_bytes(groups[i]) for i in resident - forced)
    staging = grow(staging, [groups[i] for i in free if i not in resident], request, room)
    return evaluate_plan(request, resident, staging, least)


def _fixed_bytes(request: PlanRequest, forced: set[int]) -> int:
    """Return what no plan can avoid: tables, workspace, and state that must stay in RAM."""
    nbytes = request.workspace_bytes + request.gradient_bytes
    for index, group in enumerate(request.sub_groups):
        nbytes += small_bytes(group, request)
        nbytes += ram_bytes(group if index in forced else tagged(group))
    return nbytes


def _least_bytes(request: PlanRequest, fixed: int, everything: int, ways: Sequence[Staging]) -> int:
    if not ways:
        return everything
    streamed = fixed + ways[-1].nbytes
    # Written through, even resident state passes the staging buffers.
    return streamed if request.writes_through else min(streamed, everything)


def sweep_order(num_sub_groups: int, step: int) -> range:
    """Return the order of a step's sweep: forward in even steps, backward in odd ones.

    Alternation makes what is still in the buffers from the end of one step the start of the next.
    """
    forward = range(num_sub_groups)
    return forward if step % 2 == 0 else forward[::-1]


def _choose_resident(free: Sequence[int], room: int, request: PlanRequest) -> Iterator[int]:
    """Yield the sub-groups to keep: most I/O saved per byte of RAM first, spread over the sweep."""

    groups = request.sub_groups

    def worth(index: int) -> float:
        read, written = step_bytes(groups[index], False, request)
        _, through = step_bytes(groups[index], True, request)
        return (read + written - through) / max(1, added_ram_bytes(groups[index]))

    spread = {index: _reversed_bits(position) for position, index in enumerate(free)}
    for index in sorted(free, key=lambda i: (-worth(i), spread[i])):
        need = added_ram_bytes(groups[index])
        if need <= room:
            room -= need
            yield index


def _reversed_bits(position: int) -> int:
    """Return a sort key that visits 0, half, a quarter, three quarters, ... of any range.

    Resident sub-groups between swapped ones give the drive time to catch up.
    """
    return int(f"{position:032b}"[::-1], 2)


def _too_small(request: PlanRequest, least: int, everything: int, ways: Sequence[Staging]) -> str:
    text = f"host_memory is {format_size(request.host_memory)}, which is too small: "
    if not request.has_storage:
        return text + (
            f"without a path all state stays in RAM and needs {least} bytes "
            f"({format_size(least)}); set host_memory to that, or name a path"
        )
    way = ways[-1] if ways else None
    chunk = (
        f"{way.num_buffers} buffers of {format_size(way.buffer_bytes)}, checksum tables, workspace "
        "and state that must stay in RAM"
        if way
        else "state that must stay in RAM"
    )
    return text + (
        f"the least that does is {least} bytes ({format_size(least)}), for {chunk}; "
        f"all state in RAM is {format_size(everything)}"
    )


def evaluate_plan(request: PlanRequest, resident: set[int], staging: Staging, least: int) -> Plan:
    """Return the plan with these sub-groups resident and this staging: its bytes and seconds.

    Args:
        request: What the planner was asked.
        resident: Indices of the sub-groups that stay in RAM.
        staging: How the rest is streamed.
        least: The least budget that would do.
    """
    groups = request.sub_groups
    in_ram = [
        ram_bytes(group if i in resident else tagged(group)) for i, group in enumerate(groups)
    ]
    resident_bytes = sum(in_ram)
    small = sum(small_bytes(group, request) for group in groups)
    moved = [step_bytes(group, i in resident, request) for i, group in enumerate(groups)]
    swapped = [group for i, group in enumerate(groups) if i not in resident]
    kept = kept_chunks(swapped, staging, request)
    read, written = sum(r for r, _ in moved) - kept.read, sum(w for _, w in moved) - kept.written
    touched = sum(group.numel * group.touched_bytes for group in groups)
    slots = sum(slot_bytes(group, i in resident, request) for i, group in enumerate(groups))
    used = staging.nbytes + resident_bytes + small
    used += request.workspace_bytes + request.gradient_bytes
    time = predict(
        request.rates,
        read_bytes=read,
        write_bytes=written,
        touched_bytes=touched,
        checksum=request.checksum,
        pipeline_read=request.pipeline_read,
        pipeline_write=request.pipeline_write,
        flops=sum(group.flops for group in groups),
    )
    plan = Plan(
        resident=tuple(sorted(resident)),
        chunk_numel=staging.chunk_numel,
        buffer_bytes=staging.buffer_bytes,
        read_ahead=staging.read_ahead,
        writing=staging.writing,
        num_buffers=staging.num_buffers,
        staging_bytes=staging.nbytes,
        kept_bytes=kept.held,
        resident_bytes=resident_bytes,
        small_bytes=small,
        workspace_bytes=request.workspace_bytes,
        gradient_bytes=request.gradient_bytes,
        spare_bytes=request.host_memory - used,
        host_memory=request.host_memory,
        minimum_host_memory=least,
        numel=sum(group.numel for group in groups),
        num_sub_groups=len(groups),
        num_slots=request.num_slots if slots else 0,
        disk_bytes=slots * request.num_slots,
        disk_free_bytes=request.disk_free_bytes,
        read_bytes=read,
        write_bytes=written,
        time=time,
    )
    return dataclasses.replace(plan, notes=tuple(_notes(plan, request)))


def _notes(plan: Plan, request: PlanRequest) -> Iterator[str]:
    if not plan.disk_fits:
        yield (
            f"the slots need {format_size(plan.disk_bytes)}, but only "
            f"{format_size(plan.disk_free_bytes or 0)} are free; lower spare_slots or free space"
        )
    if plan.time.checksum_limits:
        yield "the drive is faster than the checksums; checksum=False would be faster here"
    if plan.read_bytes + plan.write_bytes and request.rates.mixed is None:
        yield (
            "without mixed_bandwidth the drive is taken to read and write in turns; "
            "`swapio tune` measures it"
        )
