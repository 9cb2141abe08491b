# SPDX-License-Identifier: Apache-2.0
"""State that stays on the parameters' device and is stepped there: `ratio` below 1.

    construction, load, set_state    the swapper has the state
    step                             copied to the device (once), stepped there by torch
    state_of, save, a commit         copied back; the swapper has the state again

The swapper stays the owner: for whoever looks, its records are made what the device has. So
checkpoints, state_dict and recovery know nothing of it.

Facts about the arithmetic: the kernels round after every operation, and so do torch's elementwise
functions, one call for each. Torch's fp32 square root on the CPU is not always the nearest; the
float64 one, rounded to fp32, is. So the state is that of the kernels, bit for bit, while no nan is
in it.

Invariant: the device's copy is used only if nobody can have changed the swapper's since.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.context import StepContext
from swapio.optim.layout import PackedGroup, ParameterInfo, flat
from swapio.optim.masters import Masters
from swapio.swapper import PartitionedSwapper

_COPY_NUMEL = 1 << 22  # elements that are copied through RAM at a time
_STEP_NUMEL = 1 << 24  # elements that are stepped at a time: temporaries are as large

GradientOf = Callable[[ParameterInfo], torch.Tensor]


@dataclass(frozen=True)
class AdamNumbers:
    """What the kernels make of hyperparameters and factor, as fp32 values."""

    scale: float
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    decay: float
    l2: float
    step_size: float
    root2: float
    eps: float

    @classmethod
    def of(cls, hyper: Any, scale: float) -> AdamNumbers:
        """From a row of the kernels' table; worked out in float64 and rounded once."""
        flags, step = int(hyper["flags"]), float(hyper["step"])
        lr, eps, decay = (float(hyper[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = float(hyper["beta1"]), float(hyper["beta2"])
        corrects, is_decoupled = flags & kernels.BIAS_CORRECTION, flags & kernels.DECOUPLED
        correction1 = 1.0 - beta1**step if corrects else 1.0
        correction2 = 1.0 - beta2**step if corrects else 1.0
        numbers = (
            -scale if flags & kernels.MAXIMIZE else scale,
            beta1,
            beta2,
            1.0 - beta1,
            1.0 - beta2,
            1.0 - lr * decay if is_decoupled else 1.0,
            0.0 if is_decoupled else decay,
            lr / correction1,
            1.0 / math.sqrt(correction2),
            eps,
        )
        return cls(*(float(np.float32(number)) for number in numbers))


def adam_update(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, n: AdamNumbers
) -> None:
    """Step fp32 tensors in place, in the kernels' order of roundings; `g` is scratch afterwards."""
    g.mul_(n.scale)
    if n.l2:
        g.add_(p * n.l2)
    m.mul_(n.beta1).add_(g * n.rest1)
    v.mul_(n.beta2).add_((g * n.rest2).mul_(g))
    root = v.double().sqrt_().float()
    denominator = root.mul_(n.root2).add_(n.eps)
    p.mul_(n.decay).sub_((m * n.step_size).div_(denominator))


@dataclass
class _Run:
    """Elements that are stepped with the same hyperparameters: `[start, stop)` of a sub-group."""

    start: int
    stop: int
    hyper: int
    rows: list[int]


class DeviceState:
    """The state of some sub-groups on their device.

    Args:
        groups: The sub-groups; their masters are separate.
        infos: All parameters.
        records: Dtype of each record.
        swapper: Gives the swapper, which recovery replaces.
        device: The device.

    Memory: as much as the state, on the device, from construction on.
    """

    def __init__(
        self,
        groups: Sequence[PackedGroup],
        infos: Sequence[ParameterInfo],
        records: dict[str, torch.dtype],
        swapper: Callable[[], PartitionedSwapper],
        device: torch.device,
    ) -> None:
        self._infos = infos
        self._swapper = swapper
        self._device = device
        self._groups = {packed.key: packed for packed in groups}
        self._state = {
            packed.key: {
                name: torch.empty(packed.numel, dtype=dtype, device=device)
                for name, dtype in records.items()
            }
            for packed in groups
        }
        self._is_here: set[str] = set()
        self._is_ahead: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether a sub-group is stepped on the device."""
        return key in self._groups

    def step(
        self, packed: PackedGroup, step: StepContext, masters: Masters, gradient_of: GradientOf
    ) -> None:
        """Step a sub-group; its parameters have their new values, in the device's order of work.

        Args:
            packed: The sub-group.
            step: The step.
            masters: Knows which parameters somebody else changed.
            gradient_of: Gives a parameter's gradient, 1-D in memory order, on any device.
        """
        key = packed.key
        rows = step.rows_of(packed, 0, packed.numel)
        if not len(rows):
            return
        if key not in self._is_here:
            self._fetch(packed)
        state = self._state[key]
        masters.check_on_device(packed, rows, step, state["master"])
        self._is_ahead.add(key)
        numbers = [AdamNumbers.of(hyper, step.scale) for hyper in step.hypers]
        for run in _runs(packed, rows, step.hyper_index):
            part = slice(run.start, run.stop)
            grad = self._gradient(packed, run, gradient_of)
            p, m, v = (state[name][part] for name in ("master", "exp_avg", "exp_avg_sq"))
            wide_m, wide_v = m.float(), v.float()  # the moments themselves if they are fp32
            adam_update(p, grad, wide_m, wide_v, numbers[run.hyper])
            if m.dtype is not torch.float32:
                m.copy_(wide_m)
                v.copy_(wide_v)
            self._publish(packed, run, p)

    def flush(self, *, keep: bool) -> None:
        """Give the swapper what the device has; blocks.

        Args:
            keep: Nobody is going to change what the swapper has.
        """
        swapper = self._swapper()
        if swapper.failure is None:
            for key in sorted(self._is_ahead):
                swapper.refill(key, {n: _filler(t) for n, t in self._state[key].items()})
            self._is_ahead.clear()
        # After a failure only a load or recovery can follow: what is here is void then too.
        if not keep:
            self._is_here.clear()

    def forget(self) -> None:
        """What the swapper has counts, whatever is here."""
        self._is_here.clear()
        self._is_ahead.clear()

    def _fetch(self, packed: PackedGroup) -> None:
        swapper = self._swapper()
        for name, target in self._state[packed.key].items():
            for start in range(0, packed.numel, _COPY_NUMEL):
                part = target[start : start + _COPY_NUMEL]
                host = torch.empty(part.numel(), dtype=part.dtype)
                part.copy_(swapper.read(packed.key, name, host, start=start))
        self._is_here.add(packed.key)

    def _gradient(self, packed: PackedGroup, run: _Run, gradient_of: GradientOf) -> torch.Tensor:
        """The gradient of a run, as fp32 memory of its own on the device."""
        units = packed.units
        grad = torch.empty(run.stop - run.start, dtype=torch.float32, device=self._device)
        for row in run.rows:
            at, count = int(units.position[row]) - run.start, int(units.numel[row])
            first = int(units.offset[row])
            source = gradient_of(self._infos[units.param[row]])
            grad[at : at + count].copy_(source[first : first + count])
        return grad

    def _publish(self, packed: PackedGroup, run: _Run, master: torch.Tensor) -> None:
        units = packed.units
        for row in run.rows:
            at, count = int(units.position[row]) - run.start, int(units.numel[row])
            first = int(units.offset[row])
            target = flat(self._infos[units.param[row]].param)[first : first + count]
            target.copy_(master[at : at + count])


def _filler(source: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
    def fill(start: int, out: torch.Tensor) -> None:
        out.copy_(source[start : start + out.numel()])

    return fill


def _runs(
    packed: PackedGroup, rows: npt.NDArray[np.int64], hyper_index: npt.NDArray[np.int32]
) -> Iterator[_Run]:
    """Join units that follow each other and share their hyperparameters."""
    units, run = packed.units, None
    for row in rows.tolist():
        start, hyper = int(units.position[row]), int(hyper_index[units.param[row]])
        stop = start + int(units.numel[row])
        follows = run is not None and (run.stop, run.hyper) == (start, hyper)
        if run is not None and follows and stop - run.start <= _STEP_NUMEL:
            run.stop = stop
            run.rows.append(row)
            continue
        if run is not None:
            yield run
        run = _Run(start, stop, hyper, [row])
    if run is not None:
        yield run
