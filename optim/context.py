# SPDX-License-Identifier: Apache-2.0
"""What all chunks of one step share: gradients, the factor, counters and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.gradients import Gradients
from swapio.optim.layout import PackedGroup
from swapio.optim.speculation_undo import EarlyCall
from swapio.optim.unit_cut import UnitCut
from swapio.views import Chunk


class HyperSource(Protocol):
    """Who knows how to write a param group's hyperparameters into the kernels' table."""

    param_groups: list[dict[str, Any]]

    def fill_hyper(self, row: Any, group: dict[str, Any]) -> None: ...  # noqa: D102


@dataclass
class Elsewhere:
    """Where an update of one chunk goes instead of in place.

    Attributes:
        chunk: The same elements of the records, in other memory; None for the state in place.
        weights: Address that element 0 of each parameter would have where new weights go (uint64).
        ties: Collects (units, their new ties) of a split master.
        low: Address of the sub-group's first element where new lower halves go; 0: with the state.
        calls: Collects what is done to the state in place; None where it need not be taken back.
    """

    chunk: Chunk | None
    weights: npt.NDArray[np.uint64]
    ties: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]] = field(default_factory=list)
    low: int = 0
    calls: list[EarlyCall] | None = None


class StepContext:
    """What is the same for all chunks of one step: gradients, factor, hyperparameters.

    Attributes:
        gradients: Addresses of this step's gradients.
        scale: Factor for every gradient.
        counts: Step count of each parameter, this step included.
        is_complete: Whether every parameter has a gradient.
        param_address: Address of each parameter's first element (uint64).
        threads: At most so many threads for the kernels; None for all.
        elsewhere: Where results go, in an early step; None for in place.
    """

    threads: int | None = None
    elsewhere: Elsewhere | None = None

    def __init__(
        self,
        source: HyperSource,
        groups: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        gradients: Gradients,
        scale: float,
    ) -> None:
        self.gradients = gradients
        self.scale = scale
        self.is_complete = gradients.complete
        self.counts = counts + gradients.present
        self.param_address = gradients.parameters
        self.hyper_index, self.hypers = self._hyper_table(source, groups)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Parameters that have a gradient."""
        return np.flatnonzero(self.gradients.present)

    def _hyper_table(
        self, source: HyperSource, groups: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        """One row for each distinct (param group, step count) among the stepped parameters."""
        # A parameter that has no gradient and was never stepped shares the row of step 1.
        pairs = groups << 48 | np.maximum(self.counts, 1)
        if len(pairs) and (pairs == pairs[0]).all():
            distinct, inverse = pairs[:1], np.zeros(len(pairs), np.int32)
        else:
            distinct, inverse = np.unique(pairs, return_inverse=True)
        rows = np.zeros(len(distinct), kernels.HYPER_DTYPE)
        for row, pair in zip(rows, distinct, strict=True):
            group = source.param_groups[int(pair) >> 48]
            source.fill_hyper(row, group)
            row["step"] = int(pair) & ((1 << 48) - 1)
        return inverse.astype(np.int32), rows

    def touches(self, packed: PackedGroup) -> bool:
        """Whether any parameter of a sub-group has a gradient."""
        return self.is_complete or bool(self.gradients.present[packed.units.param].any())

    def rows_of(self, packed: PackedGroup, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Units of a sub-group within elements `[start, stop)` that have a gradient."""
        span = packed.units.slice_of(start, stop)
        rows = np.arange(span.start, span.stop)
        if self.gradients.complete:
            return rows
        chosen: npt.NDArray[np.int64] = rows[self.gradients.present[packed.units.param[rows]]]
        return chosen

    def by_dtype(
        self, packed: PackedGroup, cut: UnitCut, chunk_start: int
    ) -> Iterator[tuple[torch.dtype, UnitCut]]:
        """Split the units of a chunk by the dtype of their gradient."""
        common, others = self.gradients.dtype, self.gradients.dtypes
        if common is None:
            return
        if not others:
            yield common, cut
            return
        rows = cut.row_numbers()
        dtypes = [others.get(int(param), common) for param in cut.param]
        for dtype in dict.fromkeys(dtypes):
            chosen = rows[np.array([d is dtype for d in dtypes])]
            yield dtype, UnitCut(packed, chosen, chunk_start)
