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

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swapio.aio import Engine
from swapio.catalog import Catalog
from swapio.committer import Committer
from swapio.errors import AioError, ClosedError, ConfigError, SwapStateError
from swapio.holds import FileHold, locate_slot
from swapio.slots import Slot, SubGroup
from swapio.store import (
    ChooseCommit,
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
        weights: Share of each path, for instance its bandwidth, or a function that measures it
            when it is needed; equal by default.
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
        weights: Sequence[float] | Callable[[], Sequence[float]] | None = None,
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
        self._transactions: dict[str, FileTransaction] = {}
        self._folders = StoreFolders(
            paths,
            engine,
            namespace=namespace,
            lock_timeout=lock_timeout,
            weights=weights,
            num_commit_files=3 if confirm_commits else 2,
        )
        self._catalog = Catalog(
            self._shared, self._folders, durability=durability, num_slots=self.num_slots
        )
        self._committer = Committer(
            self._shared,
            self._folders,
            is_synced=durability == "power",
            needs_confirm=confirm_commits,
        )
        # At the interpreter's exit without `close`, or when nobody holds the store any more: leave
        # nothing behind that nobody wants. A finalizer, so that it neither blocks nor keeps alive.
        self._abandon = weakref.finalize(self, _abandon, self._folders, self._pid, durability)

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
        sub_groups = self._catalog.sub_groups.values()
        hashes = sum(slot.hashes.nbytes for entry in sub_groups for slot in entry.slots)
        return hashes + self._shared.scratch.nbytes

    @property
    def keys(self) -> tuple[str, ...]:
        """The sub-groups: those with storage, then those that were only added."""
        return self._catalog.keys

    def add(self, key: str, records: Sequence[RecordLayout], meta_bytes: int = 0) -> None:
        """Declare a sub-group; see `SwapStore.add`."""
        self._check()
        self._catalog.declare(key, records, meta_bytes)

    def allocate(self, progress: Progress | None = None) -> None:
        """Reserve and write once the storage of what was added; see `SwapStore.allocate`."""
        self._check()
        self._catalog.allocate(progress)

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
        return self._catalog.add_slots(self._catalog.sub_groups if keys is None else keys, progress)

    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Start to read blocks of the LIVE slot; see `SwapStore.read`."""
        sub_group = self._fenced(key)
        slot = sub_group.require_live()
        settle = None
        if sub_group.has_transaction and self._transactions[key].is_in_place:
            settle = self._transactions[key].settle
        transfer = self._shared.mover.read(sub_group, slot, pieces, owner, settle)
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
        return self._committer.commit(
            step, list(self._catalog.sub_groups.values()), payload, scalars or {}
        )

    @property
    def newest_commit(self) -> int:
        """The step of the newest commit that is whole; -1 when there is none."""
        return self._committer.newest_step

    def confirm(self, step: int) -> None:
        """Free the slots of commits older than `step`; see `SwapStore.confirm`."""
        self._committer.confirm(step)

    def recover(
        self, step: int | None = None, *, choose: ChooseCommit | None = None
    ) -> CommitRecord | None:
        """Take up a commit of an earlier run; see `SwapStore.recover`.

        Args:
            step: The step that is wanted; None is the newest.
            choose: Is given all whole commits, newest first, and returns one of them, or None for
                none: then nothing was changed. Not called when there is no commit.
        """
        self._check()
        record = self._catalog.recover(step, choose)
        if record is None:
            return None
        self._committer.take_up(record.step, list(self._catalog.sub_groups.values()))
        while short := self.short_of_slots(self._catalog.sub_groups, live_is_held=False):
            self._catalog.add_slots(short, None)
        self._catalog.write_manifest("open")
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
        self._abandon.detach()
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
            if not remove and self._catalog.sub_groups:
                self._catalog.write_manifest("closed")
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

    def has_free_slots(self) -> bool:
        """Whether every sub-group has a slot that a transaction could write now; does not wait."""
        in_place = self.durability == "checkpoint"
        with self._shared.lock:
            sub_groups = self._catalog.sub_groups.values()
            return all(sub_group.free_slots(in_place=in_place) for sub_group in sub_groups)

    def note_checkpoint(self, path: str) -> None:
        """Remember the last checkpoint, so that after a crash the next run can name it."""
        self._check()
        self._folders.checkpoint = path
        self._catalog.write_manifest("open")

    def short_of_slots(
        self, keys: Iterable[str], freed: Collection[Path] = (), *, live_is_held: bool = True
    ) -> list[str]:
        """Return those of `keys` that the steps to come would have no slot for.

        Args:
            keys: Sub-groups.
            freed: Folders of checkpoints' files that will be removed.
            live_is_held: Whether the LIVE slots are about to be held; else they count as
                writable, after the next commit, unless a checkpoint has them.
        """
        needed = 1 if self.durability == "checkpoint" else 2
        short = []
        for key in keys:
            sub_group = self._fenced(key)
            with self._shared.lock:
                free = [
                    slot
                    for slot in sub_group.slots
                    if slot is not sub_group.live
                    and not (slot.num_holds or slot.num_commits or slot.is_target)
                    and not slot.is_linked_without(freed)
                ]
                live = sub_group.live
                if not live_is_held and live is not None and not live.is_linked_without(freed):
                    free.append(live)
            if len(free) < needed:
                short.append(key)
        return short

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the store in {self._folders.folders[0]} was closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the store in {self._folders.folders[0]} belongs to process {self._pid}, the "
                "parent of this one; make a new one here"
            )

    def _fenced(self, key: str) -> SubGroup:
        """Return a sub-group whose last seal is over; raise its error if nobody saw it."""
        self._check()
        sub_group = self._catalog.get(key)
        task = sub_group.pending
        if task is not None:
            try:
                if not (task.has_failed and task.was_seen):
                    task.result()
            finally:
                with self._shared.lock:
                    # A hold comes here from any thread, and there may be a newer seal by now.
                    if task.done() and sub_group.pending is task:
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
                slot.refresh_links()
            free = sub_group.free_slots(in_place=in_place)
        if not free:
            return None
        slot = free[0]
        slot.is_target = sub_group.has_transaction = True
        if slot is not sub_group.live:
            slot.bad.clear()
            slot.left_out.clear()
            slot.generation = -1
        return slot

    def _must_keep_previous(self) -> bool:
        previous = self.previous
        return not self._catalog.sub_groups and previous is not None and bool(previous.steps)


def _abandon(folders: StoreFolders, pid: int, durability: str) -> None:
    if os.getpid() == pid and durability == "checkpoint":
        folders.remove_names()


def _num_slots(durability: str, spare_slots: int | None) -> int:
    if durability not in ("checkpoint", "step", "power"):
        raise ConfigError(f'durability must be "checkpoint", "step" or "power", not {durability!r}')
    spare = 1 if spare_slots is None else spare_slots
    if spare < 0:
        raise ConfigError(f"spare_slots must not be negative, not {spare}")
    return spare + (1 if durability == "checkpoint" else 2)


def _holdable(sub_group: SubGroup) -> Slot:
    slot = sub_group.require_live()
    if slot.is_target:
        raise SwapStateError(
            f"sub-group {sub_group.key!r} is being written in place; seal or abort its "
            "transaction first"
        )
    if slot.left_out:
        raise SwapStateError(
            f"sub-group {sub_group.key!r} cannot be held: newer bytes of {len(slot.left_out)} of "
            "its blocks are in memory only; flush the swapper first"
        )
    if slot.bad or slot.has_failed:
        raise SwapStateError(
            f"sub-group {sub_group.key!r} cannot be held: a write in place failed or was aborted"
        ) from sub_group.failure
    return slot
