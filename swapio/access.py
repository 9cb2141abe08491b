# SPDX-License-Identifier: Apache-2.0
"""Single records of a swapper: get, set and tag them wherever they live.

Invariant: a run of elements never crosses a chunk, so that one buffer, or one piece of storage,
holds the truth of it.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from swapio.errors import AioError, CorruptionError
from swapio.lifecycle import SwapperBase
from swapio.subgroup import RecordBuffer, SubGroup, SubGroupState, place

RecordFiller = Callable[[int, torch.Tensor], None]


class RecordAccess(SwapperBase, abc.ABC):
    """The verbs `read`, `write`, `tag_resident` and `untag_resident` of a swapper."""

    @abc.abstractmethod
    def mark_dirty(self, key: str, records: Iterable[str] = ()) -> None:
        """Say that records (default: all) were changed through a view."""

    @abc.abstractmethod
    def _settle(self, group: SubGroup) -> None:
        """Make storage the only holder of the swapped records of `group`."""

    def read(
        self, key: str, record: str, out: torch.Tensor | None = None, *, start: int = 0
    ) -> torch.Tensor:
        """Return elements `start:start + out.numel()` of a record, in RAM or not (a copy).

        Args:
            key: The sub-group.
            record: The record's name.
            out: Contiguous CPU tensor of the record's dtype; None makes one, up to the end of the
                record, in its logical shape if `start` is 0.
            start: First element.

        Blocks. Works on a FAILED swapper for what is still whole. Raises ConfigError for an
        unknown record, ValueError for a wrong `out`.
        """
        group = self._group(key, failed_ok=True)
        spec = self._spec(group, record)
        if out is None:
            out = torch.empty(spec.numel - start, dtype=spec.dtype)
            out = out.view(spec.shape) if start == 0 else out
        self._check_span(group, record, start, out)
        flat = out.view(-1)
        with self._lock:
            self._settle_unread(group, record)
            for lo, hi in self._runs(group, start, start + out.numel()):
                self._read_run(group, record, lo, flat[lo - start : hi - start])
        return out

    def write(self, key: str, record: str, value: torch.Tensor, *, start: int = 0) -> None:
        """Replace elements `start:start + value.numel()` of a record, in RAM or on storage.

        Blocks. Raises as `read`.
        """
        group = self._group(key)
        self._check_span(group, record, start, value)
        flat = value.detach().view(-1)
        with self._lock:
            self._settle_unread(group, record)
            for lo, hi in self._runs(group, start, start + value.numel()):
                self._write_run(group, record, lo, flat[lo - start : hi - start])

    def refill(self, key: str, fillers: Mapping[str, RecordFiller]) -> None:
        """Replace whole records, streamed chunk by chunk through one buffer.

        Blocks. For each chunk the fillers are called in the order of the records, as
        `fill(start, out)` for elements `start:start + out.numel()`. Records without one stay.
        What `set_meta` was given meanwhile is written with the records.
        """
        group = self._group(key)
        for name in fillers:
            self._spec(group, name)
        with self._lock:
            self._settle(group)
            home = self._home.get(key)
            for name in [name for name in group.specs if name in fillers]:
                if home is not None and name in home.placements:
                    fillers[name](0, home.tensor(name))
                    self._dirty[key].add(name)
            names = [name for name in group.swapped if name in fillers]
            if names:
                self._refill_swapped(group, names, fillers)

    def _refill_swapped(
        self, group: SubGroup, names: list[str], fillers: Mapping[str, RecordFiller]
    ) -> None:
        transaction = self._require_store().begin_write(group.key, self._generation)
        try:
            for index in range(group.num_chunks):
                placements, nbytes = place(group.specs, names, *group.chunk_bounds(index))
                with RecordBuffer(self._lease(nbytes), placements) as buffer:
                    for name in names:
                        fillers[name](buffer.placements[name].start, buffer.tensor(name))
                    transaction.write(buffer.pieces(), owner=buffer).result()
        except BaseException as error:
            transaction.abort()
            if transaction.is_in_place and isinstance(error, Exception):
                self._fail(error)
            raise
        transaction.seal(self._meta.get(group.key, b"")).result()

    def tag_resident(self, key: str, record: str) -> None:
        """Keep a record in RAM from now on: reads it if needed (blocking)."""
        group = self._group(key)
        self._spec(group, record)
        if record in group.resident:
            return
        self._settle(group)
        placements, nbytes = place(group.specs, [record], 0, None)
        with self._lease(nbytes) as lease:
            buffer = RecordBuffer(lease, placements)
            self.read(key, record, buffer.tensor(record))
            self._move_home(group, group.resident | {record}, {record: buffer.tensor(record)})
        if not group.swapped:
            self._states[key] = SubGroupState.RESIDENT

    def untag_resident(self, key: str, record: str) -> None:
        """Let a record be swapped again: writes it to storage (blocking)."""
        group = self._group(key)
        self._spec(group, record)
        if record not in group.resident:
            return
        store = self._require_store()
        self._settle(group)
        if key not in self._stored:
            store.add(key, group.layouts(), group.meta_bytes)
            self._stored.add(key)
            store.allocate()
        home = self._home[key]
        self._transfer(group, home, [record])
        self._move_home(group, group.resident - {record}, {})
        self._states[key] = SubGroupState.OUT

    def _settle_unread(self, group: SubGroup, record: str) -> None:
        # What is in RAM of a record that swapping in does not read may be undefined.
        if not group.specs[record].is_read and record not in group.resident:
            self._settle(group)

    def _check_span(self, group: SubGroup, record: str, start: int, tensor: torch.Tensor) -> None:
        spec = self._spec(group, record)
        if tensor.dtype != spec.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"{group.key}:{record} holds {spec.dtype} on the CPU, got {tensor.dtype} on "
                f"{tensor.device}"
            )
        if start < 0 or start + tensor.numel() > spec.numel or not tensor.is_contiguous():
            raise ValueError(
                f"{group.key}:{record} has {spec.numel} elements, wanted "
                f"[{start}, {start + tensor.numel()}) as one contiguous tensor"
            )

    def _held(
        self,
        group: SubGroup,
        record: str,
        element: int,  # noqa: ARG002
    ) -> RecordBuffer | None:
        """The buffer in RAM that holds the truth of an element, or None: storage does."""
        for buffers in (self._home, self._buffers):
            buffer = buffers.get(group.key)
            if buffer is not None and record in buffer.placements:
                return buffer
        return None

    def _touch(self, group: SubGroup, record: str, element: int) -> None:  # noqa: ARG002
        """Note that an element was changed in the buffer that `_held` returned."""
        self.mark_dirty(group.key, [record])

    def _runs(self, group: SubGroup, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut elements `[start, stop)` at chunk bounds."""
        step = group.chunk_numel or max(1, group.numel)
        while start < stop:
            end = min(stop, (start // step + 1) * step)
            yield start, end
            start = end

    def _read_run(self, group: SubGroup, record: str, start: int, out: torch.Tensor) -> None:
        held = self._held(group, record, start)
        if held is not None:
            first = start - held.placements[record].start
            out.copy_(held.tensor(record)[first : first + out.numel()])
            return
        with self._borrow(group, record, start, start + out.numel()) as buffer:
            self._read_pieces(group, buffer)
            first = start - buffer.placements[record].start
            out.copy_(buffer.tensor(record)[first : first + out.numel()])

    def _write_run(self, group: SubGroup, record: str, start: int, value: torch.Tensor) -> None:
        held = self._held(group, record, start)
        if held is not None:
            first = start - held.placements[record].start
            held.tensor(record)[first : first + value.numel()] = value
            self._touch(group, record, start)
            return
        with self._borrow(group, record, start, start + value.numel()) as buffer:
            target = buffer.tensor(record)
            first = start - buffer.placements[record].start
            if target.numel() != value.numel():
                self._read_pieces(group, buffer)
            target[first : first + value.numel()] = value
            self._transfer(group, buffer, [record])

    def _borrow(self, group: SubGroup, record: str, start: int, stop: int) -> RecordBuffer:
        """A temporary buffer for the blocks around elements `[start, stop)` of one record."""
        unit = group.chunk_unit_numel
        hi = min(group.specs[record].numel, -(-stop // unit) * unit)
        placements, nbytes = place(group.specs, [record], start // unit * unit, hi)
        return RecordBuffer(self._lease(nbytes), placements)

    def _transfer(self, group: SubGroup, buffer: RecordBuffer, names: Iterable[str]) -> None:
        """Write records of a buffer to storage and seal them, blocking."""
        transaction = self._require_store().begin_write(group.key, self._generation)
        try:
            transaction.write(buffer.pieces(names), owner=buffer).result()
            transaction.seal(self._meta.get(group.key, b"")).result()
        except BaseException:
            transaction.abort()
            raise

    def _read_pieces(
        self, group: SubGroup, buffer: RecordBuffer, names: Iterable[str] | None = None
    ) -> None:
        """Read records (default: all) that a buffer is laid out for, blocking."""
        began = time.perf_counter()
        try:
            future = self._require_store().read(group.key, buffer.pieces(names), owner=buffer)
            self._stats.read_bytes += future.result()
        except (AioError, CorruptionError) as error:
            self._fail(error)
            raise
        finally:
            self._stats.stall_seconds += time.perf_counter() - began

    def _move_home(
        self, group: SubGroup, resident: set[str], new: Mapping[str, torch.Tensor]
    ) -> None:
        """Change the set of resident records, keeping the contents of those that stay."""
        old = self._home.pop(group.key, None)
        names = [name for name in group.specs if name in resident]
        group.resident = set(resident)
        group.set_chunk_bytes(self._chunk_bytes, self.chunk_numel)
        if names:
            placements, nbytes = place(group.specs, names, 0, None)
            home = RecordBuffer(self._lease(nbytes), placements)
            for name in names:
                source = new[name] if name in new or old is None else old.tensor(name)
                home.tensor(name).copy_(source)
            self._home[group.key] = home
        if old is not None:
            old.lease.release()
