# SPDX-License-Identifier: Apache-2.0
"""Saving: held slots become files of the checkpoint, the rest is written, the manifest is last.

    in the caller      hold slots -> refuse if the next step had no slot -> all ranks see the folder
                       -> link -> write what is in RAM
    there, or in the   copy held slots that could not be linked -> fsync -> every rank is done
    background         -> rank 0 writes the manifest -> retention -> the slots are free, or linked

Invariants: nothing that a later step changes is read after `start_save` has returned; a save that
fails on any rank leaves neither a manifest nor files, and the checkpoints before it as they were;
every rank raises.
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
from swapio.checkpoint.agreement import Agreement, Alone, as_aio_error, together
from swapio.checkpoint.datafile import DataFile, Fill
from swapio.checkpoint.folders import (
    DataFolder,
    Summary,
    check_tag,
    is_named,
    new_token,
    note_written,
    remove_checkpoint,
    remove_stale,
    survey,
)
from swapio.checkpoint.linking import LinkedFiles, can_link, copy_records
from swapio.checkpoint.manifest import (
    CheckpointManifest,
    PackEntry,
    ParameterEntry,
    RecordEntry,
    write_manifest,
)
from swapio.checkpoint.merge import Part, merge_parts
from swapio.errors import AioError, CheckpointError, ConfigError
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
    handle.run(saver.finish, in_background=saver.may_go_on_later(in_background))
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
        self._is_first = agreement.rank == 0
        self._root = handle.path.parent
        self._hold: FileHold | None = None
        self._linked: LinkedFiles | None = None
        self._folder: DataFolder | None = None
        self._data: DataFile | None = None
        self._files: list[tuple[str, int]] = []
        self._entries: dict[tuple[int, str], RecordEntry] = {}
        self._late_error: BaseException | None = None
        self._must_finish = False

    # -- in the caller -----------------------------------------------------------------------

    def begin(self) -> None:
        """Hold, link and write what later steps would change."""
        self._all_do(self._sweep)
        token = self._agreement.share(new_token())
        self._all_do(lambda: self._take(token))
        self._all_do(self._look)
        self._all_do(self._write)

    def may_go_on_later(self, wanted: bool) -> bool:
        """Whether the rest may be done in the background, on every rank."""
        votes = self._agreement.gather(wanted and not self._must_finish)
        if all(votes):
            self._agreement = self._agreement.background()
        return all(votes)

    def _sweep(self) -> None:
        if self._is_first:
            remove_stale(self._root)

    def _take(self, token: str) -> None:
        self._take_hold()
        try:
            self._folder = DataFolder(self._handle.path, token, is_creator=self._is_first)
        except OSError as error:
            raise AioError(error.errno or 0, "mkdir", self._handle.path) from error

    def _look(self) -> None:
        """Before anything is linked: ranks that do not see one folder cannot save into it."""
        if self._folder is not None and not self._folder.is_visible():
            raise CheckpointError(
                f"{self._folder.path}, which rank 0 made, cannot be seen here: all ranks must be "
                "given one folder on a file system that all of them share"
            )

    def _write(self) -> None:
        contents, folder = self._contents, self._required_folder()
        prefix = f"rank{self._agreement.rank}-"
        if self._hold is not None:
            self._linked = can_link(self._hold, folder.path, f"{prefix}slots-")
        if self._linked is not None:
            self._files = [(path.name, path.stat().st_size) for path in self._linked.paths.values()]
        path = folder.path / f"{prefix}data.bin"
        self._data = DataFile(self._engine, path, len(self._files))
        for index, pack in enumerate(contents.packs):
            for name, array in pack.ram.items():
                entry = self._data.append(array.dtype, array.nbytes, array.fill)
                self._entries[index, name] = entry
                self._stats.ram_bytes += array.nbytes

    def _required_folder(self) -> DataFolder:
        if self._folder is None:
            raise CheckpointError("the save was not begun")
        return self._folder

    def _take_hold(self) -> None:
        keys = [pack.key for pack in self._contents.packs if pack.held]
        store = self._store
        if store is None or not keys:
            return
        freed = [summary.path / summary.data for summary in self._to_be_removed()]
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
        self._must_finish = bool(short)
        self._hold = store.hold(keys)

    def _to_be_removed(self) -> list[Summary]:
        found = survey(self._root)
        same = [summary for summary in found if summary.path.name == self._handle.tag]
        others = [summary for summary in found if summary.path.name != self._handle.tag]
        if self._keep_last is None:
            return same
        return same + others[: max(0, len(others) - (self._keep_last - 1))]

    # -- in the background -------------------------------------------------------------------

    def finish(self) -> None:
        """Copy, sync, publish, and give old checkpoints up."""
        try:
            self._finish()
        except BaseException:
            self._clean_up()
            raise

    def _finish(self) -> None:
        self._all_do(self._complete_files)
        contents = self._contents
        packs = [
            PackEntry(
                pack.numel,
                {name: self._entries[index, name] for name in (*pack.held, *pack.ram)},
            )
            for index, pack in enumerate(contents.packs)
        ]
        part = Part(
            self._files,
            packs,
            list(contents.parameters),
            list(contents.groups),
            contents.payload,
            (contents.step, self._handle.tag),
        )
        parts = self._agreement.gather(part)
        self._all_do(lambda: self._publish(parts))
        self._retire()
        self._agreement.share(None)  # what was retired is gone before any rank needs its slots
        self._give_up_hold(may_be_linked=True)
        together(self._agreement, self._raise_late)

    def _give_up_hold(self, *, may_be_linked: bool) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            return
        if may_be_linked and self._linked is not None and self._linked.is_shared:
            hold.hand_over(self._linked.paths)
        else:
            hold.release()

    def _complete_files(self) -> None:
        data, hold, linked = self._data, self._hold, self._linked
        if data is None:
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
        sync_folder(self._required_folder().path)

    def _publish(self, parts: Sequence[Part]) -> None:
        """Let rank 0 write the manifest of what all ranks have."""
        merged = merge_parts(parts)
        if not self._is_first:
            return
        contents, folder = self._contents, self._required_folder()
        known = survey(self._root)
        before = [summary.data for summary in known if summary.path == self._handle.path]
        manifest = CheckpointManifest(
            tag=self._handle.tag,
            step=contents.step,
            sequence=1 + max((summary.sequence for summary in known), default=0),
            saved=time.time(),
            world_size=len(parts),
            data=folder.path.name,
            files=tuple(merged.files),
            packs=tuple(merged.packs),
            parameters=tuple(merged.parameters),
            groups=tuple(merged.groups),
            scalars=contents.scalars | merged.scalars,
            payload=contents.payload,
        )
        sync_folder(self._root)  # the folder's own name is on storage before its manifest is
        try:
            write_manifest(self._handle.path, manifest)
        except BaseException as error:
            if not is_named(folder.path):
                raise
            self._late_error = error  # after the rename: what it names must stay
        note_written(self._handle.path, manifest)
        folder.close()
        for name in before:
            DataFolder(self._handle.path, name.removeprefix("data-"), is_creator=False).remove()

    def _retire(self) -> None:
        if self._keep_last is None or not self._is_first:
            return
        found = survey(self._root)
        for old in found[: max(0, len(found) - self._keep_last)]:
            try:
                remove_checkpoint(old.path)
            except OSError as error:
                _logger.warning("the old checkpoint %s could not be removed: %s", old.path, error)

    def _raise_late(self) -> None:
        if self._late_error is not None:
            raise self._late_error

    # -- agreement ---------------------------------------------------------------------------

    def _all_do(self, work: Callable[[], None]) -> None:
        """Work on every rank; if one fails clean up on all of them and raise."""
        try:
            together(self._agreement, work)
        except BaseException as error:
            self._clean_up()
            wrapped = as_aio_error(error, "write", self._handle.path)
            if wrapped is error:
                raise
            raise wrapped from error

    def _clean_up(self) -> None:
        if self._data is not None:
            self._data.close()
        if self._folder is not None:
            self._folder.discard()
        # Another rank may have published before this one lost touch with it: links that are gone
        # bind nothing, links that are there must not be written.
        self._give_up_hold(may_be_linked=self._agreement.world_size > 1)
