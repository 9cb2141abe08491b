# SPDX-License-Identifier: Apache-2.0
"""Fill an optimizer's records from somewhere else: a state dict, or a checkpoint.

Sub-group by sub-group, chunk by chunk: memory is one chunk, whatever the size of the state.

Invariants: elements are addressed by parameter and offset in its memory order, so that nothing
depends on how either side packs them; a loaded master sets its parameter as well.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.layout import (
    Layout,
    MasterForm,
    PackedGroup,
    ParameterInfo,
    flat,
)
from swapio.optim.masters import Masters
from swapio.swapper import PartitionedSwapper

_logger = logging.getLogger("swapio.optim")
_WINDOW_NUMEL = 1 << 20
_MANY_RUNS = 16  # in a window: then they are read together, and copied, instead of one by one

Filler = Callable[[int, torch.Tensor], None]


class UnitRuns(NamedTuple):
    """Runs of parameters side by side in a piece of a sub-group, as columns.

    Attributes:
        param: Parameter index.
        offset: First element within the parameter, in its memory order.
        at: First element within the piece, ascending.
        numel: Elements.
    """

    param: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """(param, offset, at, numel) of each run."""
        return zip(*(column.tolist() for column in self), strict=True)

    def of(self, chosen: npt.NDArray[np.bool_]) -> UnitRuns:
        """The runs that are chosen."""
        return UnitRuns(
            self.param[chosen], self.offset[chosen], self.at[chosen], self.numel[chosen]
        )


class Source(Protocol):
    """Where state comes from."""

    def has(self, index: int, name: str) -> bool:
        """Whether state `name` of parameter `index` is there; "master" is the fp32 master."""

    def read(self, index: int, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill the 1-D tensor `out` from element `offset` of the parameter, in memory order."""

    def read_units(self, name: str, runs: UnitRuns, out: torch.Tensor) -> npt.NDArray[np.bool_]:
        """Fill `out` with those runs that can be read together; return which those are."""


class DictSource:
    """The entries of a state dict, by parameter index."""

    def __init__(
        self, infos: list[ParameterInfo], entries: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._infos = infos
        self._entries = entries
        self._ordered: tuple[tuple[int, str], torch.Tensor] | None = None

    def has(self, index: int, name: str) -> bool:
        """Whether the entry has a tensor of that name."""
        return name in self._entries.get(index, {})

    def read(self, index: int, name: str, offset: int, out: torch.Tensor) -> None:
        """Copy a run of elements; see `Source`."""
        value = self._in_memory_order(index, name)
        out.copy_(value[offset : offset + out.numel()])

    def read_units(
        self,
        name: str,  # noqa: ARG002
        runs: UnitRuns,
        out: torch.Tensor,  # noqa: ARG002
    ) -> npt.NDArray[np.bool_]:
        """None: each entry is a tensor of its own."""
        return np.zeros(len(runs.param), bool)

    def _in_memory_order(self, index: int, name: str) -> torch.Tensor:
        if self._ordered is not None and self._ordered[0] == (index, name):
            return self._ordered[1]
        param = self._infos[index].param
        value = torch.as_tensor(self._entries[index][name]).detach()
        if value.shape != param.shape:
            raise ValueError(
                f"state {name} of {self._infos[index].name} has shape {tuple(param.shape)}, got "
                f"{tuple(value.shape)}"
            )
        if value.device.type != "cpu":
            value = value.cpu()
        if value.stride() != param.stride() and param.numel():
            memory = torch.empty(param.numel(), dtype=value.dtype)
            shaped(memory, param).copy_(value)
            value = memory
        self._ordered = ((index, name), flat(value))
        return self._ordered[1]


def shaped(memory: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Elements in the memory order of `param`, seen in its logical shape."""
    if param.is_contiguous():
        return memory.view(param.shape)
    return torch.as_strided(memory, param.shape, param.stride())


def warn_of_conversion(name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Say that loaded state changes its dtype; a warning if it loses bits."""
    if wanted.itemsize < found.itemsize:
        warnings.warn(
            f"loaded state {name!r} is {found}, this optimizer keeps {wanted} (state_dtype): it is "
            "rounded once",
            stacklevel=2,
        )
    elif wanted is not found:
        _logger.info("loaded state %r is %s and kept as %s", name, found, wanted)


def fill(
    layout: Layout, swapper: PartitionedSwapper, masters: Masters, source: Source, names: set[str]
) -> None:
    """Replace all state records, the masters and, where the source has a master, parameters.

    State that the source lacks becomes zero, a master that it lacks what the parameter is.

    Args:
        layout: The optimizer's sub-groups.
        swapper: Where the records are.
        masters: The optimizer's masters.
        source: Where state comes from.
        names: The state records' names.
    """
    for packed in layout.groups.values():
        filler = _GroupFiller(layout, packed, masters, source)
        filler.set_own_masters()
        swapper.refill(packed.key, filler.fillers(swapper.records(packed.key), names))
    masters.remember(layout.groups.values())
    torch.autograd.graph.increment_version([info.param for info in layout.infos])


class _GroupFiller:
    """Fills the records of one sub-group."""

    def __init__(
        self, layout: Layout, packed: PackedGroup, masters: Masters, source: Source
    ) -> None:
        self._infos = layout.infos
        self._packed = packed
        self._masters = masters
        self._source = source
        masters.begin_fill(packed)

    def fillers(self, records: Mapping[str, Any], names: set[str]) -> dict[str, Filler]:
        """The filler of each record."""
        made: dict[str, Filler] = {}
        for record in records:
            if record in names:
                made[record] = self._state_filler(record)
        if "master" in records:
            made["master"] = _in_windows(self._fill_master)
        if "master_low" in records:
            made["master_low"] = _in_windows(self._fill_low)
        if "param" in records:
            made["param"] = self._fill_param
        return made

    def set_own_masters(self) -> None:
        """Set the parameters that are their own master."""
        if self._packed.bucket.form in (MasterForm.SEPARATE, MasterForm.SPLIT):
            return
        for start, stop in windows(self._packed.numel):
            self._set_own_masters(start, stop)

    def _set_own_masters(self, start: int, stop: int) -> None:
        runs = self._runs(start, stop)
        if len(runs.param) > _MANY_RUNS:
            masters = torch.empty(stop - start, dtype=torch.float32)
            has_master = self._read_masters(start, masters)
            self._set_parameters(runs.of(has_master), masters)
            return
        for index, first, _at, count in runs.rows():
            if self._source.has(index, "master"):
                target = flat(self._infos[index].param)[first : first + count]
                self._read_master(index, first, target)

    def _runs(self, start: int, stop: int) -> UnitRuns:
        units = self._packed.units
        rows = units.slice_of(start, stop)
        at = units.position[rows] - start
        return UnitRuns(units.param[rows], units.offset[rows], at, units.numel[rows])

    def _state_filler(self, name: str) -> Filler:
        def fill_state(start: int, out: torch.Tensor) -> None:
            runs = self._runs(start, start + out.numel())
            done = self._source.read_units(name, runs, out)
            for index, first, at, count in runs.of(~done).rows():
                part = out[at : at + count]
                if self._source.has(index, name):
                    self._source.read(index, name, first, part)
                else:
                    part.zero_()

        return _in_windows(fill_state)

    def _read_masters(self, start: int, out: torch.Tensor) -> npt.NDArray[np.bool_]:
        """Fill `out` with masters, or parameters that have none; return which units have one."""
        runs = self._runs(start, start + out.numel())
        has_master = self._source.read_units("master", runs, out)
        for row in np.flatnonzero(~has_master).tolist():
            index, first, at, count = (int(column[row]) for column in runs)
            part = out[at : at + count]
            if self._source.has(index, "master"):
                self._source.read(index, "master", first, part)
                has_master[row] = True
            else:
                part.copy_(flat(self._infos[index].param)[first : first + count])
        return has_master

    def _read_master(self, index: int, first: int, target: torch.Tensor) -> torch.Tensor:
        """Read a run of the master, and round it to the parameter's elements `target`."""
        if target.dtype is torch.float32 and target.device.type == "cpu":
            self._source.read(index, "master", first, target)
            return target
        master = torch.empty(target.numel(), dtype=torch.float32)
        self._source.read(index, "master", first, master)
        target.copy_(master)
        return master

    def _set_parameters(self, runs: UnitRuns, values: torch.Tensor) -> None:
        """Round values to the parameters' dtype and put them there."""
        bucket = self._packed.bucket
        if bucket.device != "cpu":
            for index, first, at, count in runs.rows():
                flat(self._infos[index].param)[first : first + count] = values[at : at + count]
            return
        rounded, width = values.to(bucket.dtype), np.uint64(bucket.dtype.itemsize)
        starts = [self._infos[index].param.data_ptr() for index in runs.param.tolist()]
        source = np.uint64(rounded.data_ptr()) + runs.at.astype(np.uint64) * width
        target = np.array(starts, np.uint64) + runs.offset.astype(np.uint64) * width
        kernels.copy_spans(source, target, runs.numel * bucket.dtype.itemsize)

    def _fill_master(self, start: int, out: torch.Tensor) -> None:
        has_master = self._read_masters(start, out)
        self._set_parameters(self._runs(start, start + out.numel()).of(has_master), out)

    def _fill_low(self, start: int, out: torch.Tensor) -> None:
        masters = torch.empty(out.numel(), dtype=torch.float32)
        has_master = self._read_masters(start, masters)
        high = torch.empty(out.numel(), dtype=self._packed.bucket.dtype)
        self._masters.split_run(self._packed, start, masters, high, out)
        self._set_parameters(self._runs(start, start + out.numel()).of(has_master), high)

    def _fill_param(self, start: int, out: torch.Tensor) -> None:
        for index, first, at, count in self._runs(start, start + out.numel()).rows():
            out[at : at + count] = flat(self._infos[index].param)[first : first + count]


def _in_windows(filler: Filler) -> Filler:
    """Bound what a filler needs besides its output, whatever the size of a chunk."""

    def fill_windows(start: int, out: torch.Tensor) -> None:
        for lo, hi in windows(out.numel()):
            filler(start + lo, out[lo:hi])

    return fill_windows


def windows(numel: int) -> Iterator[tuple[int, int]]:
    """Cut a sub-group's elements into windows of whole units: (start, stop)."""
    for start in range(0, numel, _WINDOW_NUMEL):
        yield start, min(numel, start + _WINDOW_NUMEL)


def addresses_of(tensors: Mapping[int, torch.Tensor], num_params: int) -> npt.NDArray[np.uint64]:
    """Address of the tensor of each parameter; 0 where there is none."""
    addresses = np.zeros(num_params, np.uint64)
    for index, tensor in tensors.items():
        addresses[index] = tensor.data_ptr()
    return addresses
