# SPDX-License-Identifier: Apache-2.0
"""What a param group of Muon says: its route, its matrices, and whether that makes sense."""

from __future__ import annotations

from typing import Any

import torch

from swapio.errors import ConfigError
from swapio.optim.layout import MUON_RULE
from swapio.optim.muon_math import MatrixLayout, adjusted_lr, matrix_layout
from swapio.optim.newton_schulz import resolve_coefficients

ADAM_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}
MUON_DEFAULTS = {"num_heads": 1, "muon_view": "auto"}
MUON_ONLY = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")


def use_muon(group: dict[str, Any]) -> bool:
    """Read the routing of a group; raises ConfigError if it is unknown or contradicts itself."""
    algorithm = group.get("algorithm")
    if algorithm not in (None, "muon", "adamw"):
        raise ConfigError(f"algorithm={algorithm!r} is neither 'muon' nor 'adamw'")
    wanted = group.get("use_muon", algorithm != "adamw")
    if not isinstance(wanted, bool):
        raise ConfigError(f"use_muon={wanted!r} is neither True nor False")
    if algorithm is not None and wanted != (algorithm == "muon"):
        raise ConfigError(f"use_muon={wanted} contradicts algorithm={algorithm!r}")
    return wanted


def route_of(group: dict[str, Any]) -> str:
    """Name of the update rule of a group."""
    return MUON_RULE if use_muon(group) else "adam"


def layout_of(name: str, param: torch.Tensor, group: dict[str, Any]) -> MatrixLayout:
    """The matrices of a parameter; raises ConfigError, naming it, if it has none."""
    return matrix_layout(
        param.shape, view=group["muon_view"], num_heads=group["num_heads"], name=name
    )


def check_muon_group(group: dict[str, Any]) -> None:
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


def planned(group: dict[str, Any]) -> tuple[Any, ...]:
    """Settings of a group that layout and scratch memory follow from."""
    if not group["use_muon"]:
        return (len(group["params"]),)
    triples = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    return (len(group["params"]), triples, group["num_heads"], group["muon_view"])
