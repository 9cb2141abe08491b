# SPDX-License-Identifier: Apache-2.0
"""`swapio config show FILE`: the effective value of every setting, and where it came from."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swapio.config_deepspeed_rules import DeepSpeedMapping


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "config",
        help="the effective value of every setting and where it came from",
        description="Reads a configuration file of swapio's (JSON or TOML) or DeepSpeed's, applies "
        "SWAPIO_* variables, and shows every setting with its origin.",
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    show = actions.add_parser("show", help="show a file's effective values")
    show.add_argument(
        "file", metavar="FILE", nargs="?", help="configuration file; defaults and variables if none"
    )
    show.add_argument("--changed", action="store_true", help="leave out what is at its default")
    show.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings; a file that is refused raises ConfigError."""
    from swapio.config import SwapConfig
    from swapio.config_sources import describe, from_file

    config = SwapConfig.from_env() if args.file is None else from_file(args.file)
    mapping = None if args.file is None else _deepspeed(args.file)
    if args.json:
        values, sources = config.to_dict(), config.sources
        found: dict[str, Any] = {
            name: {"value": value, "source": sources[name]}
            for name, value in values.items()
            if not args.changed or sources[name] != "default"
        }
        print(json.dumps({"settings": found, "deepspeed": _plain(mapping)}, indent=2))
        return 0
    print(describe(config, changed=args.changed))
    if mapping is not None:
        print(_text(mapping))
    return 0


def _deepspeed(file: str) -> DeepSpeedMapping | None:
    """Return what DeepSpeed's keys of a file mean, None when it has none."""
    from swapio.config import field_names
    from swapio.config_deepspeed import map_deepspeed
    from swapio.config_sources import load_file

    own = {*field_names(), "swapio", "swap", "tool"}
    data = load_file(file)
    theirs = {key: value for key, value in data.items() if key not in own}
    # A pyproject.toml has tables of other tools; they are none of DeepSpeed's.
    return map_deepspeed(theirs) if theirs and "tool" not in data else None


def _text(mapping: DeepSpeedMapping) -> str:
    lines = [""]
    if mapping.optimizer or mapping.arguments:
        arguments = ", ".join(f"{name}={value!r}" for name, value in mapping.arguments.items())
        lines.append(f"optimizer: swapio.optim.{mapping.optimizer or '...'}({arguments})")
    for rule, settings in mapping.groups.items():
        lines.append(f"param groups stepped by {rule}: {settings}")
    if mapping.scaler:
        scaler = ", ".join(f"{name}={value!r}" for name, value in mapping.scaler.items())
        lines.append(f"scaler: swapio.optim.GradScaler({scaler})")
    if mapping.stage is not None:
        lines.append(f"ZeRO stage: {mapping.stage}")
    width = max((len(note.key) for note in mapping.notes), default=0)
    lines.append("DeepSpeed's keys:")
    lines += [f"  {note.key:<{width}}  {note.outcome}: {note.text}" for note in mapping.notes]
    return "\n".join(lines)


def _plain(mapping: DeepSpeedMapping | None) -> dict[str, Any] | None:
    if mapping is None:
        return None
    return {
        "optimizer": mapping.optimizer,
        "arguments": mapping.arguments,
        "groups": mapping.groups,
        "scaler": mapping.scaler,
        "stage": mapping.stage,
        "keys": [note._asdict() for note in mapping.notes],
    }
