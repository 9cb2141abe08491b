# SPDX-License-Identifier: Apache-2.0
"""AdamW and Adam with swapped state.

The formula and its rounding order are those of `swapio.optim.kernels.adam_step`, which follows
torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101; Kingma and Ba 2015,
arXiv:1412.6980).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from swapio.errors import ConfigError
from swapio.optim import kernels
from swapio.optim.base import SwapOptimizer, SwapSetting
from swapio.optim.context import Elsewhere, StepContext
from swapio.optim.layout import Bucket, MasterForm, PackedGroup
from swapio.optim.speculation_undo import EarlyCall, results_of
from swapio.optim.unit_cut import RecordAt, UnitCut
from swapio.views import Chunk

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class AdamRuleMixin(SwapOptimizer):
    """The Adam update on the kernels, for every class that has Adam groups."""

    def adam_records(self) -> dict[str, torch.dtype]:
        """Adam's state records."""
        dtype = _DTYPES[self.config.state_dtype]
        return {"exp_avg": dtype, "exp_avg_sq": dtype}

    def adam_update(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Step the units of a chunk that have a gradient; False if none has."""
        cut = self._cuts.of(packed, chunk.start, chunk.stop)
        if not step.is_complete:
            cut = UnitCut(packed, step.rows_of(packed, chunk.start, chunk.stop), chunk.start)
        if not len(cut):
            return False
        self._masters.check(packed, chunk, cut, step)
        for dtype, chosen in step.by_dtype(packed, cut, chunk.start):
            self._adam_call(packed, chunk, step, chosen, dtype)
        self._masters.publish(packed, cut, step)
        return True

    def _adam_call(
        self, packed: PackedGroup, chunk: Chunk, step: StepContext, cut: UnitCut, dtype: torch.dtype
    ) -> None:
        bucket, to = packed.bucket, step.elsewhere
        # There is no kernel with an fp32 copy of an fp32 master: it is copied after the pass.
        is_copied = bucket.form is MasterForm.SEPARATE and bucket.dtype is torch.float32
        spans = self._spans(packed, chunk, step, cut, dtype)
        if to is not None:
            self._redirect(spans, packed, cut, to)
        split = bucket.form is MasterForm.SPLIT
        form = self._form(bucket.form, bucket.dtype, dtype)
        ties = kernels.adam_step_spans(
            form,
            spans,
            step.hypers,
            grad_scale=step.scale,
            ties=self._masters.ties_of(packed, chunk.start, chunk.stop) if split else None,
            seed=self._num_steps,
            threads=step.threads,
        )
        if to is not None and to.calls is not None:
            plain = self._form(bucket.form, bucket.dtype, dtype, has_out=False)
            done, bounds = results_of(spans), (chunk.start, chunk.stop)
            call = EarlyCall(form, plain, done, step.hypers, ties, cut, bounds, is_copied)
            to.calls.append(call)
        if is_copied:
            source = "param" if to is None or to.chunk is None else "param_to"
            target = cut.of_parameters(step.param_address) if to is None else spans["out"]
            kernels.copy_spans(spans[source], target, cut.numel * 4)
        if ties is None:  # only a split master has them
            return
        if to is None:
            self._masters.replace_ties(packed, cut, ties, chunk)
        else:
            to.ties.append((cut.row_numbers(), ties))

    def _spans(
        self, packed: PackedGroup, chunk: Chunk, step: StepContext, cut: UnitCut, dtype: torch.dtype
    ) -> Any:
        """The spans of a call that updates in place."""
        bucket = packed.bucket
        records = [
            RecordAt(name, record_dtype.itemsize, chunk.address(name))
            for name, record_dtype in self.adam_records().items()
        ]
        if bucket.form is MasterForm.SEPARATE:
            records.append(RecordAt("param", 4, chunk.address("master")))
        elif bucket.form is MasterForm.SPLIT:
            records.append(RecordAt("low", 2, chunk.address("master_low")))
        spans = cut.spans(records, step.gradients.address, dtype.itemsize)
        if bucket.form is not MasterForm.SEPARATE:
            spans["param"] = cut.of_parameters(step.param_address)
        elif bucket.dtype is not torch.float32:
            spans["out"] = cut.of_parameters(step.param_address)
        spans["hyper"] = step.hyper_index[cut.param]
        if bucket.form is MasterForm.NONE:  # which noise an element gets depends on no sub-group
            spans["position"] = self._table.first_element[cut.param] + cut.offset
        return spans

    def _redirect(self, spans: Any, packed: PackedGroup, cut: UnitCut, to: Elsewhere) -> None:
        """Have the results of a call written elsewhere; the sources stay as they are."""
        bucket = packed.bucket
        weights = to.weights[cut.param] + cut.model_offset
        spans["out" if bucket.form is MasterForm.SEPARATE else "param_to"] = weights
        if to.low:
            spans["low_to"] = cut.position.astype(np.uint64) * np.uint64(2) + np.uint64(to.low)
        if to.chunk is None:
            return
        place = cut.position - to.chunk.start
        for name, record_dtype in self.adam_records().items():
            spans[f"{name}_to"] = to.chunk.address(name) + place * record_dtype.itemsize
        if bucket.form is MasterForm.SEPARATE:
            spans["param_to"] = to.chunk.address("master") + place * 4
        elif bucket.form is MasterForm.SPLIT:
            spans["low_to"] = to.chunk.address("master_low") + place * 2

    def early_update(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """As adam_update, but every result goes elsewhere; False if it must not be done early.

        Nothing is changed: no ties, no digests, no parameter. A parameter that somebody else
        changed is left to the step proper, which knows what to do about it.
        """
        cut = UnitCut(packed, step.rows_of(packed, chunk.start, chunk.stop), chunk.start)
        if not len(cut):
            return True
        if self._masters.is_changed(packed, cut, step):
            return False
        for dtype, chosen in step.by_dtype(packed, cut, chunk.start):
            self._adam_call(packed, chunk, step, chosen, dtype)
        return True

    def check_bucket(self, bucket: Bucket, name: str) -> None:
        """Refuse, before any work, a combination of settings and dtype that has no kernel."""
        if bucket.rule != "adam":
            return
        try:
            self._form(bucket.form, bucket.dtype, bucket.dtype)
        except TypeError as error:
            raise ConfigError(
                f"parameter {name} is {bucket.dtype}: with master={self.config.master!r}, "
                f"state_dtype={self.config.state_dtype!r} and stochastic_rounding="
                f"{self.config.stochastic_rounding} there is no update kernel. {error}"
            ) from error

    def _form(
        self, form: MasterForm, param: torch.dtype, grad: torch.dtype, *, has_out: bool = True
    ) -> int:
        state = _DTYPES[self.config.state_dtype]
        if form is MasterForm.SEPARATE and not has_out:
            param = torch.float32
        return _form_code(form, param, grad, state, self.config.stochastic_rounding)


@functools.cache
def _form_code(
    form: MasterForm, param: torch.dtype, grad: torch.dtype, state: torch.dtype, stochastic: bool
) -> int:
    """Return the kernels' code of a form; raises TypeError where there is no kernel."""
    if form is MasterForm.SEPARATE:
        out = None if param is torch.float32 else param
        return kernels.adam_form(param=torch.float32, grad=grad, state=state, out=out)
    return kernels.adam_form(
        param=param,
        grad=grad,
        state=state,
        split=form is MasterForm.SPLIT,
        stochastic=form is MasterForm.NONE and stochastic,
    )


class AdamW(AdamRuleMixin):
    """AdamW (decoupled weight decay) whose state may live on storage.

    A real torch optimizer: closures, hooks, schedulers and `add_param_group` work as usual.

    Args:
        params: Parameters, named parameters, or param groups, as for torch.optim.AdamW. Dense
            fp32, bf16 or fp16 parameters, on the CPU or on one CUDA device.
        lr: Learning rate.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator, as in torch.
        weight_decay: Decoupled weight decay.
        amsgrad: Not supported; raises if true.
        maximize: Ascend instead of descend.
        swap: Where state lives: a folder, a dict or SwapConfig of settings, or None for RAM.
        max_grad_norm: Clip the global gradient norm inside the step (no extra pass over p.grad).
        gradients: "keep" or "stream"; see SwapOptimizer.
        speculate: Step sub-groups during backward: False, "adaptive" or "always".
        undo: How early steps are undone: "exact", or "algebraic": to rounding, with less memory.
        ratio: Share of the state that is offloaded; the rest stays on the parameters' device.
        nonfinite: "propagate", "skip" or "raise"; default "skip" with `max_grad_norm`.
        resume: Continue from the last committed step in the folder (durability "step", "power").

    Raises:
        ConfigError: A setting or a parameter is unsuitable; the message names it.
        StoreLockedError: Another run uses the folder.

    Example:
        >>> opt = AdamW(model.parameters(), lr=1e-3, swap="/nvme/run1")
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        bias_correction: bool = True,
        swap: SwapSetting = None,
        max_grad_norm: float | None = None,
        gradients: str = "keep",
        speculate: str | bool = False,
        undo: str = "exact",
        ratio: float = 1.0,
        nonfinite: str | None = None,
        resume: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "bias_correction": bias_correction,
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

    def check_group(self, group: dict[str, Any]) -> None:
        """Validate a param group; see SwapOptimizer."""
        check_adam_group(group)
        super().check_group(group)

    def rule_of(self, group: dict[str, Any]) -> str:  # noqa: ARG002
        """All groups use Adam."""
        return "adam"

    def state_records(self, rule: str) -> dict[str, torch.dtype]:  # noqa: ARG002
        """exp_avg and exp_avg_sq."""
        return self.adam_records()

    def update_chunk(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Run the Adam kernel over a chunk."""
        return self.adam_update(packed, chunk, step)

    def fill_hyper(self, row: Any, group: dict[str, Any]) -> None:
        """Write a group's hyperparameters into a row of the kernel's table."""
        fill_adam_hyper(row, group, decoupled=self._decoupled)


class Adam(AdamW):
    """Adam: as AdamW, with weight decay added to the gradient (L2), off by default."""

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)


def check_adam_group(group: dict[str, Any]) -> None:
    """Raise ConfigError for Adam hyperparameters outside their range."""
    beta1, beta2 = group["betas"]
    checks = {
        "lr": float(group["lr"]) >= 0,
        "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
    }
    for name, valid in checks.items():
        if not valid:
            raise ConfigError(f"{name}={group[name]!r} is out of range")
    if group.get("amsgrad"):
        raise ConfigError("amsgrad=True is not supported: it needs a third moment; set it to False")


def fill_adam_hyper(row: Any, group: dict[str, Any], *, decoupled: bool) -> None:
    """Write Adam hyperparameters into a row of the kernel's table."""
    row["lr"] = float(group["lr"])
    row["beta1"], row["beta2"] = group["betas"]
    row["eps"] = group["eps"]
    row["weight_decay"] = group["weight_decay"]
    flags = kernels.DECOUPLED if decoupled else 0
    flags |= kernels.BIAS_CORRECTION if group.get("bias_correction", True) else 0
    flags |= kernels.MAXIMIZE if group.get("maximize") else 0
    row["flags"] = flags
