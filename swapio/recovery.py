# SPDX-License-Identifier: Apache-2.0
"""Taking up a commit of an earlier run: manifest, files, commit records, slot tables.

Invariant: a commit is taken up only if every slot table that it names is there with the checksum
that it names; otherwise an older one is tried, and if none is whole that is an error, not a
fresh start. Which of the whole ones it is, the caller may choose: ranks must take the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from swapio.commit import UNWRITTEN, StepRecord
from swapio.commitlog import CommitLog
from swapio.errors import CheckpointError, CorruptionError
from swapio.manifest import Manifest, restore_groups
from swapio.slotfiles import SlotFiles, num_links
from swapio.slots import SubGroup
from swapio.store import ChooseCommit, CommitRecord
from swapio.striping import FileGroup, SubGroupLayout
from swapio.tables import SlotTable
from swapio.transaction import Shared, read_table

_logger = logging.getLogger("swapio.store")


@dataclass(frozen=True, slots=True)
class Recovered:
    """A commit that was taken up.

    Attributes:
        record: The commit record.
        groups: The file groups, in order.
        sub_groups: All sub-groups, with their LIVE slots set.
    """

    record: StepRecord
    groups: list[FileGroup]
    sub_groups: list[SubGroup]


def recover_store(
    manifest: Manifest,
    declared: Sequence[SubGroupLayout],
    files: SlotFiles,
    log: CommitLog,
    shared: Shared,
    *,
    step: int | None,
    choose: ChooseCommit | None = None,
) -> Recovered | None:
    """Open what an earlier run left and take up its newest whole commit, or that of `step`.

    Args:
        manifest: Of the earlier run.
        declared: The sub-groups of this run; empty takes those of the earlier one.
        files: Opens the slot files.
        log: Reads the commit records.
        shared: The store's common parts.
        step: The step that is wanted; None is the newest.
        choose: Is given all whole commits, newest first, and says which one it is to be.

    Returns:
        None if there is no commit, or `choose` wants none.

    Raises:
        CheckpointError: If no commit is whole, or the declared sub-groups differ.
        CorruptionError: If the manifest or a file's size is wrong.
    """
    records = [
        record for record in log.read() if record.store_id == bytes.fromhex(manifest.store_id)
    ]
    if not records and step is None:
        return None
    candidates = [record for record in records if step in (None, record.step)]
    if not candidates:
        found = [record.step for record in records]
        raise CheckpointError(f"there is no commit of step {step}; there are commits of {found}")
    placed = restore_groups(manifest)
    _compare(declared, [layout for group, _ in placed for layout, _ in group.members])
    sub_groups = [
        sub_group for group, num_slots in placed for sub_group in _open(files, group, num_slots)
    ]
    whole = _whole(candidates, sub_groups, shared, want_all=choose is not None)
    position = 0 if choose is None else _position(choose, [record for record, _ in whole])
    if position is None:
        return None
    record, tables = whole[position]
    _take_up(record, sub_groups, tables)
    log.resume_after(record)
    return Recovered(record, [group for group, _ in placed], sub_groups)


def _whole(
    candidates: Sequence[StepRecord],
    sub_groups: Sequence[SubGroup],
    shared: Shared,
    *,
    want_all: bool,
) -> list[tuple[StepRecord, list[SlotTable | None]]]:
    """Return the commits whose tables are all there: the newest, or all of them."""
    found: list[tuple[StepRecord, list[SlotTable | None]]] = []
    reasons = []
    for record in candidates:
        try:
            found.append((record, _read_tables(record, sub_groups, shared)))
        except CorruptionError as error:
            reasons.append(f"step {record.step}: {error}")
            if not found:  # an older one's slots may well have been written since
                _logger.warning("the commit of step %d is not whole: %s", record.step, error)
        if found and not want_all:
            break
    if not found:
        reason = "; ".join(reasons)
        raise CheckpointError(f"no commit is whole; resume from a checkpoint. {reason}")
    return found


def _position(choose: ChooseCommit, records: Sequence[StepRecord]) -> int | None:
    offered = [CommitRecord(r.step, r.payload, r.scalars, ()) for r in records]
    chosen = choose(offered)
    return None if chosen is None else offered.index(chosen)


def _compare(declared: Sequence[SubGroupLayout], stored: Sequence[SubGroupLayout]) -> None:
    if not declared:
        return
    wanted = {layout.key: layout.identity for layout in declared}
    found = {layout.key: layout.identity for layout in stored}
    if wanted == found:
        return
    different = sorted(
        key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)
    )
    raise CheckpointError(
        f"the committed state has other sub-groups than this run: {different[:5]} "
        f"({len(different)} differ). Use the same parameters and sub_group_numel as the run that "
        "wrote it, or load a checkpoint"
    )


def _open(files: SlotFiles, group: FileGroup, num_slots: int) -> list[SubGroup]:
    members = [SubGroup(layout, group, index) for index, (layout, _) in enumerate(group.members)]
    for slot_index in range(num_slots):
        file_set = files.open_existing(group, slot_index)
        is_linked = num_links(file_set) > 1
        for member in members:
            member.add_slot(file_set).is_linked = is_linked
    return members


def _read_tables(
    record: StepRecord, sub_groups: Sequence[SubGroup], shared: Shared
) -> list[SlotTable | None]:
    if len(record.entries) > len(sub_groups):
        raise CorruptionError(
            f"the commit names {len(record.entries)} sub-groups, the manifest {len(sub_groups)}"
        )
    tables: list[SlotTable | None] = []
    for entry, sub_group in zip(record.entries, sub_groups, strict=False):
        if entry.identity != sub_group.layout.identity:
            raise CorruptionError(f"the commit names another sub-group than {sub_group.key!r}")
        if entry.slot == UNWRITTEN:
            tables.append(None)
            continue
        if entry.slot >= len(sub_group.slots):
            raise CorruptionError(f"the commit names slot {entry.slot} of {sub_group.key!r}")
        slot = sub_group.slots[entry.slot]
        table = read_table(shared, sub_group, slot)
        if (table.table_hash, table.generation) != (entry.table_hash, entry.generation):
            raise CorruptionError(
                f"slot {entry.slot} of {sub_group.key!r} holds generation "
                f"{table.generation}, the commit names generation {entry.generation}"
            )
        if table.has_checksums != shared.mover.has_checksums:
            raise CheckpointError("the committed state has another checksum setting than this run")
        tables.append(table)
    return tables


def _take_up(
    record: StepRecord, sub_groups: Sequence[SubGroup], tables: Sequence[SlotTable | None]
) -> None:
    for sub_group, entry, table in zip(sub_groups, record.entries, tables, strict=False):
        if table is None:
            continue
        slot = sub_group.slots[entry.slot]
        slot.hashes = table.hashes
        slot.generation = table.generation
        slot.table_hash = table.table_hash
        slot.meta = table.meta
        sub_group.live = slot
