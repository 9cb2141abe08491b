# SPDX-License-Identifier: Apache-2.0
"""Muon with swapped state, and AdamW for what Muon does not step, in one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of
each matrix; the definitions are those of torch.optim.Muon, see `swapio.optim.muon_math`.

Invariants:
- a parameter is stepped by what its group said at construction, and by nothing else;
- momentum advances once per step that is taken, on the gradient as it is then;
- each sub-group is swapped in once per step: momentum, Newton-Schulz and weights in one visit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.errors import ConfigError
from swapio.optim.adamw import check_adam_group, fill_adam_hyper
from swapio.optim.base import SwapSetting
from swapio.optim.context import StepContext
from swapio.optim.layout import MUON_RULE, Bucket, MasterForm, PackedGroup, ParameterInfo
from swapio.optim.muon_device import DeviceMatrices
from swapio.optim.muon_groups import Route, format_routes
from swapio.optim.muon_math import AdjustLr, MatrixLayout
from swapio.optim.muon_settings import (
    ADAM_DEFAULTS,
    MUON_DEFAULTS,
    MUON_ONLY,
    check_muon_group,
    layout_of,
    planned,
    route_of,
    use_muon,
)
from swapio.optim.muon_sharded import ShardedMuonMixin
from swapio.optim.muon_update import (
    MASTER_RECORDS,
    MatrixStep,
    Scratch,
    ScratchNeed,
    Weights,
    joins_master,
    scratch_need,
    spread,
    step_matrices,
    tensor_at,
)
from swapio.optim.newton_schulz import (
    DEFAULT_COEFFICIENTS,
    DEFAULT_EPS,
    DEFAULT_STEPS,
    Coefficients,
    newton_schulz_flops,
)
from swapio.optim.registration import Listed, text
from swapio.optim.stream_open import device_of, is_on_device
from swapio.runtime import GroupRequest
from swapio.views import Chunk

_NS_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Muon(ShardedMuonMixin):
    """Muon for matrices and AdamW for the rest; state may live on storage.

    A group with `use_muon=False` (or `algorithm="adamw"`) is stepped by AdamW, on the same kernels
    and in the same sweep; `muon_param_groups(model)` makes the groups and shows who goes where.
    Such a group takes `lr` and `weight_decay` of the constructor unless it has its own, and has
    `betas` (0.9, 0.999) and `eps` 1e-8. Momentum is kept in fp32 whatever the parameter.

    Args:
        params: Matrices, named matrices, or param groups. Convolution kernels are stepped as
            [out, rest], three-dimensional parameters as stacked matrices; a group's `muon_view`
            ("stacked", "flat") and `num_heads` (rows cut in so many matrices) say otherwise.
        lr: Learning rate; see `adjust_lr_fn`.
        weight_decay: Decoupled weight decay.
        momentum: Decay of the momentum.
        nesterov: Whether the update mixes the gradient in once more.
        ns_coefficients: The polynomial of Newton-Schulz: one triple, or a list with one per step.
        eps: Floor of the norm that the update is divided by.
        ns_steps: Steps of Newton-Schulz.
        adjust_lr_fn: None and "original" multiply lr by sqrt(max(1, rows / cols));
            "match_rms_adamw" by 0.2 sqrt(max(rows, cols)), so that AdamW's lr can be used.
        swap: Where state lives: a folder, a dict or SwapConfig of settings, or None for RAM.
        ns_dtype: Dtype of the matrix products; None is fp32 on the CPU, bf16 on CUDA.
        max_grad_norm: Clip the global norm of all groups' gradients, by one factor for all, before
            the momentum. What Muon does hardly depends on it; the AdamW groups are clipped.
        gradients: "keep" or "stream"; see SwapOptimizer.
        speculate: Step sub-groups during backward: False, "adaptive" or "always".
        undo: How early steps are undone: "exact", or "algebraic": to rounding, with less memory.
        ratio: Share of the state that is offloaded; the rest stays on the parameters' device.
        nonfinite: "propagate", "skip" or "raise"; default "skip" with `max_grad_norm`.
        resume: Continue from the last committed step in the folder (durability "step", "power").

    Raises:
        ConfigError: A setting or parameter is unsuitable, or host_memory is too small for the
            largest matrix; the message names it, and the number that would do.
        StoreLockedError: Another run uses the folder.

    Example:
        >>> opt = Muon(muon_param_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-4}),
        ...            swap={"path": "/nvme/run1", "resident": ["momentum_buffer"]})
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients | Sequence[Coefficients] = DEFAULT_COEFFICIENTS,
        eps: float = DEFAULT_EPS,
        ns_steps: int = DEFAULT_STEPS,
        adjust_lr_fn: AdjustLr = None,
        *,
        swap: SwapSetting = None,
        ns_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        gradients: str = "keep",
        speculate: str | bool = False,
        undo: str = "exact",
        ratio: float = 1.0,
        nonfinite: str | None = None,
        resume: bool = False,
    ) -> None:
        if ns_dtype not in _NS_DTYPES:
            raise ConfigError(f"ns_dtype={ns_dtype!r} is none of {_NS_DTYPES}")
        self._ns_dtype = ns_dtype
        self._listed_matrices: dict[int, tuple[MatrixLayout, dict[str, Any]]] = {}
        self._matrices: dict[int, MatrixLayout] = {}
        self._costs: dict[str, float] = {}
        self._need = ScratchNeed()
        self._verified: dict[int, Any] = {}
        self._scratch = Scratch(self._need, "auto")
        self._on_device: DeviceMatrices | None = None
        self._num_newton_schulz = 0
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(
            params,
            defaults,
            swap=swap,
            max_grad_norm=max_grad_norm,
            gradients=gradients,
            speculate=speculate,
            undo=undo,
            ratio=ratio,
            nonfinite=nonfinite,
            resume=resume,
        )
        self._reserve()

    # -- groups ------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for Muon, or with `use_muon=False` for AdamW; see SwapOptimizer."""
        if isinstance(param_group, dict):
            param_group["use_muon"] = use_muon(param_group)
            more = MUON_DEFAULTS if param_group["use_muon"] else ADAM_DEFAULTS
            for name, value in more.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        if not param_group["use_muon"]:
            for name in MUON_ONLY:
                param_group.pop(name, None)

    def check_group(self, group: dict[str, Any]) -> None:
        """Validate a param group; see SwapOptimizer."""
        if not group["use_muon"]:
            check_adam_group(group)
        else:
            check_muon_group(group)
            if self.config.stochastic_rounding:
                raise ConfigError("stochastic_rounding is for AdamW only: Muon rounds to nearest")
        super().check_group(group)
        if group["use_muon"]:
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                name = names[position] if names else f"number {position} of its group"
                if param.requires_grad:
                    layout_of(str(name), param, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch.optim.Muon; see SwapOptimizer.

        Raises:
            ValueError: Groups or parameters do not match, or a group is routed otherwise.
        """
        for at, (mine, theirs) in enumerate(
            zip(self.param_groups, state_dict["param_groups"], strict=False)
        ):
            if use_muon({"use_muon": mine["use_muon"], **theirs}) != mine["use_muon"]:
                raise ValueError(
                    f"param group {at} was stepped by {route_of(theirs)} when the state was saved, "
                    f"and is stepped by {route_of(mine)} here"
                )
        super().load_state_dict(state_dict)

    # -- what the base asks ------------------------------------------------------------------

    def rule_of(self, group: dict[str, Any]) -> str:
        """Muon unless the group says otherwise."""
        return route_of(group)

    def state_records(self, rule: str) -> dict[str, torch.dtype]:
        """momentum_buffer, or AdamW's moments."""
        return {"momentum_buffer": torch.float32} if rule == MUON_RULE else self.adam_records()

    def fill_hyper(self, row: Any, group: dict[str, Any]) -> None:
        """Write an AdamW group's hyperparameters into a row of the kernel's table.

        Raises:
            ConfigError: A setting is out of range, or not what the state was laid out for; nothing
                has been stepped.
        """
        if use_muon(group):
            check_muon_group(group)
        else:
            fill_adam_hyper(row, group, decoupled=True)
        seen = planned(group)
        if self._verified.get(id(group)) != seen:
            self._verify(group)
            self._verified[id(group)] = seen

    def _verify(self, group: dict[str, Any]) -> None:
        """Compare a group with what its parameters were laid out for."""
        for param in group["params"]:
            index = int(self._table.indices_of([param])[0])
            if index < 0:  # still frozen
                continue
            info = self._layout.infos[index]
            if info.bucket.rule != route_of(group):
                raise ConfigError(
                    f"parameter {info.name} was routed to {info.bucket.rule} at construction, but "
                    f"its group says {route_of(group)} now; routes cannot change later"
                )
            layout = self._matrices.get(index)
            if layout is None:  # AdamW's, or without elements
                continue
            if layout_of(info.name, info.listed, group) != layout:
                raise ConfigError(
                    f"parameter {info.name} was laid out as {layout.num_matrices} matrices of "
                    f"{layout.rows}x{layout.cols}; num_heads and muon_view cannot change later"
                )
            need = self._need_of(info, layout, group)
            if need | self._need != self._need:
                raise ConfigError(
                    f"ns_coefficients or ns_steps were changed so that {info.name} needs "
                    f"{need.nbytes} bytes of scratch memory, but {self._need.nbytes} were reserved "
                    "at construction; make the optimizer with the larger setting"
                )

    def _register_all(self) -> list[PackedGroup]:
        packed = super()._register_all()
        rules = {info.bucket.rule for info in self._layout.infos}
        if self.config.state_dtype != "float32" and rules == {MUON_RULE}:
            raise ConfigError(
                f"state_dtype={self.config.state_dtype!r} is about moments of AdamW groups, but "
                "every group here is Muon's, whose momentum is always fp32; leave it out"
            )
        return packed

    def workspace_bytes(self, groups: Iterable[PackedGroup]) -> int:  # noqa: ARG002
        """What all sub-groups requested so far need, the largest matrix decides."""
        if not self.is_sharded:
            return self._need.nbytes
        for info in self._layout.infos:  # also those of which only other ranks have elements
            if info.bucket.rule == MUON_RULE and info.index not in self._matrices:
                self._note_matrices(info)
        self._name_packs()
        exchange = self._exchange
        members = self._members.values() if exchange is not None else ()
        staged = 0 if exchange is None else exchange.staging_bytes(list(members))
        return self._need.nbytes + staged

    def sweep_order(self, keys: list[str]) -> list[str]:
        """AdamW's sub-groups evenly between Muon's, whose Newton-Schulz hides all I/O."""
        fillers = [key for key in keys if key not in self._costs]
        return spread(fillers, {key: self._costs[key] for key in keys if key in self._costs})

    def _bucket(self, member: Listed) -> Bucket:
        bucket = super()._bucket(member)
        if bucket.is_whole:
            layout = layout_of(text(member.name), member.param, member.group)
            self._listed_matrices[id(member.param)] = (layout, member.group)
        return bucket

    def _request(self, packed: PackedGroup) -> GroupRequest:
        request = super()._request(packed)
        if packed.bucket.rule != MUON_RULE:
            return request
        indices = dict.fromkeys(packed.units.param.tolist())
        flops = sum(self._note_matrices(self._layout.infos[index]) for index in indices)
        self._costs[packed.key] = flops
        return dataclasses.replace(request, streamed=False, flops=int(flops))

    def _note_matrices(self, info: ParameterInfo) -> float:
        """Note what the matrices of a parameter need; return the cost of their Newton-Schulz."""
        layout, group = self._listed_matrices[id(info.listed)]
        self._matrices[info.index] = layout
        self._need |= self._need_of(info, layout, group)
        if self.is_sharded and layout.numel:
            self._add_member(info, layout, group)
        return newton_schulz_flops(layout.shape, group["ns_coefficients"], group["ns_steps"])

    def _need_of(
        self, info: ParameterInfo, layout: MatrixLayout, group: dict[str, Any]
    ) -> ScratchNeed:
        return scratch_need(
            layout,
            group,
            is_contiguous=info.param.is_contiguous() or self.is_sharded,
            joins=joins_master(info),
            ns_dtype=self._ns_dtype,
            on_device=info.bucket.device != "cpu" and not self.is_sharded,
        )

    def _enlarge(self, infos: Sequence[ParameterInfo]) -> None:
        need = self._need
        try:
            super()._enlarge(infos)
        except BaseException:
            self._need = need
            self._listed_matrices.clear()
            raise
        self._reserve()

    def _reserve(self) -> None:
        """Have the scratch memory that is needed by now."""
        if self._exchange is not None:
            self._exchange.reserve(list(self._members.values()))
        if self._scratch.need == self._need:
            return
        self._close_scratch()
        pin = bool(self.config.pin_memory) if self._need.staged_bytes else None
        self._scratch = Scratch(self._need, self.config.huge_pages, pin=pin)

    def _close_scratch(self) -> None:
        if self._on_device is not None:
            self._on_device.close()
            self._on_device = None
        self._scratch.close()

    def _group_of(self, index: int) -> dict[str, Any]:
        group: dict[str, Any] = self.param_groups[self._group_index()[index]]
        return group

    # -- the update --------------------------------------------------------------------------

    def update_chunk(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Step the parameters of one chunk in place; a chunk of Muon is a whole sub-group."""
        if packed.bucket.rule != MUON_RULE:
            return self.adam_update(packed, chunk, step)
        if self.is_sharded:
            return self._update_shards(packed, chunk, step)
        units = packed.units
        rows = np.flatnonzero(step.gradients.present[units.param])
        if not len(rows):
            return False
        self._masters.check(packed, chunk, rows, step)
        indices = list(dict.fromkeys(units.param[rows].tolist()))
        steps = (self._step_of(packed, chunk, step, index) for index in indices)
        if is_on_device(packed):
            ties = self._device_matrices().step(self._polled(steps))
        else:
            ties = [
                step_matrices(one, self._scratch, self._ns_dtype) for one in self._polled(steps)
            ]
        if packed.bucket.form is MasterForm.SPLIT:
            for index, new in zip(indices, ties, strict=True):
                self._masters.replace_ties(packed, self._rows_of(packed, index), new, chunk)
        self._masters.publish(packed, rows, step)
        return True

    def _step_of(
        self, packed: PackedGroup, chunk: Chunk, step: StepContext, index: int
    ) -> MatrixStep:
        units, info, layout = packed.units, self._layout.infos[index], self._matrices[index]
        start = int(units.position[self._rows_of(packed, index)[0]])
        run = slice(start, start + layout.numel)
        dtype = step.gradients.dtypes.get(index, step.gradients.dtype or info.param.dtype)
        gradient = tensor_at(int(step.gradients.address[index]), layout.numel, dtype)
        # Of a parameter on a device this is where its weights are staged.
        model = tensor_at(int(step.param_address[index]), layout.numel, info.param.dtype)
        record = MASTER_RECORDS.get(info.form)
        master = chunk[record][run] if record else None
        return MatrixStep(
            weights=Weights(info.form, model, master, start),
            gradient=gradient,
            momentum=chunk["momentum_buffer"][run],
            group=self._group_of(index),
            scale=step.scale,
            layout=layout,
            shaped_as=None if info.param.is_contiguous() else info.param,
            ties=lambda first, last: self._masters.ties_of(packed, first, last),
        )

    @staticmethod
    def _rows_of(packed: PackedGroup, index: int) -> npt.NDArray[np.int64]:
        return np.arange(*np.searchsorted(packed.units.param, (index, index + 1)))

    def _polled(self, steps: Iterable[MatrixStep]) -> Iterator[MatrixStep]:
        """Count the matrices, and let the swapper go on between them."""
        for one in steps:
            yield one
            self._num_newton_schulz += one.layout.num_matrices
            self._runtime.swapper.poll()

    def _device_matrices(self) -> DeviceMatrices:
        if self._on_device is None:
            device = device_of(self._layout.infos)
            if device is None:
                raise ConfigError("no parameter of this optimizer is on a device")
            self._on_device = DeviceMatrices(device, self._scratch, self._ns_dtype)
        return self._on_device

    # -- reports and end ---------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """What steps each parameter, in order: Muon with its matrices, or AdamW."""
        found = []
        for info in self._layout.infos:
            group = self._group_of(info.index)
            layout = self._matrices.get(info.index)
            heads, view = group.get("num_heads", 1), group.get("muon_view", "auto")
            algorithm = "muon" if info.bucket.rule == MUON_RULE else "adamw"
            reason = f"use_muon={group['use_muon']}" + (f", {heads} heads" if heads > 1 else "")
            shape = tuple(info.listed.shape)
            found.append(Route(info.name, shape, algorithm, layout, view, heads, reason))
        return found

    def describe(self) -> str:
        """As SwapOptimizer.describe, and a table of what steps each parameter."""
        return f"{super().describe()}\n\n{format_routes(self.routes())}"

    def stats(self) -> dict[str, Any]:
        """As SwapOptimizer.stats, and `num_newton_schulz`: matrices orthogonalised so far."""
        if self._exchange is None:
            return {**super().stats(), "num_newton_schulz": self._num_newton_schulz}
        return {
            **super().stats(),
            "num_newton_schulz": self._exchange.num_matrices,
            "exchange_peak_bytes": self._exchange.peak_bytes,
        }

    def close(self) -> None:
        """Wait for transfers, give up memory and files. Idempotent."""
        super().close()
        if self._closed:
            self._close_scratch()
            if self._exchange is not None:
                self._exchange.close()
