# SPDX-License-Identifier: Apache-2.0
"""`swapio report`: a self-contained HTML page about a run, from the trace it wrote."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from swapio.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "report",
        help="a page about a run: bytes, bandwidth, stalls, residency, wear, time line",
        description="Makes one HTML file, which needs nothing else, of a trace that a run wrote "
        "(SwapConfig(trace=FILE)), or of all traces in a folder (one for each rank).",
    )
    parser.add_argument("source", metavar="DIR_OR_TRACE", help="trace, or folder with traces")
    parser.add_argument("--output", metavar="FILE", help="page to write; default: beside the trace")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page; ConfigError where there is no trace."""
    from swapio.cli.report_page import page
    from swapio.cli.report_run import TracedRun

    files = find_traces(Path(args.source))
    runs = [TracedRun(file.stem, _load(file)) for file in files]
    if args.json:
        print(json.dumps([run.summary() for run in runs], indent=2))
        return 0
    output = Path(args.output) if args.output else files[0].with_suffix(".html")
    output.write_text(page(runs), encoding="utf-8")
    print(f"{output}: {len(runs)} trace{'s' if len(runs) > 1 else ''}")
    return 0


def find_traces(source: Path) -> list[Path]:
    """Return the trace, or those in a folder, oldest first.

    Raises:
        ConfigError: There is none.
    """
    if source.is_file():
        _load(source)
        return [source]
    if not source.is_dir():
        raise ConfigError(f"{source}: no such file or folder; want a trace or a folder of traces")
    found = []
    for file in sorted(source.glob("*.json")):
        try:
            _load(file)
        except ConfigError:
            continue
        found.append(file)
    if not found:
        raise ConfigError(
            f"{source}: no trace in this folder; run with SwapConfig(trace='{source}/trace.json')"
        )
    return found


def _load(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found["otherData"]["swapio"], dict) and "traceEvents" in found:
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a trace of swapio ({error!r})") from error
    raise ConfigError(f"{file} is not a trace of swapio")
