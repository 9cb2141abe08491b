# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: any run of elements of any state, verified, through a few small windows.

Invariants: only what is asked for is read, in windows of 3 MiB; no byte is handed out whose block
was not verified; memory is `NUM_WINDOWS` windows, whatever is read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from swapio.aio import OP_READ, Engine, File, Request
from swapio.align import BLOCK_BYTES
from swapio.buffers import BufferPool, Lease
from swapio.checkpoint.manifest import CheckpointManifest, ParameterEntry, RecordEntry
from swapio.checksum import block_hashes
from swapio.errors import CheckpointError, CorruptionError

WINDOW_BYTES = 3 << 20
# Two for each of the four records of a split master's parameter: what is loaded may begin anywhere
# in a window, and the next part of each record needs the same one again.
NUM_WINDOWS = 8

_Bytes = npt.NDArray[np.uint8]


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises:
        CheckpointError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has records of dtype {name!r}, which torch lacks")
    return dtype


_offset_of = attrgetter("offset")


def _sorted(entry: ParameterEntry) -> ParameterEntry:
    if all(a.offset <= b.offset for a, b in itertools.pairwise(entry.runs)):
        return entry
    return replace(entry, runs=tuple(sorted(entry.runs, key=_offset_of)))


class CheckpointReader:
    """Reads one checkpoint; a context manager.

    Args:
        folder: The checkpoint's folder.
        manifest: Its manifest.
        engine: Reads the files.

    Attributes:
        bytes_read: From storage, so far.
    """

    def __init__(self, folder: Path, manifest: CheckpointManifest, engine: Engine) -> None:
        self.manifest = manifest
        self.folder = folder
        self.bytes_read = 0
        self._engine = engine
        self._files: dict[int, File] = {}
        self._pool = BufferPool(NUM_WINDOWS * WINDOW_BYTES, name="checkpoint", pin=False)
        self._free = [self._pool.lease(WINDOW_BYTES) for _ in range(NUM_WINDOWS)]
        self._windows: OrderedDict[tuple[int, str, int], Lease] = OrderedDict()
        self.parameters = {entry.name: _sorted(entry) for entry in manifest.parameters}
        self._check_files()

    def _check_files(self) -> None:
        data = self.folder / self.manifest.data
        for name, nbytes in self.manifest.files:
            path = data / name
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < nbytes:
                raise CorruptionError(
                    f"{path} of {nbytes} bytes is missing"
                    if found is None
                    else f"{path} has {found} of {nbytes} bytes"
                )

    def records(self, entry: ParameterEntry) -> dict[str, str]:
        """Names and dtypes of the records that all runs of a parameter have."""
        common: dict[str, str] | None = None
        for run in entry.runs:
            pack = self.manifest.packs[run.pack].records
            found = {name: record.dtype for name, record in pack.items()}
            if common is not None:
                found = {n: d for n, d in found.items() if common.get(n) == d}
            common = found
        return common or {}

    def read(self, entry: ParameterEntry, record: str, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, of the record's dtype) from element `offset` of a parameter; blocks.

        Raises:
            CheckpointError: The checkpoint does not have these elements.
            CorruptionError: A block is not what was written.
            AioError: A read failed.
        """
        for pack, position, first, count in self.positions(entry, offset, out.numel()):
            part = out[first - offset : first - offset + count]
            self.read_run(pack, record, position, part)

    def read_run(self, pack: int, record: str, position: int, out: torch.Tensor) -> None:
        """Fill `out` from element `position` of a record of a pack; as `read`."""
        target = out.view(torch.uint8).numpy()
        self.read_bytes(pack, record, position * out.dtype.itemsize, target)

    def _runs(
        self, entry: ParameterEntry, offset: int, numel: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """(pack, position, offset, numel) of the runs that overlap."""
        runs = entry.runs
        at = max(0, bisect_right(runs, offset, key=_offset_of) - 1)
        while at < len(runs) and runs[at].offset < offset + numel:
            run = runs[at]
            at += 1
            first = max(offset, run.offset)
            stop = min(offset + numel, run.offset + run.numel)
            if first < stop:
                yield run.pack, run.position + first - run.offset, first, stop - first

    def positions(
        self, entry: ParameterEntry, offset: int, numel: int
    ) -> list[tuple[int, int, int, int]]:
        """Where elements of a parameter are: (pack, position, offset, numel) of each run.

        Raises:
            CheckpointError: The checkpoint does not have all of them.
        """
        runs = list(self._runs(entry, offset, numel))
        found = sum(run[3] for run in runs)
        if found != numel:
            raise CheckpointError(
                f"the checkpoint has {found} of the elements {offset} to {offset + numel} of "
                f"{entry.name!r}"
            )
        return runs

    def read_bytes(self, pack: int, record: str, start: int, out: _Bytes) -> None:
        """Fill `out` from byte `start` of a record of a pack; blocks. Raises as `read`."""
        entry = self.manifest.packs[pack].records[record]
        end = start + len(out)
        if end > entry.nbytes:
            raise CorruptionError(
                f"checkpoint {self.folder}: {record!r} in pack {pack} has {entry.nbytes} bytes, "
                f"and a parameter lies at {start} to {end}"
            )
        while start < end:
            index = start // WINDOW_BYTES
            window = self._window(pack, record, entry, index)
            lo = start - index * WINDOW_BYTES
            count = min(end - start, WINDOW_BYTES - lo)
            memory = np.frombuffer(window.memory, np.uint8)
            out[len(out) - (end - start) :][:count] = memory[lo : lo + count]
            start += count

    def _window(self, pack: int, record: str, entry: RecordEntry, index: int) -> Lease:
        key = (pack, record, index)
        lease = self._windows.get(key)
        if lease is not None:
            self._windows.move_to_end(key)
            return lease
        lease = self._free.pop() if self._free else self._windows.popitem(last=False)[1]
        try:
            self._load(pack, record, entry, index, lease)
        except BaseException:
            self._free.append(lease)
            raise
        self._windows[key] = lease
        return lease

    def _load(self, pack: int, record: str, entry: RecordEntry, index: int, lease: Lease) -> None:
        start = index * WINDOW_BYTES
        nbytes = min(WINDOW_BYTES, entry.nbytes - start)
        requests = []
        at = 0
        for piece in entry.pieces:
            first, stop = max(start, at), min(start + nbytes, at + piece.nbytes)
            if first < stop:
                offset = piece.offset + first - at
                address = lease.address + first - start
                requests.append(
                    Request(OP_READ, self._file(piece.file), address, stop - first, offset)
                )
            at += piece.nbytes
        self._engine.submit(requests, owner=lease).result()
        self.bytes_read += nbytes
        if len(entry.hashes):
            found = block_hashes(lease.address, nbytes)
            first_block = start // BLOCK_BYTES
            wrong = np.flatnonzero(found != entry.hashes[first_block : first_block + len(found)])
            if len(wrong):
                block = first_block + int(wrong[0])
                raise CorruptionError(
                    f"checkpoint {self.folder}: the checksum of block {block} of {record!r} in "
                    f"pack {pack} differs ({self._describe(entry, block * BLOCK_BYTES)})"
                )

    def _describe(self, entry: RecordEntry, start: int) -> str:
        at = 0
        for piece in entry.pieces:
            if at <= start < at + piece.nbytes:
                name = self.manifest.files[piece.file][0]
                return f"{self.manifest.data}/{name} at offset {piece.offset + start - at}"
            at += piece.nbytes
        return "nowhere"

    def _file(self, index: int) -> File:
        if index not in self._files:
            path = self.folder / self.manifest.data / self.manifest.files[index][0]
            self._files[index] = self._engine.open(path, read_only=True)
        return self._files[index]

    def close(self) -> None:
        """Close the files and give up the windows."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._windows.clear()
        self._free.clear()
        self._pool.close(force=True)

    def __enter__(self) -> CheckpointReader:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
