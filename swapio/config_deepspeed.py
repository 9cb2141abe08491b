# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration, read as it is. Pure; standard library only.

A whole ds_config file, or only its sections, or the bare keys of its offload_optimizer and aio
sections, become settings of SwapConfig and arguments of the optimizer.

Invariants:
    Every key is mapped, noted with a reason, or refused by name with a reason; refusals are
    collected, so that one error names them all.
    "auto" leaves a value to swapio or to the trainer; None is as if the key were not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from swapio.config import field_names
from swapio.config_deepspeed_keys import OPTIMIZER_PARAMS, SECTIONS, TOP_LEVEL
from swapio.config_deepspeed_rules import DeepSpeedMapping, Note, Rule
from swapio.config_sources import load_file, unknown_key
from swapio.config_values import flag
from swapio.errors import ConfigError

_OPTIMIZERS = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "cpuadam": "AdamW",
    "deepspeedcpuadam": "AdamW",
    "muon": "Muon",
}
_OPTIMIZER_SECTION = {"type", "params", "legacy_fusion"}
_NESTED = {"offload_optimizer", "offload_param"}

# Keys that may stand by themselves, without their section; the first table that has one wins.
_BARE: dict[str, tuple[str, Rule]] = {
    key: (section, rule)
    for section in ("bf16", "zero_optimization", "aio", "offload_optimizer")
    for key, rule in SECTIONS[section].items()
    if key not in ("enabled", *TOP_LEVEL)
}


def map_deepspeed_file(path: str | os.PathLike[str]) -> DeepSpeedMapping:
    """Map a ds_config file; for the parts that are no SwapConfig (optimizer, scaler, stage).

    Raises:
        ConfigError: The file cannot be read, or holds what `map_deepspeed` refuses.
    """
    return map_deepspeed(load_file(path), source=f"file {path}")


def map_deepspeed(data: Mapping[str, Any], *, source: str = "dict") -> DeepSpeedMapping:
    """Map a DeepSpeed configuration.

    Args:
        data: A whole ds_config, some of its sections, or bare keys of its sections.
        source: What to call it in errors.

    Raises:
        ConfigError: Keys that nobody knows, each with the nearest known one, or that swapio
            refuses, each with the reason.
    """
    mapper = _Mapper(source)
    mapper.top(data)
    if mapper.problems:
        raise ConfigError("; ".join(mapper.problems))
    if mapper.mapping.uses_scaler is False:
        mapper.mapping.scaler.clear()
    return mapper.mapping


def known_keys() -> tuple[str, ...]:
    """Return the keys and sections that may stand at the top."""
    return tuple(dict.fromkeys([*SECTIONS, "optimizer", *TOP_LEVEL, *_BARE]))


class _Mapper:
    """Walks a configuration and collects what it means and what is wrong with it."""

    def __init__(self, source: str) -> None:
        self.mapping = DeepSpeedMapping()
        self.problems: list[str] = []
        self._source = source

    def top(self, data: Mapping[str, Any]) -> None:
        for key in _in_order(data):
            value = data[key]
            if value is None:
                continue
            if key == "zero_optimization" and isinstance(value, bool):
                # The form of old files: true was stage 1.
                self._apply(SECTIONS[key]["stage"], key, int(value))
            elif key == "optimizer":
                self._optimizer(value)
            elif key in SECTIONS:
                self._section(key, value)
            elif key in TOP_LEVEL:
                self._apply(TOP_LEVEL[key], key, value)
            elif key in _BARE:
                self._apply(_BARE[key][1], key, value)
            else:
                known = [*field_names(), *known_keys()]
                self.problems.append(unknown_key(key, self._source, known))

    def _section(self, name: str, value: object, prefix: str = "") -> None:
        where = prefix + name
        if not isinstance(value, Mapping):
            self.problems.append(f"{where} is {value!r} in {self._source}; want a section")
            return
        rules = SECTIONS[name]
        for key in _in_order(value):
            item = value[key]
            if item is None:
                continue
            if name == "zero_optimization" and key in _NESTED:
                self._section(key, item, f"{where}.")
            elif key in rules:
                self._apply(rules[key], f"{where}.{key}", item)
            else:
                known = [*rules, *(_NESTED if name == "zero_optimization" else ())]
                self.problems.append(unknown_key(key, f"{where} of {self._source}", known))

    def _optimizer(self, value: object) -> None:
        if not isinstance(value, Mapping):
            self.problems.append(f"optimizer is {value!r} in {self._source}; want a section")
            return
        for key in value:
            if key not in _OPTIMIZER_SECTION:
                where = f"optimizer of {self._source}"
                self.problems.append(unknown_key(str(key), where, sorted(_OPTIMIZER_SECTION)))
        params = value.get("params") or {}
        if not isinstance(params, Mapping):
            self.problems.append(f"optimizer.params is {params!r}; want a section")
            return
        self._optimizer_type(value.get("type"), params)
        for key, item in params.items():
            if key in OPTIMIZER_PARAMS and item is not None:
                self._apply(OPTIMIZER_PARAMS[key], f"optimizer.params.{key}", item)
            elif key not in OPTIMIZER_PARAMS:
                where = f"optimizer.params of {self._source}"
                self.problems.append(unknown_key(str(key), where, OPTIMIZER_PARAMS))

    def _optimizer_type(self, given: object, params: Mapping[str, Any]) -> None:
        if given is None or given == "auto":
            return
        name = _OPTIMIZERS.get(str(given).lower())
        if name is None:
            self.problems.append(
                f"optimizer.type is {given!r}: swapio has AdamW, Adam and Muon; others have no "
                "kernel here"
            )
            return
        mode = params.get("adam_w_mode", True)
        try:
            # DeepSpeed's "Adam" decays like AdamW unless adam_w_mode is false.
            if str(given).lower() == "adam" and mode != "auto" and not flag("adam_w_mode", mode):
                name = "Adam"
        except ConfigError as error:
            self.problems.append(str(error))
        self.mapping.optimizer = name
        self.mapping.notes.append(Note("optimizer.type", "mapped", f"swapio.optim.{name}"))

    def _apply(self, rule: Rule, key: str, value: object) -> None:
        if isinstance(value, str) and value.strip().lower() == "auto":
            self.mapping.notes.append(Note(key, "left to the trainer", "the value is 'auto'"))
            return
        try:
            rule.apply(self.mapping, key, value)
        except ConfigError as error:
            self.problems.append(f"{error} (in {self._source})")


def _in_order(data: Mapping[str, Any]) -> list[str]:
    """Return the keys, those first that decide what others mean: device, a static loss_scale."""
    return sorted((str(key) for key in data), key=lambda key: key not in ("device", "loss_scale"))
