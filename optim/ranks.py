# SPDX-License-Identifier: Apache-2.0
"""How the processes that share one optimizer act together; here: there is only one.

`swapio.optim.zero` has the others. What a rank keeps of a parameter is a dense tensor of its own
(a shard, a DTensor's local tensor) and a Placement that says which elements of the whole it has.

Invariant: every rank makes the same calls in the same order, whatever its shards hold, and learns
of a failure on any of them at the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swapio.optim.gradients import Gradients
from swapio.optim.parameters import ParameterTable

if TYPE_CHECKING:
    from swapio.checkpoint.agreement import Agreement
    from swapio.checkpoint.placement import Placement
    from swapio.optim.layout import ParameterInfo
    from swapio.optim.zero.comm import Comm

T = TypeVar("T")


class Ranks:
    """One process alone.

    Attributes:
        rank: This process.
        world_size: How many there are.
        gather: Gives the gradients of the step instead of `p.grad`; None where those are it.
        agreement: For saving and loading; None alone.
        shards: The ranks that have shards of one copy of the parameters; None alone.
    """

    rank = 0
    world_size = 1
    gather: Callable[[ParameterTable], Gradients] | None = None
    agreement: Agreement | None = None
    shards: Comm | None = None

    def local(self, name: str, listed: torch.Tensor) -> tuple[torch.Tensor, Placement | None]:
        """Return what this rank steps of a parameter that the user listed, and where it belongs."""
        del name
        return listed, None

    def outer(self, info: ParameterInfo, value: torch.Tensor) -> torch.Tensor | None:
        """Return what `state_dict` gives for this rank's part of a state, or None."""
        del info, value
        return None

    def largest_numel(self, listed: torch.Tensor) -> int | None:
        """Most elements that any rank steps of a parameter; None where all ranks have as many."""
        del listed
        return None

    def bounds(self, listed: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """First and last element that each rank of `shards` steps of a parameter."""
        return ((0, listed.numel()),)

    def begin_step(self) -> None:
        """Finish what backward began; before anything that can fail on one rank."""

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail; if it fails on one rank, raise on all of them."""
        return work()

    def is_whole(self, listed: torch.Tensor) -> bool:
        """Whether every rank has all of a parameter; the same answer on each."""
        return all(bounds == (0, listed.numel()) for bounds in self.bounds(listed))

    def tell(self, error: BaseException) -> None:
        """Let the others know of a failure here, before they wait for this rank in vain."""

    def counted(self, gradients: Gradients) -> Gradients:
        """Return those that this rank adds to the global norm: each element counts once."""
        return gradients

    def total(self, value: float) -> float:
        """Return the sum over all ranks, the same bits on each."""
        return value

    def announce(self, listed: Sequence[torch.Tensor]) -> None:
        """Tell autograd that these parameters are about to be stepped in place."""
        torch.autograd.graph.increment_version(listed)

    def publish(self, infos: Iterable[ParameterInfo]) -> None:
        """Bring the parameters just stepped to where the model sees them."""

    def scratch_bytes(self, params: Sequence[torch.Tensor]) -> int:
        """Memory of the collectives for these parameters, which host_memory must cover."""
        del params
        return 0

    def planned_collectives(self) -> dict[str, int]:
        """Collectives of one step without accumulation and late gradients, by name."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Return numbers for the optimizer's stats()."""
        return {}

    def close(self) -> None:
        """Remove hooks, and give up memory and connections."""


def find_ranks(params: Sequence[torch.Tensor], name_of: Callable[[int], str]) -> Ranks:
    """Return the ranks that share these parameters: those of their mesh if they are DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # then there cannot be one
        return Ranks()
    if not any(isinstance(param, module.DTensor) for param in params):
        return Ranks()
    from swapio.optim.zero.mesh import mesh_ranks

    return mesh_ranks(params, name_of)
