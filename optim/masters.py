# SPDX-License-Identifier: Apache-2.0
"""Master weights that are not the parameter itself: first contents, digests, ties, resync.

A parameter in bf16 or fp16 is the rounded copy of an fp32 master. If somebody else writes to the
parameter (load_state_dict, an EMA swap, `p.data.mul_()`), the master no longer fits it. That is
noticed by a digest of each unit's bytes, taken after a step and compared before the next, and the
unit's master becomes what the parameter says ("resync") or the step raises ("error").

A split master keeps int16 lower halves; the few values whose lower half is +32768 are a sorted
list of positions ("ties") for each sub-group, which travels with the sub-group's records.

Invariant: digests are taken in whole units, so that what is resynced does not depend on chunks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from swapio import checksum
from swapio.errors import SwapStateError
from swapio.optim import kernels
from swapio.optim.cuda_versions import Versions
from swapio.optim.cuda_weights import host_addresses
from swapio.optim.layout import UNIT_NUMEL, Layout, MasterForm, PackedGroup, flat
from swapio.optim.unit_cut import Rows, UnitCut
from swapio.swapper import PartitionedSwapper
from swapio.views import Chunk

if TYPE_CHECKING:
    from swapio.optim.context import StepContext

_ALL = slice(None)
_RESTORE_NUMEL = 4 * UNIT_NUMEL
_LIST, _BITMAP = b"\0", b"\1"


class Masters:
    """The masters of one optimizer."""

    def __init__(self, layout: Layout, swapper: PartitionedSwapper, on_param_change: str) -> None:
        self._layout = layout
        self._swapper = swapper
        self._on_change = on_param_change
        self._ties: dict[str, npt.NDArray[np.uint32]] = {}
        self._foreign: str | None = None
        self._warned = False
        self.versions = Versions(layout)

    @staticmethod
    def filler(layout: Layout, packed: PackedGroup) -> Callable[[int, torch.Tensor], None]:
        """Return the `init` of a master record: the parameters, in fp32."""

        def fill(start: int, out: torch.Tensor) -> None:
            units = packed.units
            rows = units.slice_of(start, start + out.numel())
            for row in range(rows.start, rows.stop):
                at, count = int(units.position[row]) - start, int(units.numel[row])
                source = flat(layout.infos[units.param[row]].param)
                first = int(units.offset[row])
                out[at : at + count] = source[first : first + count]

        return fill

    def remember(self, groups: Iterable[PackedGroup]) -> None:
        """Take the digests of all units of new sub-groups."""
        for packed in groups:
            self.versions.forget(packed.units.param.tolist())
            if self._has_digest(packed):
                cut = UnitCut(packed, _ALL, 0)
                packed.units.digest[:] = self._hash_now(packed, cut)
                packed.units.known[:] = True

    def begin_step(self, step: StepContext) -> None:
        """Under on_param_change="error" look at every parameter before anything is changed."""
        self.versions.look()
        if self._on_change != "error":
            return
        for index in sorted(self.versions.changed):
            self._refuse(index)
        for packed in self._layout.groups.values():
            if self._has_digest(packed):
                rows = np.flatnonzero(step.gradients.present[packed.units.param])
                now = self._hash_now(packed, UnitCut(packed, rows, 0))
                changed = rows[packed.units.known[rows] & (now != packed.units.digest[rows])]
                if len(changed):
                    self._refuse(int(packed.units.param[changed[0]]))

    def _refuse(self, index: int) -> NoReturn:
        raise SwapStateError(
            f"parameter {self._layout.infos[index].name} was changed by somebody else since the "
            "last step; nothing was stepped. Set on_param_change='resync' to take such changes as "
            "new master weights"
        )

    def check(
        self, packed: PackedGroup, chunk: Chunk, rows: Rows | UnitCut, step: StepContext
    ) -> None:
        """Resync the masters of those units in `rows` whose parameter somebody else changed."""
        changed = self._changed(packed, _cut_of(packed, rows), step)
        if not len(changed):
            return
        if self._foreign is None:
            self._foreign = self._layout.infos[packed.units.param[changed[0]]].name
        self._resync(packed, chunk, changed)

    def check_on_device(
        self, packed: PackedGroup, rows: Rows, step: StepContext, masters: torch.Tensor
    ) -> None:
        """As `check`, for masters on the parameters' device: all elements of the sub-group."""
        units = packed.units
        for row in self._changed(packed, UnitCut(packed, rows, 0), step).tolist():
            info = self._layout.infos[units.param[row]]
            if self._foreign is None:
                self._foreign = info.name
            at, first, count = (int(c[row]) for c in (units.position, units.offset, units.numel))
            masters[at : at + count].copy_(flat(info.param)[first : first + count])

    def is_changed(self, packed: PackedGroup, cut: Rows | UnitCut, step: StepContext) -> bool:
        """Whether somebody else changed the parameter of one of these units."""
        return bool(len(self._changed(packed, _cut_of(packed, cut), step)))

    def digests_at(
        self, packed: PackedGroup, rows: Rows, weights: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64] | None:
        """Digests of units whose weights lie at other addresses; None where none are kept."""
        return _hash(_cut_of(packed, rows), weights) if self._has_digest(packed) else None

    def digests_of_own(
        self, packed: PackedGroup, rows: Rows, step: StepContext
    ) -> npt.NDArray[np.uint64] | None:
        """Digests, as of now, of parameters that are their own masters; None for others.

        For them a change is no matter but between an early step and the step proper.
        """
        own = packed.bucket.form in (MasterForm.PARAM, MasterForm.NONE)
        return _hash(_cut_of(packed, rows), step.param_address) if own else None

    def adopt_digests(
        self, packed: PackedGroup, rows: Rows, digests: npt.NDArray[np.uint64]
    ) -> None:
        """Remember what `digests_at` gave: those weights are the parameters now."""
        packed.units.digest[rows] = digests
        packed.units.known[rows] = True

    def resync_now(self) -> None:
        """Do what the next step would do about foreign changes; before state is saved. Blocks.

        A parameter in upper halves that somebody changed does not fit its lower halves: saved
        together they would be a master that never was.
        """
        if self._on_change != "resync":
            return
        for packed in self._layout.groups.values():
            if not self._has_digest(packed):
                continue
            units = packed.units
            now = self._hash_now(packed, UnitCut(packed, _ALL, 0))
            changed = np.flatnonzero(units.known & (now != units.digest))
            for row in changed:
                self._adopt_unit(packed, int(row))
            units.digest[changed] = now[changed]

    def _adopt_unit(self, packed: PackedGroup, row: int) -> None:
        units, key = packed.units, packed.key
        at, first, count = int(units.position[row]), int(units.offset[row]), int(units.numel[row])
        info = self._layout.infos[units.param[row]]
        self._foreign = self._foreign or info.name
        weights = flat(info.param)[first : first + count].cpu()
        if info.form is MasterForm.SEPARATE:
            self._swapper.write(key, "master", weights.float(), start=at)
            return
        ties = self._all_ties(key)
        lo, hi = np.searchsorted(ties, (at, at + count))
        self._ties[key] = np.concatenate([ties[:lo], ties[hi:]])
        self._swapper.set_meta(key, _encode(self._ties[key], packed.numel))
        self._swapper.write(key, "master_low", torch.zeros(count, dtype=torch.int16), start=at)
        if "param" in self._swapper.records(key):
            self._swapper.write(key, "param", weights, start=at)

    def warn(self) -> None:
        """Say once that a parameter was resynced. After the step: a warning may be an exception."""
        if self._foreign is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"parameter {self._foreign} was changed outside the optimizer; its master weights "
                "are taken from it (on_param_change='resync'; said once)",
                stacklevel=2,
            )

    def publish(self, packed: PackedGroup, rows: Rows | UnitCut, step: StepContext) -> None:
        """Remember what the parameters are after their update."""
        if self._has_digest(packed):
            cut = _cut_of(packed, rows)
            packed.units.digest[cut.rows] = _hash(cut, step.param_address)
            packed.units.known[cut.rows] = True

    # -- the parameter as a record -----------------------------------------------------------

    def copy_params(
        self, packed: PackedGroup, chunk: Chunk, addresses: npt.NDArray[np.uint64]
    ) -> None:
        """Copy the model weights of a chunk to its `param` record, if it has one."""
        if "param" not in chunk.group.specs:
            return
        units, width = packed.units, packed.bucket.dtype.itemsize
        rows = units.slice_of(chunk.start, chunk.stop)
        source = addresses[units.param[rows]] + (units.offset[rows] * width).astype(np.uint64)
        target = (units.position[rows] - chunk.start) * width
        kernels.copy_spans(
            source,
            target.astype(np.uint64) + np.uint64(chunk.address("param")),
            units.numel[rows] * width,
        )

    def restore_params(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Set the chosen parameters (by index) from what storage holds of them; blocks."""
        addresses = self._addresses()
        for packed in self._layout.groups.values():
            if chosen[packed.units.param].any():
                self._restore_group(packed, chosen, addresses)
        torch.autograd.graph.increment_version(
            [info.param for info in self._layout.infos if chosen[info.index]]
        )
        self.remember(self._layout.groups.values())

    def _restore_group(
        self,
        packed: PackedGroup,
        chosen: npt.NDArray[np.bool_],
        addresses: npt.NDArray[np.uint64],
    ) -> None:
        separate = packed.bucket.form is MasterForm.SEPARATE
        record = "master" if separate else "param"
        dtype = torch.float32 if separate else packed.bucket.dtype
        units, width = packed.units, packed.bucket.dtype.itemsize
        for start in range(0, packed.numel, _RESTORE_NUMEL):
            stop = min(packed.numel, start + _RESTORE_NUMEL)
            memory = torch.empty(stop - start, dtype=dtype)
            self._swapper.read(packed.key, record, memory, start=start)
            span = units.slice_of(start, stop)
            rows = np.arange(span.start, span.stop)
            rows = rows[chosen[units.param[rows]]]
            if packed.bucket.device != "cpu":
                self._restore_on_device(packed, rows, memory, start)
                continue
            at = ((units.position[rows] - start) * dtype.itemsize).astype(np.uint64)
            source = at + np.uint64(memory.data_ptr())
            target = addresses[units.param[rows]] + (units.offset[rows] * width).astype(np.uint64)
            if dtype is packed.bucket.dtype:
                kernels.copy_spans(source, target, units.numel[rows] * width)
            else:
                kernels.convert_spans(source, target, units.numel[rows], dtype, packed.bucket.dtype)

    def _restore_on_device(
        self, packed: PackedGroup, rows: Rows, memory: torch.Tensor, start: int
    ) -> None:
        units = packed.units
        for row in rows.tolist():
            at, count = int(units.position[row]) - start, int(units.numel[row])
            first = int(units.offset[row])
            target = flat(self._layout.infos[units.param[row]].param)
            target[first : first + count].copy_(memory[at : at + count])

    # -- ties of split masters ---------------------------------------------------------------

    def ties_of(self, packed: PackedGroup, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Sorted positions of ties within elements `[start, stop)` of a sub-group."""
        ties = self._all_ties(packed.key)
        lo, hi = ties.searchsorted((start, stop))
        return ties[lo:hi]

    def replace_ties(
        self,
        packed: PackedGroup,
        rows: Rows | UnitCut,
        new: npt.NDArray[np.uint32],
        chunk: Chunk | None = None,
    ) -> None:
        """Replace the ties of the units in `rows` (all within `chunk`, if given) by `new`."""
        ties = self._all_ties(packed.key)
        bounds = (0, packed.numel) if chunk is None else (chunk.start, chunk.stop)
        lo, hi = ties.searchsorted(bounds)
        old = ties[lo:hi]
        if isinstance(rows, UnitCut) and rows.is_whole and chunk is not None:
            old = old[:0]
        if len(old):
            numbers = rows.row_numbers() if isinstance(rows, UnitCut) else rows
            row_of = np.searchsorted(packed.units.position, old, side="right") - 1
            old = old[~np.isin(row_of, numbers)]
        if len(new) or hi - lo != len(old):
            inner = np.sort(np.concatenate([old, new]))
            self._ties[packed.key] = np.concatenate([ties[:lo], inner, ties[hi:]])
            self._swapper.set_meta(packed.key, _encode(self._ties[packed.key], packed.numel))

    def _all_ties(self, key: str) -> npt.NDArray[np.uint32]:
        if key not in self._ties:
            self._ties[key] = _decode(self._swapper.meta(key))
        return self._ties[key]

    # -- whole masters of one parameter ------------------------------------------------------

    def read(self, index: int) -> torch.Tensor:
        """The fp32 master of a parameter, in its logical shape (a copy). May block."""
        info = self._layout.infos[index]
        memory = torch.empty(info.param.numel(), dtype=torch.float32)
        for span in self._layout.spans(index):
            part = memory[span.offset : span.offset + span.numel]
            if info.form is MasterForm.SEPARATE:
                self._swapper.read(span.key, "master", part, start=span.position)
                continue
            low = torch.empty(span.numel, dtype=torch.int16)
            self._swapper.read(span.key, "master_low", low, start=span.position)
            high = flat(info.param)[span.offset : span.offset + span.numel].cpu()
            packed = self._layout.groups[span.key]
            ties = self.ties_of(packed, span.position, span.position + span.numel)
            kernels.join_master_spans(
                [high.data_ptr()],
                [low.data_ptr()],
                [part.data_ptr()],
                [span.numel],
                [span.position],
                ties=ties,
            )
        if info.param.is_contiguous():
            return memory.view(info.param.shape)
        return torch.as_strided(memory, info.param.shape, info.param.stride())

    def write(self, index: int, memory: torch.Tensor) -> None:
        """Set a parameter's master (fp32, memory order), and the parameter to its rounding."""
        info = self._layout.infos[index]
        target = flat(info.param)
        target.copy_(memory)
        for span in self._layout.spans(index):
            part = memory[span.offset : span.offset + span.numel]
            if info.form is MasterForm.SEPARATE:
                self._swapper.write(span.key, "master", part, start=span.position)
            else:
                self._write_split(span.key, span.position, part, target, span.offset)
            if "param" in self._swapper.records(span.key):
                high = target[span.offset : span.offset + span.numel].cpu()
                self._swapper.write(span.key, "param", high, start=span.position)
        torch.autograd.graph.increment_version([info.param])
        self.versions.forget([index])
        self._rehash(index)

    def adopt(self, index: int) -> None:
        """Make the parameter, as it is, the master."""
        self.write(index, flat(self._layout.infos[index].param).float())

    def begin_fill(self, packed: PackedGroup) -> None:
        """Forget the ties of a sub-group whose masters are about to be replaced."""
        if packed.bucket.form is MasterForm.SPLIT:
            self._ties[packed.key] = np.zeros(0, np.uint32)
            self._swapper.set_meta(packed.key, b"")

    def split_run(
        self,
        packed: PackedGroup,
        position: int,
        master: torch.Tensor,
        high: torch.Tensor,
        low: torch.Tensor,
    ) -> None:
        """Split masters, from `position` of a sub-group on, into upper and lower halves."""
        key = packed.key
        half = high if high.device.type == "cpu" else torch.empty_like(high, device="cpu")
        new = kernels.split_master_spans(
            [master.data_ptr()], [half.data_ptr()], [low.data_ptr()], [low.numel()], [position]
        )
        if half is not high:
            high.copy_(half)
        ties = self._all_ties(key)
        lo, hi = np.searchsorted(ties, (position, position + low.numel()))
        self._ties[key] = np.concatenate([ties[:lo], new, ties[hi:]])
        self._swapper.set_meta(key, _encode(self._ties[key], packed.numel))

    def _write_split(
        self, key: str, position: int, part: torch.Tensor, target: torch.Tensor, at: int
    ) -> None:
        low = torch.empty(part.numel(), dtype=torch.int16)
        high = target[at : at + part.numel()]
        self.split_run(self._layout.groups[key], position, part, high, low)
        self._swapper.write(key, "master_low", low, start=position)

    def _rehash(self, index: int) -> None:
        param = flat(self._layout.infos[index].param).cpu()
        start = param.data_ptr()
        for span in self._layout.spans(index):
            packed = self._layout.groups[span.key]
            units = packed.units
            lo, hi = np.searchsorted(units.param, (index, index + 1))
            width = packed.bucket.dtype.itemsize
            starts = np.uint64(start) + (units.offset[lo:hi] * width).astype(np.uint64)
            units.digest[lo:hi] = checksum.span_hashes(starts, units.numel[lo:hi] * width)
            units.known[lo:hi] = True

    # -- digests -----------------------------------------------------------------------------

    @staticmethod
    def _has_digest(packed: PackedGroup) -> bool:
        # A step that does not read the parameter would have to fetch it from its device.
        form, on_host = packed.bucket.form, packed.bucket.device == "cpu"
        return form is MasterForm.SPLIT or (on_host and form is MasterForm.SEPARATE)

    def _addresses(self) -> npt.NDArray[np.uint64]:
        infos = self._layout.infos
        return np.fromiter((info.param.data_ptr() for info in infos), np.uint64, len(infos))

    def _hash_now(self, packed: PackedGroup, cut: UnitCut) -> npt.NDArray[np.uint64]:
        """Digests of parameters as they are, wherever they are; blocks on a device."""
        addresses, memory = host_addresses(self._layout.infos, packed)
        hashes = _hash(cut, addresses)
        del memory  # not before
        return hashes

    def _changed(self, packed: PackedGroup, cut: UnitCut, step: StepContext) -> Rows:
        if self._has_digest(packed):
            return _changed(packed, cut, step)
        rows: Rows = cut.row_numbers()
        if packed.bucket.device == "cpu":
            return rows[:0]
        found = {index: self.versions.is_changed(index) for index in set(cut.param.tolist())}
        return rows[np.array([found[index] for index in cut.param.tolist()], np.bool_)]

    def _resync(self, packed: PackedGroup, chunk: Chunk, rows: Rows) -> None:
        """Make the masters of some units what their parameters are."""
        units = packed.units
        split = packed.bucket.form is MasterForm.SPLIT
        record = chunk["master_low" if split else "master"]
        for row in rows:
            at, count = int(units.position[row]) - chunk.start, int(units.numel[row])
            if split:
                record[at : at + count] = 0
            else:
                first = int(units.offset[row])
                source = flat(self._layout.infos[units.param[row]].param)
                record[at : at + count] = source[first : first + count]
        if split:
            self.replace_ties(packed, rows, np.zeros(0, np.uint32), chunk)


def _cut_of(packed: PackedGroup, rows: Rows | UnitCut) -> UnitCut:
    return rows if isinstance(rows, UnitCut) else UnitCut(packed, rows, 0)


def _hash(cut: UnitCut, param_address: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return checksum.span_hashes(cut.of_parameters(param_address), cut.model_nbytes)


def _changed(packed: PackedGroup, cut: UnitCut, step: StepContext) -> Rows:
    """Rows whose parameter is not what it was after its last update."""
    now = _hash(cut, step.param_address)
    is_changed = now != packed.units.digest[cut.rows]
    is_changed &= packed.units.known[cut.rows]
    if not is_changed.any():
        return np.zeros(0, np.int64)
    rows: Rows = cut.row_numbers()[is_changed]
    return rows


def _encode(ties: npt.NDArray[np.uint32], numel: int) -> bytes:
    """A list of positions, or a bitmap where that is shorter."""
    if not len(ties):
        return b""
    if ties.nbytes <= numel // 8:
        return _LIST + ties.tobytes()
    bits = np.zeros(numel, dtype=bool)
    bits[ties] = True
    return _BITMAP + np.packbits(bits).tobytes()


def _decode(meta: bytes) -> npt.NDArray[np.uint32]:
    if not meta:
        return np.zeros(0, np.uint32)
    if meta[:1] == _LIST:
        return np.frombuffer(meta, np.uint32, offset=1).copy()
    bits = np.unpackbits(np.frombuffer(meta, np.uint8, offset=1))
    return np.flatnonzero(bits).astype(np.uint32)
