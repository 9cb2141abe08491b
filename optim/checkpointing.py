# SPDX-License-Identifier: Apache-2.0
"""What of an optimizer goes into a checkpoint, and how it comes out again.

Each sub-group becomes a pack: its swapped records are the held slot, its resident records and the
parameters (which are masters, or their upper halves) are written from RAM.

Invariant: nothing here knows the names of any optimizer's state: what is there is saved, and what
the loading optimizer asks for is looked up by name.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.buffers import Lease
from swapio.checkpoint import (
    CheckpointManifest,
    CheckpointReader,
    Contents,
    PackContents,
    RamArray,
)
from swapio.checkpoint.agreement import Agreement
from swapio.checkpoint.manifest import ParameterEntry, Run
from swapio.checkpoint.reader import dtype_of
from swapio.errors import CheckpointError
from swapio.optim import kernels
from swapio.optim.commit_scalars import encode_group
from swapio.optim.cuda_weights import host_addresses
from swapio.optim.filling import UnitRuns
from swapio.optim.layout import Layout, MasterForm, PackedGroup, ParameterInfo, Span
from swapio.optim.masters import Masters
from swapio.swapper import PartitionedSwapper

TIES = "master_ties"


class Loaded(NamedTuple):
    """What `load` found.

    Attributes:
        step: Steps taken when the checkpoint was made.
        tag: Its name.
        payload: The bytes that `commit_payload` was when it was made.
        missing: Parameters of this optimizer that it lacks; empty with strict=True.
        unexpected: Parameters that only it has.
        bytes_read: What was read from storage.
    """

    step: int
    tag: str
    payload: bytes
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int = 0


# -- saving ----------------------------------------------------------------------------------


def contents_of(
    layout: Layout,
    swapper: PartitionedSwapper,
    masters: Masters,
    counts: npt.NDArray[np.int64],
    groups: Sequence[dict[str, Any]],
    *,
    step: int,
    payload: bytes,
) -> Contents:
    """Describe a checkpoint of an optimizer whose swapper was flushed."""
    keys = list(layout.groups)
    packs = [_pack(layout, swapper, masters, layout.groups[key]) for key in keys]
    number_of = {key: number for number, key in enumerate(keys)}
    spans = layout.all_spans()
    parameters = [
        _parameter_entry(info, int(counts[info.index]), spans.get(info.index, ()), number_of)
        for info in layout.infos
    ]
    name_of = {id(info.listed): info.name for info in layout.infos}
    plain = tuple(
        {
            "hyper": encode_group(group),
            "params": [name_of[id(p)] for p in group["params"] if id(p) in name_of],
        }
        for group in groups
    )
    return Contents(step, packs, parameters, plain, {"num_steps": step}, payload)


def _parameter_entry(
    info: ParameterInfo, count: int, spans: Sequence[Span], number_of: Mapping[str, int]
) -> ParameterEntry:
    place = info.place
    runs = tuple(
        Run(number_of[span.key], run.offset, span.position + run.local - span.offset, run.numel)
        for span in (spans if place.is_saved else ())
        for run in place.find(span.offset, span.numel)
    )
    dtype = str(info.param.dtype).removeprefix("torch.")
    return ParameterEntry(info.name, place.shape, place.order, dtype, count, runs)


def _pack(
    layout: Layout, swapper: PartitionedSwapper, masters: Masters, packed: PackedGroup
) -> PackContents:
    key = packed.key
    records = swapper.records(key)
    swapped = set(swapper.swapped_records(key)) - {"param"}
    held = {
        name: str(spec.dtype).removeprefix("torch.")
        for name, spec in records.items()
        if name in swapped
    }
    ram = {
        name: _resident_array(swapper, key, name, spec.dtype, spec.nbytes)
        for name, spec in records.items()
        if name not in swapped and name != "param"
    }
    if packed.bucket.form is not MasterForm.SEPARATE:
        ram["param"] = _param_array(layout, packed)
    if packed.bucket.form is MasterForm.SPLIT:
        ram[TIES] = _bytes_array("uint32", masters.ties_of(packed, 0, packed.numel))
    return PackContents(packed.numel, key if held else "", held, ram)


def _resident_array(
    swapper: PartitionedSwapper, key: str, name: str, dtype: torch.dtype, nbytes: int
) -> RamArray:
    def fill(start: int, lease: Lease, length: int) -> None:
        out = lease.tensor(dtype, (length // dtype.itemsize,))
        swapper.read(key, name, out, start=start // dtype.itemsize)

    return RamArray(str(dtype).removeprefix("torch."), nbytes, fill)


def _param_array(layout: Layout, packed: PackedGroup) -> RamArray:
    dtype = packed.bucket.dtype
    units, width = packed.units, dtype.itemsize

    def fill(start: int, lease: Lease, length: int) -> None:
        # A window is whole units, so this is a list of copies.
        rows = units.slice_of(start // width, (start + length) // width)
        infos = layout.infos
        if packed.bucket.device == "cpu":
            starts, _kept = np.array([infos[i].param.data_ptr() for i in units.param[rows]]), None
        else:
            addresses, _kept = host_addresses(infos, packed)
            starts = addresses[units.param[rows]]
        source = starts.astype(np.uint64) + (units.offset[rows] * width).astype(np.uint64)
        target = (units.position[rows] * width - start).astype(np.uint64)
        kernels.copy_spans(source, target + np.uint64(lease.address), units.numel[rows] * width)

    return RamArray(str(dtype).removeprefix("torch."), packed.numel * width, fill)


def _bytes_array(dtype: str, values: npt.NDArray[Any]) -> RamArray:
    data = values.tobytes()

    def fill(start: int, lease: Lease, length: int) -> None:
        lease.memory[:length] = data[start : start + length]

    return RamArray(dtype, len(data), fill)


# -- loading ---------------------------------------------------------------------------------


class CheckpointSource:
    """State and masters of a checkpoint, for `filling.fill`."""

    def __init__(
        self,
        reader: CheckpointReader,
        infos: Sequence[ParameterInfo],
        found: Mapping[int, ParameterEntry],
    ) -> None:
        self._reader = reader
        self._infos = infos
        self._found = found
        self._records = {index: reader.records(entry) for index, entry in found.items()}
        self._pack, self._position = _whole_runs(infos, found)
        self._ties: dict[int, npt.NDArray[np.uint32]] = {}
        self._ordered: tuple[tuple[int, str], torch.Tensor] | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from storage."""
        return self._reader.bytes_read

    def dtypes(self, index: int) -> dict[str, str]:
        """The records that the checkpoint has of a parameter."""
        return self._records.get(index, {})

    def has(self, index: int, name: str) -> bool:
        """Whether the checkpoint has a record, or something to make the master of."""
        records = self._records.get(index, {})
        return bool(records) if name == "master" else name in records

    def read(self, index: int, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill `out` from element `offset` of a parameter; see `filling.Source`."""
        entry, place = self._found[index], self._infos[index].place
        if entry.order == place.order:
            for run in place.find(offset, out.numel()):
                part = out[run.local - offset : run.local - offset + run.numel]
                self._read(index, entry, name, run.offset, part)
            return
        # Another memory format: the whole parameter is turned.
        if self._ordered is None or self._ordered[0] != (index, name):
            numel = math.prod(entry.shape)
            stored = torch.empty(numel, dtype=out.dtype)
            self._read(index, entry, name, 0, stored)
            seen = stored.view([entry.shape[dim] for dim in entry.order])
            seen = seen.permute([entry.order.index(dim) for dim in place.order])
            self._ordered = ((index, name), seen.reshape(numel))
        for run in place.find(offset, out.numel()):
            part = out[run.local - offset : run.local - offset + run.numel]
            part.copy_(self._ordered[1][run.offset : run.offset + run.numel])

    def _read(
        self, index: int, entry: ParameterEntry, name: str, offset: int, out: torch.Tensor
    ) -> None:
        records = self._records[index]
        if name != "master" or "master" in records:
            self._read_as(entry, name, records[name], offset, out)
        elif "master_low" in records:
            self._join(entry, offset, out)
        elif "param" in records:
            self._read_as(entry, "param", records["param"], offset, out)
        else:
            raise CheckpointError(f"the checkpoint has no weights of {entry.name!r}")

    def _read_as(
        self, entry: ParameterEntry, name: str, dtype: str, offset: int, out: torch.Tensor
    ) -> None:
        stored = dtype_of(dtype)
        if stored is out.dtype:
            self._reader.read(entry, name, offset, out)
            return
        memory = torch.empty(out.numel(), dtype=stored)
        self._reader.read(entry, name, offset, memory)
        out.copy_(memory)

    def read_units(self, name: str, runs: UnitRuns, out: torch.Tensor) -> npt.NDArray[np.bool_]:
        """Fill `out` with runs of many parameters at once; see `filling.Source`.

        Those that are neighbours in the checkpoint too, as most are, are one read.
        """
        pack = self._pack[runs.param]
        known = [number for number in np.unique(pack).tolist() if self._has_record(number, name)]
        done = np.isin(pack, known)
        position = self._position[runs.param] + runs.offset
        follows = done[1:] & (pack[1:] == pack[:-1])
        follows &= position[1:] == position[:-1] + runs.numel[:-1]
        follows &= runs.at[1:] == runs.at[:-1] + runs.numel[:-1]
        cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(pack)]
        for lo, hi in itertools.pairwise(cuts):
            if lo < hi and done[lo]:
                part = out[int(runs.at[lo]) : int(runs.at[hi - 1] + runs.numel[hi - 1])]
                self._read_run(int(pack[lo]), name, int(position[lo]), part)
        return done

    def _has_record(self, pack: int, name: str) -> bool:
        if pack < 0:
            return False
        records = self._reader.manifest.packs[pack].records
        return name in records or (name == "master" and "param" in records)

    def _read_run(self, pack: int, name: str, position: int, out: torch.Tensor) -> None:
        records = self._reader.manifest.packs[pack].records
        if name == "master" and name not in records:
            if "master_low" in records:
                self._join_run(pack, position, out)
                return
            name = "param"
        stored = dtype_of(records[name].dtype)
        memory = out if stored is out.dtype else torch.empty(out.numel(), dtype=stored)
        self._reader.read_run(pack, name, position, memory)
        if memory is not out:
            out.copy_(memory)

    def _join(self, entry: ParameterEntry, offset: int, out: torch.Tensor) -> None:
        """Put a split master together."""
        for pack, position, first, count in self._reader.positions(entry, offset, out.numel()):
            self._join_run(pack, position, out[first - offset : first - offset + count])

    def _join_run(self, pack: int, position: int, out: torch.Tensor) -> None:
        record = self._reader.manifest.packs[pack].records["param"]
        high = torch.empty(out.numel(), dtype=dtype_of(record.dtype))
        low = torch.empty(out.numel(), dtype=torch.int16)
        self._reader.read_run(pack, "param", position, high)
        self._reader.read_run(pack, "master_low", position, low)
        ties = self._pack_ties(pack)
        lo, hi = np.searchsorted(ties, (position, position + out.numel()))
        kernels.join_master_spans(
            [high.data_ptr()],
            [low.data_ptr()],
            [out.data_ptr()],
            [out.numel()],
            [position],
            ties=ties[lo:hi],
        )

    def _pack_ties(self, pack: int) -> npt.NDArray[np.uint32]:
        if pack not in self._ties:
            record = self._reader.manifest.packs[pack].records[TIES]
            data = np.empty(record.nbytes, np.uint8)
            self._reader.read_bytes(pack, TIES, 0, data)
            self._ties = {pack: data.view(np.uint32)}
        return self._ties[pack]


def _whole_runs(
    infos: Sequence[ParameterInfo], found: Mapping[int, ParameterEntry]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pack of each parameter, and where it begins there; -1 unless it is one run on both sides."""
    pack = np.full(len(infos), -1, np.int64)
    position = np.zeros(len(infos), np.int64)
    for index, entry in found.items():
        place = infos[index].place
        alone = len(entry.runs) == 1 and len(place.runs) == 1 and entry.order == place.order
        if alone and entry.runs[0].numel == place.runs[0].numel == math.prod(entry.shape):
            pack[index], _offset, position[index], _numel = entry.runs[0]
    return pack, position


def match_parameters(
    infos: Sequence[ParameterInfo], reader: CheckpointReader, *, strict: bool
) -> tuple[dict[int, ParameterEntry], tuple[str, ...], tuple[str, ...]]:
    """Find each parameter in the checkpoint: entries by index, missing, unexpected names.

    Raises:
        CheckpointError: A shape differs, or with `strict` a parameter is on one side only.
    """
    found = {
        info.index: reader.parameters[info.name] for info in infos if info.name in reader.parameters
    }
    for index, entry in found.items():
        shape = tuple(infos[index].place.shape)
        if entry.shape != shape:
            raise CheckpointError(
                f"parameter {entry.name!r} has shape {entry.shape} in the checkpoint, {shape} here"
            )
    names = {info.name for info in infos}
    missing = tuple(info.name for info in infos if info.index not in found)
    unexpected = tuple(name for name in reader.parameters if name not in names)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint lacks {list(missing[:5])} ({len(missing)}) and has besides "
            f"{list(unexpected[:5])} ({len(unexpected)}); pass named_parameters() to both "
            "optimizers, or strict=False"
        )
    return found, missing, unexpected


def match_groups(
    groups: Sequence[dict[str, Any]], infos: Sequence[ParameterInfo], saved: Sequence[Any]
) -> list[dict[str, Any] | None]:
    """Find the saved hyperparameters of each param group, by its first known parameter."""
    of_name = {name: entry["hyper"] for entry in saved for name in entry["params"]}
    name_of = {id(info.listed): info.name for info in infos}
    return [
        next(
            (of_name[n] for n in (name_of.get(id(p)) for p in group["params"]) if n in of_name),
            None,
        )
        for group in groups
    ]


def payload_of(manifest: CheckpointManifest, agreement: Agreement) -> bytes:
    """The user's bytes of this rank, or of rank 0 if there were other ranks."""
    of_ranks = manifest.scalars.get("payloads", [])
    if len(of_ranks) != agreement.world_size:
        return manifest.payload
    return base64.b64decode(of_ranks[agreement.rank])
