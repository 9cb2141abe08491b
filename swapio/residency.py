# SPDX-License-Identifier: Apache-2.0
"""Resident tagging: which state stays in RAM, by state name, by pattern, or by tensor.

A rule is either a state name (`"momentum_buffer"`), or `parameter:state` where both sides may be
shell patterns (`"*.embed*:exp_avg"`, `"lm_head.weight:*"`), or a tagged parameter tensor, all of
whose state stays.

Invariant: a tagged record is never written between saves, never evicted, and is part of every
checkpoint. What else stays in RAM is the planner's choice, and may change from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from swapio.errors import ConfigError

_TAG = "_swapio_resident"


def tag_resident(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a parameter so that optimizers created afterwards keep its state in RAM.

    Does not block and may be called from any thread. Returns the tensor itself.
    """
    setattr(tensor, _TAG, True)
    return tensor


def untag_resident(tensor: torch.Tensor) -> torch.Tensor:
    """Undo `tag_resident` (or `tensor.swappable = False`) at once; returns the tensor."""
    setattr(tensor, _TAG, False)
    if getattr(tensor, "swappable", True) is False:
        tensor.swappable = True  # type: ignore[attr-defined]
    return tensor


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether `tag_resident` marked the tensor, or an engine set `tensor.swappable = False`."""
    return bool(getattr(tensor, _TAG, False)) or getattr(tensor, "swappable", True) is False


class ResidencyRules:
    """The rules of one optimizer, asked once for each parameter and state name."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._patterns: list[tuple[str, str]] = []
        for rule in rules:
            parameter, colon, state = rule.rpartition(":")
            if not state or (colon and not parameter):
                raise ConfigError(
                    f"resident={rule!r} is neither a state name nor a 'parameter:state' pattern"
                )
            if colon:
                self._patterns.append((parameter, state))
            else:
                self._names.add(state)

    def select(
        self, parameter_name: str, parameter: torch.Tensor | None, states: Iterable[str]
    ) -> frozenset[str]:
        """Return those of `states` that must stay in RAM for this parameter."""
        if parameter is not None and is_resident(parameter):
            return frozenset(states)
        return frozenset(
            state
            for state in states
            if any(fnmatchcase(state, name) for name in self._names)
            or any(
                fnmatchcase(parameter_name, left) and fnmatchcase(state, right)
                for left, right in self._patterns
            )
        )
