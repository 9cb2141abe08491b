# SPDX-License-Identifier: Apache-2.0
"""Looking at the state that runs left in their swap folders, without changing anything.

Invariant: a folder in use is refused: its slots may change while they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from swapio.align import BLOCK_BYTES
from swapio.checksum import hash_bytes
from swapio.commit import FILE_NAMES as COMMIT_NAMES
from swapio.commit import UNWRITTEN, Entry, StepRecord, decode_record
from swapio.errors import CheckpointError, CorruptionError, StoreLockedError
from swapio.leftovers import FOLDER_PREFIX, read_previous
from swapio.locking import try_lock_folder
from swapio.manifest import FILE_NAME, Manifest, restore_groups
from swapio.slotfiles import FOLDER_NAME, file_name
from swapio.striping import SubGroupLayout
from swapio.tables import decode_table


def find_stores(root: Path) -> list[Path]:
    """Return the store folders in a swap path, or the folder itself if it is one."""
    if root.name.startswith(FOLDER_PREFIX) and (root / FILE_NAME).is_file():
        return [root]
    return sorted(path for path in root.glob(f"{FOLDER_PREFIX}*") if (path / FILE_NAME).is_file())


def describe_store(folder: Path) -> dict[str, Any]:
    """Return what the manifest and the commit records of a store say.

    Raises:
        CheckpointError: They cannot be read.
    """
    previous, manifest = read_previous(folder)
    if previous is None or manifest is None:
        raise CheckpointError(f"the manifest of {folder} cannot be read")
    members = [entry for group in manifest.groups for entry in group["sub_groups"]]
    return {
        "path": str(folder),
        "state": manifest.state,
        "durability": manifest.durability,
        "checksum": manifest.checksum,
        "paths": manifest.num_paths,
        "pid": manifest.pid,
        "host": manifest.host,
        "started": manifest.started,
        "commits": list(previous.steps),
        "checkpoint": manifest.checkpoint,
        "sub_groups": [
            {"key": entry["key"], "records": dict(map(tuple, entry["records"]))}
            for entry in members
        ],
        "slots": sum(group["num_slots"] * len(group["sub_groups"]) for group in manifest.groups),
        "bytes": sum(nbytes for entry in members for _, nbytes in entry["records"]),
    }


def verify_store(
    folder: Path, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Read the slots of a store's newest commit and check them; blocks.

    Raises:
        CheckpointError: There is no commit, or the store is on several paths.
        CorruptionError: A table or block differs from what the commit vouches for.
        StoreLockedError: A run uses it.
    """
    _, manifest = read_previous(folder)
    if manifest is None:
        raise CheckpointError(f"the manifest of {folder} cannot be read")
    if manifest.num_paths != 1:
        raise CheckpointError(f"{folder} is one of {manifest.num_paths} paths; only a run reads it")
    lock = try_lock_folder(folder)
    if lock is None:
        raise StoreLockedError(f"{folder} is in use by a run; verify a checkpoint of it instead")
    try:
        record = _newest_commit(folder, manifest)
        nbytes = blocks = 0
        placed = [
            (group, *member) for group, _ in restore_groups(manifest) for member in group.members
        ]
        total = sum(part.nbytes for _, layout, _ in placed for part in layout.layouts)
        for entry, (group, layout, bases) in zip(record.entries, placed, strict=False):
            if entry.slot != UNWRITTEN:
                path = folder / FOLDER_NAME / file_name(group, entry.slot)
                blocks += _verify_slot(path, layout, bases[0], entry)
            nbytes += sum(part.nbytes for part in layout.layouts)
            if progress is not None:
                progress(nbytes, total)
        return {"step": record.step, "bytes": nbytes, "blocks": blocks}
    finally:
        lock.release(remove=False)


def _newest_commit(folder: Path, manifest: Manifest) -> StepRecord:
    found = []
    for name in COMMIT_NAMES:
        path = folder / name
        try:
            record = decode_record(path.read_bytes(), str(path)) if path.is_file() else None
        except CorruptionError:
            continue  # torn by a crash: the other one counts
        if record is not None and record.store_id == bytes.fromhex(manifest.store_id):
            found.append(record)
    if not found:
        raise CheckpointError(f"{folder} has no committed step: nothing in it is meant to last")
    return max(found, key=lambda record: record.sequence)


def _verify_slot(path: Path, layout: SubGroupLayout, base: int, entry: Entry) -> int:
    """Check the table and all blocks of one slot; return the number of blocks."""
    with path.open("rb") as file:
        file.seek(base)
        table = decode_table(layout, file.read(layout.table_bytes), f"{path} at {base}")
        if table.table_hash != entry.table_hash:
            raise CorruptionError(
                f"{path}: slot {entry.slot} of {layout.key!r} holds generation {table.generation}, "
                f"the commit names generation {entry.generation}"
            )
        if not table.has_checksums:
            return 0
        for place in layout.places.values():
            for _, offset, length in place.pieces(0, place.nbytes):
                for start in range(0, length, BLOCK_BYTES):
                    file.seek(base + offset + start)
                    data = file.read(min(BLOCK_BYTES, length - start))
                    if hash_bytes(data) != table.hashes[place.first_block + start // BLOCK_BYTES]:
                        raise CorruptionError(
                            f"{path}: the checksum of block {start // BLOCK_BYTES} of record "
                            f"{place.name!r} of {layout.key!r} differs (at offset "
                            f"{base + offset + start})"
                        )
    return layout.num_blocks
