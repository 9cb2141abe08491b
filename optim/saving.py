# SPDX-License-Identifier: Apache-2.0
"""Saving and loading an optimizer: checkpoints, and safetensors for other programs.

Invariants: what can be refused is refused before anything is changed; with several ranks every
step that may fail on one of them is taken together, so that all succeed or all raise.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from swapio.aio import Engine
from swapio.checkpoint import (
    CheckpointManifest,
    CheckpointReader,
    Contents,
    SaveHandle,
    find_checkpoint,
    read_manifest,
    start_save,
)
from swapio.checkpoint.agreement import together
from swapio.checkpoint.manifest import ParameterEntry
from swapio.checkpoint.reader import dtype_of
from swapio.errors import CheckpointError, SwapioError
from swapio.optim.checkpointing import (
    CheckpointSource,
    Loaded,
    contents_of,
    match_groups,
    match_parameters,
    payload_of,
)
from swapio.optim.commit_scalars import apply_group
from swapio.optim.exchange import export_state, import_state
from swapio.optim.filling import warn_of_conversion
from swapio.optim.state_access import StateAccess

_logger = logging.getLogger("swapio.optim")


class _Found(NamedTuple):
    """What a checkpoint has of an optimizer's parameters and groups."""

    source: CheckpointSource
    entries: dict[int, ParameterEntry]
    hypers: list[dict[str, Any] | None]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Saving(StateAccess):
    """The part of SwapOptimizer that saves and loads."""

    _payload: bytes = b""
    _num_steps: int

    @property
    def commit_payload(self) -> bytes:
        """Bytes of the user's that go into the commit of the next step, and into checkpoints.

        Raises:
            TypeError: When it is set to something else.
        """
        return self._payload

    @commit_payload.setter
    def commit_payload(self, value: bytes) -> None:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(
                f"commit_payload must be bytes, not {type(value).__name__}: encode it, as with "
                "json.dumps(...).encode()"
            )
        self._payload = bytes(value)

    @abc.abstractmethod
    def _commit_step(self) -> None: ...

    @abc.abstractmethod
    def _reopen(self, *, resume: bool) -> None: ...

    @abc.abstractmethod
    def _agree_on_commits(self, *, completely: bool = False) -> None: ...

    def save(
        self,
        dir: str | os.PathLike[str],
        tag: str | None = None,
        wait: bool = True,
        keep_last: int | None = None,
    ) -> SaveHandle:
        """Save everything into `dir/tag`; blocks, with `wait=False` only as long as it must.

        Slots on the same file system are linked, not copied. With `wait=False` copies to another
        file system and syncing go on in the background, and training may too: later steps do not
        change what is saved. With several ranks all of them call it, with the same arguments; if
        one fails all raise.

        Args:
            dir: The folder of checkpoints; made if it is not there.
            tag: Name of this one; "step-<number>" by default. One of that name is replaced.
            wait: Return only when the checkpoint is there.
            keep_last: Remove all but so many of the newest checkpoints once this one is there;
                None takes `SwapConfig.keep_last`, which keeps all by default.

        Returns:
            A handle: `result()` waits and returns the checkpoint's folder, `stats` has progress.

        Raises:
            CheckpointError: The next step would have no slot; nothing was written.
            AioError: The storage failed or is full: the checkpoints before are as they were, and
                training can go on.
        """
        self._finish_save()
        self._agree_on_commits(completely=True)  # slots of older ones count as free then
        contents = together(self._agreement, self._contents)
        self._save = start_save(
            Path(dir),
            f"step-{self._num_steps:08d}" if tag is None else tag,
            contents,
            store=self._runtime.store,
            engine=self._checkpoint_engine(),
            keep_last=self.config.keep_last if keep_last is None else keep_last,
            in_background=not wait,
            agreement=self._agreement,
        )
        together(self._agreement, lambda: self._note_checkpoint(self._required_save().path))
        return self._save

    def _contents(self) -> Contents:
        """Bring storage up to date and describe what a checkpoint consists of."""
        self._check_open()
        self._snapshots.settle()
        swapper = self._runtime.swapper
        self._masters.resync_now()
        swapper.flush()
        return contents_of(
            self._layout,
            swapper,
            self._masters,
            self._counts,
            self.param_groups,
            step=self._num_steps,
            payload=self.commit_payload,
        )

    @torch.no_grad()
    def load(
        self,
        dir: str | os.PathLike[str],
        tag: str = "latest",
        strict: bool = True,
    ) -> Loaded:
        """Load a checkpoint of any swapio optimizer that has the same parameters; blocks.

        Streams from file to file. Sub-group sizes, swappers, engines, master forms, world sizes,
        and whether state is in RAM may differ. State, masters, parameters, step counts and
        hyperparameters are replaced.

        Args:
            dir: The folder of checkpoints, or one checkpoint.
            tag: Which one.
            strict: Whether it must have exactly this optimizer's parameters. Otherwise what it
                lacks starts anew.

        Raises:
            CheckpointError: There is none, it is of another version, or does not fit; nothing was
                changed.
            CorruptionError: A block is not what was saved. The optimizer is FAILED then: load
                another checkpoint. (A load also revives one that failed before.)
        """
        self._finish_save()
        folder, manifest = self._find(Path(dir), tag)
        with ExitStack() as stack:

            def prepare() -> _Found:
                return self._prepare_load(folder, manifest, strict, stack)

            found = together(self._agreement, prepare)
            if self._has_failed_somewhere():
                stack.close()
                self._reopen(resume=False)
                found = together(self._agreement, prepare)
            self._agree_on_commits(completely=True)  # the slots of older ones are needed now
            together(self._agreement, lambda: self._apply_load(found, manifest))
        together(self._agreement, lambda: self._end_load(folder))
        self._agree_on_commits(completely=True)
        return Loaded(
            manifest.step,
            manifest.tag,
            self.commit_payload,
            found.missing,
            found.unexpected,
            found.source.bytes_read,
        )

    def _end_load(self, folder: Path) -> None:
        self._note_checkpoint(folder)
        if self.is_committing:
            self._commit_step()

    def _has_failed_somewhere(self) -> bool:
        """Whether some rank needs new storage before it can be filled again."""
        failure = self._runtime.swapper.failure
        return any(self._agreement.gather(failure is not None))

    def _find(self, root: Path, tag: str) -> tuple[Path, CheckpointManifest]:
        """Let rank 0 decide which checkpoint it is, and read its manifest on every rank."""
        agreement = self._agreement
        mine: list[tuple[Path, CheckpointManifest]] = []

        def find() -> None:
            self._check_open(failed_ok=True)
            if agreement.rank == 0:
                mine.append(find_checkpoint(root, tag))

        together(agreement, find)
        chosen = agreement.share((str(mine[0][0].absolute()), mine[0][1].data) if mine else None)

        def read() -> tuple[Path, CheckpointManifest]:
            if mine or chosen is None:
                return mine[0]
            folder = Path(chosen[0])
            manifest = read_manifest(folder)
            if manifest.data != chosen[1]:
                raise CheckpointError(
                    f"{folder} is another checkpoint here than on rank 0: all ranks must be given "
                    "one folder that all of them see"
                )
            return folder, manifest

        return together(agreement, read)

    def _prepare_load(
        self, folder: Path, manifest: CheckpointManifest, strict: bool, stack: ExitStack
    ) -> _Found:
        """Look at everything before anything is changed."""
        infos = self._layout.infos
        reader = stack.enter_context(CheckpointReader(folder, manifest, self._checkpoint_engine()))
        entries, missing, unexpected = match_parameters(infos, reader, strict=strict)
        source = CheckpointSource(reader, infos, entries)
        self._warn_of_conversions(source)
        hypers = match_groups(self.param_groups, infos, manifest.groups)
        return _Found(source, entries, hypers, missing, unexpected)

    def _apply_load(self, found: _Found, manifest: CheckpointManifest) -> None:
        for group, hyper in zip(self.param_groups, found.hypers, strict=True):
            if hyper is not None:
                apply_group(group, hyper)
        for info in self._layout.infos:
            entry = found.entries.get(info.index)
            self._counts[info.index] = 0 if entry is None else entry.step
            self._owned[info.index] |= entry is not None
        self._fill(found.source)
        self._num_steps = manifest.step
        self.commit_payload = payload_of(manifest, self._agreement)

    def export_safetensors(
        self,
        dir: str | os.PathLike[str],
        *,
        max_bytes: int = 4 << 30,
    ) -> None:
        """Write all state into a new folder of safetensors files, for other programs; blocks.

        Tensors are named `<parameter>.<state>`. Files are cut at about `max_bytes`.

        Raises:
            CheckpointError: The folder has an export already, or this rank has parts only.
            AioError: The storage failed, or is full.
        """
        self._check_open()
        self._require_whole("export_safetensors")
        export_state(self, self._layout.infos, Path(dir), max_bytes=max_bytes)

    @torch.no_grad()
    def import_safetensors(self, dir: str | os.PathLike[str]) -> None:
        """Load what `export_safetensors` wrote; blocks.

        Raises:
            CheckpointError: A parameter is missing, the format is another one, or this rank has
                parts only.
            CorruptionError: A file is malformed.
            ValueError: A state is unknown, or has another shape.
        """
        self._check_open()
        self._require_whole("import_safetensors")
        entries = import_state(Path(dir), self._layout.infos, self.param_groups)
        self._check_entries(entries)
        self._fill_from(entries)

    def _require_whole(self, what: str) -> None:
        infos = self._layout.infos
        # Of a small parameter one rank may have everything: all must come to the same answer.
        parts = [i.name for i in infos if not (i.is_whole and self._ranks.is_whole(i.listed))]
        if parts:
            raise CheckpointError(
                f"{what} needs whole parameters, and ranks have parts only of {parts[0]} "
                f"({len(parts)} such): save(dir) on all ranks, load it in one process, and do it "
                "there"
            )

    def _note_checkpoint(self, folder: Path) -> None:
        """Remember a checkpoint for what the next start says after a crash."""
        if self._runtime.store is None:
            return
        try:
            self._runtime.store.note_checkpoint(str(folder.resolve()))
        except OSError as error:  # it is there and whole all the same
            _logger.warning("a run after a crash of this one cannot name %s: %s", folder, error)

    def _warn_of_conversions(self, source: CheckpointSource) -> None:
        seen = set()
        for info in self._layout.infos:
            for name, wanted in self.state_records(info.bucket.rule).items():
                found = source.dtypes(info.index).get(name)
                if found is not None and (name, found) not in seen:
                    seen.add((name, found))
                    warn_of_conversion(name, dtype_of(found), wanted)

    def _required_save(self) -> SaveHandle:
        if self._save is None:
            raise CheckpointError("no save was started")
        return self._save

    def _checkpoint_engine(self) -> Engine:
        if self._runtime.engine is not None:
            return self._runtime.engine
        if self._own_engine is None or self._own_engine.closed:
            self._own_engine = Engine(self.config.engine, direct=self.config.direct)
        return self._own_engine

    def _finish_save(self) -> None:
        """Wait for a save in the background; its error was logged, and is the handle's."""
        if self._save is not None and not self._save.done():
            with contextlib.suppress(SwapioError, OSError):
                self._save.result()

    def _close_saving(self) -> None:
        self._finish_save()
        if self._own_engine is not None:
            self._own_engine.close()

    _save: SaveHandle | None = None
    _own_engine: Engine | None = None
