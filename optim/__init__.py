# SPDX-License-Identifier: Apache-2.0
"""Optimizers and CPU kernels of swapio (imported as `swapio.optim`)."""

from __future__ import annotations

from swapio.optim.adamw import Adam, AdamW
from swapio.optim.amp import GradScaler
from swapio.optim.muon import Muon
from swapio.optim.muon_groups import muon_param_groups

__all__ = ["Adam", "AdamW", "GradScaler", "Muon", "muon_param_groups"]
