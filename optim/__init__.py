# SPDX-License-Identifier: Apache-2.0
"""Optimizers and CPU kernels of swapio (imported as `swapio.optim`)."""

from __future__ import annotations

from swapio.optim.adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
