# SPDX-License-Identifier: Apache-2.0
"""What the planner is asked, and the bytes of a sub-group in RAM, on storage and on the way. Pure.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swapio.align import PAGE_BYTES, num_blocks, placed_bytes, round_up
from swapio.config import SwapConfig
from swapio.plan_forms import RecordSize, SubGroupSize
from swapio.plan_time import Rates

_HASH_BYTES = 8

# A model has tens of thousands of sub-groups, nearly all alike.
_cached = functools.lru_cache(maxsize=1024)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the planner decides from. All sizes in bytes unless they say elements.

    Attributes:
        sub_groups: In the order in which they are stepped.
        host_memory: The budget.
        chunk_numel: Elements of a chunk, or "auto".
        pipeline_read: Whether reads overlap the update.
        pipeline_write: Whether writes overlap the update.
        min_swap_bytes: Sub-groups with smaller records stay in RAM.
        durability: "checkpoint", "step" or "power".
        spare_slots: Slots beyond what durability needs; None is one.
        checksum: Whether blocks are checksummed.
        in_flight_bytes: Bytes that the engine keeps in flight: queue depth times block size.
        workspace_bytes: Newton-Schulz, gather and other scratch that the optimizer asks for.
        gradient_bytes: RAM for streamed gradients.
        rates: Measured speeds, where they are known.
        disk_free_bytes: Free space of the paths together, where it is known.
        has_storage: False when there is no path: then all state must fit in the budget.
    """

    sub_groups: tuple[SubGroupSize, ...]
    host_memory: int
    chunk_numel: int | Literal["auto"] = "auto"
    pipeline_read: bool = True
    pipeline_write: bool = True
    min_swap_bytes: int = 1 << 20
    durability: str = "checkpoint"
    spare_slots: int | None = None
    checksum: bool = True
    in_flight_bytes: int = 16 << 20
    workspace_bytes: int = 0
    gradient_bytes: int = 0
    rates: Rates = dataclasses.field(default_factory=Rates)
    disk_free_bytes: int | None = None
    has_storage: bool = True

    @classmethod
    def from_config(
        cls, config: SwapConfig, sub_groups: Sequence[SubGroupSize], **more: Any
    ) -> PlanRequest:
        """Take what a SwapConfig says; `more` are fields of PlanRequest, and win.

        Without any pipeline, sub-groups are taken whole: the blocking swapper does not stream.
        """
        if config.swapper == "partitioned":
            sub_groups = [group._replace(is_whole=True) for group in sub_groups]
        rates = Rates(
            read=config.read_bandwidth, write=config.write_bandwidth, mixed=config.mixed_bandwidth
        )
        given: dict[str, Any] = {
            "host_memory": config.resolve_host_memory() if "host_memory" not in more else 0,
            "chunk_numel": config.chunk_numel,
            "pipeline_read": config.pipeline_read,
            "pipeline_write": config.pipeline_write,
            "min_swap_bytes": config.min_swap_bytes,
            "durability": config.durability,
            "spare_slots": config.spare_slots,
            "checksum": config.checksum,
            "in_flight_bytes": config.queue_depth * config.block_size,
            "rates": rates,
            "has_storage": bool(config.paths),
        }
        return cls(sub_groups=tuple(sub_groups), **(given | more))

    @property
    def is_pipelined(self) -> bool:
        """Whether chunks are streamed; the blocking swapper moves whole sub-groups."""
        return self.pipeline_read or self.pipeline_write

    @property
    def num_slots(self) -> int:
        """Slots of each sub-group on storage."""
        spare = 1 if self.spare_slots is None else self.spare_slots
        return spare + (2 if self.writes_through else 1)

    @property
    def writes_through(self) -> bool:
        """Whether resident state is written in each step."""
        return self.durability != "checkpoint" and self.has_storage


@_cached
def tagged(group: SubGroupSize) -> SubGroupSize:
    """Return the sub-group with only the records that are tagged resident."""
    return group._replace(records=tuple(r for r in group.records if r.is_resident))


@_cached
def untagged(group: SubGroupSize) -> SubGroupSize:
    """Return the sub-group without the records that are tagged resident."""
    return group._replace(records=tuple(r for r in group.records if not r.is_resident))


def record_bytes(numel: int, record: RecordSize) -> int:
    """Return the bytes of a record, or of a chunk of `numel` elements of it."""
    return (record.numel or numel) * record.item_bytes


@_cached
def ram_bytes(group: SubGroupSize) -> int:
    """Return what the records take when they are resident.

    A written parameter too: it is copied there, because what is on its way to storage must not
    change, and the user's tensor may at any time.
    """
    sizes = [record_bytes(group.numel, r) for r in group.records]
    return placed_bytes(sizes) if sizes else 0


@_cached
def added_ram_bytes(group: SubGroupSize) -> int:
    """Return the RAM that a sub-group takes when all of it is resident, not only what is tagged."""
    return ram_bytes(group) - ram_bytes(tagged(group))


def must_stay(group: SubGroupSize, request: PlanRequest) -> bool:
    """Whether a sub-group stays in RAM because its records are small, or because all are."""
    swapped = sum(record_bytes(group.numel, r) for r in group.records if not r.is_resident)
    return swapped < max(1, request.min_swap_bytes)


def small_bytes(group: SubGroupSize, request: PlanRequest) -> int:
    """Return the bytes of checksum tables and lists beside the records."""
    if not (request.checksum and request.has_storage):
        return group.small_bytes
    blocks = sum(num_blocks(record_bytes(group.numel, r)) for r in group.records)
    # One for each slot, and those of what is being written.
    return group.small_bytes + blocks * _HASH_BYTES * (request.num_slots + 1)


def chunk_bytes(group: SubGroupSize, numel: int) -> int:
    """Return the bytes of a buffer for `numel` elements of each record."""
    sizes = [record_bytes(numel, record) for record in group.records]
    return placed_bytes(sizes) if sizes else 0


def step_bytes(group: SubGroupSize, resident: bool, request: PlanRequest) -> tuple[int, int]:
    """Return the bytes read and written for a sub-group in a step."""
    if not request.has_storage:
        return 0, 0
    read = written = 0
    for record in group.records:
        nbytes = record_bytes(group.numel, record)
        in_ram = resident or record.is_resident
        read += nbytes if record.is_read and not in_ram else 0
        written += nbytes if not in_ram or request.writes_through else 0
    return read, written


def slot_bytes(group: SubGroupSize, resident: bool, request: PlanRequest) -> int:
    """Return the bytes of one slot: records on storage, each aligned, and the table's pages."""
    if not request.has_storage:
        return 0
    swapped = not resident and any(not record.is_resident for record in group.records)
    if not swapped and not request.writes_through:
        return 0
    # Tagged records have their place too: a save puts them there.
    sizes = [record_bytes(group.numel, record) for record in group.records]
    table = sum(num_blocks(size) * _HASH_BYTES for size in sizes) + group.small_bytes
    records = sum(round_up(size, PAGE_BYTES) for size in sizes)
    return records + round_up(table + PAGE_BYTES, PAGE_BYTES)
