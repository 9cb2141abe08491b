# SPDX-License-Identifier: Apache-2.0
"""Joining what the ranks wrote into one manifest.

Invariant: a manifest is made only of parts that are of one step and together have every element of
every parameter exactly once.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from swapio.checkpoint.manifest import PackEntry, ParameterEntry, Piece
from swapio.errors import CheckpointError


class Part(NamedTuple):
    """What one rank has in a checkpoint; its numbers of files and packs are its own.

    Attributes:
        files: Name and length of each file.
        packs: Its arrays.
        parameters: What it has of each parameter.
        groups: Hyperparameters and names of each param group.
        payload: The user's bytes on that rank.
        about: Step and tag, which must be those of all ranks.
    """

    files: list[tuple[str, int]]
    packs: list[PackEntry]
    parameters: list[ParameterEntry]
    groups: list[dict[str, Any]]
    payload: bytes
    about: tuple[int, str]


@dataclass
class Merged:
    """The parts as one; `scalars` holds the payload of each rank where there are several."""

    files: list[tuple[str, int]] = field(default_factory=list)
    packs: list[PackEntry] = field(default_factory=list)
    parameters: list[ParameterEntry] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)


def merge_parts(parts: Sequence[Part]) -> Merged:
    """Join the parts of all ranks: files and packs are renumbered, runs of a parameter joined.

    Raises:
        CheckpointError: They are of different steps, or an element is missing or there twice.
    """
    for rank, part in enumerate(parts):
        if part.about != parts[0].about:
            raise CheckpointError(
                f"the ranks save different things: step and tag are {parts[0].about} on rank 0, "
                f"{part.about} on rank {rank}"
            )
    merged = Merged()
    parameters: dict[str, ParameterEntry] = {}
    for rank, part in enumerate(parts):
        first_file, first_pack = len(merged.files), len(merged.packs)
        merged.files += part.files
        merged.packs += [_shift(pack, first_file) for pack in part.packs]
        for entry in part.parameters:
            mine = _renumbered(entry, first_pack)
            known = parameters.get(mine.name)
            parameters[mine.name] = mine if known is None else _joined(known, mine, rank)
    merged.parameters = [_checked(entry) for entry in parameters.values()]
    merged.groups = _merge_groups([part.groups for part in parts])
    if len(parts) > 1:
        payloads = [base64.b64encode(part.payload).decode() for part in parts]
        merged.scalars["payloads"] = payloads
    return merged


def _renumbered(entry: ParameterEntry, first_pack: int) -> ParameterEntry:
    if not first_pack:
        return entry
    runs = tuple(run._replace(pack=run.pack + first_pack) for run in entry.runs)
    return replace(entry, runs=runs)


def _joined(known: ParameterEntry, entry: ParameterEntry, rank: int) -> ParameterEntry:
    mine = (known.shape, known.order, known.dtype)
    if (entry.shape, entry.order, entry.dtype) != mine:
        raise CheckpointError(
            f"the ranks differ about parameter {entry.name!r}: rank {rank} has shape {entry.shape} "
            f"and {entry.dtype}, an earlier one {known.shape} and {known.dtype}"
        )
    return replace(known, runs=known.runs + entry.runs, step=max(known.step, entry.step))


def _checked(entry: ParameterEntry) -> ParameterEntry:
    """Sort the runs of a parameter, and see that they are all of it."""
    runs = tuple(sorted(entry.runs, key=lambda run: run.offset))
    at = 0
    for run in runs:
        if run.offset != at:
            what = "there twice (two of that name?)" if run.offset < at else "on no rank"
            raise CheckpointError(
                f"elements {min(at, run.offset)} to {max(at, run.offset)} of parameter "
                f"{entry.name!r} are {what}"
            )
        at += run.numel
    if at != math.prod(entry.shape):
        raise CheckpointError(
            f"elements {at} to {math.prod(entry.shape)} of parameter {entry.name!r} are on no rank"
        )
    return entry if runs == entry.runs else replace(entry, runs=runs)


def _merge_groups(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Hyperparameters of the first rank, names of all."""
    if any(len(groups) != len(ranks[0]) for groups in ranks):
        raise CheckpointError(
            f"the ranks have {[len(groups) for groups in ranks]} param groups; they must be alike"
        )
    return [
        {
            **same[0],
            "params": list(dict.fromkeys(name for group in same for name in group["params"])),
        }
        for same in zip(*ranks, strict=True)
    ]


def _shift(pack: PackEntry, first_file: int) -> PackEntry:
    records = {
        name: replace(
            record,
            pieces=tuple(Piece(p.file + first_file, p.offset, p.nbytes) for p in record.pieces),
        )
        for name, record in pack.records.items()
    }
    return PackEntry(pack.numel, records)
