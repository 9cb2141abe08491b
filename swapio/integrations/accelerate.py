# SPDX-License-Identifier: Apache-2.0
"""Keep accelerate's `prepare` from moving optimizer state to the accelerator.

accelerate sends what an optimizer's `state_dict()` holds to its device and loads it back: for state
on a drive that is all of it, 12 bytes per parameter, at once in GPU memory. There is nothing to
move: swapio steps parameters of any device from where the state is.

    accelerator = Accelerator()
    keep_state_in_place(accelerator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    trainer = transformers.Trainer(..., optimizers=(optimizer, scheduler))
    keep_state_in_place(trainer.accelerator)
    trainer.train()

Without it, results are the same; it is a matter of memory and time.
"""

from __future__ import annotations

from typing import Any, TypeVar

from swapio.errors import ConfigError

__all__ = ["keep_state_in_place"]

AcceleratorLike = TypeVar("AcceleratorLike")


def keep_state_in_place(accelerator: AcceleratorLike) -> AcceleratorLike:
    """Make `prepare` of this accelerator leave the state of swapio's optimizers where it is.

    Other optimizers are prepared as before. Call it before `prepare`; again does nothing. It reads
    and writes no state and does not block.

    Args:
        accelerator: An accelerate.Accelerator, such as a transformers.Trainer's `accelerator`.

    Returns:
        The same object.

    Raises:
        ConfigError: The object has no `prepare_optimizer`.
    """
    holder: Any = accelerator
    prepare = getattr(holder, "prepare_optimizer", None)
    if prepare is None:
        raise ConfigError(
            f"accelerator is a {type(accelerator).__name__}; want an accelerate.Accelerator, such "
            "as trainer.accelerator"
        )
    if getattr(prepare, "keeps_state_in_place", False):
        return accelerator

    def prepare_optimizer(optimizer: Any, device_placement: bool | None = None) -> Any:
        from swapio.optim.base import SwapOptimizer

        if isinstance(optimizer, SwapOptimizer):
            device_placement = False
        return prepare(optimizer, device_placement=device_placement)

    prepare_optimizer.keeps_state_in_place = True  # type: ignore[attr-defined]
    holder.prepare_optimizer = prepare_optimizer
    return accelerator
