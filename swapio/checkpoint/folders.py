# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: tags, the latest one, retention, and what crashed saves left.

Invariants: a checkpoint is removed manifest first, so that what is left half-removed is none; a
data folder is removed only if no manifest names it and no process is writing it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from swapio.checkpoint.manifest import FILE_NAME, CheckpointManifest, read_manifest
from swapio.errors import CheckpointError, ConfigError, CorruptionError
from swapio.manifest import sync_folder

_logger = logging.getLogger("swapio.checkpoint")

DATA_PREFIX = "data-"
OWNER_NAME = ".owner"
LATEST = "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}")


def check_tag(tag: str) -> str:
    """Return the tag, or raise ConfigError if it cannot be the name of a folder."""
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise ConfigError(
            f"tag {tag!r} cannot name a checkpoint: use letters, digits and ._+=-, not {LATEST!r}"
        )
    return tag


def list_checkpoints(root: Path) -> list[tuple[Path, CheckpointManifest]]:
    """Return the whole checkpoints under `root`, the oldest first; damaged ones are logged."""
    found = []
    if not root.is_dir():
        return []
    for folder in sorted(root.iterdir()):
        if not (folder / FILE_NAME).is_file():
            continue
        try:
            found.append((folder, read_manifest(folder)))
        except (CheckpointError, CorruptionError) as error:
            _logger.warning("passing over %s: %s", folder, error)
    found.sort(key=lambda entry: (entry[1].sequence, entry[1].saved))
    return found


def find_checkpoint(root: Path, tag: str = LATEST) -> tuple[Path, CheckpointManifest]:
    """Return the folder and manifest of `tag`; of the checkpoint itself if `root` is one.

    Raises:
        CheckpointError: There is none; the message names those there are.
        CorruptionError: Its manifest is damaged.
    """
    if tag == LATEST and (root / FILE_NAME).is_file():
        return root, read_manifest(root)
    if tag == LATEST:
        found = list_checkpoints(root)
        if not found:
            raise CheckpointError(f"there is no checkpoint in {root}")
        return found[-1]
    if not (root / tag / FILE_NAME).is_file():
        tags = [folder.name for folder, _ in list_checkpoints(root)]
        raise CheckpointError(f"there is no checkpoint {tag!r} in {root}; there are {tags}")
    return root / tag, read_manifest(root / tag)


class DataFolder:
    """The folder that one save writes into, locked by a file in it until `close`."""

    def __init__(self, folder: Path, token: str, *, is_creator: bool = True) -> None:
        self.path = folder / f"{DATA_PREFIX}{token}"
        self._fd = -1
        if is_creator:
            # Locked before it has the name by which a sweep would look at it.
            unborn = folder / f".{token}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                unborn.mkdir()
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(unborn / OWNER_NAME, flags, 0o644)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                unborn.rename(self.path)
            except BaseException:
                shutil.rmtree(unborn, ignore_errors=True)
                self.discard()
                raise

    def discard(self) -> None:
        """Remove everything that was written, and the checkpoint's folder if nothing is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        try:
            self.path.parent.rmdir()
        except OSError:
            return

    def close(self) -> None:
        """Unlock; the lock file is not needed any more."""
        if self._fd >= 0:
            (self.path / OWNER_NAME).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def new_token() -> str:
    """Return a name that no other save has."""
    return secrets.token_hex(8)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; its slots are free when this returns."""
    (folder / FILE_NAME).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)


def remove_stale(root: Path) -> None:
    """Remove data folders that no manifest names and nobody writes."""
    if not root.is_dir():
        return
    for folder in [path for path in root.iterdir() if path.is_dir()]:
        named = None
        if (folder / FILE_NAME).is_file():
            try:
                named = read_manifest(folder).data
            except (CheckpointError, CorruptionError):
                continue  # somebody may still want to look at it
        for data in folder.glob(f"{DATA_PREFIX}*"):
            if data.name != named and _is_abandoned(data):
                _logger.info("removing %s, which a save that failed left", data)
                shutil.rmtree(data, ignore_errors=True)
        for temporary in folder.glob(f".{FILE_NAME}.*"):
            temporary.unlink(missing_ok=True)
        if named is None and not any(folder.iterdir()):
            folder.rmdir()


def _is_abandoned(data: Path) -> bool:
    try:
        fd = os.open(data / OWNER_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not _is_named(data)  # unless a save has ended just now
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_named(data: Path) -> bool:
    try:
        return read_manifest(data.parent).data == data.name
    except (CheckpointError, CorruptionError):
        return False
