# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a folder of safetensors files, and back.

The format (https://github.com/huggingface/safetensors): 8 bytes, little-endian: the length of a
JSON object; the object, name to `{"dtype", "shape", "data_offsets": [begin, end)}`, offsets
counted from its end, and `__metadata__`, text to text; then the bytes. Tensors are in C order.

A tensor is named `<parameter>.<state>`; `step` is a float32 scalar, as in torch. Split masters are
written as fp32 `master`. Files are cut at about `max_bytes`; `optimizer.safetensors.index.json`
maps names to files, as transformers writes it.

Invariant: a folder is complete when its index is there: that is renamed last.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swapio.errors import AioError, CheckpointError, CorruptionError
from swapio.manifest import sync_folder

INDEX_NAME = "optimizer.safetensors.index.json"
_WINDOW_NUMEL = 1 << 20
_HEADER_BYTES_MAX = 100 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

# (first element, 1-D tensor to fill)
Read = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Source:
    """A tensor to write: its kind, and how to get its elements in C order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Read

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize


def write_folder(
    folder: Path,
    tensors: dict[str, Source],
    metadata: dict[str, str],
    *,
    max_bytes: int = 4 << 30,
) -> None:
    """Write tensors into a new folder, or one without an index; blocks.

    Raises:
        CheckpointError: There is an index already.
        AioError: It could not be written.
    """
    if (folder / INDEX_NAME).exists():
        raise CheckpointError(f"{folder} has a {INDEX_NAME} already; export to another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parts = _cut(tensors, max_bytes)
        index: dict[str, str] = {}
        for number, names in enumerate(parts, 1):
            file_name = f"optimizer-{number:05d}-of-{len(parts):05d}.safetensors"
            _write_file(folder / file_name, {name: tensors[name] for name in names}, metadata)
            index.update(dict.fromkeys(names, file_name))
        total = sum(source.nbytes for source in tensors.values())
        content = {"metadata": {"total_size": total, **metadata}, "weight_map": index}
        temporary = folder / f".{INDEX_NAME}.{os.getpid()}"
        with temporary.open("x") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / INDEX_NAME)
        sync_folder(folder)
    except OSError as error:
        raise AioError(error.errno or 0, "write", error.filename or folder) from error


def _cut(tensors: dict[str, Source], max_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name, source in tensors.items():
        if parts[-1] and size + source.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += source.nbytes
    return parts


def _write_file(path: Path, tensors: dict[str, Source], metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, source in tensors.items():
        if source.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {source.dtype}, which safetensors lacks")
        header[name] = {
            "dtype": _NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [at, at + source.nbytes],
        }
        at += source.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for source in tensors.values():
            for start in range(0, source.numel, _WINDOW_NUMEL):
                count = min(_WINDOW_NUMEL, source.numel - start)
                window = torch.empty(count, dtype=source.dtype)
                source.read(start, window)
                file.write(window.view(torch.uint8).numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The tensor, as a private map of the file: nothing is read before it is used."""
        numel = 1
        for size in self.shape:
            numel *= size
        if not numel:
            return torch.empty(self.shape, dtype=self.dtype)
        whole = torch.from_file(
            str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8
        )
        part = whole[self.offset : self.offset + numel * self.dtype.itemsize]
        if part.data_ptr() % self.dtype.itemsize:
            part = part.clone()
        return part.view(self.dtype).view(self.shape)


def read_folder(folder: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the headers of all files of a folder: tensors by name, and the metadata.

    Raises:
        CheckpointError: There is no safetensors file.
        CorruptionError: A header is malformed, or says what cannot be.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"there is no safetensors file in {folder}")
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for path in paths:
        for name, value in _read_header(path):
            if name == "__metadata__":
                metadata.update(value)
            else:
                tensors[name] = value
    return tensors, metadata


def _read_header(path: Path) -> Iterator[tuple[str, Any]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _HEADER_BYTES_MAX):
            raise CorruptionError(f"{path}: its header of {length} bytes does not fit in it")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CorruptionError(f"{path}: its header is not JSON: {error}") from error
    for name, entry in header.items():
        if name == "__metadata__":
            yield name, entry
            continue
        try:
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{path}: the entry of {name!r} is malformed") from error
        nbytes = dtype.itemsize
        for count in shape:
            nbytes *= count
        if begin < 0 or end - begin != nbytes or 8 + length + end > size:
            raise CorruptionError(f"{path}: {name!r} lies outside the file, or has other bytes")
        yield name, Stored(path, 8 + length + begin, dtype, shape)
