# SPDX-License-Identifier: Apache-2.0
"""The manifest of a store: its layout, so that a folder explains itself (docs/format.md).

Invariant: it is replaced as a whole (write, fsync, rename, fsync of the folder) and is there
before the first slot file, so that what a killed run leaves can always be told.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swapio.align import BLOCK_BYTES
from swapio.checksum import hash_bytes
from swapio.errors import AioError, CorruptionError
from swapio.store import RecordLayout
from swapio.striping import FileGroup, SubGroupLayout, lay_out

FILE_NAME = "manifest.json"
FORMAT = "swapio-store"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of a store and the run that made it.

    Attributes:
        store_id: 32 hexadecimal digits, new with each `allocate` that discards content.
        durability: "checkpoint", "step" or "power".
        checksum: "xxh3-64" or "none".
        num_paths: Number of folders the store is striped over.
        path_index: Which of them this copy lies in.
        pattern: Path of each block of a stripe period.
        state: "allocating", "open", or "closed" after a clean end.
        pid: Process of the last run.
        host: Its machine.
        started: When it began, seconds since the epoch.
        groups: File groups as plain data, see `describe_groups`.
        checkpoint: The last checkpoint that was saved from, or loaded into, the store; or empty.
    """

    store_id: str
    durability: str
    checksum: str
    num_paths: int
    path_index: int
    pattern: tuple[int, ...]
    state: str
    pid: int
    host: str
    started: float
    groups: tuple[dict[str, Any], ...]
    checkpoint: str = ""


def describe_groups(groups: Sequence[tuple[FileGroup, int]]) -> tuple[dict[str, Any], ...]:
    """Return file groups with their numbers of slots as JSON data."""
    return tuple(
        {
            "name": group.name,
            "num_slots": num_slots,
            "file_bytes": list(group.file_bytes),
            "sub_groups": [_describe_member(layout, bases) for layout, bases in group.members],
        }
        for group, num_slots in groups
    )


def _describe_member(layout: SubGroupLayout, bases: tuple[int, ...]) -> dict[str, Any]:
    return {
        "key": layout.key,
        "records": [[record.name, record.nbytes] for record in layout.layouts],
        "meta_bytes": layout.meta_bytes,
        "phase": layout.phase,
        "table_bytes": layout.table_bytes,
        "region_offsets": list(bases),
        "region_bytes": list(layout.region_bytes),
    }


def restore_groups(manifest: Manifest) -> list[tuple[FileGroup, int]]:
    """Rebuild the file groups and compare every stated number with the computed one.

    Raises:
        CorruptionError: If a number differs.
    """
    restored = []
    for data in manifest.groups:
        members = []
        ends = [0] * manifest.num_paths
        for entry in data["sub_groups"]:
            records = [RecordLayout(name, nbytes) for name, nbytes in entry["records"]]
            layout = lay_out(
                entry["key"], records, entry["meta_bytes"], manifest.pattern, entry["phase"]
            )
            members.append((layout, tuple(ends)))
            ends = [end + size for end, size in zip(ends, layout.region_bytes, strict=True)]
        group = FileGroup(data["name"], tuple(members), tuple(ends))
        if describe_groups([(group, data["num_slots"])])[0] != data:
            raise CorruptionError(f"the manifest places file group {data['name']!r} differently")
        restored.append((group, data["num_slots"]))
    return restored


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of `folder`; blocks until it is on storage.

    Raises:
        AioError: If it cannot be written; the one before stays.
    """
    content = {"format": FORMAT, "version": FORMAT_VERSION, "block_bytes": BLOCK_BYTES}
    content |= asdict(manifest)
    content["hash"] = f"{_hash(content):016x}"
    temporary = folder / f".{FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            file.write(json.dumps(content, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / FILE_NAME)
        sync_folder(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        hint = "The manifest before it is still there"
        raise AioError(error.errno or 0, "write", folder / FILE_NAME, hint=hint) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_manifest(folder: Path) -> Manifest | None:
    """Read and check the manifest of `folder`; None if there is none.

    Raises:
        CorruptionError: If it is damaged, or of a version that this code does not read.
    """
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptionError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptionError(f"{path} is not the manifest of a swapio store")
    if content.get("version") != FORMAT_VERSION or content.get("block_bytes") != BLOCK_BYTES:
        raise CorruptionError(
            f"{path} has format version {content.get('version')!r} with blocks of "
            f"{content.get('block_bytes')!r} bytes; this swapio reads version {FORMAT_VERSION} "
            f"with {BLOCK_BYTES}"
        )
    stated = content.pop("hash", None)
    if stated != f"{_hash(content):016x}":
        raise CorruptionError(f"{path} was changed: its hash differs")
    fields = {name: content[name] for name in Manifest.__dataclass_fields__}
    fields["pattern"] = tuple(fields["pattern"])
    fields["groups"] = tuple(fields["groups"])
    return Manifest(**fields)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(content: dict[str, Any]) -> int:
    return hash_bytes(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
