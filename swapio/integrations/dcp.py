# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint for swapio optimizers: loading that streams, saving without a copy.

Plain `dcp.save`, `dcp.load` and `async_save` work on a swapio optimizer as on any other. Loaded
values are then written into the private maps that `state_dict()` made, so RAM grows by the state.
With these two classes it does not:

    planner = LoadPlanner(folder)
    dcp.load({"model": model, "optimizer": planner.streamed(optimizer)}, planner=planner, ...)

    dcp.async_save({"model": model, "optimizer": optimizer}, async_stager=SnapshotStager(), ...)

What DCP stores is one `torch.save` archive for each chunk of each tensor, stored without
compression: the bytes of the tensor lie in one piece at a place that its directory tells. They are
read from there, window by window, sub-group by sub-group, into the slots.

Invariants: only elements that this rank keeps are read; nothing is unpickled but numbers, strings
and the arguments of a tensor; a checkpoint that is laid out in another way is refused, by name.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.default_planner import (  # noqa: TID251
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (  # noqa: TID251
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: TID251
from torch.distributed.checkpoint.staging import AsyncStager  # noqa: TID251

from swapio.checkpoint.placement import PlacedRun, Placement, box_placement, whole
from swapio.errors import CheckpointError

_LOCAL_HEADER_BYTES = 30
_HINT = "load it with plain torch.distributed.checkpoint.load, which takes RAM for the state"


class StoredChunk(NamedTuple):
    """One chunk of a tensor in a file.

    Attributes:
        path: The file.
        offset: Of the tensor's first byte in it.
        place: Which elements of the whole tensor these are.
        starts: First element of each run in the whole, for searching.
    """

    path: Path
    offset: int
    place: Placement
    starts: list[int]


class LoadPlanner(DefaultLoadPlanner):
    """A planner for `dcp.load` that leaves what is streamed to the optimizers.

    Args:
        checkpoint_id: The folder of the checkpoint, as for `dcp.load`.
        options: As for torch's DefaultLoadPlanner.
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        self._folder = Path(checkpoint_id)
        self._streamed: list[StreamedOptimizer] = []
        self._chunks: dict[str, list[StoredChunk]] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def streamed(self, optimizer: Any, *, by_name: bool = False) -> StreamedOptimizer:
        """Return what stands for a swapio optimizer in the dict that `dcp.load` is given.

        Args:
            optimizer: Whose state is to be loaded.
            by_name: Whether it was saved by parameter names (`get_optimizer_state_dict`) instead
                of by position (`optimizer.state_dict()`).
        """
        self._streamed.append(StreamedOptimizer(optimizer, self, by_name=by_name))
        return self._streamed[-1]

    def create_local_plan(self) -> LoadPlan:
        """Plan everything but the large state of streamed optimizers."""
        metadata = self.metadata
        if metadata is None:
            raise CheckpointError(f"{self._folder} has no metadata of a distributed checkpoint")
        for fqn, item in self.state_dict.items():
            if isinstance(item, _Later):
                self._locate(fqn, item, metadata)
        now = {k: v for k, v in self.state_dict.items() if not isinstance(v, _Later)}
        return create_default_local_load_plan(now, metadata, not self.allow_partial_load)

    def _locate(self, fqn: str, item: _Later, metadata: Metadata) -> None:
        stored = metadata.state_dict_metadata.get(fqn)
        if stored is None and item.is_optional:
            return
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder} lacks the tensor {fqn!r}")
        if tuple(stored.size) != item.shape:
            raise CheckpointError(
                f"{fqn!r} has shape {tuple(stored.size)} in {self._folder}, {item.shape} here"
            )
        item.fqn = fqn
        self._dtypes[fqn] = stored.properties.dtype
        self._chunks[fqn] = []
        for chunk in stored.chunks:
            if math.prod(chunk.sizes):
                index = MetadataIndex(fqn, chunk.offsets)
                info = metadata.storage_data[index]
                place = box_placement(stored.size, chunk.offsets, chunk.sizes)
                found = self._find_bytes(info, fqn, tuple(chunk.sizes), stored.properties.dtype)
                starts = [run.offset for run in place.runs]
                self._chunks[fqn].append(StoredChunk(*found, place, starts))

    def _find_bytes(
        self, info: Any, fqn: str, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Path, int]:
        """Where the bytes of a chunk lie: file and offset."""
        path = self._folder / getattr(info, "relative_path", "")
        if not path.is_file() or getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{fqn!r} is not stored as plain bytes in {self._folder}; {_HINT}"
            )
        with path.open("rb") as file:
            offset = _tensor_bytes(_Slice(file, info.offset, info.length), sizes, dtype)
        if offset is None:
            raise CheckpointError(f"{fqn!r} is stored in another layout in {path}; {_HINT}")
        return path, info.offset + offset

    # -- what the source asks ----------------------------------------------------------------

    def dtype_of(self, fqn: str) -> torch.dtype:
        """The stored dtype of a tensor."""
        return self._dtypes[fqn]

    def read(self, fqn: str, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (of the stored dtype) from element `offset` of a whole, contiguous tensor.

        Raises:
            CheckpointError: Elements are missing.
        """
        width, done = out.dtype.itemsize, 0
        target = out.view(torch.uint8).numpy()
        for chunk in self._chunks[fqn]:
            for run in _overlaps(chunk, offset, out.numel()):
                at = (run.offset - offset) * width
                part = target[at : at + run.numel * width]
                _read_into(chunk.path, chunk.offset + run.local * width, part)
                done += run.numel
        if done != out.numel():
            raise CheckpointError(
                f"{self._folder} has {done} of the elements {offset} to {offset + out.numel()} of "
                f"{fqn!r}"
            )


class _Later(str):
    """Stands for a tensor that is streamed after DCP has read the rest.

    A text, because DCP refuses values of kinds that it does not know.
    """

    __slots__ = ("fqn", "is_optional", "shape")
    shape: tuple[int, ...]
    fqn: str  # empty until the checkpoint is known to have it
    is_optional: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], name: str) -> _Later:
        """Make one for a state; checkpoints of torch's own optimizers have no master."""
        made = cls("streamed")
        made.shape = shape
        made.fqn = ""
        made.is_optional = name == "master"
        return made


class StreamedOptimizer:
    """Stands for an optimizer in `dcp.load`; made by `LoadPlanner.streamed`.

    A `Stateful`: DCP asks for the state dict, has the planner fill it, and hands it back.
    """

    def __init__(self, optimizer: Any, planner: LoadPlanner, *, by_name: bool) -> None:
        self._optimizer = optimizer
        self._planner = planner
        self._by_name = by_name

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict with placeholders for the large tensors."""
        optimizer = self._optimizer
        state: dict[Any, dict[str, Any]] = {}
        for index, key in self._keys():
            names = optimizer.state_names(index)
            shape = optimizer.place_of(index).shape
            entry: dict[str, Any] = {
                name: _Later.of(shape, name) for name in names if name != "step"
            }
            state[key] = {"step": torch.zeros(()), **entry}
        groups = []
        for group in optimizer.param_groups:
            plain = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append(plain)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stream what was left for later, and set step counts and hyperparameters; blocks."""
        entries = {}
        for index, key in self._keys():
            entries[index] = state_dict["state"][key]
        source = _Source(self._optimizer, self._planner, entries)
        counts = {index: int(entry["step"]) for index, entry in entries.items()}
        self._optimizer.load_from(source, counts, state_dict["param_groups"])

    def _keys(self) -> Iterator[tuple[int, Any]]:
        """Index and key of each parameter that has state."""
        optimizer = self._optimizer
        position = -1
        for group in optimizer.param_groups:
            for param in group["params"]:
                position += 1
                if param in optimizer.state:
                    index = optimizer.parameter_index(param)
                    yield index, optimizer.name_of(index) if self._by_name else position


class _Source:
    """State of an optimizer in a distributed checkpoint; see `swapio.optim.filling.Source`."""

    def __init__(
        self, optimizer: Any, planner: LoadPlanner, entries: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._optimizer = optimizer
        self._planner = planner
        self._entries = entries
        self._turned: tuple[tuple[int, str], torch.Tensor] | None = None

    def has(self, index: int, name: str) -> bool:
        """Whether the checkpoint has that state of a parameter."""
        value = self._entries.get(index, {}).get(name)
        return isinstance(value, _Later) and bool(value.fqn)

    def read(self, index: int, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill `out` from element `offset` of what this rank has of the parameter."""
        fqn, place = self._entries[index][name].fqn, self._optimizer.place_of(index)
        is_contiguous = place.order == tuple(range(len(place.shape)))
        for run in place.find(offset, out.numel()):
            part = out[run.local - offset : run.local - offset + run.numel]
            if is_contiguous:
                self._read_as(fqn, run.offset, part)
            else:
                part.copy_(self._whole(index, name)[run.offset : run.offset + run.numel])

    def read_units(
        self,
        name: str,  # noqa: ARG002
        runs: Any,
        out: torch.Tensor,  # noqa: ARG002
    ) -> npt.NDArray[np.bool_]:
        """None: each value is read by itself."""
        return np.zeros(len(runs.param), bool)

    def _read_as(self, fqn: str, offset: int, out: torch.Tensor) -> None:
        dtype = self._planner.dtype_of(fqn)
        if dtype is out.dtype:
            self._planner.read(fqn, offset, out)
            return
        stored = torch.empty(out.numel(), dtype=dtype)
        self._planner.read(fqn, offset, stored)
        out.copy_(stored)

    def _whole(self, index: int, name: str) -> torch.Tensor:
        """The whole of a parameter that is kept in another memory order, turned."""
        if self._turned is None or self._turned[0] != (index, name):
            fqn, place = self._entries[index][name].fqn, self._optimizer.place_of(index)
            stored = torch.empty(math.prod(place.shape), dtype=self._planner.dtype_of(fqn))
            self._planner.read(fqn, 0, stored)
            turned = stored.view(place.shape).permute(place.order).reshape(-1)
            self._turned = ((index, name), turned)
        return self._turned[1]


class SnapshotStager(AsyncStager):
    """A stager for `dcp.async_save` that copies everything but snapshots of swapio optimizers.

    `state_dict()` of a swapio optimizer is a snapshot already: later steps do not change it.

    Args:
        keys: Top-level names of optimizers in the dict that is saved.
    """

    _synchronize_after_execute = False

    def __init__(self, keys: tuple[str, ...] = ("optimizer",)) -> None:
        self._keys = keys

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a dict that training does not change."""
        return {
            key: value if key in self._keys else _copied(value) for key, value in state_dict.items()
        }

    def synchronize_staging(self) -> None:
        """Nothing is staged later."""

    def close(self) -> None:
        """Nothing is held."""


def _copied(value: Any) -> Any:
    """A copy of nested containers with tensors, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _overlaps(chunk: StoredChunk, offset: int, numel: int) -> Iterator[PlacedRun]:
    """The runs of a chunk that lie in elements `offset:offset + numel` of the whole."""
    runs = chunk.place.runs
    at = max(0, bisect_right(chunk.starts, offset) - 1)
    while at < len(runs) and runs[at].offset < offset + numel:
        run = runs[at]
        at += 1
        first, stop = max(offset, run.offset), min(offset + numel, run.offset + run.numel)
        if first < stop:
            yield PlacedRun(first, run.local + first - run.offset, stop - first)


def _read_into(path: Path, offset: int, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    view: memoryview = out.data
    with path.open("rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view], offset)
            if not count:
                raise CheckpointError(f"{path} ends at {offset}; {len(view)} bytes are missing")
            view, offset = view[count:], offset + count
        with contextlib.suppress(OSError):
            # It is read once: the page cache has better uses.
            os.posix_fadvise(file.fileno(), offset - len(out), len(out), os.POSIX_FADV_DONTNEED)


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _TensorArguments(pickle.Unpickler):
    """Reads the arguments that torch.save noted of one tensor, and builds nothing."""

    def find_class(self, module: str, name: str) -> Any:
        return lambda *arguments: (module, name, arguments)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _tensor_bytes(archive: _Slice, sizes: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Offset of a contiguous tensor's bytes in a torch.save archive; None if it is not one."""
    try:
        with zipfile.ZipFile(archive) as members:
            names = members.namelist()
            (pickled,) = [name for name in names if name.endswith("/data.pkl")]
            stored = [i for i in members.infolist() if "/data/" in i.filename]
            _, function, arguments = _TensorArguments(io.BytesIO(members.read(pickled))).load()
    except (zipfile.BadZipFile, ValueError, TypeError, pickle.UnpicklingError, KeyError):
        return None
    if not function.startswith("_rebuild_tensor") or len(stored) != 1:
        return None
    _, first, size, stride = arguments[:4]
    nbytes = math.prod(sizes) * dtype.itemsize
    is_plain = stored[0].compress_type == zipfile.ZIP_STORED and stored[0].file_size == nbytes
    if not is_plain or first != 0 or tuple(size) != sizes or not _is_contiguous(size, stride):
        return None
    archive.seek(stored[0].header_offset)
    header = archive.read(_LOCAL_HEADER_BYTES)
    if header is None or len(header) != _LOCAL_HEADER_BYTES:
        return None
    lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return stored[0].header_offset + _LOCAL_HEADER_BYTES + sum(lengths)


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    order = whole(size, range(len(size))).order
    expected = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != expected:
            return False
        expected *= size[dim]
    return True
