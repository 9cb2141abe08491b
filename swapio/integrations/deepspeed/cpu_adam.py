# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepSpeed's cpu_adam extension, on swapio's kernels.

The result is torch's to 2 ulp (DeepSpeed's own kernel rounds hyperparameters to fp32 and fuses
multiply and add). Functions return 0 as DeepSpeed expects, and raise instead of returning -1.
"""

from __future__ import annotations

import logging

import torch

from swapio.errors import ConfigError

__all__ = ["adam_rollback", "adam_update", "create_adam", "destroy_adam"]

_logger = logging.getLogger("swapio.integrations.deepspeed")
_is_decoupled: dict[int, bool] = {}


def create_adam(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Announce an optimizer. Hyperparameters are taken from each step; only the mode is kept.

    Args:
        optimizer_id: A number of the caller's choice.
        alpha: Learning rate, for the log line.
        betta1: Decay rate of the first moment, for the log line.
        betta2: Decay rate of the second moment, for the log line.
        eps: For the log line.
        weight_decay: For the log line.
        adamw_mode: AdamW's decoupled decay; False adds the decay to the gradient.
        should_log: Log one line.
    """
    from swapio.optim.kernels import simd_level

    _is_decoupled[optimizer_id] = bool(adamw_mode)
    if should_log:
        _logger.info(
            "Adam optimizer %d on swapio's kernels (%s): lr %g, betas (%g, %g), eps %g, "
            "weight decay %g, %s",
            *(optimizer_id, simd_level(), alpha, betta1, betta2, eps, weight_decay),
            "decoupled" if adamw_mode else "L2",
        )
    return 0


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """Take one step in place. Blocks until done, with the GIL released.

    Args:
        optimizer_id: As given to create_adam.
        step: The number of this step, from 1.
        lr: Learning rate.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        epsilon: Added to the root of the second moment.
        weight_decay: As adamw_mode says.
        bias_correction: Whether the moments are corrected for their start at zero.
        params: fp32, bf16 or fp16, on the CPU, contiguous; updated.
        grads: fp32, bf16 or fp16, as many elements.
        exp_avg: fp32, or the parameter's dtype; updated.
        exp_avg_sq: As exp_avg; updated.

    Raises:
        ConfigError: No such optimizer.
        TypeError: No kernel for these dtypes.
        ValueError: A tensor that is elsewhere, not contiguous, or of another size.
    """
    from swapio.optim.kernels import adam_step

    adam_step(
        params,
        grads,
        exp_avg,
        exp_avg_sq,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=_mode_of(optimizer_id),
        bias_correction=bool(bias_correction),
    )
    return 0


def adam_rollback(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """Undo the step with this number, to 2 ulp; for the arguments see adam_update.

    Raises:
        ConfigError: No such optimizer.
        TypeError: The tensors are not fp32.
        ValueError: L2 decay (adamw_mode=False), a zero beta, or lr * weight_decay == 1.
    """
    from swapio.optim.kernels import adam_rollback as rollback

    rollback(
        params,
        grads,
        exp_avg,
        exp_avg_sq,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=_mode_of(optimizer_id),
        bias_correction=bool(bias_correction),
    )
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Forget an optimizer; does nothing when there is none of this number."""
    _is_decoupled.pop(optimizer_id, None)
    return 0


def _mode_of(optimizer_id: int) -> bool:
    try:
        return _is_decoupled[optimizer_id]
    except KeyError:
        raise ConfigError(
            f"optimizer_id is {optimizer_id}; create_adam was not called with it, or destroy_adam "
            "was called since"
        ) from None
