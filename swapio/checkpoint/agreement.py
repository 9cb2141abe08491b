# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run agree on while they save or load; one process agrees with itself.

Invariant: work that may fail on one rank runs inside `together`, so that every rank makes the same
calls in the same order whatever fails where, and no rank waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from swapio.errors import AioError, CheckpointError, SwapioError

T = TypeVar("T")


class Agreement(Protocol):
    """Collectives over small Python objects; every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    def share(self, value: T) -> T:
        """Return rank 0's value on all ranks."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on all ranks."""

    def background(self) -> Agreement:
        """Return an agreement of the same ranks for use on another thread, beside this one."""


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

    def background(self) -> Alone:
        """Return self."""
        return self


def together(agreement: Agreement, work: Callable[[], T]) -> T:
    """Run `work` on this rank, as all others do; raise on every rank if it failed on one.

    Raises:
        CheckpointError: It failed on another rank; names the first one that did, and its error.
        Exception: What it raised here.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = work()
    except BaseException as first:
        error = first
    failures = agreement.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"rank {rank} of {len(failures)} failed: {failure}")
    return result  # type: ignore[no-any-return]


def as_aio_error(error: BaseException, op: str, path: Any) -> BaseException:
    """Return the AioError of an OSError that the system raised; other errors as they are."""
    if isinstance(error, OSError) and not isinstance(error, SwapioError):
        made = AioError(error.errno or 0, op, path)
        made.__cause__ = error
        return made
    return error
