# SPDX-License-Identifier: Apache-2.0
"""Param groups of a SwapOptimizer: checks, packing into sub-groups, growth after construction.

A frozen parameter has no state: `AdamW(model.parameters())` of an adapter on a large frozen model
must not reserve storage for that model. It is registered at the first step after it was unfrozen.

Invariants:
- a group that cannot be added leaves param groups, layout and state as they were;
- a parameter's default name is its position among all that were listed, frozen ones included.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.checkpoint.agreement import Agreement, Alone
from swapio.checkpoint.placement import Placement
from swapio.config import SwapConfig
from swapio.errors import ConfigError
from swapio.optim.layout import (
    MUON_RULE,
    Bucket,
    Layout,
    MasterForm,
    PackedGroup,
    ParameterInfo,
    check_parameter,
    master_form,
)
from swapio.optim.masters import Masters
from swapio.optim.parameters import ParameterTable
from swapio.optim.ranks import Ranks, find_ranks
from swapio.optim.unit_cut import UnitCuts
from swapio.residency import ResidencyRules
from swapio.runtime import GroupRequest, SwapRuntime
from swapio.subgroup import RecordSpec


class Listed(NamedTuple):
    """A parameter as the user listed it."""

    name: str | int
    param: torch.Tensor
    group: dict[str, Any]


class Registration(torch.optim.Optimizer, abc.ABC):
    """The part of SwapOptimizer that follows its param groups."""

    config: SwapConfig
    _ranks: Ranks = Ranks()
    _agreement: Agreement = Alone()  # the ranks that keep this state together
    _runtime: SwapRuntime
    _masters: Masters

    ratio: float = 1.0
    _kept_ids: frozenset[int] = frozenset()

    def _begin_registration(self, config: SwapConfig) -> None:
        """Prepare; comes before torch's constructor, which adds the first groups."""
        self._ready = False
        self.config = config
        self._layout = Layout()
        self._table = ParameterTable(self._layout.infos)
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._owned: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._cuts = UnitCuts()
        self._rules = ResidencyRules(config.resident)
        self._buckets: dict[Bucket, Bucket] = {}
        self._frozen: list[Listed] = []
        self._num_listed = 0
        self._group_refs: list[dict[str, Any]] = []
        self._group_sizes: list[int] = []
        self._groups_of: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def _register_all(self) -> list[PackedGroup]:
        """Pack the trainable parameters of all groups."""
        members = [member for group in self.param_groups for member in self._listed(group)]
        if type(self._ranks) is Ranks:
            params = [member.param for member in members]
            self._ranks = find_ranks(params, lambda at: text(members[at].name))
        self._agreement = self._ranks.agreement or self._agreement
        self._kept_ids = self._choose_kept()
        infos = self._trainable(members)
        self._table.check(infos)
        new = self._layout.add(infos, self.config.sub_group_numel)
        self._table.update()
        self._counts = np.zeros(len(infos), np.int64)
        self._owned = np.zeros(len(infos), np.bool_)
        return new

    def _choose_kept(self) -> frozenset[int]:
        """Ids of the parameters whose state is not offloaded: the first ones, by elements.

        Their gradients are the last that backward makes: nothing is left to hide their step.
        """
        if self.ratio == 1.0:
            return frozenset()
        listed = [
            param
            for group in self.param_groups
            for param in group["params"]
            if param.requires_grad and self.rule_of(group) != MUON_RULE
        ]
        left = (1.0 - self.ratio) * sum(param.numel() for param in listed)
        chosen: set[int] = set()
        for param in listed:
            if left <= 0:
                break
            chosen.add(id(param))
            left -= param.numel()
        return frozenset(chosen)

    @property
    def is_committing(self) -> bool:
        """Whether every step is committed: there is a path, and durability says so."""
        return bool(self.config.paths) and self.config.durability != "checkpoint"

    # -- what a rule gives -------------------------------------------------------------------

    @abc.abstractmethod
    def rule_of(self, group: dict[str, Any]) -> str:
        """Name of the update rule of a param group; parameters of one rule are packed together."""

    @abc.abstractmethod
    def state_records(self, rule: str) -> dict[str, torch.dtype]:
        """State records that a rule keeps for each element, by torch's names."""

    def workspace_bytes(self, groups: Iterable[PackedGroup]) -> int:  # noqa: ARG002
        """Scratch memory of the rules for these sub-groups, which host_memory must cover too."""
        return 0

    def scratch_bytes(self, groups: Iterable[PackedGroup]) -> int:
        """All memory beside state and staging that host_memory must cover."""
        return self.workspace_bytes(groups)

    def _follow_table(self) -> None:
        """Parameters were added to the table."""

    def check_bucket(self, bucket: Bucket, name: str) -> None:
        """Raise ConfigError if the rule cannot step what `name` is the first parameter of."""

    def placement_of(self, name: str, param: torch.Tensor) -> Placement | None:  # noqa: ARG002
        """Which elements of a whole parameter this rank's tensor has; None: it is the whole."""
        return None

    # -- groups ------------------------------------------------------------------------------

    @abc.abstractmethod
    def _check_open(self, *, failed_ok: bool = False) -> None: ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also after steps were taken; its state goes where the config says.

        Raises:
            ConfigError: A setting or parameter is unsuitable, or there is no room for its state;
                the optimizer is as before.
        """
        if self._ready:
            self._check_open()
        _check_listed(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        listed, frozen = self._num_listed, len(self._frozen)
        try:
            self.check_group(group)
            if self._ready:
                self._enlarge(self._trainable(self._listed(group)))
        except BaseException:
            self.param_groups.pop()
            self._num_listed = listed
            del self._frozen[frozen:]
            raise

    def check_group(self, group: dict[str, Any]) -> None:
        """Validate the hyperparameters and parameters of a group; raises ConfigError."""
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            if param.requires_grad:
                name = names[position] if names else f"number {position} of its group"
                check_parameter(str(name), param)

    def _listed(self, group: dict[str, Any]) -> Iterator[Listed]:
        names = group.get("param_names")
        first = self._num_listed
        self._num_listed += len(group["params"])
        for at, param in enumerate(group["params"]):
            yield Listed(str(names[at]) if names else first + at, param, group)

    def _trainable(self, members: Iterable[Listed]) -> list[ParameterInfo]:
        """Describe those that have state from now on; the others are kept as frozen."""
        infos: list[ParameterInfo] = []
        for member in members:
            if member.param.requires_grad:
                index = len(self._layout.infos) + len(infos)
                infos.append(self._describe(index, member))
            else:
                self._frozen.append(member)
        return infos

    def _describe(self, index: int, member: Listed) -> ParameterInfo:
        bucket = self._bucket(member)
        param, part = self._ranks.local(text(member.name), member.param)
        part = part or self.placement_of(text(member.name), member.param)
        whole = None if param is member.param else member.param
        name = index if index == member.name else member.name  # one object for both
        largest = self._ranks.largest_numel(member.param)
        return ParameterInfo(index, name, param, bucket, part, whole, largest)

    def _thaw(self) -> None:
        """Register frozen parameters that became trainable."""
        if not any(map(_requires_grad, (member.param for member in self._frozen))):
            return
        frozen = self._frozen
        for member in frozen:
            if member.param.requires_grad:
                check_parameter(text(member.name), member.param)
        try:
            self._frozen = []
            self._enlarge(self._trainable(frozen))
        except BaseException:
            self._frozen = frozen
            raise

    def _enlarge(self, infos: Sequence[ParameterInfo]) -> None:
        """Make state for further parameters; on an error nothing is changed."""
        if not infos:
            return
        self._runtime.swapper.drain()
        self._table.check(infos)
        before = len(self._layout.infos)
        new = self._layout.add(infos, self.config.sub_group_numel)
        try:
            requests = [self._request(packed) for packed in new]
            self._runtime.add(requests, workspace_bytes=self.scratch_bytes(new))
        except BaseException:
            self._layout.forget(new, before)
            raise
        self._table.update()
        self._counts = np.concatenate([self._counts, np.zeros(len(infos), np.int64)])
        self._owned = np.concatenate([self._owned, np.zeros(len(infos), np.bool_)])
        self._masters.remember(new)
        self._follow_table()

    def _group_index(self) -> npt.NDArray[np.int64]:
        """Position of each parameter's group in `param_groups`; -1 for one that was taken out."""
        groups = self.param_groups
        sizes = [len(group["params"]) for group in groups]
        known = len(self._groups_of) == len(self._table) and sizes == self._group_sizes
        if known and all(map(is_, groups, self._group_refs)):
            return self._groups_of
        result = np.full(len(self._table), -1, np.int64)
        frozen = {id(member.param) for member in self._frozen}
        for at, group in enumerate(groups):
            indices = self._table.indices_of(group["params"])
            result[indices[indices >= 0]] = at
            for position in np.flatnonzero(indices < 0):
                if id(group["params"][position]) not in frozen:
                    raise ConfigError(
                        f"parameter number {position} of param group {at} was put into "
                        "`param_groups` by hand; use add_param_group, which makes its state"
                    )
        self._groups_of, self._group_refs, self._group_sizes = result, list(groups), sizes
        return result

    # -- packing -----------------------------------------------------------------------------

    def _bucket(self, member: Listed) -> Bucket:
        name, param = text(member.name), member.param
        rule = self.rule_of(member.group)
        # With state in RAM the separate form of a device's parameters saves a copy down each step.
        split = param.device.type == "cpu" or bool(self.config.paths)
        form = master_form(self.config.master, name, param, split=split)
        states = [*self.state_records(rule), "master"]
        resident = self._rules.select(name, param, states)
        is_kept = id(param) in self._kept_ids
        if is_kept and param.device.type == "cpu":
            resident = frozenset(states)
        elif is_kept:
            form = MasterForm.SEPARATE
        bucket = Bucket(rule, form, param.dtype, str(param.device), resident, is_kept)
        if bucket not in self._buckets:
            self.check_bucket(bucket, name)
        # One object for all parameters of a bucket: there may be a hundred thousand.
        return self._buckets.setdefault(bucket, bucket)

    def _request(self, packed: PackedGroup) -> GroupRequest:
        bucket = packed.bucket
        records = {
            name: RecordSpec((packed.numel,), dtype)
            for name, dtype in self.state_records(bucket.rule).items()
        }
        resident = set(bucket.resident)
        meta_bytes = 0
        if bucket.form is MasterForm.SEPARATE:
            records["master"] = RecordSpec(
                (packed.numel,), torch.float32, Masters.filler(self._layout, packed)
            )
        elif bucket.form is MasterForm.SPLIT:
            records["master_low"] = RecordSpec((packed.numel,), torch.int16)
            meta_bytes = packed.numel // 8 + 4096
            if "master" in resident:
                resident.add("master_low")
        if self.is_committing and bucket.form is not MasterForm.SEPARATE:
            # Written with each step, so that a commit has all that rebuilds the parameter.
            fill = Masters.filler(self._layout, packed)
            if resident >= set(records):
                resident.add("param")
            records["param"] = RecordSpec((packed.numel,), bucket.dtype, fill, is_read=False)
        width = bucket.dtype.itemsize
        touched = 2 * sum(spec.dtype.itemsize for spec in records.values()) + 3 * width
        return GroupRequest(
            packed.key, records, frozenset(resident & set(records)), meta_bytes, touched
        )


_requires_grad = attrgetter("requires_grad")


def text(name: str | int) -> str:
    """The name of a parameter that was listed."""
    return name if isinstance(name, str) else f"param.{name}"


def _check_listed(param_group: dict[str, Any]) -> None:
    """Raise ConfigError, by name, where torch would only warn or not say which parameter it is."""
    params = param_group.get("params") if isinstance(param_group, dict) else None
    if params is None or isinstance(params, torch.Tensor | set):
        return
    params = param_group["params"] = list(params)
    tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    if len(np.unique(np.fromiter(map(id, tensors), np.int64, len(tensors)))) == len(
        tensors
    ) and all(
        isinstance(tensor, torch.Tensor) and (tensor.is_leaf or tensor.retains_grad)
        for tensor in tensors
    ):
        return
    seen: dict[int, int] = {}
    for position, item in enumerate(params):
        name, param = item if isinstance(item, tuple) else (f"number {position}", item)
        if isinstance(param, torch.Tensor) and not (param.is_leaf or param.retains_grad):
            raise ConfigError(
                f"parameter {name} of the group is not a leaf tensor: pass the parameter itself, "
                "not a result of it"
            )
        first = seen.setdefault(id(param), position)
        if first != position:
            raise ConfigError(
                f"parameter {name} of the group is the same tensor as number {first}: list each "
                "parameter once (tied weights too)"
            )
