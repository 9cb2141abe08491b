# SPDX-License-Identifier: Apache-2.0
"""The agreement of several ranks over a checkpoint, on swapio's own collectives."""

from __future__ import annotations

from typing import TypeVar

from swapio.optim.zero.comm import Comm

T = TypeVar("T")


class CommAgreement:
    """Collectives over small Python objects; see swapio.checkpoint.agreement.Agreement.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size

    def share(self, value: T) -> T:
        """Return rank 0's value on all ranks; blocks."""
        return self._comm.share(value)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on all ranks; blocks."""
        return self._comm.gather(value)

    def background(self) -> CommAgreement:
        """Return an agreement for another thread, beside this one. All ranks must call it."""
        return CommAgreement(self._comm.background())
