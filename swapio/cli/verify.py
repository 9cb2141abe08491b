# SPDX-License-Identifier: Apache-2.0
"""`swapio verify`: read a checkpoint, or the committed state of a run, and check every checksum."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "verify",
        help="check every checksum of a checkpoint or of a run's committed state",
        description="Reads everything and compares it with its checksums. Exit status 1 if "
        "anything differs.",
    )
    parser.add_argument("dir", metavar="DIR", help="a checkpoint, a folder of them, or a swap path")
    parser.add_argument("--tag", help="only this checkpoint (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and print a table; 0 if all is well."""
    from swapio.aio import Engine
    from swapio.checkpoint.survey import find_stores

    root = Path(args.dir).expanduser()
    results: list[dict[str, Any]] = []
    with Engine() as engine:
        progress = None if args.json or not sys.stderr.isatty() else _show
        results += _verify_checkpoints(root, args.tag, engine, progress)
        for folder in find_stores(root) if args.tag is None else ():
            results.append(_verify_store(folder, progress))
    if progress is not None:
        print(file=sys.stderr)
    if not results:
        from swapio.errors import CheckpointError

        raise CheckpointError(f"there is neither a checkpoint nor a run's state in {root}")
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            _print(result)
    return int(any(result["problems"] for result in results))


def _verify_checkpoints(root: Path, tag: str | None, engine: Any, progress: Any) -> list[Any]:
    from swapio.checkpoint import find_checkpoint, verify_checkpoint
    from swapio.checkpoint.manifest import FILE_NAME, FORMAT
    from swapio.errors import CheckpointError, CorruptionError

    if tag is not None:
        folders = [find_checkpoint(root, tag)[0]]
    else:
        candidates = [root, *sorted(path for path in root.glob("*") if path.is_dir())]
        folders = [path for path in candidates if _format_of(path / FILE_NAME) == FORMAT]
    results = []
    for folder in folders:
        result: dict[str, Any] = {"kind": "checkpoint", "path": str(folder), "problems": []}
        try:
            _, manifest = find_checkpoint(folder)
            records = [r for pack in manifest.packs for r in pack.records.values()]
            result |= {"step": manifest.step, "bytes": sum(r.nbytes for r in records)}
            result["blocks"] = sum(len(r.hashes) for r in records)
            found = verify_checkpoint(folder, manifest, engine, progress)
            result["problems"] = [problem.message for problem in found]
        except (CheckpointError, CorruptionError) as error:
            result["problems"] = [str(error)]
        results.append(result)
    return results


def _format_of(path: Path) -> str | None:
    # A damaged manifest is still to be told of: what cannot be read counts as a checkpoint's.
    from swapio.checkpoint.manifest import FORMAT

    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return FORMAT
    return content.get("format") if isinstance(content, dict) else FORMAT


def _verify_store(folder: Path, progress: Any) -> dict[str, Any]:
    from swapio.checkpoint.survey import verify_store
    from swapio.errors import SwapioError

    result: dict[str, Any] = {"kind": "run", "path": str(folder), "problems": []}
    try:
        facts = verify_store(folder, progress)
    except SwapioError as error:
        result["problems"] = [str(error)]
        return result
    return result | facts


def _print(result: dict[str, Any]) -> None:
    state = "DAMAGED" if result["problems"] else "ok"
    nbytes = result.get("bytes", 0)
    print(
        f"{state:8} {result['kind']:11} step {result.get('step', '?'):>8}  "
        f"{result.get('blocks', 0):>7} blocks {nbytes / 1e9:9.3f} GB  {result['path']}"
    )
    for problem in result["problems"]:
        print(f"         {problem}")


def _show(done: int, total: int) -> None:
    print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr)
