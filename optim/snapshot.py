# SPDX-License-Identifier: Apache-2.0
"""Snapshots of all state as tensors: maps of held slots where that works, copies elsewhere.

    one contiguous run in one file, >= 1 MiB     private map of the slot, which stays held
    else >= 1 MiB, and there is storage          copied to a file without a name, and mapped
    else                                         copied to RAM

Each tensor has a storage of its own that is exactly its bytes: torch.save of a view would write
everything that is mapped.

Invariant: a slot is held while a tensor that maps it is alive. The tensors' end is noted where it
happens and acted on by the next call here, because finalizers must not take locks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.align import PAGE_BYTES
from swapio.errors import SwapStateError
from swapio.optim import kernels
from swapio.optim.cuda_weights import host_addresses
from swapio.optim.filling import addresses_of, shaped, windows
from swapio.optim.layout import Layout, MasterForm, PackedGroup
from swapio.optim.masters import Masters
from swapio.runtime import SwapRuntime
from swapio.store import FilePiece, Hold

MAP_BYTES_MIN = 1 << 20

Records = Callable[[str], dict[str, torch.dtype]]
Tensors = dict[int, dict[str, torch.Tensor]]


class _Pin:
    """A hold, and how many maps of each of its sub-groups are alive."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.counts: dict[str, int] = dict.fromkeys(hold.keys, 0)
        self.dead: deque[str] = deque()

    def settle(self) -> bool:
        """Release what no map needs any more; True when nothing is left."""
        while self.dead:
            self.counts[self.dead.popleft()] -= 1
        gone = [key for key, count in self.counts.items() if not count]
        self.hold.release(gone)
        for key in gone:
            del self.counts[key]
        return not self.counts


class Snapshots:
    """Makes snapshots of one optimizer and gives slots back when they are gone."""

    def __init__(self, layout: Layout, runtime: SwapRuntime, masters: Masters) -> None:
        self._layout = layout
        self._runtime = runtime
        self._masters = masters
        self._pins: list[_Pin] = []

    def settle(self) -> None:
        """Give back the slots of snapshots that nobody has any more."""
        if self._pins:
            self._pins = [pin for pin in self._pins if not pin.settle()]

    def take(self, records_of: Records) -> Tensors:
        """Return the state of all parameters by index and name, without `step`."""
        self.settle()
        swapper = self._runtime.swapper
        if swapper.failure is None:
            self._masters.resync_now()
            swapper.flush()
        taker = _Taker(self._layout, self._runtime, self._masters, self._pin())
        try:
            for packed in self._layout.groups.values():
                taker.take(packed, records_of(packed.bucket.rule))
        finally:
            if taker.pin is not None and not taker.pin.settle():
                self._pins.append(taker.pin)
        return taker.finish()

    def _pin(self) -> _Pin | None:
        store, swapper = self._runtime.store, self._runtime.swapper
        if store is None or swapper.failure is not None:
            return None
        keys = [key for key in self._layout.groups if swapper.swapped_records(key)]
        if not keys:
            return None
        hold = store.hold(keys)
        for key in keys:
            if not store.num_free_slots(key):
                hold.release()
                raise SwapStateError(
                    f"a state_dict now would leave sub-group {key!r} no slot for the next step: "
                    "earlier state_dicts or checkpoints hold all of them. Drop those state_dicts, "
                    "save with keep_last, or raise spare_slots"
                )
        return _Pin(hold)


class _Taker:
    """Fills the tensors of one snapshot."""

    def __init__(
        self, layout: Layout, runtime: SwapRuntime, masters: Masters, pin: _Pin | None
    ) -> None:
        self.pin = pin
        self._layout = layout
        self._runtime = runtime
        self._masters = masters
        folder = runtime.store.folders[0] if runtime.store is not None else None
        self._folder = None if folder is None else Path(folder)
        self._flat: Tensors = {info.index: {} for info in layout.infos}

    def finish(self) -> Tensors:
        """Return the tensors in logical shapes."""
        infos = self._layout.infos
        return {
            index: {name: shaped(tensor, infos[index].param) for name, tensor in entry.items()}
            for index, entry in self._flat.items()
        }

    def take(self, packed: PackedGroup, records: dict[str, torch.dtype]) -> None:
        """Map or copy the state of the parameters, or parts of them, in one sub-group."""
        wanted = dict(records)
        if packed.bucket.form in (MasterForm.SEPARATE, MasterForm.SPLIT):
            wanted["master"] = torch.float32
        for name, dtype in wanted.items():
            self._take_record(packed, name, dtype)

    def _take_record(self, packed: PackedGroup, name: str, dtype: torch.dtype) -> None:
        copied: dict[int, torch.Tensor] = {}
        for index, position, count in _members(packed):
            numel = self._layout.infos[index].param.numel()
            mapped = None
            if count == numel and count * dtype.itemsize >= MAP_BYTES_MIN:
                mapped = self._map(packed, name, dtype, position, count)
            if mapped is not None:
                self._flat[index][name] = mapped
                continue
            if name not in self._flat[index]:
                self._flat[index][name] = self._new(numel, dtype)
            copied[index] = self._flat[index][name]
        # Zero-size parameters are in no sub-group: see `finish`.
        if copied:
            self._copy(packed, name, dtype, addresses_of(copied, len(self._layout.infos)))

    def _map(
        self, packed: PackedGroup, name: str, dtype: torch.dtype, position: int, count: int
    ) -> torch.Tensor | None:
        key = packed.key
        if self.pin is None or key not in self.pin.counts:
            return None
        if name not in self._runtime.swapper.swapped_records(key):
            return None
        runs = self.pin.hold.locate(key).records[name]
        if len(runs) != 1:
            return None
        self.pin.counts[key] += 1
        area = _map_private(runs[0], position * dtype.itemsize, count * dtype.itemsize)
        weakref.finalize(area.memory, self.pin.dead.append, key)
        return torch.frombuffer(area.memory, dtype=dtype, count=count, offset=area.start)

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if self._folder is None or nbytes < MAP_BYTES_MIN:
            return torch.empty(numel, dtype=dtype)
        with tempfile.TemporaryFile(dir=self._folder, prefix="snapshot-") as file:
            # Reserved first: a full disk is an error here, not a SIGBUS at some later store.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def _copy(
        self,
        packed: PackedGroup,
        name: str,
        dtype: torch.dtype,
        target: npt.NDArray[np.uint64],
    ) -> None:
        units, swapper = packed.units, self._runtime.swapper
        split = name == "master" and packed.bucket.form is MasterForm.SPLIT
        record, stored = ("master_low", torch.int16) if split else (name, dtype)
        # What is on a device is copied here, and kept until the end.
        params, _kept = host_addresses(self._layout.infos, packed)
        for start, stop in windows(packed.numel):
            span = units.slice_of(start, stop)
            rows = np.arange(span.start, span.stop)
            rows = rows[target[units.param[rows]] > 0]
            if not len(rows):
                continue
            memory = torch.empty(stop - start, dtype=stored)
            swapper.read(packed.key, record, memory, start=start)
            at = ((units.position[rows] - start) * stored.itemsize).astype(np.uint64)
            source = at + np.uint64(memory.data_ptr())
            offset = units.offset[rows]
            index = units.param[rows]
            goal = target[index] + (offset * dtype.itemsize).astype(np.uint64)
            if not split:
                kernels.copy_spans(source, goal, units.numel[rows] * dtype.itemsize)
                continue
            high = params[index] + (offset * packed.bucket.dtype.itemsize).astype(np.uint64)
            kernels.join_master_spans(
                high,
                source,
                goal,
                units.numel[rows],
                units.position[rows],
                ties=self._masters.ties_of(packed, start, stop),
            )


class _Area:
    """A private map of part of a file, and where in it the part begins."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self.memory = memory
        self.start = start


def _map_private(run: FilePiece, start: int, nbytes: int) -> _Area:
    first = run.offset + start
    base = first // PAGE_BYTES * PAGE_BYTES
    with run.path.open("rb") as file:
        memory = mmap.mmap(
            file.fileno(),
            first + nbytes - base,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=base,
        )
    return _Area(memory, first - base)


def _members(packed: PackedGroup) -> Iterator[tuple[int, int, int]]:
    """(parameter, position, numel) of each parameter's run in a sub-group."""
    units = packed.units
    starts = np.flatnonzero(np.diff(units.param, prepend=-1))
    ends: Any = np.append(starts[1:], len(units.param))
    for lo, hi in zip(starts.tolist(), ends.tolist(), strict=True):
        yield int(units.param[lo]), int(units.position[lo]), int(units.numel[lo:hi].sum())
