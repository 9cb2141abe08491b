# SPDX-License-Identifier: Apache-2.0
"""The units of one chunk as the kernels are told of them: all but the addresses, worked out once.

Invariant: nothing here depends on a step; addresses of parameters, gradients and buffers are added
at each step, since all of them may move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from swapio.optim import kernels
from swapio.optim.layout import PackedGroup

Rows = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

# Spans are rows of eight-byte numbers; the last one holds the hyperparameters' index.
_NUM_COLUMNS = kernels.SPAN_DTYPE.itemsize // 8
_COLUMNS = {
    name: offset // 8 for name, (_, offset, *_) in (kernels.SPAN_DTYPE.fields or {}).items()
}

_UNITS_MAX = 4096
"""So many units are kept in all, about 200 bytes each: with a hundred thousand small parameters
they would take megabytes."""


class RecordAt(NamedTuple):
    """A record of a chunk: the span's field, bytes of an element, address of the first one."""

    field: str
    itemsize: int
    address: int


class UnitCut:
    """Some units of a sub-group, seen from the start of a chunk.

    Attributes:
        rows: Their rows in the sub-group's table; a slice of all units of the chunk.
        param: Parameter index of each.
        model_offset: Bytes from the start of the parameter (uint64).
        model_nbytes: Bytes of the parameter (int64).
        numel: Elements.
        offset: Elements from the start of the parameter.
        position: Elements from the start of the sub-group.
        start: First element of the chunk.
    """

    __slots__ = (
        "_last", "_templates", "model_nbytes", "model_offset", "numel", "offset", "param",
        "position", "rows", "start",
    )  # fmt: skip

    def __init__(self, packed: PackedGroup, rows: slice | Rows, chunk_start: int) -> None:
        units, width = packed.units, packed.bucket.dtype.itemsize
        self.rows = rows
        self.param = units.param[rows]
        self.numel = units.numel[rows]
        self.position = units.position[rows]
        self.start = chunk_start
        self.offset = units.offset[rows]
        self.model_offset = (self.offset * width).astype(np.uint64)
        self.model_nbytes = self.numel * width
        self._last: tuple[Addresses, Addresses] | None = None
        self._templates: dict[tuple[Any, ...], npt.NDArray[np.uint64]] = {}

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.param)

    @property
    def is_whole(self) -> bool:
        """Whether these are all units of the chunk."""
        return isinstance(self.rows, slice)

    def row_numbers(self) -> Rows:
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

    def spans(
        self, records: Sequence[RecordAt], grad_address: Addresses, grad_itemsize: int
    ) -> npt.NDArray[np.void]:
        """Spans for the kernels, without the parameter's address and hyperparameters.

        Args:
            records: The records of the chunk that the kernel is given.
            grad_address: Address of every parameter's gradient.
            grad_itemsize: Bytes of an element of these units' gradients.
        """
        key = (grad_itemsize, *[(field, itemsize) for field, itemsize, _ in records])
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._template(records, grad_itemsize)
        matrix = template.copy()
        bases = [0] * _NUM_COLUMNS
        for field, _, address in records:
            bases[_COLUMNS[field]] = address
        matrix += np.array(bases, np.uint64)
        matrix[:, _COLUMNS["grad"]] += grad_address[self.param]
        spans: npt.NDArray[np.void] = matrix.view(kernels.SPAN_DTYPE).reshape(-1)
        return spans

    def _template(self, records: Sequence[RecordAt], grad_itemsize: int) -> npt.NDArray[np.uint64]:
        """Spans as rows of numbers: what is added to the addresses, and what does not change."""
        spans = np.zeros(len(self.param), kernels.SPAN_DTYPE)
        spans["numel"] = self.numel
        spans["position"] = self.position
        spans["grad"] = self.offset * grad_itemsize
        for field, itemsize, _ in records:
            spans[field] = (self.position - self.start) * itemsize
        return spans.view(np.uint64).reshape(-1, _NUM_COLUMNS)


class UnitCuts:
    """The cuts of whole chunks, kept from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], UnitCut] = {}
        self._num_units = 0

    def of(self, packed: PackedGroup, start: int, stop: int) -> UnitCut:
        """All units of the elements `[start, stop)` of a sub-group."""
        key = (packed.key, start, stop)
        cut = self._known.get(key)
        if cut is None:
            cut = UnitCut(packed, packed.units.slice_of(start, stop), start)
            if self._num_units + len(cut) <= _UNITS_MAX:
                self._num_units += len(cut)
                self._known[key] = cut
        return cut
