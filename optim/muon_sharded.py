# SPDX-License-Identifier: Apache-2.0
"""The part of Muon for parameters of which each rank has a shard; see `zero.matrices`.

Sub-groups of matrices consist of the same parameters on every rank, and all ranks visit them in
the same order. A rank that has no element of one takes part in its rounds without a sub-group.

Invariant: which rounds there are depends on which parameters have a gradient, which all ranks know
alike, and not on what a rank's shards hold.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import torch

from swapio.errors import ConfigError
from swapio.optim.adamw import AdamRuleMixin
from swapio.optim.context import StepContext
from swapio.optim.layout import MUON_RULE, MasterForm, Pack, PackedGroup, ParameterInfo
from swapio.optim.muon_math import MatrixLayout
from swapio.optim.muon_update import MASTER_RECORDS, Scratch, Weights, block_matrices, tensor_at
from swapio.optim.newton_schulz import newton_schulz_flops
from swapio.optim.stream_open import device_of
from swapio.optim.zero.matrices import MatrixExchange, Member, Shard
from swapio.views import Chunk


class ShardedMuonMixin(AdamRuleMixin):
    """Muon's sweep over sub-groups that several ranks have in common."""

    _ns_dtype: torch.dtype | None
    _scratch: Scratch
    _costs: dict[str, float]
    _exchange: MatrixExchange | None = None
    _members: dict[int, Member]
    _packs: dict[str, Pack]

    @abc.abstractmethod
    def _group_of(self, index: int) -> dict[str, Any]: ...

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks have the rest of the parameters."""
        return self._ranks.shards is not None

    def _add_member(self, info: ParameterInfo, layout: MatrixLayout, group: dict[str, Any]) -> None:
        """Note a matrix parameter; called for all of them, also for those with an empty shard."""
        bounds = self._ranks.bounds(info.listed)
        comm = self._ranks.shards
        if comm is None or len(bounds) != comm.world_size:
            raise ConfigError(
                f"parameter {info.name} is the same on every rank, but Muon steps DTensors here: "
                "shard it with the others, or route it to AdamW (use_muon=False)"
            )
        if not info.listed.is_contiguous():
            raise ConfigError(
                f"parameter {info.name} has strides {info.listed.stride()}; over several ranks "
                "Muon steps contiguous parameters only"
            )
        if self._exchange is None:
            self._exchange = MatrixExchange(comm)
            self._members = {}
        flops = newton_schulz_flops(layout.shape, group["ns_coefficients"], group["ns_steps"])
        block = block_matrices(layout, self._ns_dtype)
        each = flops / max(1, layout.num_matrices)
        self._members[info.index] = Member(info.index, layout, bounds, block, each)

    def _name_packs(self) -> None:
        """Name what is stepped together: by the sub-group here, or without one."""
        self._packs, self._costs = {}, {}
        for number, pack in enumerate(self._layout.packs):
            name = pack.key or f"absent-{number}"
            self._packs[name] = pack
            members = [self._members[index] for index in pack.indices]
            self._costs[name] = sum(m.flops * m.layout.num_matrices for m in members)

    def planned_collectives(self) -> dict[str, int]:
        """As SwapOptimizer's, with those that bring matrices to their owners and back."""
        planned = super().planned_collectives()
        exchange = self._exchange
        if exchange is None:
            return planned
        packs = ([self._members[index] for index in p.indices] for p in self._packs.values())
        return planned | {"all_to_all": sum(map(exchange.num_collectives, packs))}

    # -- the sweep ---------------------------------------------------------------------------

    def sweep_keys(self, step: StepContext, done: set[str]) -> list[str]:
        """All sub-groups to step, also those of which only other ranks have elements."""
        keys = super().sweep_keys(step, done)
        if self._exchange is None:
            return keys
        present, groups = step.gradients.present, self._layout.groups
        adam = [key for key in keys if groups[key].bucket.rule != MUON_RULE]
        packs = [name for name, pack in self._packs.items() if present[list(pack.indices)].any()]
        return adam + packs

    def sweep_group(self, key: str, step: StepContext) -> None:
        """Step one sub-group; see SwapOptimizer."""
        pack = None if self._exchange is None else self._packs.get(key)
        if pack is not None:
            packed = self._layout.groups.get(key)
            if packed is None or not step.gradients.present[packed.units.param].any():
                self._exchange_step(self._present(pack, step), {}, step)
                return
        super().sweep_group(key, step)

    def _present(self, pack: Pack, step: StepContext) -> list[Member]:
        present = step.gradients.present
        return [self._members[index] for index in pack.indices if present[index]]

    def _update_shards(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Step the shards of a sub-group, together with the other ranks."""
        rows = np.flatnonzero(step.gradients.present[packed.units.param])
        self._masters.check(packed, chunk, rows, step)
        indices = dict.fromkeys(packed.units.param[rows].tolist())
        shards = {index: self._shard_of(packed, chunk, step, index) for index in indices}
        found = self._exchange_step(self._present(self._packs[packed.key], step), shards, step)
        if packed.bucket.form is MasterForm.SPLIT:
            for index, ties in found.items():
                mine = np.flatnonzero(packed.units.param == index)
                self._masters.replace_ties(packed, mine, ties, chunk)
        self._masters.publish(packed, rows, step)
        return True

    def _exchange_step(
        self, members: list[Member], shards: dict[int, Shard], step: StepContext
    ) -> dict[int, Any]:
        if self._exchange is None:
            raise ConfigError("this optimizer has no matrices")
        return self._exchange.step(
            members,
            shards.get,
            self._group_of,
            scale=step.scale,
            scratch=self._scratch,
            ns_dtype=self._ns_dtype,
            device=device_of(self._layout.infos),
        )

    def _shard_of(self, packed: PackedGroup, chunk: Chunk, step: StepContext, index: int) -> Shard:
        units, info = packed.units, self._layout.infos[index]
        mine = np.flatnonzero(units.param == index)
        start, numel = int(units.position[mine[0]]), int(units.numel[mine].sum())
        run = slice(start, start + numel)
        dtype = step.gradients.dtypes.get(index, step.gradients.dtype or info.param.dtype)
        model = tensor_at(int(step.param_address[index]), numel, info.param.dtype)
        record = MASTER_RECORDS.get(info.form)
        return Shard(
            Weights(info.form, model, chunk[record][run] if record else None, start),
            tensor_at(int(step.gradients.address[index]), numel, dtype),
            chunk["momentum_buffer"][run],
            lambda first, last: self._masters.ties_of(packed, first, last),
        )
