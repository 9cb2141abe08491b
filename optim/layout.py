# SPDX-License-Identifier: Apache-2.0
"""How parameters become sub-groups: master forms, checks of parameters, packed unit tables.

A *unit* is the part of one parameter that lies in one sub-group between two multiples of
`UNIT_NUMEL`. Units are what the kernels step and what the digests cover; every chunk of a
sub-group consists of whole units, so nothing depends on the chunk size.

Invariant: elements are counted in memory order. A dense parameter whose strides are permuted
(channels_last, a transposed matrix) is stepped in place like any other.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.checkpoint.placement import Placement, whole
from swapio.errors import ConfigError
from swapio.partition import Fragment, iter_pack, pack_whole

UNIT_NUMEL = 1 << 18
MUON_RULE = "muon"

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class MasterForm(enum.Enum):
    """Where the fp32 master weights are (design of the byte counts: see README)."""

    PARAM = "param"
    SPLIT = "split"
    SEPARATE = "separate"
    NONE = "none"


class Bucket(NamedTuple):
    """Parameters that may share a sub-group: all of this must be equal."""

    rule: str
    form: MasterForm
    dtype: torch.dtype
    device: str
    resident: frozenset[str]
    is_kept: bool = False  # on the parameters' device, whatever else is offloaded

    @property
    def is_whole(self) -> bool:
        """Whether its parameters are never cut over sub-groups: Muon needs whole matrices."""
        return self.rule == MUON_RULE


@dataclass(slots=True)
class ParameterInfo:
    """What the optimizer knows of one parameter.

    Attributes:
        index: Position over all param groups, in the order in which they were added.
        given_name: The user's name for it, or its position among all that were listed.
        param: The tensor that is stepped.
        bucket: What it may be packed with.
        part: Which elements of the whole parameter the tensor has; None: all, it is the whole.
        whole_param: What the user listed, if the tensor is a part of that.
        largest: Most elements that any rank steps of it; None: as many as here.
    """

    index: int
    given_name: str | int
    param: torch.Tensor
    bucket: Bucket
    part: Placement | None = None
    whole_param: torch.Tensor | None = None
    largest: int | None = None

    @property
    def listed(self) -> torch.Tensor:
        """The tensor that the user listed, where that is another one than is stepped."""
        return self.param if self.whole_param is None else self.whole_param

    @property
    def place(self) -> Placement:
        """Where the tensor's elements belong in the whole parameter."""
        return self.part or whole(self.param.shape, memory_order(self.param))

    @property
    def is_whole(self) -> bool:
        """Whether the tensor has every element of the parameter."""
        part = self.part
        return part is None or sum(run.numel for run in part.runs) == math.prod(part.shape)

    @property
    def name(self) -> str:
        """A name that is stable over runs and used in checkpoints."""
        name = self.given_name
        return name if isinstance(name, str) else f"param.{name}"

    @property
    def form(self) -> MasterForm:
        """Where the master is."""
        return self.bucket.form


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in memory order, as a 1-D view."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))


def memory_order(param: torch.Tensor) -> tuple[int, ...]:
    """Dimensions of a dense tensor from the slowest to the fastest in memory."""
    strides: tuple[int, ...] = param.stride()
    return tuple(sorted(range(param.dim()), key=lambda d: (-int(strides[d]), d)))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def check_parameter(name: str, param: torch.Tensor) -> None:
    """Raise ConfigError, naming the parameter, if swapio cannot step it."""

    def refuse(what: str, hint: str) -> ConfigError:
        return ConfigError(f"parameter {name} ({tuple(param.shape)}, {param.dtype}) {what}. {hint}")

    if param.is_meta:
        raise refuse("is on the meta device", "Materialise the model before the optimizer.")
    if param.device.type not in ("cpu", "cuda"):
        raise refuse(f"is on {param.device}", "Parameters may be on the CPU or on a CUDA device.")
    if param.layout is not torch.strided:
        raise refuse(f"has layout {param.layout}", "Only dense parameters can be swapped.")
    if param.is_neg():
        raise refuse("has the negative bit", "Pass a parameter made of .resolve_neg().")
    if param.dtype not in _FLOATS:
        known = ", ".join(str(dtype) for dtype in _FLOATS)
        raise refuse("has a dtype without an update kernel", f"Supported: {known}.")
    if not param.is_leaf:
        raise refuse("is not a leaf tensor", "Pass the parameter itself, not a result of it.")
    if param.numel() and not is_dense(param):
        raise refuse(
            f"has gaps or overlaps in memory (strides {param.stride()})",
            "Pass a contiguous parameter.",
        )


def master_form(wanted: str, name: str, param: torch.Tensor, *, split: bool) -> MasterForm:
    """Resolve `SwapConfig.master` for one parameter.

    Args:
        wanted: "auto", "param", "split", "separate" or "none".
        name: For messages.
        param: A checked parameter.
        split: Whether "auto" may choose the split form for bf16 on this device.
    """
    on_cpu = param.device.type == "cpu"
    if wanted == "auto":
        if param.dtype is torch.float32 and on_cpu:
            return MasterForm.PARAM
        if param.dtype is torch.bfloat16 and split:
            return MasterForm.SPLIT
        return MasterForm.SEPARATE
    form = MasterForm(wanted)
    if form is MasterForm.PARAM and (param.dtype is not torch.float32 or not on_cpu):
        raise ConfigError(
            f"master='param' needs fp32 parameters on the CPU, but {name} is {param.dtype} on "
            f"{param.device}; use master='auto'"
        )
    if form is MasterForm.NONE and not on_cpu:
        raise ConfigError(
            f"master='none' is for parameters on the CPU, but {name} is on {param.device}; use "
            "master='auto'"
        )
    if form is MasterForm.SPLIT and param.dtype is not torch.bfloat16:
        if param.dtype is torch.float32 and on_cpu:
            return MasterForm.PARAM
        return MasterForm.SEPARATE
    if form in (MasterForm.SEPARATE, MasterForm.NONE) and param.dtype is torch.float32 and on_cpu:
        return MasterForm.PARAM  # a master beside it would be a copy of the parameter
    return form


class UnitTable:
    """The units of one sub-group, as columns.

    Attributes:
        param: Parameter index (int32).
        offset: First element within the parameter (int64).
        position: First element within the sub-group (int64), ascending.
        numel: Elements (int64).
        digest: xxh3-64 of the model weights' bytes after the last step (uint64); 0 = unknown.
    """

    __slots__ = ("digest", "known", "numel", "offset", "param", "position")

    def __init__(self, fragments: Sequence[Fragment], param_indices: Sequence[int]) -> None:
        rows = [
            (param_indices[f.param_index], f.param_offset + at, f.sub_group_offset + at, size)
            for f in fragments
            for at, size in _cut(f.sub_group_offset, f.numel)
        ]
        columns: npt.NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        self.param = columns[0].astype(np.int32)
        self.offset, self.position, self.numel = columns[1].copy(), columns[2].copy(), columns[3]
        self.numel = self.numel.copy()
        self.digest = np.zeros(len(rows), dtype=np.uint64)
        self.known = np.zeros(len(rows), dtype=bool)

    def slice_of(self, start: int, stop: int) -> slice:
        """Rows whose elements lie in `[start, stop)`; the bounds never cut a unit."""
        lo, hi = np.searchsorted(self.position, (start, stop))
        return slice(int(lo), int(hi))


_Cut = tuple[Sequence[int], Sequence[Fragment]]


def _cut_anywhere(members: Sequence[ParameterInfo], sub_group_numel: int) -> Iterator[_Cut]:
    """Fragments of each sub-group; parameters are cut where it is full."""
    known: dict[int, int] = {}
    numels = [known.setdefault(n, n) for n in (info.param.numel() for info in members)]
    for plan in iter_pack(numels, sub_group_numel):
        yield (), plan.fragments


def _cut_whole(members: Sequence[ParameterInfo], sub_group_numel: int) -> Iterator[_Cut]:
    """Members and fragments of each sub-group; no parameter is cut.

    The same members on every rank, whatever each has of them.
    """
    largest = [info.param.numel() if info.largest is None else info.largest for info in members]
    for plan in pack_whole(largest, sub_group_numel):
        inside = [fragment.param_index for fragment in plan.fragments]
        fragments, position = [], 0
        for at in inside:
            numel = members[at].param.numel()
            if numel:
                fragments.append(Fragment(at, 0, position, numel))
            position += numel
        yield inside, fragments


def _cut(start: int, numel: int) -> list[tuple[int, int]]:
    """Cut a fragment at multiples of UNIT_NUMEL of the sub-group: (offset, numel) pairs."""
    cuts = []
    at = 0
    while at < numel:
        size = min(numel - at, UNIT_NUMEL - (start + at) % UNIT_NUMEL)
        cuts.append((at, size))
        at += size
    return cuts


class PackedGroup(NamedTuple):
    """One sub-group of packed parameters."""

    key: str
    bucket: Bucket
    numel: int
    units: UnitTable


class Pack(NamedTuple):
    """Parameters that are stepped together on all ranks that share them.

    Attributes:
        indices: The parameters, the same on every rank.
        key: The sub-group that has them here; None if this rank has no element of them.
    """

    indices: tuple[int, ...]
    key: str | None


class Span(NamedTuple):
    """A run of one parameter's elements inside one sub-group."""

    key: str
    offset: int
    position: int
    numel: int


class Layout:
    """Which parameter lies where: all packed sub-groups of one optimizer.

    Memory: a few numpy columns for each unit, no Python object per fragment, because models with
    a hundred thousand small parameters exist.

    Attributes:
        infos: All parameters.
        groups: The sub-groups by key.
        packs: What is in each sub-group of whole parameters.
    """

    def __init__(self) -> None:
        self.infos: list[ParameterInfo] = []
        self.groups: dict[str, PackedGroup] = {}
        self.packs: list[Pack] = []
        self._by_bucket: dict[Bucket, list[str]] = {}

    def add(self, infos: Sequence[ParameterInfo], sub_group_numel: int) -> list[PackedGroup]:
        """Pack new parameters into new sub-groups and return those."""
        buckets: dict[Bucket, list[ParameterInfo]] = {}
        for info in infos:
            self.infos.append(info)
            buckets.setdefault(info.bucket, []).append(info)
        new: list[PackedGroup] = []
        for bucket, members in buckets.items():
            known = self._by_bucket.setdefault(bucket, [])
            indices = [info.index for info in members]
            cut = _cut_whole if bucket.is_whole else _cut_anywhere
            for inside, fragments in cut(members, sub_group_numel):
                numel = sum(fragment.numel for fragment in fragments)
                key = f"{self._bucket_name(bucket)}-{len(known):05d}"
                if bucket.is_whole:
                    pack = tuple(indices[at] for at in inside)
                    self.packs.append(Pack(pack, key if numel else None))
                if not numel:
                    continue
                self.groups[key] = PackedGroup(key, bucket, numel, UnitTable(fragments, indices))
                new.append(self.groups[key])
                known.append(key)
        return new

    def forget(self, groups: Sequence[PackedGroup], num_infos: int) -> None:
        """Undo the last `add`: drop its sub-groups, and all parameters from `num_infos` on."""
        for packed in groups:
            del self.groups[packed.key]
            self._by_bucket[packed.bucket].remove(packed.key)
        del self.infos[num_infos:]
        self.packs = [pack for pack in self.packs if pack.indices[0] < num_infos]

    def spans(self, index: int) -> list[Span]:
        """The runs of parameter `index`, in ascending order of their offset in it."""
        found = []
        keys = self._by_bucket.get(self.infos[index].bucket, [])
        at = max(0, bisect_left(keys, index, key=self._first_of) - 1)
        while at < len(keys) and self._first_of(keys[at]) <= index:
            key = keys[at]
            units = self.groups[key].units
            at += 1
            lo, hi = np.searchsorted(units.param, (index, index + 1))
            if hi > lo:
                numel = int(units.numel[lo:hi].sum())
                found.append(Span(key, int(units.offset[lo]), int(units.position[lo]), numel))
        return found

    def all_spans(self) -> dict[int, list[Span]]:
        """The runs of every parameter that has elements here; as `spans` of each, but at once."""
        found: dict[int, list[Span]] = {}
        for key, packed in self.groups.items():
            units = packed.units
            first = np.flatnonzero(np.diff(units.param, prepend=-1))
            numels = np.add.reduceat(units.numel, first)
            for index, offset, position, numel in zip(
                *(column[first].tolist() for column in (units.param, units.offset, units.position)),
                numels.tolist(),
                strict=True,
            ):
                found.setdefault(index, []).append(Span(key, offset, position, numel))
        return found

    def _first_of(self, key: str) -> int:
        return int(self.groups[key].units.param[0])

    def _bucket_name(self, bucket: Bucket) -> str:
        dtype = str(bucket.dtype).removeprefix("torch.")
        ordinal = list(self._by_bucket).index(bucket)
        return f"{ordinal}-{bucket.rule}-{bucket.form.value}-{dtype}"
