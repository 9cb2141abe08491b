# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model, from file headers alone: nothing of their data is read.

A safetensors file begins with the length of its header (8 bytes, little-endian), then the header as
JSON: name to dtype, shape and offsets. A torch checkpoint is loaded onto the meta device.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swapio.errors import ConfigError

HEADER_BYTES_MAX = 100_000_000  # the limit of the format itself
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


class TensorInfo(NamedTuple):
    """A tensor of a model: its name, shape and dtype ("float32", "bfloat16", "int64", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_model(path: str) -> list[TensorInfo]:
    """Return the tensors of a model file, or of the files in a folder.

    Args:
        path: A .safetensors file, an .index.json that lists several, a torch checkpoint, or a
            folder that holds one of these.

    Raises:
        ConfigError: There is no such file, or it is not what its name says.
    """
    tensors = [tensor for file in _files(Path(path).expanduser()) for tensor in _read_file(file)]
    if not tensors:
        raise ConfigError(f"{path} holds no tensor")
    return tensors


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        for pattern in ("*.safetensors", *(f"*{ending}" for ending in _TORCH_ENDINGS)):
            found = sorted(path.glob(pattern))
            if found:
                return found
        raise ConfigError(f"{path} holds no .safetensors file and no torch checkpoint")
    if not path.is_file():
        raise ConfigError(f"model {path}: no such file")
    if path.name.endswith(".index.json"):
        return _indexed(path)
    return [path]


def _indexed(path: Path) -> list[Path]:
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        files = sorted(path.parent / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of model files: it has no weight_map") from error
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{path} lists {', '.join(missing)}, which is not there")
    return files


def _read_file(path: Path) -> list[TensorInfo]:
    if path.suffix == ".safetensors":
        return list(read_safetensors(path))
    if path.suffix in _TORCH_ENDINGS:
        return list(_read_torch(path))
    endings = ", ".join((".safetensors", ".index.json", *_TORCH_ENDINGS))
    raise ConfigError(f"model {path}: the name must end in one of {endings}")


def read_safetensors(path: Path) -> Iterator[TensorInfo]:
    """Yield the tensors that the header of a safetensors file names.

    Raises:
        ConfigError: The header is cut off, too long, or not what the format says.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= HEADER_BYTES_MAX:
            raise ConfigError(f"{path} is no safetensors file: its header would be {length} bytes")
        header = file.read(length)
    if len(header) < length:
        raise ConfigError(f"{path} is cut off: {len(header)} of {length} bytes of header")
    try:
        entries = json.loads(header)
        for name, entry in entries.items():
            if name != "__metadata__":
                shape = tuple(int(size) for size in entry["shape"])
                kind = str(entry["dtype"])
                yield TensorInfo(name, shape, _DTYPES.get(kind, kind.lower()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has a broken safetensors header: {error!r}") from error


def _read_torch(path: Path) -> Iterator[TensorInfo]:
    import pickle

    import torch

    try:
        data = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (RuntimeError, OSError, ValueError, pickle.UnpicklingError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(f"{path} cannot be read as a torch checkpoint: {first}") from error
    for name, tensor in _tensors(data):
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield TensorInfo(name, tuple(tensor.shape), dtype)


def _tensors(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model's tensors: those at the top, or of the part that is the model."""
    import torch

    if not isinstance(data, Mapping):
        return
    found = {str(k): v for k, v in data.items() if isinstance(v, torch.Tensor)}
    if found:
        yield from found.items()
        return
    for key in ("state_dict", "model", "module", "model_state_dict"):
        if isinstance(data.get(key), Mapping):
            yield from _tensors(data[key])
            return
