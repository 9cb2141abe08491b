# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run agree on while they save or load; one process agrees with itself."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Agreement(Protocol):
    """Collectives over small Python objects; every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    def share(self, value: T) -> T:
        """Return rank 0's value on all ranks."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on all ranks."""


class Alone:
    """The agreement of a single process."""

    rank = 0
    world_size = 1

    def share(self, value: Any) -> Any:
        """Return the value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return a list of the value."""
        return [value]
