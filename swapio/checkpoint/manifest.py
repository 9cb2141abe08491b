# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: which bytes of which file are which elements of which state.

    <root>/<tag>/manifest.json     replaced by a rename, last
                 data-<token>/     hard links to slots, copies, and what lived in RAM

It knows parameters and named records, and nothing of world size, sub-groups, swappers or the
optimizer: a *pack* is a set of equally long arrays, and a parameter is a list of runs in packs.
The format is in docs/format.md, "Checkpoint".

Invariant: a manifest names only files that are whole and synced; a folder without one is not a
checkpoint, whatever else is in it.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swapio.align import BLOCK_BYTES
from swapio.checksum import Hashes, hash_bytes
from swapio.errors import AioError, CheckpointError, CorruptionError
from swapio.manifest import sync_folder

FILE_NAME = "manifest.json"
FORMAT = "swapio-checkpoint"
FORMAT_VERSION = 1


class Piece(NamedTuple):
    """A contiguous run of a record's bytes: file (index in the manifest's list), offset, length."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One array of a pack.

    Attributes:
        dtype: Name as torch's, for instance "float32".
        nbytes: Logical length.
        pieces: Where its bytes are, in order.
        hashes: xxh3-64 of each block of 1 MiB; empty without checksums.
    """

    dtype: str
    nbytes: int
    pieces: tuple[Piece, ...]
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class PackEntry:
    """Arrays of `numel` elements each, which parameters have runs in."""

    numel: int
    records: dict[str, RecordEntry]


class Run(NamedTuple):
    """Elements `offset:offset + numel` of a parameter are those from `position` of a pack."""

    pack: int
    offset: int
    position: int
    numel: int


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter.

    Attributes:
        name: The user's name of it.
        shape: Logical shape.
        order: Its dimensions from the slowest to the fastest in memory: elements are counted so.
        dtype: Of the parameter itself.
        step: Its step count.
        runs: Where its elements are.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: str
    step: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A whole checkpoint.

    Attributes:
        tag: Its name.
        step: Steps taken when it was made.
        sequence: Grows with each checkpoint of a root; the largest is the latest.
        saved: When, in seconds since the epoch.
        world_size: Ranks that wrote it; for information only.
        data: Name of the folder of its files.
        files: `(path in that folder, length)`.
        packs: The arrays.
        parameters: By position.
        groups: Param groups: hyperparameters as JSON data, and `params`, a list of names.
        scalars: What else the optimizer keeps, as JSON data.
        payload: The user's bytes.
    """

    tag: str
    step: int
    sequence: int
    saved: float
    world_size: int
    data: str
    files: tuple[tuple[str, int], ...]
    packs: tuple[PackEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    groups: tuple[dict[str, Any], ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


def to_json(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as JSON, with its hash."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "block_bytes": BLOCK_BYTES,
        "tag": manifest.tag,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "saved": manifest.saved,
        "world_size": manifest.world_size,
        "data": manifest.data,
        "files": [list(file) for file in manifest.files],
        "packs": [_pack_to_json(pack) for pack in manifest.packs],
        "parameters": [
            (p.name, p.shape, p.order, p.dtype, p.step, p.runs) for p in manifest.parameters
        ],
        "groups": list(manifest.groups),
        "scalars": manifest.scalars,
        "payload": base64.b64encode(manifest.payload).decode(),
    }
    encoded = _encode(content)
    # Put in by hand: with many parameters encoding it all twice is a good part of a save.
    return encoded[:-1] + f',"hash":"{hash_bytes(encoded):016x}"}}'.encode()


def _pack_to_json(pack: PackEntry) -> dict[str, Any]:
    records = {
        name: {
            "dtype": record.dtype,
            "nbytes": record.nbytes,
            "pieces": [list(piece) for piece in record.pieces],
            "hashes": base64.b64encode(record.hashes.astype("<u8").tobytes()).decode(),
        }
        for name, record in pack.records.items()
    }
    return {"numel": pack.numel, "records": records}


def from_json(content: Any, where: str) -> CheckpointManifest:
    """Check every field and return the manifest.

    Raises:
        CheckpointError: It is of another format or version.
        CorruptionError: It was changed, or says what cannot be.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a swapio checkpoint")
    if content.get("version") != FORMAT_VERSION or content.get("block_bytes") != BLOCK_BYTES:
        raise CheckpointError(
            f"{where} has format version {content.get('version')!r} with blocks of "
            f"{content.get('block_bytes')!r} bytes; this swapio reads version {FORMAT_VERSION} "
            f"with {BLOCK_BYTES}"
        )
    stated = content.get("hash")
    plain = {key: value for key, value in content.items() if key != "hash"}
    if stated != f"{hash_bytes(_encode(plain)):016x}":
        raise CorruptionError(f"{where} was changed: its hash differs")
    try:
        manifest = _decode(plain)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{where}: a field is missing or malformed: {error!r}") from error
    _check(manifest, where)
    return manifest


def _decode(content: Mapping[str, Any]) -> CheckpointManifest:
    parameters = tuple(
        ParameterEntry(
            name, tuple(shape), tuple(order), dtype, step, tuple(Run(*run) for run in runs)
        )
        for name, shape, order, dtype, step, runs in content["parameters"]
    )
    packs = tuple(
        PackEntry(
            pack["numel"],
            {name: _decode_record(record) for name, record in pack["records"].items()},
        )
        for pack in content["packs"]
    )
    plain = {name: content[name] for name in ("tag", "step", "sequence", "saved", "world_size")}
    return CheckpointManifest(
        **plain,
        data=content["data"],
        files=tuple((name, nbytes) for name, nbytes in content["files"]),
        packs=packs,
        parameters=parameters,
        groups=tuple(content["groups"]),
        scalars=content["scalars"],
        payload=base64.b64decode(content["payload"]),
    )


def _decode_record(data: Mapping[str, Any]) -> RecordEntry:
    hashes = np.frombuffer(base64.b64decode(data["hashes"]), dtype="<u8").astype(np.uint64)
    pieces = tuple(Piece(*piece) for piece in data["pieces"])
    return RecordEntry(data["dtype"], data["nbytes"], pieces, hashes)


def _check(manifest: CheckpointManifest, where: str) -> None:
    """Hold every number against the others: nothing is read from outside a file or an array."""
    if "/" in manifest.data or manifest.data in ("", ".", ".."):
        raise CorruptionError(f"{where}: its data folder is {manifest.data!r}")
    for name, nbytes in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts or nbytes < 0:
            raise CorruptionError(f"{where}: file {name!r} of {nbytes} bytes")
    for index, pack in enumerate(manifest.packs):
        for name, record in pack.records.items():
            _check_record(manifest, record, f"{where}: {name!r} in pack {index}")
    for parameter in manifest.parameters:
        for run in parameter.runs:
            if not 0 <= run.pack < len(manifest.packs) or min(run) < 0:
                raise CorruptionError(f"{where}: a run of {parameter.name!r} is in no pack")
            if run.position + run.numel > manifest.packs[run.pack].numel:
                raise CorruptionError(f"{where}: a run of {parameter.name!r} leaves its pack")


def _check_record(manifest: CheckpointManifest, record: RecordEntry, where: str) -> None:
    if sum(piece.nbytes for piece in record.pieces) != record.nbytes:
        raise CorruptionError(f"{where}: the pieces do not make it up")
    if len(record.hashes) not in (0, -(-record.nbytes // BLOCK_BYTES)):
        raise CorruptionError(f"{where}: there are {len(record.hashes)} checksums")
    for piece in record.pieces:
        inside = 0 <= piece.file < len(manifest.files) and piece.offset >= 0
        if not inside or piece.offset + piece.nbytes > manifest.files[piece.file][1]:
            raise CorruptionError(f"{where}: a piece lies outside its file")


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Publish the manifest in `folder`: write, fsync, rename, fsync of the folder; blocks.

    Raises:
        AioError: It could not be written; the one before stays.
    """
    temporary = folder / f".{FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            file.write(to_json(manifest))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / FILE_NAME)
        sync_folder(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        hint = "The checkpoint before it is still there"
        raise AioError(error.errno or 0, "write", folder / FILE_NAME, hint=hint) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read and check the manifest in `folder`.

    Raises:
        CheckpointError: There is none, or it is of another version.
        CorruptionError: It is damaged.
    """
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {FILE_NAME}") from None
    except ValueError as error:
        raise CorruptionError(f"{path} is not JSON: {error}") from error
    return from_json(content, str(path))


def _encode(content: Mapping[str, Any]) -> bytes:
    """What the hash is of."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
