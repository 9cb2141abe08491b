# SPDX-License-Identifier: Apache-2.0
"""What earlier runs left: told, and swept where nobody can want it.

Invariant: only files that a store makes are removed, only under their folder's lock, and never a
commit that could be recovered.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swapio.aio import Engine
from swapio.commit import FILE_NAMES as COMMIT_NAMES
from swapio.commitlog import peek_steps
from swapio.errors import CorruptionError, StoreLockedError
from swapio.locking import LOCK_NAME, Deadline, is_claimed, open_locked, try_lock_folder
from swapio.manifest import FILE_NAME as MANIFEST_NAME
from swapio.manifest import Manifest, read_manifest
from swapio.slotfiles import FOLDER_NAME
from swapio.store import PreviousRun

_logger = logging.getLogger("swapio.store")

FOLDER_PREFIX = "swapio-"


def read_previous(folder: Path) -> tuple[PreviousRun | None, Manifest | None]:
    """Return what an earlier run left in a store folder, as far as it can be read."""
    try:
        manifest = read_manifest(folder)
    except CorruptionError as error:
        _logger.warning("%s; what the folder holds cannot be recovered", error)
        return None, None
    if manifest is None:
        return None, None
    previous = PreviousRun(
        was_closed=manifest.state == "closed",
        durability=manifest.durability,
        steps=peek_steps(folder),
        pid=manifest.pid,
        host=manifest.host,
        started=manifest.started,
        checkpoint=manifest.checkpoint,
    )
    return previous, manifest


def sweep_siblings(parent: Path, engine: Engine) -> None:
    """Remove the folders in `parent` of dead runs that left nothing to recover."""
    for folder in sorted(parent.glob(FOLDER_PREFIX + "*")):
        if folder.is_dir() and not is_claimed(folder):
            _sweep(folder, engine)


def _sweep(folder: Path, engine: Engine) -> None:
    lock = try_lock_folder(folder)
    if lock is None:
        return
    is_empty = False
    try:
        if not _has_commits(folder):
            is_empty = _remove_files(folder, engine)
            if is_empty:
                _logger.warning("removed %s, which a dead run left behind", folder)
    except (OSError, StoreLockedError) as error:
        _logger.warning("%s, left behind by a dead run, stays: %s", folder, error)
    finally:
        lock.release(remove=is_empty)


def _has_commits(folder: Path) -> bool:
    # A damaged record counts: somebody may still want to look at it.
    paths = [folder / name for name in COMMIT_NAMES]
    return any(path.is_file() and path.stat().st_size for path in paths)


def _remove_files(folder: Path, engine: Engine) -> bool:
    slots = folder / FOLDER_NAME
    for path in [*slots.glob("*.bin"), *(folder / name for name in COMMIT_NAMES)]:
        if path.is_file():
            # With no wait: writes that still land mean that its run is only just dying.
            file = open_locked(engine, path, Deadline(0.0))
            path.unlink()
            file.close()
    if slots.is_dir():
        slots.rmdir()
    for path in [folder / MANIFEST_NAME, *folder.glob(f".{MANIFEST_NAME}.*")]:
        path.unlink(missing_ok=True)
    return all(path.name == LOCK_NAME for path in folder.iterdir())
