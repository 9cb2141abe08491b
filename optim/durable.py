# SPDX-License-Identifier: Apache-2.0
"""What makes an optimizer's steps durable: commits, and going on from the last one.

    step N -> state, masters and parameters in new slots -> commit record N (counters, groups,
              payload) -> killed at any time -> resume=True, or recover(): exactly step N

Invariant: everything that step N+1 depends on, but the gradients, is in the slots and the record
of commit N; a parameter that was never stepped or loaded is the user's, and left alone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swapio.checkpoint.agreement import together
from swapio.checksum import hash_bytes
from swapio.errors import CheckpointError, ConfigError, SwapioError, describe_error
from swapio.leftovers import FOLDER_PREFIX
from swapio.optim.agreeing import CommitReport, CommonCommits
from swapio.optim.commit_scalars import apply_groups, decode_runs, encode_group, encode_runs
from swapio.optim.layout import PackedGroup
from swapio.optim.masters import Masters
from swapio.optim.saving import Saving
from swapio.optim.snapshot import Snapshots
from swapio.runtime import SwapRuntime
from swapio.views import TransferHandle

_logger = logging.getLogger("swapio.optim")

SCALARS_VERSION = 1


class _Started(NamedTuple):
    """A commit that was started."""

    number: int
    handle: TransferHandle


class Durable(Saving):
    """The part of SwapOptimizer that commits and recovers."""

    recovered_step: int | None
    _common: CommonCommits
    _commits: deque[_Started]  # not known to be whole
    _steps: dict[int, int]  # of the commits that some rank may still need
    _newest: int

    def _open_runtime(self, groups: list[PackedGroup], *, resume: bool) -> None:
        """Open storage and memory; take up the last commit with `resume`. Collective."""
        self._commits = deque()
        self._steps = {}
        self._newest = 0
        self._common = CommonCommits(self._agreement)
        failure: BaseException | None = None
        try:
            self._make_runtime(groups, resume=resume)
        except BaseException as error:
            failure = error
        try:
            self._common.finish_opening(failure, resume=resume)
        except BaseException:
            if failure is None:
                self._runtime.close()
            raise

    def _make_runtime(self, groups: list[PackedGroup], *, resume: bool) -> None:
        if resume and not self.is_committing:
            raise ConfigError(
                "resume=True needs a path and durability='step' or 'power'; with 'checkpoint' call "
                "load(dir) after construction"
            )
        is_alone = self._common.is_alone
        self._runtime = SwapRuntime(
            self.config,
            [self._request(group) for group in groups],
            workspace_bytes=self.scratch_bytes(groups),
            resume=resume,
            choose=None if is_alone else self._common.choose,
            confirm_commits=not is_alone,
        )
        try:
            swapper = self._runtime.swapper
            self._masters = Masters(self._layout, swapper, self.config.on_param_change)
            self._snapshots = Snapshots(self._layout, self._runtime, self._masters)
            record = self._runtime.recovered
            self.recovered_step = None if record is None else record.step
            if record is None:
                self._masters.remember(groups)
            else:
                self._restore(record.scalars, record.payload)
        except BaseException:
            self._runtime.close()
            raise

    # -- commits -----------------------------------------------------------------------------

    def _commit_step(self) -> None:
        """Start to commit the step just taken; does not wait for storage."""
        swapper = self._runtime.swapper
        if not self.is_committing:
            swapper.commit(self._num_steps)
            return
        handle = swapper.commit(self._num_steps, self.commit_payload, **self._scalars())
        self._commits.append(_Started(self._common.number, handle))
        self._steps[self._common.number] = self._num_steps

    def _pass_whole_commits(self, *, wait: bool = False) -> None:
        """Forget commits that are whole; raise the error of one that failed."""
        while self._commits and (wait or self._commits[0].handle.done()):
            self._commits[0].handle.result()
            self._newest = self._commits.popleft().number

    def _agree_on_commits(self, *, completely: bool = False) -> None:
        """Notice commits that failed, and let slots go that no rank's recovery needs any more.

        Collective, at each step's start, before anything is changed.

        Args:
            completely: Wait until every commit is whole on every rank.

        Raises:
            AioError, CheckpointError: A commit failed, here or on another rank.
        """
        if not self.is_committing:
            return
        if self._common.is_alone:
            try:
                self._pass_whole_commits()
            except (SwapioError, OSError) as error:
                self._runtime.swapper.fail(error)
                raise
            return
        reports = self._agreement.gather(self._commit_report())
        self._confirm_commits(reports, completely=completely)

    def _commit_report(self) -> CommitReport:
        """What this rank has committed; does not wait, does not raise."""
        failure = None
        try:
            self._pass_whole_commits()
        except (SwapioError, OSError) as error:
            failure = describe_error(error)
        store = self._runtime.store
        needs_room = store is not None and not store.has_free_slots()
        return CommitReport(self._newest, needs_room, failure)

    def _confirm_commits(
        self, reports: Sequence[CommitReport], *, completely: bool = False
    ) -> None:
        """Act on the reports of all ranks; the same decisions everywhere."""
        for rank, report in enumerate(reports):
            if report.failure is not None:
                if rank == self._agreement.rank:
                    self._pass_whole_commits()  # raises it
                raise CheckpointError(f"rank {rank} could not commit: {report.failure}")
        least = min(report.newest for report in reports)
        needs_room = any(report.needs_room for report in reports)
        if completely or needs_room or least < self._common.number - 1:
            together(self._agreement, lambda: self._pass_whole_commits(wait=True))
            least = self._common.number
        step = self._steps.get(least)
        if step is not None and self._runtime.store is not None:
            self._runtime.store.confirm(step)
        self._steps = {number: s for number, s in self._steps.items() if number >= least}

    def _scalars(self) -> dict[str, Any]:
        return {
            "version": SCALARS_VERSION,
            "num_steps": self._num_steps,
            "identity": self._identity(),
            "counts": encode_runs(self._counts),
            "owned": encode_runs(self._owned),
            "groups": [encode_group(group) for group in self.param_groups],
            **self._common.scalars(),
        }

    def _identity(self) -> str:
        """Names, shapes and dtypes of all parameters, as one number."""
        infos = self._layout.infos
        if self._identity_of[0] != len(infos):
            facts = [
                [i.name, list(i.param.shape), list(i.param.stride()), str(i.param.dtype)]
                + ([] if i.part is None else [i.part])
                for i in infos
            ]
            digest = f"{hash_bytes(json.dumps(facts).encode()):016x}"
            self._identity_of = (len(infos), digest)
        return self._identity_of[1]

    _identity_of: tuple[int, str] = (-1, "")

    # -- recovery ----------------------------------------------------------------------------

    def recover(self) -> int:
        """Go back to the last committed step, also after a failure; blocks.

        State, masters, parameters, step counts, hyperparameters and `commit_payload` become those
        of that step, bit for bit. Uncommitted steps are dropped.

        Returns:
            The step's number.

        Raises:
            ConfigError: Steps are not committed (durability "checkpoint", or state in RAM).
            CheckpointError: There is no whole commit.
        """
        self._check_open(failed_ok=True)
        if not self.is_committing:
            raise ConfigError(
                "recover() needs a path and durability='step' or 'power'; with 'checkpoint' call "
                "load(dir)"
            )
        self._reopen(resume=True)
        if self.recovered_step is None:
            raise CheckpointError("no step was committed yet: there is nothing to recover")
        return self.recovered_step

    def _reopen(self, *, resume: bool) -> None:
        """Close storage and open it anew, in the same folder."""
        store = self._runtime.store
        if store is not None:
            # The folder may have got a number, because another optimizer used the first name.
            name = Path(store.folders[0]).name.removeprefix(FOLDER_PREFIX)
            self.config = dataclasses.replace(self.config, namespace=name)
        try:
            self._runtime.close()
        except (SwapioError, OSError) as error:
            _logger.warning("opening storage anew after: %s", error)
        self._open_runtime(list(self._layout.groups.values()), resume=resume)

    def _restore(self, scalars: dict[str, Any], payload: bytes) -> None:
        if scalars.get("version") != SCALARS_VERSION:
            raise CheckpointError(
                f"the commit's scalars have version {scalars.get('version')!r}; this swapio reads "
                f"{SCALARS_VERSION}"
            )
        if scalars["identity"] != self._identity():
            raise CheckpointError(
                "the commit is of other parameters: their names, shapes, strides or dtypes differ. "
                "Build the same model and optimizer, or load a checkpoint"
            )
        self._common.resume(scalars)
        self._newest = self._common.number
        self._steps[self._newest] = int(scalars["num_steps"])
        apply_groups(self.param_groups, scalars["groups"])
        self._counts = decode_runs(scalars["counts"])
        self._owned = decode_runs(scalars["owned"]).astype(np.bool_)
        self._num_steps = int(scalars["num_steps"])
        self.commit_payload = payload
        self._masters.restore_params(self._owned | (self._counts > 0))
