# SPDX-License-Identifier: Apache-2.0
"""Where the values of a SwapConfig come from, and which of them wins. Pure; standard library only.

Precedence, lowest first: default; file, dict or Python argument; SWAPIO_* variable; command-line
flag. A SwapConfig remembers for each field what gave it its value.

Invariant: no key is ever ignored. What is not known is an error that names the nearest known key.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapio.config import ARGUMENT_SOURCE, DEFAULT_SOURCE, SwapConfig, field_names, setting_of
from swapio.config_values import format_size
from swapio.errors import ConfigError

if TYPE_CHECKING:
    from swapio.config_deepspeed_rules import DeepSpeedMapping

ENVIRONMENT_PREFIX = "SWAPIO_"
FLAG_SOURCE = "flag"
_VARIABLE_SOURCE = "environment"

OTHER_VARIABLES = frozenset({"SWAPIO_SIMD", "SWAPIO_DISABLE_EXT"})
"""Variables with the prefix that are no setting. Others pass if they resemble no setting."""

_SECTIONS = ("swapio", "swap")


def from_dict(
    data: Mapping[str, Any],
    *,
    source: str = "dict",
    environment: Mapping[str, str] | None = None,
) -> SwapConfig:
    """Build a SwapConfig from swapio's names or DeepSpeed's, with variables on top.

    Args:
        data: Fields of SwapConfig; or the same in a section "swapio"; or a DeepSpeed configuration,
            whole or only its offload_optimizer and aio sections. swapio's names may stand beside
            DeepSpeed's, and win.
        source: What to call it in `sources` and in errors.
        environment: os.environ when None.

    Raises:
        ConfigError: An unknown key, or a value that is not valid.
    """
    mapped, values, origins = _from_mapping(data, source)
    keep_in_ram = "path" in values and values["path"] is None
    config = with_sources(values, origins)
    config = with_environment(config, environment, keep_in_ram=keep_in_ram)
    if mapped.needs_path and config.path is None:
        raise ConfigError(
            f"{mapped.needs_path} is 'nvme' in {source}, but there is no nvme_path: name the "
            "folder for the state"
        )
    return config


def from_file(
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> SwapConfig:
    """Build a SwapConfig from a JSON or TOML file, with variables on top.

    Args:
        path: The file; `~` is expanded.
        kind: "json" or "toml"; None goes by the ending of the name.
        environment: os.environ when None.

    Raises:
        ConfigError: The file cannot be read or parsed, or holds what `from_dict` refuses.
    """
    return from_dict(load_file(path, kind=kind), source=f"file {path}", environment=environment)


def from_env(environment: Mapping[str, str] | None = None) -> SwapConfig:
    """Build a SwapConfig from SWAPIO_* variables alone.

    Raises:
        ConfigError: A variable that is nearly a known one, or a value that is not valid.
    """
    return with_environment(SwapConfig(), environment)


def coerce(value: object, environment: Mapping[str, str] | None = None) -> SwapConfig:
    """Return the SwapConfig that `swap=` means; see SwapConfig.coerce.

    Raises:
        ConfigError: A value of another type, or one that is not valid.
    """
    if isinstance(value, SwapConfig):
        return with_environment(value, environment, keep_in_ram=value.path is None)
    if value is None:
        return with_environment(SwapConfig(), environment, keep_in_ram=True)
    if isinstance(value, Mapping):
        return from_dict(value, environment=environment)
    if isinstance(value, str | os.PathLike):
        if os.fspath(value).endswith((".json", ".toml")):
            return from_file(value, environment=environment)
        return with_environment(SwapConfig(path=value), environment)
    if isinstance(value, list | tuple):
        return with_environment(SwapConfig(path=tuple(value)), environment)
    raise ConfigError(
        f"swap is {value!r}, a {type(value).__name__}; want a folder, a configuration file (.json, "
        ".toml), a dict, a SwapConfig, or None for state in RAM"
    )


def load_file(path: str | os.PathLike[str], *, kind: str | None = None) -> dict[str, Any]:
    """Read a JSON or TOML file into a dict.

    Raises:
        ConfigError: The file cannot be read, is not what its name says, or is no table.
    """
    file = Path(path).expanduser()
    kind = kind or file.suffix.lower().lstrip(".")
    if kind not in ("json", "toml"):
        raise ConfigError(f"configuration file {file}: the name must end in .json or .toml")
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text) if kind == "json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"configuration file {file} is not {kind.upper()}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"configuration file {file} holds a {type(data).__name__}, want a table")
    return data


def with_environment(
    config: SwapConfig,
    environment: Mapping[str, str] | None = None,
    *,
    keep_in_ram: bool = False,
) -> SwapConfig:
    """Return `config` with SWAPIO_* variables on top; values that a flag gave stay.

    Args:
        config: What the variables override.
        environment: os.environ when None.
        keep_in_ram: Do not let SWAPIO_PATH move the state to storage.

    Raises:
        ConfigError: A variable that is nearly a known one, or a value that is not valid.
    """
    found = _variables(os.environ if environment is None else environment)
    changes, sources = {}, config.sources
    for name, text in found.items():
        if sources[name].startswith(FLAG_SOURCE):
            continue
        if keep_in_ram and name in ("path", "path_weights"):
            continue
        sources[name] = f"{_VARIABLE_SOURCE} {variable_of(name)}"
        changes[name] = split_paths(text) if name == "path" else text
    return with_sources(config.to_dict() | changes, sources) if changes else config


def variable_of(name: str) -> str:
    """Return the variable that overrides a field: SWAPIO_HOST_MEMORY for host_memory."""
    return ENVIRONMENT_PREFIX + name.upper()


def split_paths(text: str) -> list[str] | None:
    """Return the folders in text with the system's separator, as in PATH; None for 'none'."""
    return None if text.strip().lower() in ("", "none") else text.split(os.pathsep)


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return text by field; a name that is nearly a known one is refused."""
    known = {variable_of(name): name for name in field_names()}
    found = {}
    for variable, text in environment.items():
        if not text.strip():
            # An empty variable is how a shell takes one back.
            continue
        if variable in known:
            found[known[variable]] = text
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if near:
                raise ConfigError(
                    f"environment variable {variable} is no setting; did you mean {near[0]}?"
                )
    return found


def with_sources(data: Mapping[str, Any], sources: Mapping[str, str]) -> SwapConfig:
    """Build a SwapConfig that knows where its values came from.

    Args:
        data: Values by field.
        sources: Origin by field; fields without one are defaults.

    Raises:
        ConfigError: A value is not valid; the message says where it came from.
    """
    canonical: dict[str, Any] = {}
    for name, value in data.items():
        try:
            canonical[name] = setting_of(name).parse(name, value)
        except ConfigError as error:
            origin = sources.get(name, ARGUMENT_SOURCE)
            where = "" if origin == ARGUMENT_SOURCE else f" (from {origin})"
            raise ConfigError(f"{error}{where}") from None
    config = SwapConfig(**canonical)
    origins = {name: sources.get(name, DEFAULT_SOURCE) for name in field_names()}
    object.__setattr__(config, "_sources", origins)
    return config


def check_names(names: Iterable[str], source: str) -> None:
    """Refuse names that are no field of SwapConfig.

    Raises:
        ConfigError: Names the key, the source and the nearest field.
    """
    known = field_names()
    for name in names:
        if name not in known:
            raise ConfigError(unknown_key(name, source, known))


def unknown_key(key: str, source: str, known: Iterable[str]) -> str:
    """Return the message for a key that nobody knows, with the nearest known one."""
    candidates = list(known)
    near = difflib.get_close_matches(key.lower(), candidates, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(candidates)}"
    return f"unknown key {key!r} in {source}; {hint}"


def _from_mapping(
    data: Mapping[str, Any], source: str
) -> tuple[DeepSpeedMapping, dict[str, Any], dict[str, str]]:
    """Return what DeepSpeed's keys say, all values by field, and the origin of each."""
    from swapio.config_deepspeed import map_deepspeed

    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"key {key!r} in {source} is a {type(key).__name__}; want text")
    given, section = _own_section(data, source)
    known = field_names()
    own = {key: value for key, value in given.items() if key in known}
    theirs = {key: value for key, value in given.items() if key not in known}
    mapped = map_deepspeed(theirs, source=source)
    values = {name: value for name, (value, _) in mapped.settings.items()} | own | section
    origins = {name: f"{source}: {key}" for name, (_, key) in mapped.settings.items()}
    origins |= dict.fromkeys(own, source) | dict.fromkeys(section, f"{source} [swapio]")
    return mapped, values, origins


def _own_section(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the section with swapio's names out of a file that holds other things too."""
    tool = data.get("tool")
    if isinstance(tool, Mapping):
        # pyproject.toml: the other tables belong to other tools.
        section = tool.get("swapio")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{source} has no [tool.swapio] table")
        check_names(section, f"{source} [tool.swapio]")
        return {}, dict(section)
    for name in _SECTIONS:
        section = data.get(name)
        if isinstance(section, Mapping):
            check_names(section, f"{source} [{name}]")
            return {key: value for key, value in data.items() if key != name}, dict(section)
    return dict(data), {}


def describe(config: SwapConfig, *, changed: bool = False) -> str:
    """Return a table of fields, their values and where the values came from.

    Args:
        config: What to show.
        changed: Leave out what is at its default.
    """
    sources = config.sources
    rows = [
        (name, _shown(name, getattr(config, name)), sources[name])
        for name in field_names()
        if not changed or sources[name] != DEFAULT_SOURCE
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows
    )


def _shown(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "(none)"
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value).lower() if isinstance(value, bool) else str(value)
    unit = setting_of(name).unit
    return format_size(value) if unit.startswith("bytes") else str(value)
