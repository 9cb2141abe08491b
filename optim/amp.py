# SPDX-License-Identifier: Apache-2.0
"""A loss scaler for optimizers whose gradients are not in `p.grad` when step() is called.

`torch.amp.GradScaler` divides `p.grad` and looks for inf in it. With gradients="stream", and in
ZeRO's stage 2, there is nothing there: the division is one factor inside the update kernels, and
the step itself knows whether a gradient was not finite, on any rank.

Invariant: scale, growth and backoff follow torch.amp.GradScaler's rules, whatever the optimizers.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch.amp.grad_scaler import OptState

from swapio.errors import ConfigError
from swapio.optim.base import SwapOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, for swapio's optimizers that take gradients away, and any other.

    Used as torch's: `scaler.scale(loss).backward()`, `scaler.unscale_(opt)` if the norm is wanted
    before the step, `scaler.step(opt)`, `scaler.update()`. A step with inf or nan in a gradient is
    skipped and lowers the scale, unless the optimizer was told `nonfinite="raise"`.

    Raises:
        RuntimeError: In the cases in which torch's raises it.
        ConfigError: The optimizer was told `nonfinite="propagate"`.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer's next step divide its gradients by the scale."""
        if not self._is_announced(optimizer):
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since update()"
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step()")
        self._announce(optimizer)
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, if all is finite; blocks and returns as its own step does."""
        if not self._is_announced(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("closure use is not supported when a loss scaler steps")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if state["stage"] is OptState.READY:
            self._announce(optimizer)
        result = optimizer.step(**kwargs)
        skipped = bool(getattr(optimizer, "step_skipped", False))
        scale = self._check_scale_growth_tracker("step")[0]
        state["found_inf_per_device"] = {
            scale.device: torch.full((), float(skipped), device=scale.device)
        }
        state["swapio_skipped"] = skipped
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Raise or lower the scale by what the steps since the last update found."""
        known = self._host_scale() if new_scale is None else None
        states = self._per_optimizer_states.values()
        if known is not None and all("swapio_skipped" in state for state in states):
            known = self._next_scale(known, any(state["swapio_skipped"] for state in states))
        else:
            known = None
        super().update(new_scale)
        self._known_scale = known
        if known is None:  # what the device counts now is not known here
            self._num_good_steps = None

    def get_scale(self) -> float:
        """The scale, without waiting for a device where its history is known on the host."""
        if not self.is_enabled() or self._known_scale is None:
            return float(super().get_scale())
        return self._known_scale

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        super().load_state_dict(state_dict)
        self._known_scale = self._num_good_steps = None

    # What update() worked out on the host, as torch works it out on the device.
    _known_scale: float | None = None
    _num_good_steps: int | None = None

    def _host_scale(self) -> float | None:
        if self._num_good_steps is None and self.is_enabled():
            self._num_good_steps = int(self._get_growth_tracker())
        return self.get_scale() if self.is_enabled() else None

    def _next_scale(self, scale: float, skipped: bool) -> float:
        if skipped:
            self._num_good_steps = 0
            return float(np.float32(scale * self.get_backoff_factor()))
        self._num_good_steps = (self._num_good_steps or 0) + 1
        if self._num_good_steps < self.get_growth_interval():
            return scale
        self._num_good_steps = 0
        grown = float(np.float32(scale * self.get_growth_factor()))
        return grown if np.isfinite(grown) else scale

    def _announce(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_scale_growth_tracker("step")
        if isinstance(optimizer, SwapOptimizer):
            optimizer.set_loss_scale(self.get_scale())
            if optimizer.nonfinite == "propagate":
                optimizer.set_loss_scale(1.0)  # as before
                raise ConfigError(
                    "nonfinite='propagate' would step with the inf that a scale which is too large "
                    "makes, and the scaler would never lower it; leave `nonfinite` out, or set it "
                    "to 'skip' or 'raise'"
                )
            this = weakref.ref(self)
            optimizer.expect_loss_scale(lambda: _scale_of(this()))

    def _is_announced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is told the scale, as there is nothing to divide in `p.grad`."""
        takes = isinstance(optimizer, SwapOptimizer) and optimizer.takes_gradients
        return self.is_enabled() and takes


def _scale_of(scaler: GradScaler | None) -> float | None:
    return None if scaler is None else scaler.get_scale()
