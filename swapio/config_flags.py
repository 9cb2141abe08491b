# SPDX-License-Identifier: Apache-2.0
"""Command-line flags for scripts that use argparse: one for each setting. Standard library only.

    parser = argparse.ArgumentParser()
    swapio.config_flags.add_arguments(parser)           # --swap-path, --swap-host-memory, ...
    config = swapio.config_flags.from_arguments(parser.parse_args())

Invariant: a flag that is not given changes nothing, so that files and variables keep their say.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from swapio.config import SwapConfig, field_names, setting_of
from swapio.config_sources import (
    FLAG_SOURCE,
    from_file,
    split_paths,
    with_environment,
    with_sources,
)
from swapio.errors import ConfigError


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    prefix: str = "swap",
    only: Collection[str] | None = None,
) -> None:
    """Add a flag for every setting, and one for a configuration file, in a group of their own.

    Args:
        parser: Where they are added. Switches get a --no-... twin.
        prefix: What the flags begin with: --swap-path; "" for --path.
        only: Fields that get a flag; None for all.
    """
    group = parser.add_argument_group("optimizer state (swapio)")
    group.add_argument(
        flag_of("config", prefix),
        dest=_dest("config", prefix),
        metavar="FILE",
        help="settings from a JSON or TOML file of swapio's or DeepSpeed's; other flags win",
    )
    for name in field_names() if only is None else only:
        about = setting_of(name)
        options: dict[str, Any] = {
            "dest": _dest(name, prefix),
            "default": None,
            "help": _help(name, about.doc),
        }
        if name == "path":
            options |= {"action": "append", "metavar": "DIR", "type": _folders}
        elif about.unit == "true or false":
            options |= {"action": argparse.BooleanOptionalAction}
        else:
            options |= {"metavar": _metavar(name, about.unit), "type": _checked(name)}
        group.add_argument(flag_of(name, prefix), **options)


def from_arguments(
    namespace: argparse.Namespace,
    *,
    prefix: str = "swap",
    environment: Mapping[str, str] | None = None,
) -> SwapConfig:
    """Build a SwapConfig from parsed flags, over SWAPIO_* variables, over the file they name.

    Args:
        namespace: What parse_args returned.
        prefix: The one that add_arguments was given.
        environment: os.environ when None.

    Raises:
        ConfigError: The file or a value is not valid.
    """
    file = getattr(namespace, _dest("config", prefix), None)
    if file is None:
        config = with_environment(SwapConfig(), environment)
    else:
        config = from_file(file, environment=environment)
    changes, sources = {}, config.sources
    for name in field_names():
        value = getattr(namespace, _dest(name, prefix), None)
        if value is not None:
            changes[name] = _joined(value) if name == "path" else value
            sources[name] = f"{FLAG_SOURCE} {flag_of(name, prefix)}"
    return with_sources(config.to_dict() | changes, sources) if changes else config


def flag_of(name: str, prefix: str = "swap") -> str:
    """Return the flag of a field: --swap-host-memory; swap_gradients is --swap-gradients."""
    words = name if not prefix or name.startswith(f"{prefix}_") else f"{prefix}-{name}"
    return f"--{words.replace('_', '-')}"


def _dest(name: str, prefix: str) -> str:
    # Apart from what the script calls its own values, also without a prefix.
    return f"{prefix.replace('-', '_') or 'swapio'}__{name}"


def _checked(name: str) -> Callable[[str], str]:
    """Return a type for argparse that refuses a bad value where the flag is parsed."""

    def check(text: str) -> str:
        try:
            setting_of(name).parse(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def _folders(text: str) -> list[str]:
    return split_paths(text) or []


def _joined(given: list[list[str]]) -> list[str] | None:
    return [folder for folders in given for folder in folders] or None


def _metavar(name: str, unit: str) -> str:
    words = _choices(name)
    if name == "pin_memory":
        words = ("true", "false", "auto")
    if words:
        return "{" + ",".join(words) + "}"
    if unit == "bytes per second":
        return "RATE"
    kind = unit.split(",")[0].split()[0].upper()
    return {"BYTES": "SIZE", "ELEMENTS": "N", "FLOAT32": "DTYPE"}.get(kind, kind)


def _choices(name: str) -> tuple[str, ...]:
    hint = typing.get_type_hints(SwapConfig)[name]
    is_words = typing.get_origin(hint) is typing.Literal
    return typing.get_args(hint) if is_words else ()


def _help(name: str, doc: str) -> str:
    default = SwapConfig.__dataclass_fields__[name].default
    # argparse expands % itself.
    return f"{doc} Default: {default}.".replace("%", "%%")
