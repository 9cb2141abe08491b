# SPDX-License-Identifier: Apache-2.0
"""Optimizers and CPU kernels of swapio (imported as `swapio.optim`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapio.optim.adamw import Adam, AdamW
from swapio.optim.amp import GradScaler
from swapio.optim.muon import Muon
from swapio.optim.muon_groups import muon_param_groups

if TYPE_CHECKING:
    from swapio.optim.zero.optimizer import ZeroOptimizer

__all__ = ["Adam", "AdamW", "GradScaler", "Muon", "ZeroOptimizer", "muon_param_groups"]


def __getattr__(name: str) -> Any:
    """Import what needs torch.distributed when it is asked for."""
    if name == "ZeroOptimizer":
        from swapio.optim.zero.optimizer import ZeroOptimizer

        return ZeroOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names, also the one that is imported when it is asked for."""
    return sorted({*globals(), *__all__})
