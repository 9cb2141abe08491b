# SPDX-License-Identifier: Apache-2.0
"""Taking up what an earlier run committed, or telling what became of it.

Invariant: a commit is dropped only when this run has committed a step of its own, or when it
cannot be taken up, which is said.
"""

from __future__ import annotations

import logging

from swapio.errors import CheckpointError, CorruptionError
from swapio.filestore import FileStore
from swapio.store import ChooseCommit, CommitRecord

_logger = logging.getLogger("swapio.runtime")


def take_up_commit(
    store: FileStore | None,
    step: int | None,
    *,
    resume: bool,
    choose: ChooseCommit | None = None,
) -> CommitRecord | None:
    """Take up the commit of an earlier run: the newest, that of `step`, or what `choose` says.

    Blocks.

    Without `resume` too: its slots are then kept, beside the first contents of this run, until
    this run commits its first step.

    Raises:
        CheckpointError: With `resume`: there are commits, but none that is whole and fits.
    """
    if store is None or store.previous is None:
        return None
    if store.durability == "checkpoint":
        _tell_of_crash(store)
        return None
    try:
        record = store.recover(step, choose=choose)
    except (CheckpointError, CorruptionError) as error:
        if resume:
            raise
        _logger.warning("starting anew, and what an earlier run committed is lost: %s", error)
        return None
    if record is not None and not resume:
        # One for the first contents and one for the first step.
        while short := store.short_of_slots(store.keys):
            store.add_slots(short)
        _logger.warning(
            "starting anew beside step %d that an earlier run committed in %s: it is there until "
            "this run commits a step. resume=True, or recover() now, continues from it",
            record.step,
            store.folders[0],
        )
    return record


def _tell_of_crash(store: FileStore) -> None:
    """Say that a run ended without `close`, and where to resume from."""
    previous = store.previous
    if previous is None or previous.was_closed:
        return
    where = (
        f"load the last one, {previous.checkpoint}"
        if previous.checkpoint
        else "it saved no checkpoint"
    )
    _logger.warning(
        "process %d on %s used %s and ended without close(): its steps since its last checkpoint "
        "are lost; %s",
        previous.pid,
        previous.host,
        store.folders[0],
        where,
    )
