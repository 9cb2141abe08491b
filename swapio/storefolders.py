# SPDX-License-Identifier: Apache-2.0
"""The folders of one store: names, locks, manifest, slot files and commit files, as one owner.

Invariant: what is in the folders belongs to this object from construction to `close`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swapio.aio import Engine
from swapio.checksum import hash_bytes
from swapio.commit import FILE_NAMES as COMMIT_NAMES
from swapio.commitlog import CommitLog
from swapio.errors import AioError, CheckpointError, ConfigError, SwapioError
from swapio.filesystem import note_filesystem, usable_folder
from swapio.leftovers import FOLDER_PREFIX, read_previous, sweep_siblings
from swapio.locking import Deadline, FolderLock, claim_name, disclaim
from swapio.manifest import FILE_NAME, Manifest, describe_groups, sync_folder, write_manifest
from swapio.slotfiles import SlotFiles
from swapio.store import Durability, PreviousRun
from swapio.striping import FileGroup, stripe_pattern

NAMESPACE_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"


class StoreFolders:
    """Creates and locks a folder on each path; waits for a run that uses it, or is dying.

    Args:
        paths: One path or several.
        engine: Opens the files.
        namespace: Tells stores of several processes apart.
        lock_timeout: Seconds to wait.
        weights: Share of each path; equal by default. A function is asked for them, unless an
            earlier run's commits lie there: those keep their pattern.
        num_commit_files: Files that commit records take turns in.

    Attributes:
        folders: The folder on each path.
        pattern: Path of each block of a stripe period.
        previous: What an earlier run left, or None.
        previous_manifest: Its manifest.
        files: The slot files.
        log: The commit files.
        store_id: Names the content; 32 hexadecimal digits.
        checkpoint: The last checkpoint, for the manifest.

    Raises:
        ConfigError: If an argument or a path is unusable.
        StoreLockedError: If a folder stays in use.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        engine: Engine,
        *,
        namespace: str,
        lock_timeout: float,
        weights: Sequence[float] | Callable[[], Sequence[float]] | None,
        num_commit_files: int = 2,
    ) -> None:
        parents = _usable_parents(paths)
        if isinstance(weights, Sequence) and len(weights) != len(parents):
            raise ConfigError(f"{len(weights)} weights for {len(parents)} paths")
        self.store_id = secrets.token_hex(16)
        self._started = time.time()
        name = claim_name(parents, _folder_name(namespace))
        self.folders = [parent / name for parent in parents]
        self._locks: list[FolderLock] = []
        self._engine = engine
        try:
            deadline = Deadline(lock_timeout)
            # In one order for everybody: two runs with the same paths never wait for each other.
            for folder in sorted(self.folders):
                self._locks.append(FolderLock(folder, deadline))
            for parent, folder in zip(parents, self.folders, strict=True):
                sweep_siblings(parent, engine)
                note_filesystem(folder)
            self.previous, self.previous_manifest = _find_previous(self.folders)
            self.pattern = self._choose_pattern(weights)
            self.checkpoint = "" if self.previous is None else self.previous.checkpoint
            self.files = SlotFiles(engine, self.folders, lock_timeout)
            self.log = CommitLog(engine, self.folders[0], lock_timeout, num_commit_files)
        except BaseException as error:
            self.unlock(remove=False)
            if isinstance(error, OSError) and not isinstance(error, SwapioError):
                path = error.filename or self.folders[0]
                raise AioError(error.errno or 0, "set-up", path) from error
            raise

    def _choose_pattern(
        self, weights: Sequence[float] | Callable[[], Sequence[float]] | None
    ) -> tuple[int, ...]:
        if callable(weights):
            manifest, previous = self.previous_manifest, self.previous
            same = manifest is not None and manifest.num_paths == len(self.folders)
            if manifest is not None and same and previous is not None and previous.steps:
                return manifest.pattern
            weights = weights()
        return stripe_pattern(weights or [1.0] * len(self.folders))

    def require_same_order(self) -> None:
        """Check that the folders are those of the earlier run, in its order.

        Raises:
            CheckpointError: If one is missing, strange, or at another place.
        """
        wanted = self.previous_manifest
        for index, folder in enumerate(self.folders):
            found = read_previous(folder)[1]
            if wanted is None or found is None or found.store_id != wanted.store_id:
                raise CheckpointError(f"{folder} is not a part of the state to recover")
            if found.path_index != index or found.num_paths != len(self.folders):
                raise CheckpointError(
                    f"{folder} is path {found.path_index} of {found.num_paths} of the state to "
                    f"recover, and is given as path {index} of {len(self.folders)}: give the same "
                    "paths in the same order"
                )

    def discard_commits(self) -> None:
        """Remove the commit records, whatever order the folders had."""
        self.log.close(remove=True)
        for folder in self.folders:
            for name in COMMIT_NAMES:
                (folder / name).unlink(missing_ok=True)

    def write_manifest(
        self,
        groups: Sequence[tuple[FileGroup, int]],
        state: str,
        durability: Durability,
        *,
        has_checksums: bool,
    ) -> None:
        """Replace the manifest in every folder; blocks until it is on storage, names and all."""
        for index, folder in enumerate(self.folders):
            manifest = Manifest(
                store_id=self.store_id,
                durability=durability,
                checksum="xxh3-64" if has_checksums else "none",
                num_paths=len(self.folders),
                path_index=index,
                pattern=self.pattern,
                state=state,
                pid=os.getpid(),
                host=socket.gethostname(),
                started=self._started,
                groups=describe_groups(groups),
                checkpoint=self.checkpoint,
            )
            write_manifest(folder, manifest)
            sync_folder(folder.parent)

    def close(self, *, remove: bool) -> None:
        """Close and unlock everything; remove it if asked."""
        self.files.close(remove=remove)
        self.log.close(remove=remove)
        if remove:
            for folder in self.folders:
                for path in [folder / FILE_NAME, *folder.glob(f".{FILE_NAME}.*")]:
                    path.unlink(missing_ok=True)
        self.unlock(remove=remove)

    def remove_names(self) -> None:
        """Remove the files' names without waiting for anything; for the interpreter's exit.

        The files live on until their last write has landed; a folder with other things stays.
        """
        paths = [Path(file.path) for file in self.files.open_files]
        paths += [folder / FILE_NAME for folder in self.folders]
        with contextlib.suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            for parent in {path.parent for path in paths} - set(self.folders):
                parent.rmdir()
            self.unlock(remove=True)

    def unlock(self, *, remove: bool) -> None:
        """Give the folders back."""
        for lock in self._locks:
            lock.release(remove=remove)
        self._locks.clear()
        disclaim(self.folders)


def _find_previous(folders: Sequence[Path]) -> tuple[PreviousRun | None, Manifest | None]:
    """Return the earlier run of the first folder that has commits, or that has a manifest."""
    found = [read_previous(folder) for folder in folders]
    found = [entry for entry in found if entry[0] is not None]
    with_commits = [entry for entry in found if entry[0] is not None and entry[0].steps]
    return (with_commits or found or [(None, None)])[0]


def _usable_parents(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[Path]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ConfigError("a store needs at least one path")
    parents = [usable_folder(path).resolve() for path in given]
    if len(set(parents)) != len(parents):
        raise ConfigError(f"the paths must be different folders, not {[str(p) for p in parents]}")
    return parents


def _folder_name(namespace: str) -> str:
    if any(character not in NAMESPACE_CHARACTERS for character in namespace):
        safe = "".join(c if c in NAMESPACE_CHARACTERS else "_" for c in namespace)
        namespace = f"{safe[:40]}-{hash_bytes(namespace.encode()):016x}"
    return FOLDER_PREFIX + (namespace or "run")
