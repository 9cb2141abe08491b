# SPDX-License-Identifier: Apache-2.0
"""The state of slots in memory: which is LIVE, which are HELD, which may be written next.

A slot is FREE unless it is LIVE (read), HELD (by a Hold, or by a commit that is not superseded on
all ranks), or the target of the open transaction.

Invariants: at most one slot of a sub-group is LIVE; a HELD slot is never a target; the LIVE slot
is a target only in place, and only if it is not HELD.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swapio.aio import File
from swapio.checksum import Hashes
from swapio.errors import SwapStateError
from swapio.slotfiles import num_links
from swapio.striping import FileGroup, SubGroupLayout
from swapio.tasks import Task


class SlotState(enum.Enum):
    """What a slot is used for."""

    FREE = "free"
    LIVE = "live"
    HELD = "held"
    TARGET = "target"


@dataclass(slots=True, eq=False)
class Slot:
    """One copy of a sub-group on storage.

    Attributes:
        index: Its number among the sub-group's slots.
        files: The open file on each path; None where it has no bytes.
        bases: First byte of the sub-group's region in each file.
        hashes: Checksum of each block as it is, or is being, written.
        generation: The step it holds; -1 when it was never sealed.
        table_hash: Checksum of its table.
        meta: The blob it was sealed with.
        num_holds: Holds that pin it.
        num_commits: Commits that need it.
        is_linked: A checkpoint needs it, as far as is known: see `refresh_links`.
        links: The names that checkpoints of this run gave to one of its files; empty when it is
            linked by an earlier run, of which only the number of names is known.
        bad: Why a block cannot be read, by block number; the error is raised to a reader.
        left_out: Blocks that only a caller's memory has; see `WriteTransaction.leave_out`.
        has_failed: A write to it failed since it was last sealed: other slots are preferred.
        is_target: The open transaction, or a seal on its way, writes it.
    """

    index: int
    files: tuple[File | None, ...]
    bases: tuple[int, ...]
    hashes: Hashes
    generation: int = -1
    table_hash: int = 0
    meta: bytes = b""
    num_holds: int = 0
    num_commits: int = 0
    is_linked: bool = False
    links: list[Path] = field(default_factory=list)
    bad: dict[int, BaseException] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    has_failed: bool = False
    is_target: bool = False

    def is_linked_without(self, freed: Collection[Path] = ()) -> bool:
        """Whether checkpoints need it other than those whose files lie in the folders `freed`."""
        if self.links:
            # Small sub-groups share files: other names of a file may be for another one's sake.
            return any(link.parent not in freed and link.exists() for link in self.links)
        return self.is_linked and num_links(self.files) > 1

    def refresh_links(self) -> None:
        """Take note of checkpoints that were removed."""
        self.is_linked = self.is_linked_without()
        self.links = [link for link in self.links if link.exists()]

    @property
    def is_pinned(self) -> bool:
        """Whether a hold, a commit or a checkpoint needs its content."""
        return self.num_holds > 0 or self.num_commits > 0 or self.is_linked


@dataclass(slots=True, eq=False)
class SubGroup:
    """A sub-group's slots.

    Attributes:
        layout: Where its records lie in a slot.
        group: The files it lies in.
        member_index: Its number among the group's members.
        slots: All of them, by index.
        live: The one that is read.
        pending: The seal that is on its way.
        pending_slot: The slot that seal makes LIVE.
        has_transaction: Whether one is open.
        failure: Why the last seal failed; cleared by the next one.
    """

    layout: SubGroupLayout
    group: FileGroup
    member_index: int
    slots: list[Slot] = field(default_factory=list)
    live: Slot | None = None
    pending: Task | None = None
    pending_slot: Slot | None = None
    has_transaction: bool = False
    failure: BaseException | None = None

    @property
    def key(self) -> str:
        """Its name."""
        return self.layout.key

    def add_slot(self, files: tuple[File | None, ...]) -> Slot:
        """Append a slot that lies in `files`."""
        bases = self.group.members[self.member_index][1]
        hashes = np.zeros(self.layout.num_blocks, dtype=np.uint64)
        slot = Slot(len(self.slots), files, bases, hashes)
        self.slots.append(slot)
        return slot

    def state(self, slot: Slot) -> SlotState:
        """Return what `slot` is used for; a LIVE slot that is pinned counts as HELD."""
        if slot.is_pinned:
            return SlotState.HELD
        if slot is self.live:
            return SlotState.LIVE
        return SlotState.TARGET if slot.is_target else SlotState.FREE

    def free_slots(self, *, in_place: bool) -> list[Slot]:
        """Return the slots a transaction may write, the best first.

        Args:
            in_place: Whether the LIVE slot may be overwritten; then it is preferred unless a
                write to it failed.
        """
        free = [slot for slot in self.slots if self.state(slot) is SlotState.FREE]
        free.sort(key=lambda slot: (slot.has_failed, slot.index))
        live = self.live
        if in_place and live is not None and self.state(live) is SlotState.LIVE:
            free.insert(len(free) if live.has_failed else 0, live)
        return free

    def require_live(self) -> Slot:
        """Return the LIVE slot.

        Raises:
            SwapStateError: If nothing was ever written.
        """
        if self.live is None:
            raise SwapStateError(f"sub-group {self.key!r} was never written")
        return self.live

    def describe_slots(self) -> str:
        """Return the states of all slots for a message."""
        parts = []
        for slot in self.slots:
            text = f"{slot.index}: {self.state(slot).value}"
            if slot.is_pinned:
                text += f" ({slot.num_holds} holds, {slot.num_commits} commits"
                text += ", linked)" if slot.is_linked else ")"
            parts.append(text + (", live" if slot is self.live else ""))
        return "; ".join(parts)
