# SPDX-License-Identifier: Apache-2.0
"""Saving: held slots become files of the checkpoint, the rest is written, the manifest is last.

    in the caller      hold slots -> refuse if the next step had no slot -> link -> write what is
                       in RAM
    there, or in the   copy held slots that could not be linked -> fsync -> manifest -> retention
    background         -> the slots are free, or stay linked

Invariants: nothing that a later step changes is read after `start_save` has returned; a save that
fails leaves neither a manifest nor files, and the checkpoints before it as they were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swapio.aio import Engine
from swapio.checkpoint.agreement import Agreement, Alone
from swapio.checkpoint.datafile import DataFile, Fill
from swapio.checkpoint.folders import (
    DataFolder,
    check_tag,
    list_checkpoints,
    new_token,
    remove_checkpoint,
    remove_stale,
)
from swapio.checkpoint.linking import LinkedFiles, can_link, copy_records
from swapio.checkpoint.manifest import (
    CheckpointManifest,
    PackEntry,
    ParameterEntry,
    Piece,
    RecordEntry,
    write_manifest,
)
from swapio.errors import AioError, CheckpointError, ConfigError, SwapioError
from swapio.filestore import FileStore
from swapio.holds import FileHold
from swapio.manifest import sync_folder

_logger = logging.getLogger("swapio.checkpoint")


@dataclass(frozen=True)
class RamArray:
    """An array that is written, because it lives in RAM."""

    dtype: str
    nbytes: int
    fill: Fill


@dataclass(frozen=True)
class PackContents:
    """One pack of a checkpoint: a sub-group, as a rule.

    Attributes:
        numel: Elements of each array.
        key: The store's sub-group that `held` are records of.
        held: Records that are on storage, with their dtypes.
        ram: Arrays that are in RAM.
    """

    numel: int
    key: str = ""
    held: dict[str, str] = field(default_factory=dict)
    ram: dict[str, RamArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """What one rank puts into a checkpoint; see CheckpointManifest for the fields."""

    step: int
    packs: Sequence[PackContents]
    parameters: Sequence[ParameterEntry]
    groups: Sequence[dict[str, Any]] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


@dataclass
class SaveStats:
    """How a save went: bytes linked, copied and written, and seconds so far."""

    linked_bytes: int = 0
    copied_bytes: int = 0
    ram_bytes: int = 0
    slots_bytes: int = 0
    seconds: float = 0.0


class SaveHandle:
    """A save that may still be going on.

    Attributes:
        tag: Name of the checkpoint.
        path: Its folder.
        stats: Progress.
    """

    def __init__(self, path: Path) -> None:
        self.tag = path.name
        self.path = path
        self.stats = SaveStats()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the checkpoint is there, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the checkpoint and return its folder; raises what went wrong."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the checkpoint {self.tag} is not done after {timeout} s")
        if self._error is not None:
            raise self._error
        return self.path

    def run(self, work: Callable[[], None], *, in_background: bool) -> None:
        """Do the rest of the work, here or on a thread of its own."""
        if not in_background:
            work()
            return

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                _logger.error("the checkpoint %s failed: %s", self.path, error)

        self._thread = threading.Thread(target=guarded, name="swapio-save", daemon=True)
        self._thread.start()


def start_save(
    root: Path,
    tag: str,
    contents: Contents,
    *,
    store: FileStore | None,
    engine: Engine,
    keep_last: int | None = None,
    in_background: bool = False,
    agreement: Agreement | None = None,
) -> SaveHandle:
    """Save a checkpoint; with `in_background` what takes long goes on after the return.

    Raises:
        CheckpointError: The next step would have no slot, or another rank failed.
        AioError: The storage failed, or is full. Nothing is left behind.
    """
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"keep_last={keep_last} must be at least 1, or None to keep all")
    handle = SaveHandle(root / check_tag(tag))
    saver = _Saver(handle, contents, store, engine, keep_last, agreement or Alone())
    began = time.perf_counter()
    saver.begin()
    handle.run(saver.finish, in_background=in_background and not saver.must_finish)
    handle.stats.seconds = time.perf_counter() - began
    return handle


class _Saver:
    def __init__(
        self,
        handle: SaveHandle,
        contents: Contents,
        store: FileStore | None,
        engine: Engine,
        keep_last: int | None,
        agreement: Agreement,
    ) -> None:
        self._handle = handle
        self._stats = handle.stats
        self._contents = contents
        self._store = store
        self._engine = engine
        self._keep_last = keep_last
        self._agreement = agreement
        self._root = handle.path.parent
        self._hold: FileHold | None = None
        self._linked: LinkedFiles | None = None
        self._folder: DataFolder | None = None
        self._data: DataFile | None = None
        self._files: list[tuple[str, int]] = []
        self._entries: dict[tuple[int, str], RecordEntry] = {}
        self.must_finish = False

    # -- in the caller -----------------------------------------------------------------------

    def begin(self) -> None:
        """Hold, link and write what later steps would change."""
        if self._agreement.rank == 0:
            remove_stale(self._root)
        token = self._agreement.share(new_token())
        self._all_do(lambda: self._begin(token))

    def _begin(self, token: str) -> None:
        self._take_hold()
        try:
            is_creator = self._agreement.rank == 0
            self._folder = DataFolder(self._handle.path, token, is_creator=is_creator)
        except OSError as error:
            raise AioError(error.errno or 0, "mkdir", self._handle.path) from error
        prefix = f"rank{self._agreement.rank}-"
        if self._hold is not None:
            self._linked = can_link(self._hold, self._folder.path, f"{prefix}slots-")
        if self._linked is not None:
            self._files = [(path.name, path.stat().st_size) for path in self._linked.paths.values()]
        self._data = DataFile(
            self._engine, self._folder.path / f"{prefix}data.bin", len(self._files)
        )
        for index, pack in enumerate(self._contents.packs):
            for name, array in pack.ram.items():
                self._entries[index, name] = self._data.append(
                    array.dtype, array.nbytes, array.fill
                )
                self._stats.ram_bytes += array.nbytes

    def _take_hold(self) -> None:
        keys = [pack.key for pack in self._contents.packs if pack.held]
        store = self._store
        if store is None or not keys:
            return
        freed = [folder / manifest.data for folder, manifest in self._to_be_removed()]
        short = store.short_of_slots(keys)
        if short and store.short_of_slots(short, freed):
            try:
                while more := store.short_of_slots(keys, freed):
                    self._stats.slots_bytes += store.add_slots(more)
            except ConfigError as error:
                raise CheckpointError(
                    "the next step would have no slot to write to, because checkpoints keep "
                    f"theirs, and there is no room for more: {error}. Remove a checkpoint, or "
                    "save with keep_last"
                ) from error
            short = store.short_of_slots(keys)
        # Until the old checkpoint is gone there is no slot for a step.
        self.must_finish = bool(short)
        self._hold = store.hold(keys)

    def _to_be_removed(self) -> list[tuple[Path, CheckpointManifest]]:
        found = list_checkpoints(self._root)
        same = [entry for entry in found if entry[0].name == self._handle.tag]
        others = [entry for entry in found if entry[0].name != self._handle.tag]
        if self._keep_last is None:
            return same
        return same + others[: max(0, len(others) - (self._keep_last - 1))]

    # -- in the background -------------------------------------------------------------------

    def finish(self) -> None:
        """Copy, sync, publish, and give old checkpoints up."""
        self._all_do(self._complete_files)
        self._all_do(self._publish)
        if self._agreement.rank == 0:
            self._retire()
        self._agreement.share(None)
        if self._hold is not None:
            if self._linked is not None and self._linked.is_shared:
                self._hold.hand_over(self._linked.paths)
            else:
                self._hold.release()

    def _complete_files(self) -> None:
        data, hold, linked = self._data, self._hold, self._linked
        if data is None or self._folder is None:
            raise CheckpointError("the save was not begun")
        if linked is not None and hold is not None:
            indices = {path: number for number, path in enumerate(linked.paths.values())}
            found = linked.entries(hold, indices)
            for index, pack in enumerate(self._contents.packs):
                for name, dtype in pack.held.items():
                    self._entries[index, name] = replace(found[pack.key, name], dtype=dtype)
                    self._stats.linked_bytes += found[pack.key, name].nbytes
            hold.sync()
        elif hold is not None:
            for index, pack in enumerate(self._contents.packs):
                copied = copy_records(hold, pack.key, list(pack.held), data) if pack.held else {}
                for name, entry in copied.items():
                    self._entries[index, name] = replace(entry, dtype=pack.held[name])
                    self._stats.copied_bytes += entry.nbytes
        data.sync()
        data.close()
        self._files.append((data.path.name, data.nbytes))
        sync_folder(self._folder.path)

    def _publish(self) -> None:
        """Gather what every rank has, and let rank 0 write the manifest."""
        contents, folder = self._contents, self._folder
        packs = [
            PackEntry(
                pack.numel,
                {name: self._entries[index, name] for name in (*pack.held, *pack.ram)},
            )
            for index, pack in enumerate(contents.packs)
        ]
        parts = self._agreement.gather((self._files, packs, list(contents.parameters)))
        if self._agreement.rank != 0 or folder is None:
            return
        known = list_checkpoints(self._root)
        files, all_packs, parameters = merge_ranks(parts)
        before = [m.data for path, m in known if path == self._handle.path]
        write_manifest(
            self._handle.path,
            CheckpointManifest(
                tag=self._handle.tag,
                step=contents.step,
                sequence=1 + max((m.sequence for _, m in known), default=0),
                saved=time.time(),
                world_size=self._agreement.world_size,
                data=folder.path.name,
                files=tuple(files),
                packs=tuple(all_packs),
                parameters=tuple(parameters),
                groups=tuple(contents.groups),
                scalars=contents.scalars,
                payload=contents.payload,
            ),
        )
        folder.close()
        sync_folder(self._root)
        for name in before:
            DataFolder(self._handle.path, name.removeprefix("data-"), is_creator=False).discard()

    def _retire(self) -> None:
        if self._keep_last is None:
            return
        found = list_checkpoints(self._root)
        for path, _ in found[: max(0, len(found) - self._keep_last)]:
            try:
                remove_checkpoint(path)
            except OSError as error:
                _logger.warning("the old checkpoint %s could not be removed: %s", path, error)

    # -- agreement ---------------------------------------------------------------------------

    def _all_do(self, work: Callable[[], None]) -> None:
        """Work on every rank; if one fails clean up on all of them and raise."""
        error: BaseException | None = None
        try:
            work()
        except BaseException as first:
            error = first
        failures = self._agreement.gather(None if error is None else f"{error}")
        if not any(failure is not None for failure in failures):
            return
        self._clean_up()
        if error is None:
            rank = next(i for i, failure in enumerate(failures) if failure is not None)
            raise CheckpointError(f"rank {rank} could not save: {failures[rank]}")
        if isinstance(error, OSError) and not isinstance(error, SwapioError):
            raise AioError(error.errno or 0, "write", self._handle.path) from error
        raise error

    def _clean_up(self) -> None:
        if self._data is not None:
            self._data.close()
        if self._folder is not None:
            self._folder.discard()
        if self._hold is not None:
            self._hold.release()


def merge_ranks(
    parts: Sequence[tuple[list[tuple[str, int]], list[PackEntry], list[ParameterEntry]]],
) -> tuple[list[tuple[str, int]], list[PackEntry], list[ParameterEntry]]:
    """Join what the ranks wrote: files and packs are renumbered, runs of a parameter joined."""
    files: list[tuple[str, int]] = []
    packs: list[PackEntry] = []
    parameters: dict[str, ParameterEntry] = {}
    for rank_files, rank_packs, rank_parameters in parts:
        first_file, first_pack = len(files), len(packs)
        files += rank_files
        packs += [_shift(pack, first_file) for pack in rank_packs]
        for entry in rank_parameters:
            runs = tuple(run._replace(pack=run.pack + first_pack) for run in entry.runs)
            known = parameters.get(entry.name)
            if known is not None:
                runs = tuple(sorted((*known.runs, *runs), key=lambda run: run.offset))
            parameters[entry.name] = replace(entry, runs=runs)
    return files, packs, list(parameters.values())


def _shift(pack: PackEntry, first_file: int) -> PackEntry:
    records = {
        name: replace(
            record,
            pieces=tuple(Piece(p.file + first_file, p.offset, p.nbytes) for p in record.pieces),
        )
        for name, record in pack.records.items()
    }
    return PackEntry(pack.numel, records)
