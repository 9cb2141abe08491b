# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: tags, the latest one, retention, and what crashed saves left.

Invariants: a checkpoint is removed manifest first, so that what is left half-removed is none; a
data folder is removed only if no manifest names it and no process is writing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from swapio.checkpoint.manifest import (
    FILE_NAME,
    FORMAT,
    FORMAT_VERSION,
    CheckpointManifest,
    read_manifest,
)
from swapio.errors import CheckpointError, ConfigError, CorruptionError
from swapio.manifest import sync_folder

_logger = logging.getLogger("swapio.checkpoint")

DATA_PREFIX = "data-"
OWNER_NAME = ".owner"
LATEST = "latest"
# A folder that another rank made may be seen late: attributes are cached on network file systems.
_SEEN_AFTER_SECONDS = 5.0
_UNBORN_SECONDS_MAX = 60.0
# Summaries by path, with what tells whether the manifest is still the one that was read.
_seen: dict[Path, tuple[tuple[int, int, int], Summary]] = {}
_SEEN_MAX = 4096
_DATA = re.compile(r"data-[0-9a-f]{16}")
_UNBORN = re.compile(r"\.[0-9a-f]{16}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}")


def check_tag(tag: str) -> str:
    """Return the tag, or raise ConfigError if it cannot be the name of a folder."""
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise ConfigError(
            f"tag {tag!r} cannot name a checkpoint: use letters, digits and ._+=-, not {LATEST!r}"
        )
    return tag


class Summary(NamedTuple):
    """What the order and the removal of checkpoints need to know of one; not verified.

    Attributes:
        path: Its folder.
        sequence: Grows with each checkpoint of a root.
        saved: When, in seconds since the epoch.
        data: Name of the folder of its files.
    """

    path: Path
    sequence: int
    saved: float
    data: str


def survey(root: Path) -> list[Summary]:
    """Return summaries of the checkpoints under `root`, the oldest first.

    Cheap: a manifest that was looked at before is not read again, because a folder may hold
    hundreds of them and every save asks.
    """
    if not root.is_dir():
        return []
    found = []
    for folder in sorted(root.iterdir()):
        summary = _summary(folder)
        if summary is not None:
            found.append(summary)
    found.sort(key=lambda summary: (summary.sequence, summary.saved))
    return found


def _summary(folder: Path) -> Summary | None:
    path = folder / FILE_NAME
    try:
        signature = _signature(path)
        seen = _seen.get(path)
        if seen is not None and seen[0] == signature:
            return seen[1]
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
        data = str(content["data"])
        if content["version"] != FORMAT_VERSION or not _DATA.fullmatch(data):
            return None
        summary = Summary(folder, int(content["sequence"]), float(content["saved"]), data)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    _remember(path, signature, summary)
    return summary


def note_written(folder: Path, manifest: CheckpointManifest) -> None:
    """Take note of a manifest that was just published, so that it need not be read."""
    path = folder / FILE_NAME
    summary = Summary(folder, manifest.sequence, manifest.saved, manifest.data)
    with contextlib.suppress(OSError):
        _remember(path, _signature(path), summary)


def _signature(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _remember(path: Path, signature: tuple[int, int, int], summary: Summary) -> None:
    while len(_seen) >= _SEEN_MAX:
        _seen.pop(next(iter(_seen)))
    _seen[path] = (signature, summary)


def list_checkpoints(root: Path) -> list[tuple[Path, CheckpointManifest]]:
    """Return the whole checkpoints under `root`, the oldest first; damaged ones are logged."""
    found = []
    if not root.is_dir():
        return []
    for folder in sorted(root.iterdir()):
        if not (folder / FILE_NAME).is_file():
            continue
        manifest = _read_or_log(folder)
        if manifest is not None:
            found.append((folder, manifest))
    found.sort(key=lambda entry: (entry[1].sequence, entry[1].saved))
    return found


def _read_or_log(folder: Path) -> CheckpointManifest | None:
    try:
        return read_manifest(folder)
    except (CheckpointError, CorruptionError) as error:
        _logger.warning("passing over %s: %s", folder, error)
        return None


def find_checkpoint(root: Path, tag: str = LATEST) -> tuple[Path, CheckpointManifest]:
    """Return the folder and manifest of `tag`; of the checkpoint itself if `root` is one.

    Raises:
        CheckpointError: There is none; the message names those there are.
        CorruptionError: Its manifest is damaged.
    """
    if tag == LATEST and (root / FILE_NAME).is_file():
        return root, read_manifest(root)
    if tag == LATEST:
        for summary in reversed(survey(root)):
            manifest = _read_or_log(summary.path)
            if manifest is not None:
                return summary.path, manifest
        raise CheckpointError(f"there is no checkpoint in {root}")
    if not (root / tag / FILE_NAME).is_file():
        tags = [summary.path.name for summary in survey(root)]
        raise CheckpointError(f"there is no checkpoint {tag!r} in {root}; there are {tags}")
    return root / tag, read_manifest(root / tag)


class DataFolder:
    """The folder that one save writes into, locked by a file in it until `close`."""

    def __init__(self, folder: Path, token: str, *, is_creator: bool = True) -> None:
        self.path = folder / f"{DATA_PREFIX}{token}"
        self._is_creator = is_creator
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

    def is_visible(self) -> bool:
        """Whether this process sees what the creator made, perhaps after a moment."""
        deadline = time.monotonic() + _SEEN_AFTER_SECONDS
        while not (self.path / OWNER_NAME).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def discard(self) -> None:
        """Give up what was written: the creator removes it, unless a manifest names it."""
        if self._is_creator and not is_named(self.path):
            self.remove()
        self.close()

    def remove(self) -> None:
        """Remove all files, and the checkpoint's folder if nothing else is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

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
    """Remove data folders that no manifest names and nobody writes; nothing else in `root`."""
    if not root.is_dir():
        return
    for folder in [path for path in root.iterdir() if path.is_dir()]:
        summary = _summary(folder)
        if summary is None and (folder / FILE_NAME).exists():
            continue  # it is damaged: somebody may still want to look at it
        named = None if summary is None else summary.data
        stale = [data for data in folder.glob(f"{DATA_PREFIX}*") if data.name != named]
        stale = [data for data in stale if _is_abandoned(data)]
        stale += [path for path in folder.glob(".*") if _is_unborn(path)]
        for data in stale:
            _logger.info("removing %s, which a save that failed left", data)
            shutil.rmtree(data, ignore_errors=True)
        for temporary in folder.glob(f".{FILE_NAME}.*"):
            temporary.unlink(missing_ok=True)
        if stale and named is None and not any(folder.iterdir()):
            folder.rmdir()


def _is_unborn(path: Path) -> bool:
    """Whether a save was killed before its folder had got its name; a minute is enough for that."""
    if not _UNBORN.fullmatch(path.name) or not path.is_dir():
        return False
    return time.time() - path.stat().st_mtime > _UNBORN_SECONDS_MAX


def _is_abandoned(data: Path) -> bool:
    try:
        fd = os.open(data / OWNER_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not is_named(data)  # unless a save has ended just now
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def is_named(data: Path) -> bool:
    """Whether the manifest beside a data folder names it."""
    try:
        return read_manifest(data.parent).data == data.name
    except (CheckpointError, CorruptionError):
        return False
