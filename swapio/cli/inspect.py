# SPDX-License-Identifier: Apache-2.0
"""`swapio inspect`: what a checkpoint, or the state that a run left, consists of."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint or a run's swap folder consists of",
        description="Reads manifests and commit records only; nothing is changed.",
    )
    parser.add_argument("dir", metavar="DIR", help="a checkpoint, a folder of them, or a swap path")
    parser.add_argument("--tag", help="show the parameters of this checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print tables; 0 unless there is nothing."""
    from swapio.checkpoint import find_checkpoint, list_checkpoints
    from swapio.checkpoint.manifest import FILE_NAME
    from swapio.checkpoint.survey import describe_store, find_stores
    from swapio.errors import CheckpointError

    root = Path(args.dir).expanduser()
    stores = [describe_store(folder) for folder in find_stores(root)]
    if args.tag is not None or ((root / FILE_NAME).is_file() and not stores):
        _, manifest = find_checkpoint(root, args.tag or "latest")
        _show_one(_describe(manifest, parameters=True), as_json=args.json)
        return 0
    found = [_describe(m, parameters=False) for _, m in list_checkpoints(root)]
    if not found and not stores:
        raise CheckpointError(f"there is neither a checkpoint nor a run's state in {root}")
    if args.json:
        print(json.dumps({"checkpoints": found, "runs": stores}, indent=2))
        return 0
    for entry in found:
        print(
            f"checkpoint {entry['tag']:24} step {entry['step']:>8}  {entry['saved']}  "
            f"{entry['num_parameters']:>7} parameters {entry['bytes'] / 1e9:9.3f} GB"
        )
    for store in stores:
        print(
            f"run        {store['path']}: {store['state']}, durability {store['durability']}, "
            f"commits {store['commits']}, {len(store['sub_groups'])} sub-groups, "
            f"{store['slots']} slots, {store['bytes'] / 1e9:.3f} GB a set"
        )
        if store["checkpoint"]:
            print(f"           last checkpoint {store['checkpoint']}")
    return 0


def _describe(manifest: Any, *, parameters: bool) -> dict[str, Any]:
    records = [record for pack in manifest.packs for record in pack.records.values()]
    facts: dict[str, Any] = {
        "tag": manifest.tag,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved)),
        "world_size": manifest.world_size,
        "num_parameters": len(manifest.parameters),
        "num_files": len(manifest.files),
        "bytes": sum(record.nbytes for record in records),
        "payload_bytes": len(manifest.payload),
    }
    if parameters:
        facts["groups"] = [group["hyper"] for group in manifest.groups]
        facts["parameters"] = [
            {
                "name": entry.name,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "step": entry.step,
                "records": {
                    name: record.dtype
                    for run in entry.runs[:1]
                    for name, record in manifest.packs[run.pack].records.items()
                },
                "runs": len(entry.runs),
            }
            for entry in manifest.parameters
        ]
    return facts


def _show_one(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if name not in ("parameters", "groups"):
            print(f"{name:16} {value}")
    for number, group in enumerate(facts["groups"]):
        print(f"group {number:<10} {json.dumps(group)}")
    for entry in facts["parameters"]:
        records = " ".join(f"{name}:{dtype}" for name, dtype in entry["records"].items())
        print(f"  {entry['name']}  {entry['shape']}  {entry['dtype']}  step {entry['step']}")
        print(f"      {records}  in {entry['runs']} runs")
