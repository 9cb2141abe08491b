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
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from swapio.errors import ConfigError
from swapio.optim.adamw import AdamRuleMixin, check_adam_group, fill_adam_hyper
from swapio.optim.base import SwapSetting
from swapio.optim.context import StepContext
from swapio.optim.layout import MUON_RULE, Bucket, MasterForm, PackedGroup, ParameterInfo, flat
from swapio.optim.muon_groups import Route, format_routes
from swapio.optim.muon_math import (
    AdjustLr,
    MatrixLayout,
    adjusted_lr,
    apply_update,
    matrix_layout,
    momentum_step,
)
from swapio.optim.muon_update import (
    Scratch,
    ScratchNeed,
    Weights,
    block_matrices,
    scratch_need,
    spread,
    tensor_at,
)
from swapio.optim.newton_schulz import (
    DEFAULT_COEFFICIENTS,
    DEFAULT_EPS,
    DEFAULT_STEPS,
    Coefficients,
    newton_schulz,
    newton_schulz_flops,
    resolve_coefficients,
)
from swapio.optim.registration import Listed, text
from swapio.runtime import GroupRequest
from swapio.views import Chunk

_ADAM_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}
_MUON_ONLY = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_NS_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Muon(AdamRuleMixin):
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
        ns_dtype: Dtype of the matrix products; None is fp32 on the CPU.
        max_grad_norm: Clip the global norm of all groups' gradients, by one factor for all, before
            the momentum. What Muon does hardly depends on it; the AdamW groups are clipped.
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
        self._scratch: Scratch | None = None
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
            nonfinite=nonfinite,
            resume=resume,
        )
        self._reserve()

    # -- groups ------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for Muon, or with `use_muon=False` for AdamW; see SwapOptimizer."""
        if isinstance(param_group, dict):
            param_group["use_muon"] = _use_muon(param_group)
            more = {"num_heads": 1, "muon_view": "auto"}
            for name, value in (more if param_group["use_muon"] else _ADAM_DEFAULTS).items():
                param_group.setdefault(name, value)
        need = self._need
        try:
            super().add_param_group(param_group)
        except BaseException:
            self._need = need
            raise
        if not param_group["use_muon"]:
            for name in _MUON_ONLY:
                param_group.pop(name, None)
        if self._ready:
            self._reserve()

    def check_group(self, group: dict[str, Any]) -> None:
        """Validate a param group; see SwapOptimizer."""
        if not group["use_muon"]:
            check_adam_group(group)
        else:
            _check_muon_group(group)
            if self.config.stochastic_rounding:
                raise ConfigError("stochastic_rounding is for AdamW only: Muon rounds to nearest")
        super().check_group(group)
        if group["use_muon"]:
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                name = names[position] if names else f"number {position} of its group"
                if param.requires_grad:
                    _layout_of(str(name), param, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch.optim.Muon; see SwapOptimizer.

        Raises:
            ValueError: Groups or parameters do not match, or a group is routed otherwise.
        """
        for at, (mine, theirs) in enumerate(
            zip(self.param_groups, state_dict["param_groups"], strict=False)
        ):
            if _use_muon({"use_muon": mine["use_muon"], **theirs}) != mine["use_muon"]:
                raise ValueError(
                    f"param group {at} was stepped by {_rule(theirs)} when the state was saved, "
                    f"and is stepped by {_rule(mine)} here"
                )
        super().load_state_dict(state_dict)

    # -- what the base asks ------------------------------------------------------------------

    def rule_of(self, group: dict[str, Any]) -> str:
        """Muon unless the group says otherwise."""
        return _rule(group)

    def state_records(self, rule: str) -> dict[str, torch.dtype]:
        """momentum_buffer, or AdamW's moments."""
        return {"momentum_buffer": torch.float32} if rule == MUON_RULE else self.adam_records()

    def fill_hyper(self, row: Any, group: dict[str, Any]) -> None:
        """Write an AdamW group's hyperparameters into a row of the kernel's table."""
        if not group["use_muon"]:
            fill_adam_hyper(row, group, decoupled=True)

    def workspace_bytes(self, groups: Iterable[PackedGroup]) -> int:  # noqa: ARG002
        """What all sub-groups requested so far need, the largest matrix decides."""
        return self._need.nbytes

    def sweep_order(self, keys: list[str]) -> list[str]:
        """AdamW's sub-groups evenly between Muon's, whose Newton-Schulz hides all I/O."""
        fillers = [key for key in keys if key not in self._costs]
        return spread(fillers, {key: self._costs[key] for key in keys if key in self._costs})

    def _bucket(self, member: Listed) -> Bucket:
        bucket = super()._bucket(member)
        if bucket.is_whole:
            layout = _layout_of(text(member.name), member.param, member.group)
            self._listed_matrices[id(member.param)] = (layout, member.group)
        return bucket

    def _request(self, packed: PackedGroup) -> GroupRequest:
        request = super()._request(packed)
        if packed.bucket.rule != MUON_RULE:
            return request
        flops = 0.0
        for index in dict.fromkeys(packed.units.param.tolist()):
            info = self._layout.infos[index]
            layout, group = self._listed_matrices[id(info.param)]
            self._matrices[index] = layout
            self._need |= scratch_need(
                layout,
                group,
                is_contiguous=info.param.is_contiguous(),
                joins=_joins(info),
                ns_dtype=self._ns_dtype,
            )
            flops += newton_schulz_flops(layout.shape, group["ns_coefficients"], group["ns_steps"])
        self._costs[packed.key] = flops
        return dataclasses.replace(request, streamed=False)

    def _reserve(self) -> None:
        """Have the scratch memory that is needed by now."""
        if self._scratch is not None and self._scratch.need == self._need:
            return
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        if self._need.nbytes:
            self._scratch = Scratch(self._need, self.config.huge_pages)

    def _group_of(self, index: int) -> dict[str, Any]:
        group: dict[str, Any] = self.param_groups[self._group_index()[index]]
        return group

    # -- the update --------------------------------------------------------------------------

    def update_chunk(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Step the parameters of one chunk in place; a chunk of Muon is a whole sub-group."""
        if packed.bucket.rule != MUON_RULE:
            return self.adam_update(packed, chunk, step)
        units = packed.units
        rows = np.flatnonzero(step.gradients.present[units.param])
        if not len(rows):
            return False
        self._masters.check(packed, chunk, rows, step)
        for index in dict.fromkeys(units.param[rows].tolist()):
            self._step_parameter(packed, chunk, step, index)
            self._runtime.swapper.poll()
        self._masters.publish(packed, rows, step)
        return True

    def _step_parameter(
        self, packed: PackedGroup, chunk: Chunk, step: StepContext, index: int
    ) -> None:
        units, info, layout = packed.units, self._layout.infos[index], self._matrices[index]
        rows = np.arange(*np.searchsorted(units.param, (index, index + 1)))
        start = int(units.position[rows[0]])
        run = slice(start, start + layout.numel)
        dtype = step.gradients.dtypes.get(index, step.gradients.dtype or info.param.dtype)
        gradient = tensor_at(int(step.gradients.address[index]), layout.numel, dtype)
        record = _MASTER_RECORDS.get(info.form)
        weights = Weights(
            info.form, flat(info.param), chunk[record][run] if record else None, start
        )
        block = layout.numel
        if info.param.is_contiguous():
            block = block_matrices(layout, self._ns_dtype) * layout.rows * layout.cols
        ties = []
        for first in range(0, layout.numel, block):
            last = min(layout.numel, first + block)
            momentum = chunk["momentum_buffer"][start + first : start + last]
            part = weights.part(first, last)
            old = self._masters.ties_of(packed, start + first, start + last)
            ties.append(
                self._step_block(info, step.scale, momentum, gradient[first:last], part, old)
            )
        if info.form is MasterForm.SPLIT:
            self._masters.replace_ties(packed, rows, np.concatenate(ties), chunk)
        self._num_newton_schulz += layout.num_matrices

    def _step_block(
        self,
        info: ParameterInfo,
        scale: float,
        momentum: torch.Tensor,
        gradient: torch.Tensor,
        part: Weights,
        ties: Any,
    ) -> Any:
        """Momentum, Newton-Schulz and update of some whole matrices; the new ties."""
        scratch = self._scratch
        if scratch is None:
            raise ConfigError("Muon has no scratch memory: it was closed")
        group, layout = self._group_of(info.index), self._matrices[info.index]
        shaped = _as_is if info.param.is_contiguous() else _shaped_as(info.param)
        update = scratch.update[: momentum.numel()]
        momentum_step(
            shaped(momentum),
            shaped(gradient),
            update if shaped is _as_is else update.view(info.param.shape),
            beta=group["momentum"],
            nesterov=group["nesterov"],
            grad_scale=scale,
        )
        matrices = update.view(-1, layout.rows, layout.cols)
        newton_schulz(
            matrices,
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
            dtype=self._ns_dtype,
            out=matrices,
            workspace=scratch.workspace,
        )
        weights = part.load(scratch.master, ties)
        lr = float(group["lr"])
        apply_update(
            shaped(weights),
            update if shaped is _as_is else update.view(info.param.shape),
            lr=lr,
            update_lr=adjusted_lr(lr, layout.rows, layout.cols, group["adjust_lr_fn"]),
            weight_decay=group["weight_decay"],
        )
        return part.store(weights)

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
            shape = tuple(info.param.shape)
            found.append(Route(info.name, shape, algorithm, layout, view, heads, reason))
        return found

    def describe(self) -> str:
        """As SwapOptimizer.describe, and a table of what steps each parameter."""
        return f"{super().describe()}\n\n{format_routes(self.routes())}"

    def stats(self) -> dict[str, Any]:
        """As SwapOptimizer.stats, and `num_newton_schulz`: matrices orthogonalised so far."""
        return {**super().stats(), "num_newton_schulz": self._num_newton_schulz}

    def close(self) -> None:
        """Finish transfers and give up memory and files. Idempotent."""
        super().close()
        if self._closed and self._scratch is not None:
            self._scratch.close()
            self._scratch = None


_MASTER_RECORDS = {MasterForm.SEPARATE: "master", MasterForm.SPLIT: "master_low"}


def _joins(info: ParameterInfo) -> bool:
    """Whether the fp32 weights must be put together in a buffer."""
    low = info.form is MasterForm.NONE and info.param.dtype is not torch.float32
    return low or info.form is MasterForm.SPLIT


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _shaped_as(param: torch.Tensor) -> Any:
    """Elements in the memory order of `param`, seen in its logical shape."""
    return lambda memory: torch.as_strided(memory, param.shape, param.stride())


def _layout_of(name: str, param: torch.Tensor, group: dict[str, Any]) -> MatrixLayout:
    return matrix_layout(
        param.shape, view=group["muon_view"], num_heads=group["num_heads"], name=name
    )


def _rule(group: dict[str, Any]) -> str:
    return MUON_RULE if _use_muon(group) else "adam"


def _use_muon(group: dict[str, Any]) -> bool:
    """Read the routing of a group; raises ConfigError if it is unknown or contradicts itself."""
    algorithm = group.get("algorithm")
    if algorithm not in (None, "muon", "adamw"):
        raise ConfigError(f"algorithm={algorithm!r} is neither 'muon' nor 'adamw'")
    use_muon = group.get("use_muon", algorithm != "adamw")
    if not isinstance(use_muon, bool):
        raise ConfigError(f"use_muon={use_muon!r} is neither True nor False")
    if algorithm is not None and use_muon != (algorithm == "muon"):
        raise ConfigError(f"use_muon={use_muon} contradicts algorithm={algorithm!r}")
    return use_muon


def _check_muon_group(group: dict[str, Any]) -> None:
    """Raise ConfigError for Muon hyperparameters outside their range."""
    checks = {
        "lr": float(group["lr"]) >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "momentum": 0 <= group["momentum"] < 1,
        "eps": group["eps"] >= 0,
    }
    for name, valid in checks.items():
        if not valid:
            raise ConfigError(f"{name}={group[name]!r} is out of range")
    resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    adjusted_lr(float(group["lr"]), 1, 1, group["adjust_lr_fn"])
