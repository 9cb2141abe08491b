# SPDX-License-Identifier: Apache-2.0
"""FileStore: sub-groups in slot files on one or several paths.

    <path>/swapio-<namespace>/lock                  who uses the folder
                              manifest.json         the layout            (a copy on each path)
                              slots/*.bin           one file per slot, or per slot of several small
                                                    sub-groups, on each path
                              commit-0.bin, -1.bin  the commit records    (on the first path)

Invariants: no slot that is LIVE (except in place under "checkpoint"), HELD or committed is ever
written; every open data file is locked; after any crash the folder says what can be recovered.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swapio.aio import Engine
from swapio.committer import Committer
from swapio.errors import AioError, CheckpointError, ClosedError, ConfigError, SwapStateError
from swapio.holds import FileHold, locate_slot
from swapio.provision import provide_slots
from swapio.recovery import recover_store
from swapio.slotfiles import SlotFileSet, num_links
from swapio.slots import Slot, SubGroup
from swapio.store import (
    CommitRecord,
    Durability,
    Piece,
    PreviousRun,
    Progress,
    RecordLayout,
    SlotLocation,
    StoreStats,
    SwapStore,
    TransferFuture,
)
from swapio.storefolders import StoreFolders
from swapio.striping import FileGroup, SubGroupLayout, group_files, lay_out
from swapio.tasks import TaskQueue
from swapio.transaction import FileTransaction, Shared
from swapio.transfer import Counters, Mover
from swapio.verification import verify_slots

_logger = logging.getLogger("swapio.store")


class FileStore(SwapStore):
    """A `SwapStore` in files.

    The constructor creates and locks the folders, waiting for a dying run; storage is made by
    `allocate`, or taken up by `recover`.

    Args:
        paths: One folder, or several to stripe over.
        engine: Moves the bytes; it must outlive the store.
        durability: "checkpoint" (a crash loses what was not saved), "step" (every commit survives
            kill -9) or "power" (and power loss).
        spare_slots: Sets of slots beyond the one ("checkpoint") or two that the durability needs.
            None is one set: it lets a checkpoint hold the state while training goes on.
        checksum: Whether blocks are hashed when written and verified when read.
        lock_timeout: Seconds to wait for another run, or for a killed run's last writes.
        weights: Share of each path, for instance its bandwidth; equal by default.
        namespace: Tells stores of several processes (ranks) in one folder apart.
        confirm_commits: Keep the slots of the commit before the last one until `confirm`; for
            runs of several ranks.

    Attributes:
        durability: As given.
        num_slots: Slots per sub-group that `allocate` makes.

    Raises:
        ConfigError: If an argument or a path is unusable.
        StoreLockedError: If the folder stays in use for `lock_timeout` seconds.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        engine: Engine,
        *,
        durability: Durability = "checkpoint",
        spare_slots: int | None = None,
        checksum: bool = True,
        lock_timeout: float = 30.0,
        weights: Sequence[float] | None = None,
        namespace: str = "",
        confirm_commits: bool = False,
    ) -> None:
        self.durability: Durability = durability
        self.num_slots = _num_slots(durability, spare_slots)
        self._pid = os.getpid()
        self._is_closed = False
        counters = Counters()
        mover = Mover(engine, counters, has_checksums=checksum)
        self._shared = Shared(mover, counters, TaskQueue("swapio-store"))
        self._declared: list[SubGroupLayout] = []
        self._sub_groups: dict[str, SubGroup] = {}
        self._groups: list[FileGroup] = []
        self._transactions: dict[str, FileTransaction] = {}
        self._folders = StoreFolders(
            paths, engine, namespace=namespace, lock_timeout=lock_timeout, weights=weights
        )
        self._committer = Committer(
            self._shared,
            self._folders,
            is_synced=durability == "power",
            needs_confirm=confirm_commits,
        )
        _stores.add(self)

    @property
    def folders(self) -> list[os.PathLike[str]]:
        """The store's folder on each path."""
        return list(self._folders.folders)

    @property
    def previous(self) -> PreviousRun | None:
        """What an earlier run left in the folder."""
        return self._folders.previous

    @property
    def host_bytes(self) -> int:
        """Memory that the store holds: checksums of all slots, and the scratch buffer."""
        hashes = sum(slot.hashes.nbytes for s in self._sub_groups.values() for slot in s.slots)
        return hashes + self._shared.scratch.nbytes

    @property
    def keys(self) -> tuple[str, ...]:
        """The declared sub-groups, in order."""
        return (*self._sub_groups, *(layout.key for layout in self._declared))

    def add(self, key: str, records: Sequence[RecordLayout], meta_bytes: int = 0) -> None:
        """Declare a sub-group; see `SwapStore.add`."""
        self._check()
        if key in self.keys:
            raise ConfigError(f"sub-group {key!r} was added before")
        pattern = self._folders.pattern
        phase = len(self.keys) % len(pattern)
        self._declared.append(lay_out(key, records, meta_bytes, pattern, phase))

    def allocate(self, progress: Progress | None = None) -> None:
        """Reserve and write once the storage of what was added; see `SwapStore.allocate`."""
        self._check()
        is_first = not self._groups
        may_reuse = is_first and self._discard_previous()
        groups = group_files(self._declared, len(self._groups))
        wanted = [(group, index) for group in groups for index in range(self.num_slots)]
        file_sets, written = provide_slots(
            self._folders.files,
            wanted,
            may_reuse=may_reuse,
            # Later the manifest names new files only when they are there: until then a crash
            # finds the committed state under the old one.
            before_create=lambda: self._write_manifest("allocating", groups) if is_first else None,
            progress=progress,
        )
        self._shared.counters.add(bytes_allocated=written)
        for number, group in enumerate(groups):
            members = [SubGroup(layout, group, i) for i, (layout, _) in enumerate(group.members)]
            first = number * self.num_slots
            for file_set in file_sets[first : first + self.num_slots]:
                _add_slots(members, file_set)
            self._adopt(group, members)
        self._declared.clear()
        self._write_manifest("open")

    def add_slots(self, keys: Iterable[str] | None = None, progress: Progress | None = None) -> int:
        """Make one more slot for every sub-group, or for `keys` and those that share their files.

        Blocks until they are written once.

        Returns:
            The bytes that were written.

        Raises:
            ConfigError: If there is not enough space; nothing changed.
            AioError: If the storage failed; what was made is removed.
        """
        self._check()
        chosen = {self._get(key).group.name for key in (self.keys if keys is None else keys)}
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
        self._write_manifest("open")
        return written

    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Start to read blocks of the LIVE slot; see `SwapStore.read`."""
        sub_group = self._fenced(key)
        slot = sub_group.require_live()
        transfer = self._shared.mover.read(sub_group, slot, pieces, owner)
        self._shared.counters.add(bytes_read=transfer.nbytes, num_reads=1)
        return transfer

    def begin_write(self, key: str, generation: int) -> FileTransaction:
        """Open the sub-group's write transaction; see `SwapStore.begin_write`."""
        sub_group = self._fenced(key)
        if sub_group.has_transaction:
            raise SwapStateError(f"sub-group {key!r} has an open transaction already")
        slot = self._take_target(sub_group)
        transaction = FileTransaction(self._shared, sub_group, slot, generation)
        self._transactions[key] = transaction
        return transaction

    def meta(self, key: str) -> bytes:
        """Return the blob that the LIVE slot was sealed with."""
        return self._fenced(key).require_live().meta

    def generation(self, key: str) -> int:
        """Return the generation of the LIVE slot; -1 when nothing was written."""
        live = self._fenced(key).live
        return -1 if live is None else live.generation

    def is_written(self, key: str) -> bool:
        """Return whether the sub-group has a LIVE slot."""
        return self._fenced(key).live is not None

    def locate(self, key: str) -> SlotLocation:
        """Return where the LIVE slot lies; without a hold it may be written at any time."""
        sub_group = self._fenced(key)
        return locate_slot(sub_group, sub_group.require_live())

    def verify(self, keys: Iterable[str] | None = None, progress: Progress | None = None) -> int:
        """Read the LIVE slots of all written sub-groups, or of `keys`; see `verify_slots`."""
        with self.hold(keys) as hold:
            return verify_slots(self._shared, hold.slots, progress)

    def hold(self, keys: Iterable[str] | None = None) -> FileHold:
        """Pin LIVE slots; see `SwapStore.hold`."""
        chosen = list(self.keys) if keys is None else list(keys)
        sub_groups = [self._fenced(key) for key in chosen]
        if keys is None:
            sub_groups = [sub_group for sub_group in sub_groups if sub_group.live is not None]
        held: dict[str, tuple[SubGroup, Slot]] = {}
        with self._shared.lock:
            for sub_group in sub_groups:
                held[sub_group.key] = (sub_group, _holdable(sub_group))
            for _, slot in held.values():
                slot.num_holds += 1
        return FileHold(self._shared, held, self._check)

    def commit(
        self, step: int, payload: bytes = b"", scalars: Mapping[str, Any] | None = None
    ) -> TransferFuture:
        """Commit what was sealed; see `SwapStore.commit`."""
        self._check()
        if self.durability == "checkpoint":
            raise SwapStateError(
                'there are no commits with durability="checkpoint"; use "step" or "power"'
            )
        return self._committer.commit(step, list(self._sub_groups.values()), payload, scalars or {})

    def confirm(self, step: int) -> None:
        """Free the slots of commits older than `step`; see `SwapStore.confirm`."""
        self._committer.confirm(step)

    def recover(self, step: int | None = None) -> CommitRecord | None:
        """Take up a commit of an earlier run; see `SwapStore.recover`."""
        self._check()
        if self._groups:
            raise SwapStateError("recover comes before allocate")
        manifest = self._folders.previous_manifest
        if manifest is None:
            return None
        self._folders.require_same_order()
        if manifest.pattern != self._folders.pattern:
            raise CheckpointError(
                f"the committed state is striped as {list(manifest.pattern)} over "
                f"{manifest.num_paths} paths, this run as {list(self._folders.pattern)}"
            )
        try:
            found = recover_store(
                manifest,
                self._declared,
                self._folders.files,
                self._folders.log,
                self._shared,
                step=step,
            )
        except BaseException:
            self._folders.files.close(remove=False)
            raise
        if found is None:
            return None
        self._folders.store_id = manifest.store_id
        self._declared.clear()
        for group in found.groups:
            self._adopt(group, [s for s in found.sub_groups if s.group is group])
        self._committer.take_up(found.record.step, found.sub_groups)
        self._folders.files.remove_leftovers(self._folders.files.leftovers())
        short = [key for key in self._sub_groups if not self.num_free_slots(key)]
        if short:
            self.add_slots(short)
        self._write_manifest("open")
        record = found.record
        return CommitRecord(record.step, record.payload, record.scalars, self.keys)

    def drain(self) -> None:
        """Wait for seals and commits; see `SwapStore.drain`."""
        self._check()
        self._shared.queue.drain()

    def close(self, *, remove: bool | None = None) -> None:
        """Finish, unlock, and remove the files or leave them; see `SwapStore.close`."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        _stores.discard(self)
        error: Exception | None = None
        try:
            for transaction in self._transactions.values():
                transaction.abort()
            self._shared.queue.drain()
        except Exception as first:
            error = first
        self._shared.queue.close()
        self._shared.scratch.close()
        if remove is None:
            remove = not self._committer.has_commits and not self._must_keep_previous()
        try:
            if not remove and self._groups:
                self._write_manifest("closed")
        except AioError as full:
            _logger.warning("the end of the run is not noted, all else is: %s", full)
        finally:
            self._folders.close(remove=remove)
        if error is not None:
            raise error

    def stats(self) -> StoreStats:
        """Return the counters."""
        return self._shared.counters.snapshot()

    def num_free_slots(self, key: str) -> int:
        """Return how many slots the next write transaction could choose from."""
        sub_group = self._fenced(key)
        with self._shared.lock:
            return len(sub_group.free_slots(in_place=self.durability == "checkpoint"))

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the store in {self._folders.folders[0]} was closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the store in {self._folders.folders[0]} belongs to process {self._pid}, the "
                "parent of this one; make a new one here"
            )

    def _get(self, key: str) -> SubGroup:
        try:
            return self._sub_groups[key]
        except KeyError:
            is_declared = any(layout.key == key for layout in self._declared)
            hint = "; call allocate or recover first" if is_declared else ""
            raise SwapStateError(f"there is no sub-group {key!r} with storage{hint}") from None

    def _fenced(self, key: str) -> SubGroup:
        """Return a sub-group whose last seal is over; raise its error if nobody saw it."""
        self._check()
        sub_group = self._get(key)
        task = sub_group.pending
        if task is not None:
            try:
                if not (task.has_failed and task.was_seen):
                    task.result()
            finally:
                if task.done():
                    sub_group.pending = None
        return sub_group

    def _take_target(self, sub_group: SubGroup) -> Slot:
        is_last_try = False
        while True:
            with self._shared.lock:
                slot = self._claim_target(sub_group)
            if slot is not None:
                return slot
            if is_last_try:
                raise SwapStateError(
                    f"sub-group {sub_group.key!r} has no slot to write to "
                    f"({sub_group.describe_slots()}). Release a checkpoint or state_dict, raise "
                    "spare_slots, or confirm the last commit"
                )
            is_last_try = not self._committer.wait_for_one()

    def _claim_target(self, sub_group: SubGroup) -> Slot | None:
        in_place = self.durability == "checkpoint"
        free = sub_group.free_slots(in_place=in_place)
        if not free:
            for slot in sub_group.slots:
                slot.is_linked = slot.is_linked and num_links(slot.files) > 1
            free = sub_group.free_slots(in_place=in_place)
        if not free:
            return None
        slot = free[0]
        slot.is_target = sub_group.has_transaction = True
        if slot is not sub_group.live:
            slot.bad.clear()
            slot.generation = -1
        return slot

    def _adopt(self, group: FileGroup, members: Sequence[SubGroup]) -> None:
        self._groups.append(group)
        self._sub_groups.update((member.key, member) for member in members)

    def _members(self, group: FileGroup) -> list[SubGroup]:
        return [self._sub_groups[layout.key] for layout, _ in group.members]

    def _discard_previous(self) -> bool:
        """Forget an earlier run; return whether its files were written once."""
        previous = self.previous
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

    def _must_keep_previous(self) -> bool:
        return not self._groups and self.previous is not None and bool(self.previous.steps)

    def _write_manifest(self, state: str, more: Sequence[FileGroup] = ()) -> None:
        groups = [(group, len(self._members(group)[0].slots)) for group in self._groups]
        groups += [(group, self.num_slots) for group in more]
        self._folders.write_manifest(
            groups, state, self.durability, has_checksums=self._shared.mover.has_checksums
        )

    def _abandon(self) -> None:
        """At the interpreter's exit without `close`: leave nothing behind that nobody wants."""
        if os.getpid() == self._pid and self.durability == "checkpoint":
            self._folders.remove_names()


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


@atexit.register
def _abandon_stores() -> None:
    for store in list(_stores):
        store._abandon()


def _num_slots(durability: str, spare_slots: int | None) -> int:
    if durability not in ("checkpoint", "step", "power"):
        raise ConfigError(f'durability must be "checkpoint", "step" or "power", not {durability!r}')
    spare = 1 if spare_slots is None else spare_slots
    if spare < 0:
        raise ConfigError(f"spare_slots must not be negative, not {spare}")
    return spare + (1 if durability == "checkpoint" else 2)


def _add_slots(members: Sequence[SubGroup], file_set: SlotFileSet) -> None:
    for member in members:
        member.add_slot(file_set)


def _holdable(sub_group: SubGroup) -> Slot:
    slot = sub_group.require_live()
    if slot.is_target:
        raise SwapStateError(
            f"sub-group {sub_group.key!r} is being written in place; seal or abort its "
            "transaction first"
        )
    if slot.bad or slot.has_failed:
        raise SwapStateError(
            f"sub-group {sub_group.key!r} cannot be held: a write in place failed or was aborted"
        ) from sub_group.failure
    return slot
