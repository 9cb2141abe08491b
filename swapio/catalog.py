# SPDX-License-Identifier: Apache-2.0
"""The sub-groups of a store: declared, given storage, taken up again, given more slots.

Invariant: the manifest names every slot that a commit may name; it names new ones only when their
files are there, so that a crash in between finds the committed state under the old manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from swapio.commit import StepRecord
from swapio.errors import CheckpointError, ConfigError, SwapStateError
from swapio.provision import provide_slots
from swapio.recovery import recover_store
from swapio.slotfiles import SlotFileSet
from swapio.slots import SubGroup
from swapio.store import ChooseCommit, Durability, Progress, RecordLayout
from swapio.storefolders import StoreFolders
from swapio.striping import FileGroup, SubGroupLayout, group_files, lay_out
from swapio.transaction import Shared

_logger = logging.getLogger("swapio.store")


class Catalog:
    """The sub-groups of one store.

    Args:
        shared: The store's common parts.
        folders: Where their files are.
        durability: Noted in the manifest.
        num_slots: Slots that a new sub-group gets.

    Attributes:
        declared: Placements without storage, in order.
        sub_groups: Those with storage, by key, in the order of the manifest.
    """

    def __init__(
        self, shared: Shared, folders: StoreFolders, *, durability: Durability, num_slots: int
    ) -> None:
        self._shared = shared
        self._folders = folders
        self._durability: Durability = durability
        self._num_slots = num_slots
        self._groups: list[FileGroup] = []
        self.declared: list[SubGroupLayout] = []
        self.sub_groups: dict[str, SubGroup] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """Those with storage, then those that were only declared."""
        return (*self.sub_groups, *(layout.key for layout in self.declared))

    def get(self, key: str) -> SubGroup:
        """Return a sub-group that has storage.

        Raises:
            SwapStateError: If there is none.
        """
        try:
            return self.sub_groups[key]
        except KeyError:
            is_declared = any(layout.key == key for layout in self.declared)
            hint = "; call allocate or recover first" if is_declared else ""
            raise SwapStateError(f"there is no sub-group {key!r} with storage{hint}") from None

    def declare(self, key: str, records: Sequence[RecordLayout], meta_bytes: int) -> None:
        """Place a new sub-group; see `SwapStore.add`."""
        if key in self.keys:
            raise ConfigError(f"sub-group {key!r} was added before")
        pattern = self._folders.pattern
        phase = len(self.keys) % len(pattern)
        self.declared.append(lay_out(key, records, meta_bytes, pattern, phase))

    def allocate(self, progress: Progress | None) -> None:
        """Give storage to what was declared; see `SwapStore.allocate`."""
        is_first = not self._groups
        may_reuse = is_first and self._discard_previous()
        groups = group_files(self.declared, len(self._groups))
        wanted = [(group, index) for group in groups for index in range(self._num_slots)]
        file_sets, written = provide_slots(
            self._folders.files,
            wanted,
            may_reuse=may_reuse,
            before_create=lambda: self.write_manifest("allocating", groups) if is_first else None,
            progress=progress,
        )
        self._shared.counters.add(bytes_allocated=written)
        for number, group in enumerate(groups):
            members = [SubGroup(layout, group, i) for i, (layout, _) in enumerate(group.members)]
            first = number * self._num_slots
            for file_set in file_sets[first : first + self._num_slots]:
                _add_slots(members, file_set)
            self._adopt(group, members)
        self.declared.clear()
        self.write_manifest("open")

    def add_slots(self, keys: Iterable[str], progress: Progress | None) -> int:
        """Make one more slot for `keys`; see `FileStore.add_slots`."""
        chosen = {self.get(key).group.name for key in keys}
        groups = [group for group in self._groups if group.name in chosen]
        wanted = [(group, len(self._members(group)[0].slots)) for group in groups]
        file_sets, written = provide_slots(
            self._folders.files,
            wanted,
            may_reuse=False,
            before_create=lambda: None,
            progress=progress,
        )
        self._shared.counters.add(bytes_allocated=written)
        with self._shared.lock:
            for group, file_set in zip(groups, file_sets, strict=True):
                _add_slots(self._members(group), file_set)
        self.write_manifest("open")
        return written

    def recover(self, step: int | None, choose: ChooseCommit | None = None) -> StepRecord | None:
        """Take up a commit of an earlier run; see `FileStore.recover`."""
        if self._groups:
            raise SwapStateError("recover comes before allocate")
        folders = self._folders
        manifest = folders.previous_manifest
        if manifest is None:
            return None
        folders.require_same_order()
        if manifest.pattern != folders.pattern:
            raise CheckpointError(
                f"the committed state is striped as {list(manifest.pattern)} over "
                f"{manifest.num_paths} paths, this run as {list(folders.pattern)}"
            )
        try:
            found = recover_store(
                manifest,
                self.declared,
                folders.files,
                folders.log,
                self._shared,
                step=step,
                choose=choose,
            )
        except BaseException:
            folders.files.close(remove=False)
            raise
        if found is None:
            folders.files.close(remove=False)
            return None
        folders.store_id = manifest.store_id
        self.declared.clear()
        for group in found.groups:
            self._adopt(group, [member for member in found.sub_groups if member.group is group])
        folders.files.remove_leftovers(folders.files.leftovers())
        return found.record

    def write_manifest(self, state: str, more: Sequence[FileGroup] = ()) -> None:
        """Replace the manifest; `more` are groups whose files are about to be made."""
        groups = [(group, len(self._members(group)[0].slots)) for group in self._groups]
        groups += [(group, self._num_slots) for group in more]
        has_checksums = self._shared.mover.has_checksums
        self._folders.write_manifest(groups, state, self._durability, has_checksums=has_checksums)

    def _adopt(self, group: FileGroup, members: Sequence[SubGroup]) -> None:
        self._groups.append(group)
        self.sub_groups.update((member.key, member) for member in members)

    def _members(self, group: FileGroup) -> list[SubGroup]:
        return [self.sub_groups[layout.key] for layout, _ in group.members]

    def _discard_previous(self) -> bool:
        """Forget an earlier run; return whether its files were written once."""
        previous = self._folders.previous
        if previous is not None and previous.steps:
            _logger.warning(
                "starting anew in %s: the commit of step %d, left by process %d, is dropped",
                self._folders.folders[0],
                previous.steps[0],
                previous.pid,
            )
        self._folders.discard_commits()
        manifest = self._folders.previous_manifest
        return manifest is not None and manifest.state != "allocating"


def _add_slots(members: Sequence[SubGroup], file_set: SlotFileSet) -> None:
    for member in members:
        member.add_slot(file_set)
