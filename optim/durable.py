# SPDX-License-Identifier: Apache-2.0
"""What makes an optimizer's steps durable: commits, and going on from the last one.

    step N -> state, masters and parameters in new slots -> commit record N (counters, groups,
              payload) -> killed at any time -> resume=True, or recover(): exactly step N

Invariant: everything that step N+1 depends on, but the gradients, is in the slots and the record
of commit N; a parameter that was never stepped or loaded is the user's, and left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swapio.aio import Engine
from swapio.checkpoint import CheckpointReader, SaveHandle, find_checkpoint, start_save
from swapio.checkpoint.reader import dtype_of
from swapio.checksum import hash_bytes
from swapio.errors import CheckpointError, ConfigError, SwapioError
from swapio.leftovers import FOLDER_PREFIX
from swapio.optim.checkpointing import (
    CheckpointSource,
    Loaded,
    contents_of,
    match_groups,
    match_parameters,
)
from swapio.optim.commit_scalars import (
    apply_group,
    apply_groups,
    decode_runs,
    encode_group,
    encode_runs,
)
from swapio.optim.exchange import export_state, import_state
from swapio.optim.filling import warn_of_conversion
from swapio.optim.layout import PackedGroup
from swapio.optim.masters import Masters
from swapio.optim.snapshot import Snapshots
from swapio.optim.state_access import StateAccess
from swapio.runtime import SwapRuntime
from swapio.views import TransferHandle

_logger = logging.getLogger("swapio.optim")

SCALARS_VERSION = 1


class Durable(StateAccess):
    """The part of SwapOptimizer that commits, recovers, saves and loads."""

    commit_payload: bytes
    _num_steps: int
    _commit: TransferHandle
    recovered_step: int | None

    def _open_runtime(self, groups: list[PackedGroup], *, resume: bool) -> None:
        """Open storage and memory; take up the last commit with `resume`."""
        if resume and not self.is_committing:
            raise ConfigError(
                "resume=True needs a path and durability='step' or 'power'; with 'checkpoint' call "
                "load(dir) after construction"
            )
        requests = [self._request(group) for group in groups]
        self._runtime = SwapRuntime(
            self.config, requests, workspace_bytes=self.scratch_bytes(groups), resume=resume
        )
        swapper = self._runtime.swapper
        self._masters = Masters(self._layout, swapper, self.config.on_param_change)
        self._snapshots = Snapshots(self._layout, self._runtime, self._masters)
        self._commit = TransferHandle()
        record = self._runtime.recovered
        self.recovered_step = None if record is None else record.step
        if record is None:
            self._masters.remember(groups)
            return
        try:
            self._restore(record.scalars, record.payload)
        except BaseException:
            self._runtime.close()
            raise

    # -- commits -----------------------------------------------------------------------------

    def _commit_step(self) -> None:
        """Start to commit the step just taken; does not wait for storage.

        Raises:
            AioError: The commit of an earlier step failed.
        """
        swapper = self._runtime.swapper
        if not self.is_committing:
            swapper.commit(self._num_steps)
            return
        if self._commit.done():
            self._commit.result()
        self._commit = swapper.commit(self._num_steps, self.commit_payload, **self._scalars())

    def _scalars(self) -> dict[str, Any]:
        return {
            "version": SCALARS_VERSION,
            "num_steps": self._num_steps,
            "identity": self._identity(),
            "counts": encode_runs(self._counts),
            "owned": encode_runs(self._owned),
            "groups": [encode_group(group) for group in self.param_groups],
        }

    def _identity(self) -> str:
        """Names, shapes and dtypes of all parameters, as one number."""
        infos = self._layout.infos
        if self._identity_of[0] != len(infos):
            facts = [
                [i.name, list(i.param.shape), list(i.param.stride()), str(i.param.dtype)]
                for i in infos
            ]
            digest = f"{hash_bytes(json.dumps(facts).encode()):016x}"
            self._identity_of = (len(infos), digest)
        return self._identity_of[1]

    _identity_of: tuple[int, str] = (-1, "")

    # -- checkpoints -------------------------------------------------------------------------

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
        change what is saved.

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
        self._check_open()
        self._finish_save()
        self._snapshots.settle()
        swapper = self._runtime.swapper
        self._masters.resync_now()
        swapper.flush()
        contents = contents_of(
            self._layout,
            swapper,
            self._masters,
            self._counts,
            self.param_groups,
            step=self._num_steps,
            payload=self.commit_payload,
        )
        engine = self._checkpoint_engine()
        root = Path(dir)
        self._save = start_save(
            root,
            f"step-{self._num_steps:08d}" if tag is None else tag,
            contents,
            store=self._runtime.store,
            engine=engine,
            keep_last=self.config.keep_last if keep_last is None else keep_last,
            in_background=not wait,
        )
        self._note_checkpoint(self._save.path)
        return self._save

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
            CorruptionError: A block is not what was saved; load another checkpoint.
        """
        self._check_open()
        self._finish_save()
        folder, manifest = find_checkpoint(Path(dir), tag)
        with CheckpointReader(folder, manifest, self._checkpoint_engine()) as reader:
            infos = self._layout.infos
            found, missing, unexpected = match_parameters(infos, reader, strict=strict)
            source = CheckpointSource(reader, infos, found)
            self._warn_of_conversions(source)
            hypers = match_groups(self.param_groups, infos, manifest.groups)
            for group, hyper in zip(self.param_groups, hypers, strict=True):
                if hyper is not None:
                    apply_group(group, hyper)
            for info in infos:
                self._counts[info.index] = found[info.index].step if info.index in found else 0
                self._owned[info.index] |= info.index in found
            self._fill(source)
        self._num_steps = manifest.step
        self.commit_payload = manifest.payload
        self._note_checkpoint(folder)
        if self.is_committing:
            self._commit_step()
        return Loaded(manifest.step, manifest.tag, manifest.payload, missing, unexpected)

    def export_safetensors(
        self,
        dir: str | os.PathLike[str],
        *,
        max_bytes: int = 4 << 30,
    ) -> None:
        """Write all state into a new folder of safetensors files, for other programs; blocks.

        Tensors are named `<parameter>.<state>`. Files are cut at about `max_bytes`.

        Raises:
            CheckpointError: The folder has an export already.
            AioError: The storage failed, or is full.
        """
        self._check_open()
        export_state(self, self._layout.infos, Path(dir), max_bytes=max_bytes)

    @torch.no_grad()
    def import_safetensors(self, dir: str | os.PathLike[str]) -> None:
        """Load what `export_safetensors` wrote; blocks.

        Raises:
            CheckpointError: A parameter is missing, or the format is another one.
            CorruptionError: A file is malformed.
            ValueError: A state is unknown, or has another shape.
        """
        self._check_open()
        entries = import_state(Path(dir), self._layout.infos, self.param_groups)
        self._check_entries(entries)
        self._fill_from(entries)

    def _note_checkpoint(self, folder: Path) -> None:
        if self._runtime.store is not None:
            self._runtime.store.note_checkpoint(str(folder.resolve()))

    def _warn_of_conversions(self, source: CheckpointSource) -> None:
        seen = set()
        for info in self._layout.infos:
            for name, wanted in self.state_records(info.bucket.rule).items():
                found = source.dtypes(info.index).get(name)
                if found is not None and (name, found) not in seen:
                    seen.add((name, found))
                    warn_of_conversion(name, dtype_of(found), wanted)

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

    # -- recovery ----------------------------------------------------------------------------

    def recover(self) -> int:
        """Go back to the last committed step, also after a failure; blocks.

        State, masters, parameters, step counts, hyperparameters and `commit_payload` become those
        of that step, bit for bit. Uncommitted steps are dropped.

        Returns:
            The step's number.

        Raises:
            ConfigError: Steps are not committed (durability "checkpoint", or state in RAM).
            CheckpointError: There is no whole commit.
        """
        self._check_open(failed_ok=True)
        if not self.is_committing:
            raise ConfigError(
                "recover() needs a path and durability='step' or 'power'; with 'checkpoint' call "
                "load(dir)"
            )
        store = self._runtime.store
        if store is not None:
            # The folder may have got a number, because another optimizer used the first name.
            name = Path(store.folders[0]).name.removeprefix(FOLDER_PREFIX)
            self.config = dataclasses.replace(self.config, namespace=name)
        try:
            self._runtime.close()
        except (SwapioError, OSError) as error:
            _logger.warning("going back to the last commit after: %s", error)
        self._open_runtime(list(self._layout.groups.values()), resume=True)
        if self.recovered_step is None:
            raise CheckpointError("no step was committed yet: there is nothing to recover")
        return self.recovered_step

    def _restore(self, scalars: dict[str, Any], payload: bytes) -> None:
        if scalars.get("version") != SCALARS_VERSION:
            raise CheckpointError(
                f"the commit's scalars have version {scalars.get('version')!r}; this swapio reads "
                f"{SCALARS_VERSION}"
            )
        if scalars["identity"] != self._identity():
            raise CheckpointError(
                "the commit is of other parameters: their names, shapes, strides or dtypes differ. "
                "Build the same model and optimizer, or load a checkpoint"
            )
        apply_groups(self.param_groups, scalars["groups"])
        self._counts = decode_runs(scalars["counts"])
        self._owned = decode_runs(scalars["owned"]).astype(np.bool_)
        self._num_steps = int(scalars["num_steps"])
        self.commit_payload = payload
        self._masters.restore_params(self._owned | (self._counts > 0))
