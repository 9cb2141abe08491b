# SPDX-License-Identifier: Apache-2.0
"""Committing steps: which slots a step needs, when its record is written, when they are free.

    commit(N)   pins the slots that hold step N at once
                in the background: wait for their seals -> ["power": fdatasync] -> write the record
    then        the slots of step N-1 are free: at once, or by `confirm` when every rank has N

Invariant: commits are written in order; a commit whose seals failed is not written.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from swapio.commit import UNWRITTEN, Entry, encode_record, encode_scalars
from swapio.errors import SwapStateError
from swapio.slots import Slot, SubGroup
from swapio.storefolders import StoreFolders
from swapio.tasks import Task
from swapio.transaction import Shared


class _Commit:
    """A commit that is on its way, or whose slots are still needed."""

    def __init__(self, step: int, slots: list[Slot | None]) -> None:
        self.step = step
        self.slots = slots
        self.task: Task | None = None
        for slot in slots:
            if slot is not None:
                slot.num_commits += 1

    @property
    def is_whole(self) -> bool:
        return self.task is None or (self.task.done() and not self.task.has_failed)

    def unpin(self) -> None:
        for slot in self.slots:
            if slot is not None:
                slot.num_commits -= 1
        self.slots = []


class Committer:
    """The commits of a store.

    Args:
        shared: The store's common parts.
        folders: Where records are written.
        is_synced: Whether records and data are synced to the device ("power").
        needs_confirm: Whether the slots of older commits wait for `confirm`.
    """

    def __init__(
        self, shared: Shared, folders: StoreFolders, *, is_synced: bool, needs_confirm: bool
    ) -> None:
        self._shared = shared
        self._folders = folders
        self._is_synced = is_synced
        self._needs_confirm = needs_confirm
        self._commits: deque[_Commit] = deque()

    @property
    def has_commits(self) -> bool:
        """Whether a whole record exists."""
        return any(commit.is_whole for commit in self._commits)

    @property
    def newest_step(self) -> int:
        """The step of the newest whole record; -1 when there is none."""
        with self._shared.lock:
            whole = [commit.step for commit in self._commits if commit.is_whole]
        return whole[-1] if whole else -1

    def commit(
        self,
        step: int,
        sub_groups: Sequence[SubGroup],
        payload: bytes,
        scalars: Mapping[str, Any],
    ) -> Task:
        """Start to commit what the sub-groups hold, or will once their seals are done.

        Raises:
            SwapStateError: If one has an open transaction, or its last seal failed.
        """
        data = (bytes(payload), encode_scalars(dict(scalars)))
        with self._shared.lock:
            _require_sealed(step, sub_groups)
            slots = [sub_group.pending_slot or sub_group.live for sub_group in sub_groups]
            seals = [sub_group.pending for sub_group in sub_groups if sub_group.pending]
            before = self._commits[-1].task if self._commits else None
            commit = _Commit(step, slots)
            task = Task(lambda: self._run(commit, before, seals, list(sub_groups), data))
            commit.task = task
            self._commits.append(commit)
        self._shared.queue.put(task)
        return task

    def take_up(self, step: int, sub_groups: Sequence[SubGroup]) -> None:
        """Note a commit of an earlier run, which the LIVE slots hold."""
        self._commits.append(_Commit(step, [sub_group.live for sub_group in sub_groups]))

    def confirm(self, step: int) -> None:
        """Free the slots of commits older than the newest whole one up to `step`."""
        with self._shared.lock:
            newest = None
            for commit in self._commits:
                if commit.is_whole and commit.step <= step:
                    newest = commit
            while newest is not None and self._commits[0] is not newest:
                self._commits.popleft().unpin()

    def wait_for_one(self) -> bool:
        """Wait for the oldest commit on its way; False if there is none."""
        with self._shared.lock:
            tasks = [commit.task for commit in self._commits]
        for task in tasks:
            if task is not None and not task.done():
                task.run()
                return True
        return False

    def _run(
        self,
        commit: _Commit,
        before: Task | None,
        seals: Sequence[Task],
        sub_groups: Sequence[SubGroup],
        data: tuple[bytes, bytes],
    ) -> int:
        try:
            if before is not None:
                before.run()  # its failure is its own
            for seal in seals:
                seal.result()
            began = time.perf_counter()
            if self._is_synced:
                self._sync_data()
            nbytes = self._write_record(commit, sub_groups, data)
            self._shared.counters.add(commit_seconds=time.perf_counter() - began)
        except Exception:
            with self._shared.lock:
                self._commits.remove(commit)
                commit.unpin()
            raise
        if not self._needs_confirm:
            # The task is not done yet, so `confirm` would not take it for whole.
            with self._shared.lock:
                while self._commits[0] is not commit:
                    self._commits.popleft().unpin()
        return nbytes

    def _sync_data(self) -> None:
        with self._shared.lock:
            dirty, self._shared.dirty = self._shared.dirty, {}
        try:
            engine = self._shared.mover.engine
            for future in [engine.fsync(file, data_only=True) for file in dirty.values()]:
                future.result()
        except BaseException:
            with self._shared.lock:
                self._shared.dirty.update(dirty)
            raise

    def _write_record(
        self, commit: _Commit, sub_groups: Sequence[SubGroup], data: tuple[bytes, bytes]
    ) -> int:
        log = self._folders.log
        payload, scalars = data
        entries = [
            Entry(sub_group.layout.identity, UNWRITTEN, -1, 0)
            if slot is None
            else Entry(sub_group.layout.identity, slot.index, slot.generation, slot.table_hash)
            for sub_group, slot in zip(sub_groups, commit.slots, strict=True)
        ]
        store_id = bytes.fromhex(self._folders.store_id)
        record = encode_record(store_id, commit.step, log.sequence + 1, entries, scalars, payload)
        log.write(record, is_synced=self._is_synced)
        self._shared.counters.add(bytes_tables=len(record), num_commits=1)
        return len(record)


def _require_sealed(step: int, sub_groups: Sequence[SubGroup]) -> None:
    for sub_group in sub_groups:
        if sub_group.has_transaction:
            raise SwapStateError(
                f"step {step} cannot be committed: sub-group {sub_group.key!r} has an open "
                "transaction; seal or abort it first"
            )
        if sub_group.failure is not None and sub_group.pending_slot is None:
            raise SwapStateError(
                f"step {step} cannot be committed: the last write of sub-group "
                f"{sub_group.key!r} failed: {sub_group.failure}"
            ) from sub_group.failure
