# SPDX-License-Identifier: Apache-2.0
"""The units of one chunk as the kernels are told of them: all but the addresses, worked out once.

Invariant: nothing here depends on a step; addresses of parameters, gradients and buffers are added
at each step, since all of them may move.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swapio.optim import kernels
from swapio.optim.layout import PackedGroup

Rows = slice | npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

_UNITS_MAX = 64
"""Cuts of more units are not kept: of many small parameters they would take megabytes, and the
work on them is small beside that of their kernels."""


class UnitCut:
    """Some units of a sub-group, seen from the start of a chunk.

    Attributes:
        rows: Their rows in the sub-group's table.
        param: Parameter index of each.
        model_offset: Bytes from the start of the parameter (uint64).
        model_nbytes: Bytes of the parameter (int64).
        place: Elements from the start of the chunk.
        numel: Elements.
        position: Elements from the start of the sub-group.
    """

    __slots__ = (
        "_last", "_offset", "_spans", "model_nbytes", "model_offset", "numel", "param", "place",
        "position", "rows",
    )  # fmt: skip

    def __init__(self, packed: PackedGroup, rows: Rows, chunk_start: int) -> None:
        units, width = packed.units, packed.bucket.dtype.itemsize
        self.rows = rows
        self.param = units.param[rows]
        self.numel = units.numel[rows]
        self.position = units.position[rows]
        self.place = self.position - chunk_start
        self._offset = units.offset[rows]
        self.model_offset = (self._offset * width).astype(np.uint64)
        self.model_nbytes = self.numel * width
        self._last: tuple[Addresses, Addresses] | None = None
        self._spans: npt.NDArray[np.void] = np.zeros(len(self.param), kernels.SPAN_DTYPE)
        self._spans["numel"] = self.numel
        self._spans["position"] = self.position

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.param)

    def row_numbers(self) -> npt.NDArray[np.int64]:
        """The rows, as numbers."""
        if isinstance(self.rows, slice):
            return np.arange(self.rows.start, self.rows.stop)
        return self.rows

    def of_parameters(self, address: Addresses) -> Addresses:
        """Address of each unit in the parameters, given that of every parameter."""
        last = self._last  # asked for a few times in a step, and early ones run beside it
        if last is None or last[0] is not address:
            last = self._last = (address, address[self.param] + self.model_offset)
        return last[1]

    def of_gradients(self, address: Addresses, itemsize: int) -> Addresses:
        """Address of each unit in the gradients, given that of every gradient."""
        found: Addresses = address[self.param] + (self._offset * itemsize).astype(np.uint64)
        return found

    def spans(self) -> npt.NDArray[np.void]:
        """Spans for the kernels, without addresses and hyperparameters."""
        return self._spans.copy()


class UnitCuts:
    """The cuts of whole chunks, kept from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], UnitCut] = {}

    def of(self, packed: PackedGroup, start: int, stop: int) -> UnitCut:
        """All units of the elements `[start, stop)` of a sub-group."""
        key = (packed.key, start, stop)
        cut = self._known.get(key)
        if cut is None:
            cut = UnitCut(packed, packed.units.slice_of(start, stop), start)
            if len(cut) <= _UNITS_MAX:
                self._known[key] = cut
        return cut
