# SPDX-License-Identifier: Apache-2.0
"""Commits of several ranks: which one all of them have, and when older ones may be overwritten.

    open      every rank shows the commits that are whole on its storage; the newest that all have
              is taken up by all, or none, or all raise
    step      every rank shows the newest step that it has committed; slots of commits older than
              the smallest of them are free; nobody runs ahead by more than one commit

A commit is told by the session that wrote it (an optimizer's life between two openings) and its
number in it: steps may repeat, after a load.

Invariant: between any two collective calls every rank has the commit that recovery would choose.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from swapio.checkpoint.agreement import Agreement
from swapio.errors import CheckpointError, describe_error
from swapio.store import CommitRecord

_logger = logging.getLogger("swapio.optim")


class CommitReport(NamedTuple):
    """What one rank tells the others at the beginning of a step.

    Attributes:
        newest: The number of its newest whole commit; 0 before the first.
        needs_room: It has no slot to step into before an older commit is given up.
        failure: Why its last commit failed.
    """

    newest: int
    needs_room: bool
    failure: str | None


class _Offer(NamedTuple):
    """What one rank found when it opened its storage."""

    failure: str | None
    commits: tuple[tuple[str, int, int], ...]  # (session, number, step), newest first


class CommonCommits:
    """The commits of one optimizer on all its ranks.

    Args:
        agreement: The ranks.

    Attributes:
        number: Commits that were started, in this session and before.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._session = ""
        self._has_chosen = False
        self.number = 0

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank only."""
        return self._agreement.world_size == 1

    # -- opening -----------------------------------------------------------------------------

    def choose(self, found: Sequence[CommitRecord]) -> CommitRecord | None:
        """Return the newest commit that every rank has; None if there never was one.

        Args:
            found: Whole commits of this rank, newest first.

        Raises:
            CheckpointError: There is none that all have, or a rank could not open its storage.
        """
        mine = [_identity(record) for record in found]
        offers = self._offer(_Offer(None, tuple(mine)))
        self._raise_failure([offer.failure for offer in offers])
        others = [set(offer.commits) for offer in offers]
        for identity, record in zip(mine, found, strict=True):
            if all(identity in commits for commits in others):
                return record
        steps = {rank: [step for *_, step in o.commits] for rank, o in enumerate(offers)}
        if _was_never_common(offers):
            _logger.warning(
                "the run that was here ended before all ranks had committed its first step (whole "
                "commits by rank: %s): starting anew",
                steps,
            )
            return None
        raise CheckpointError(
            f"the ranks have no committed step in common; whole commits by rank: {steps}. Load a "
            "checkpoint, or start with the folders of one run on all ranks"
        )

    def finish_opening(self, failure: BaseException | None, *, resume: bool) -> None:
        """Take part in the choice if this rank's storage gave no occasion, then agree on the end.

        Raises:
            BaseException: `failure`, or CheckpointError if another rank failed.
        """
        if self.is_alone:
            if failure is not None:
                raise failure
            return
        if not self._has_chosen:
            offers = self._offer(_Offer(_text(failure), ()))
            has_some = any(offer.commits for offer in offers)
            if failure is None and resume and has_some and not _was_never_common(offers):
                failure = CheckpointError(
                    f"rank {self._agreement.rank} has no committed step, other ranks have some: "
                    "give it the folder of the same run, or load a checkpoint"
                )
        failures = self._agreement.gather(_text(failure))
        if failure is not None:
            raise failure
        self._raise_failure(failures)
        self._session = self._agreement.share(secrets.token_hex(8))

    def _offer(self, offer: _Offer) -> list[_Offer]:
        self._has_chosen = True
        return self._agreement.gather(offer)

    def _raise_failure(self, failures: Sequence[str | None]) -> None:
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"rank {rank} could not open its storage: {failure}")

    # -- scalars of a commit -----------------------------------------------------------------

    def scalars(self) -> dict[str, Any]:
        """Number the commit that is about to be started; what it carries to be told by."""
        self.number += 1
        if self.is_alone:
            return {}
        ranks = [self._agreement.rank, self._agreement.world_size]
        return {"ranks": ranks, "session": self._session, "commit": self.number}

    def resume(self, scalars: dict[str, Any]) -> None:
        """Go on after a commit.

        Raises:
            CheckpointError: It is of a run with other ranks.
        """
        mine = [self._agreement.rank, self._agreement.world_size]
        ranks = scalars.get("ranks", [0, 1])
        if ranks != mine:
            raise CheckpointError(
                f"the committed step is rank {ranks[0]}'s of {ranks[1]}, this is rank {mine[0]} of "
                f"{mine[1]}: commits are resumed by the same ranks; load a checkpoint into others"
            )
        self.number = int(scalars.get("commit", 0))


def _text(error: BaseException | None) -> str | None:
    return None if error is None else describe_error(error)


def _was_never_common(offers: Sequence[_Offer]) -> bool:
    """Whether a run ended so early that some rank had not committed its first step.

    Before a run's third step begins all ranks have its first commit: more than two commits, and a
    rank without any, mean that something was lost.
    """
    numbers = [number for offer in offers for _, number, _ in offer.commits]
    return max(numbers) <= 2 and any(not offer.commits for offer in offers)


def _identity(record: CommitRecord) -> tuple[str, int, int]:
    scalars = record.scalars
    return str(scalars.get("session", "")), int(scalars.get("commit", 0)), record.step
