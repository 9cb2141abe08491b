# SPDX-License-Identifier: Apache-2.0
"""The command `swapio`: one module of this package per sub-command, loaded when it is needed.

A sub-command's module offers `add_parser(subparsers)`, which sets `run` as the parser's default,
and `run(args) -> int`, the exit status. Errors that swapio raises on purpose become one line on
stderr and status 1; `SWAPIO_TRACEBACK=1` shows where they came from.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from swapio.errors import SwapioError

# Command to module of this package.
COMMANDS = {
    "info": "info",
    "bench": "bench",
    "tune": "tune",
    "plan": "plan",
    "verify": "verify",
    "inspect": "inspect",
    "config": "config_show",
    "report": "report",
    "demo": "demo",
}


def _build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swapio", description="Optimizer state on NVMe, with exact numerics."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for command in commands:
        importlib.import_module(f"swapio.cli.{COMMANDS[command]}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        argv: The arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 for success, 1 for a failure that was reported, 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Only the sub-command that was asked for is loaded; help lists them all.
    wanted = [arguments[0]] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    parser = _build_parser(wanted)
    args = parser.parse_args(arguments)
    if args.version:
        from swapio import __version__

        print(f"swapio {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        status = int(args.run(args))
        sys.stdout.flush()  # a reader that went away is noticed here, not in the last flush
        return status
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; the interpreter's last flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (SwapioError, OSError) as error:
        if os.environ.get("SWAPIO_TRACEBACK"):
            raise
        print(f"swapio {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
