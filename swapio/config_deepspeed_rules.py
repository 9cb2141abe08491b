# SPDX-License-Identifier: Apache-2.0
"""What can happen to a key of a DeepSpeed configuration. Pure; standard library only.

A key is mapped (to a setting, or to an argument of the optimizer or scaler), noted (it has no say
over optimizer state here, and the reason is kept), or refused (leaving it out would change what
the user asked for).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swapio.config_values import Parser, flag, parse_size
from swapio.errors import ConfigError


class Note(NamedTuple):
    """What became of one key: "mapped", "noted" or "left to the trainer", and why or to what."""

    key: str
    outcome: str
    text: str


@dataclass
class DeepSpeedMapping:
    """What a DeepSpeed configuration means here.

    Attributes:
        settings: Field of SwapConfig to (value, DeepSpeed's key).
        optimizer: "AdamW", "Adam" or "Muon", or None when the file does not say.
        arguments: Keyword arguments of that optimizer (lr, betas, max_grad_norm, ...).
        groups: Settings of the param groups of Muon: of those with "muon" and those with "adamw".
        scaler: Keyword arguments of swapio.optim.GradScaler; empty unless fp16 is set up.
        uses_scaler: Whether fp16 is on; None when the file does not say.
        stage: ZeRO stage, or None when the file does not say.
        needs_path: The key that puts state on storage, when one does.
        notes: What became of each key that was given.
    """

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    optimizer: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    uses_scaler: bool | None = None
    stage: int | None = None
    needs_path: str | None = None
    notes: list[Note] = field(default_factory=list)

    def set(self, name: str, value: object, key: str) -> None:
        """Give a field of SwapConfig a value that a DeepSpeed key asks for."""
        self.settings[name] = (value, key)
        self.notes.append(Note(key, "mapped", f"{name} = {value!r}"))

    def note(self, key: str, text: str) -> None:
        """Keep why a key has no effect here."""
        self.notes.append(Note(key, "noted", text))


Apply = Callable[[DeepSpeedMapping, str, Any], None]


class Rule(NamedTuple):
    """What happens to one key.

    Attributes:
        outcome: "mapped", "noted" or "refused"; for the reference page.
        text: To what, or why; for the reference page.
        apply: Does it; raises ConfigError with the reason to refuse.
    """

    outcome: str
    text: str
    apply: Apply


def to_field(name: str, parse: Parser | None = None) -> Rule:
    """Return the rule for a key that is a field of SwapConfig under another name."""

    def apply(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
        mapping.set(name, value if parse is None else parse(key, value), key)

    return Rule("mapped", f"`{name}`", apply)


def to_argument(name: str, parse: Parser | None = None) -> Rule:
    """Return the rule for a key that is a keyword argument of the optimizer."""

    def apply(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
        mapping.arguments[name] = value if parse is None else parse(key, value)
        mapping.notes.append(Note(key, "mapped", f"optimizer argument {name}"))

    return Rule("mapped", f"optimizer argument `{name}`", apply)


def to_group(rule: str, name: str) -> Rule:
    """Return the rule for a key that is a setting of Muon's or of its AdamW param groups."""

    def apply(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
        mapping.groups.setdefault(rule, {})[name] = value
        mapping.notes.append(Note(key, "mapped", f"{name} of the param groups stepped by {rule}"))

    return Rule("mapped", f"`{name}` of the param groups stepped by {rule}", apply)


def noted(why: str) -> Rule:
    """Return the rule for a key without effect here."""
    return Rule("noted", why, lambda mapping, key, _: mapping.note(key, why))


def refused_if_on(why: str, otherwise: str = "off, as here") -> Rule:
    """Return the rule for a switch that is refused when on; a section is on unless it says so."""

    def apply(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
        switch = value.get("enabled", bool(value)) if isinstance(value, dict) else value
        on = flag(key, switch)
        if on:
            raise ConfigError(f"{key} is {value!r}: {why}")
        mapping.note(key, otherwise)

    return Rule("refused", f"when on: {why}", apply)


def refused_above(limit: int, why: str, otherwise: str = "off, as here") -> Rule:
    """Return the rule for a number that is refused above `limit`."""

    def apply(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
        if parse_size(key, value, minimum=-1) > limit:
            raise ConfigError(f"{key} is {value!r}: {why}")
        mapping.note(key, otherwise)

    return Rule("refused", f"above {limit}: {why}", apply)


def custom(text: str, apply: Apply, *, outcome: str = "mapped") -> Rule:
    """Return a rule for a key that is treated in a way of its own."""
    return Rule(outcome, text, apply)
