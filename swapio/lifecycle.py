# SPDX-License-Identifier: Apache-2.0
"""What every swapper has: registered sub-groups, resident memory, counters, failure and close.

Invariants:
- after fork every verb raises ClosedError in the child;
- once a transfer has failed for good the swapper is FAILED: every verb raises the first error;
- `store=None` means that everything is RESIDENT.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from swapio.buffers import BufferPool, Lease
from swapio.errors import (
    ClosedError,
    ConfigError,
    PoolExhaustedError,
    SwapioError,
    SwapStateError,
    describe_error,
)
from swapio.gradients import FragmentSizes, GradientFragments, Look
from swapio.store import Progress, SwapStore
from swapio.subgroup import RecordBuffer, RecordSpec, SubGroup, SubGroupState, place
from swapio.views import Chunk


class SwapperStats:
    """Counters since construction (seconds and bytes; plain numbers, cheap to read)."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.write_bytes = 0
        self.stall_seconds = 0.0
        self.checksum_seconds = 0.0
        self.num_chunks = 0
        self.num_cached_chunks = 0

    def as_dict(self) -> dict[str, float]:
        """All counters by name."""
        return dict(vars(self))


class SwapperBase:
    """Registry, resident memory and failure state of a swapper. See PartitionedSwapper.

    Attributes:
        chunk_numel: Elements of a chunk of sub-groups added from now on; None: by `chunk_bytes`.
        observe_chunks: Wraps the chunks of each view, given its key; for time lines.
    """

    chunk_numel: int | None = None
    observe_chunks: Callable[[str, Iterator[Chunk]], Iterator[Chunk]] | None = None

    def __init__(
        self,
        store: SwapStore | None,
        pool: BufferPool,
        *,
        chunk_bytes: int = 10 << 20,
        min_swap_bytes: int = 1 << 20,
        swap_gradients: bool = False,
        writes_through: bool = False,
    ) -> None:
        self._store = store
        self._writes_through = writes_through and store is not None
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._min_swap_bytes = min_swap_bytes
        self._groups: dict[str, SubGroup] = {}
        self._stored: set[str] = set()
        self._states: dict[str, SubGroupState] = {}
        self._home: dict[str, RecordBuffer] = {}
        self._buffers: dict[str, RecordBuffer] = {}
        self._dirty: dict[str, set[str]] = {}
        self._meta: dict[str, bytes] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._generation = 1
        self._lock = threading.RLock()
        self._stats = SwapperStats()
        self._gradients = GradientFragments(
            store if swap_gradients else None, self._lease, min_swap_bytes=min_swap_bytes
        )

    # -- registration ------------------------------------------------------------------------

    def add_sub_group(
        self,
        key: str,
        records: Mapping[str, RecordSpec],
        fragments: Sequence[Any] = (),
        *,
        resident: Iterable[str] | None = None,
        meta_bytes: int = 0,
        streamed: bool = True,
    ) -> SubGroup:
        """Register a sub-group; `allocate()` must follow before its first use.

        Args:
            key: Unique and stable name: it names files and checkpoint entries.
            records: Record specifications by name.
            fragments: Opaque to the swapper; kept as `SubGroup.fragments`.
            resident: Names of records that stay in RAM; None decides by `min_swap_bytes`.
            meta_bytes: Room for `set_meta` bytes that travel with the records.
            streamed: Whether it may be cut in chunks; if not, `chunks()` gives it in one piece.

        Raises:
            ConfigError: The key is taken, or `resident` names an unknown record.
        """
        self._check()
        if key in self._groups:
            raise ConfigError(f"sub-group {key!r} is registered already")
        unknown = set(resident or ()) - set(records)
        if unknown:
            raise ConfigError(f"sub-group {key!r} has no record {sorted(unknown)[0]!r}")
        group = SubGroup(
            key, dict(records), tuple(fragments), streamed=streamed, meta_bytes=meta_bytes
        )
        small = group.nbytes < self._min_swap_bytes
        everything = self._store is None or (resident is None and small)
        group.resident = set(records) if everything else set(resident or ())
        group.set_chunk_bytes(self._chunk_bytes, self.chunk_numel)
        self._groups[key] = group
        self._states[key] = SubGroupState.RESIDENT if not group.swapped else SubGroupState.OUT
        if self._store is not None and (group.swapped or self._writes_through):
            self._store.add(key, group.layouts(), meta_bytes)
            self._stored.add(key)
        return group

    def allocate(self, progress: Progress | None = None, pool: BufferPool | None = None) -> None:
        """Create slot files and resident buffers of new sub-groups and fill in first contents.

        Blocks until all of it is written.

        Args:
            progress: Called now and then with (bytes done, bytes in total) of the slot files.
            pool: Where resident records of the new sub-groups live, if not in the swapper's pool.
        """
        self._check()
        new = [group for key, group in self._groups.items() if key not in self._dirty]
        if self._store is not None:
            self._store.allocate(progress)
        for group in new:
            # The first commit must find them on storage, also if no step touches them.
            self._dirty[group.key] = set(group.resident) if self._writes_through else set()
            for name, record in self._lease_home(group, pool or self._pool).items():
                group.specs[name].fill(0, record)
            if group.swapped:
                self._fill_swapped(group)

    def take_up(self, step: int) -> None:
        """Instead of `allocate`, after the store recovered `step`: read the resident records.

        Blocks until they are there.
        """
        self._check()
        self._generation = step + 1
        for group in self._groups.values():
            self._dirty[group.key] = set()
            for name in self._lease_home(group, self._pool):
                home = self._home[group.key]
                pieces = home.pieces([name])
                self._require_store().read(group.key, pieces, owner=home).result()

    def _lease_home(self, group: SubGroup, pool: BufferPool) -> dict[str, torch.Tensor]:
        """Lease memory for the resident records of a sub-group and return them by name."""
        names = [name for name in group.specs if name in group.resident]
        if not names:
            return {}
        placements, nbytes = place(group.specs, names, 0, None)
        home = self._home[group.key] = RecordBuffer(pool.lease(nbytes), placements)
        return {name: home.tensor(name) for name in names}

    def _fill_swapped(self, group: SubGroup) -> None:
        """Write the first contents chunk by chunk: streamed groups may exceed the pool."""
        store = self._require_store()
        transaction = store.begin_write(group.key, 0)
        for index in range(group.num_chunks):
            placements, nbytes = place(group.specs, group.swapped, *group.chunk_bounds(index))
            with self._lease(nbytes) as lease:
                buffer = RecordBuffer(lease, placements)
                for name in group.swapped:
                    group.specs[name].fill(placements[0].start, buffer.tensor(name))
                transaction.write(buffer.pieces(), owner=lease).result()
        transaction.seal(self._meta.get(group.key, b"")).result()

    def records(self, key: str) -> Mapping[str, RecordSpec]:
        """The records of a sub-group."""
        return self._group(key).specs

    def swapped_records(self, key: str) -> list[str]:
        """Names of the records of a sub-group that live on storage."""
        return self._group(key).swapped

    def _lease(self, nbytes: int) -> Lease:
        """Borrow memory of the pool; what only waits there gives way. May block on writes."""
        while True:
            try:
                return self._pool.lease(nbytes)
            except PoolExhaustedError:
                if self._give_way():
                    continue
                if self._failure is None:
                    raise
                # What is unsaved stays where it is; reading what is still whole must be possible.
                return BufferPool(nbytes, name="rescue", pin=False).lease(nbytes)

    def _give_way(self) -> bool:
        """Free some memory of the pool; False if there is nothing that could be given up."""
        return False

    # -- counters and end

    @property
    def cached_bytes(self) -> int:
        """Bytes of RAM that hold sub-groups, or chunks of them, which are not resident."""
        return sum(buffer.lease.nbytes for buffer in self._buffers.values())

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to storage so far, of transfers that are complete."""
        return self._stats.read_bytes, self._stats.write_bytes

    def stats(self) -> dict[str, float]:
        """Counters since construction, the store's included."""
        numbers = self._stats.as_dict()
        if self._store is not None:
            numbers.update(self._store.stats()._asdict())
        return numbers

    def close(self) -> None:
        """Give up all memory at once: drain first. Store and pool are the caller's. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for buffer in [*self._buffers.values(), *self._home.values()]:
            buffer.lease.release()
        self._buffers.clear()
        self._home.clear()
        self._gradients.close()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # -- gradient fragments ------------------------------------------------------------------

    def keep_gradients_in(self, store: SwapStore, lease: Callable[[int], Lease]) -> None:
        """Put large fragments in a store of their own, through memory that `lease` lends.

        They are no part of what a commit or a checkpoint holds, and need no second slot.
        """
        self._gradients = GradientFragments(store, lease, min_swap_bytes=self._min_swap_bytes)

    def reserve_gradients(
        self, sizes: FragmentSizes, open_pool: Callable[[int], BufferPool]
    ) -> None:
        """Take what gradient fragments will need now, and nothing when they are put.

        Args:
            sizes: How large the fragments of each sub-group are, by name.
            open_pool: Opens a pool of so many bytes; the swapper closes it.
        """
        for key in sizes:
            self._group(key)
        self._gradients.reserve(sizes, open_pool)

    def put_gradient(
        self, key: str, name: str, offset: int, tensor: torch.Tensor, look: Look | None = None
    ) -> None:
        """Copy `tensor`, a gradient fragment, for the elements from `offset` of a sub-group.

        Blocks until a large fragment is on storage. `key` is the sub-group's, `name` tells its
        fragments apart. A second fragment of the same name replaces the first. Large ones go to
        storage under `swap_gradients=True`; small ones stay in RAM until `drop_gradients`. `look`
        is called with the elements while they are in RAM.
        """
        self._gradients.put(self._group(key).key, name, offset, tensor, look)

    def add_gradient(
        self,
        key: str,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        look: Look | None = None,
    ) -> None:
        """Add to a fragment that was put.

        Args:
            key: The sub-group's.
            name: The fragment's.
            tensor: What is added: as many elements as the fragment has.
            dtype: Of the sum; the widest of those involved where that is wider.
            look: Called with the sum while it is in RAM.
        """
        self._gradients.add(self._group(key).key, name, tensor, dtype, look)

    def gradient(self, key: str, name: str) -> torch.Tensor:
        """The fragment as last put or written back, in RAM (a copy if it was on storage).

        Memory that was reserved for it is used again when it is put again or dropped.
        """
        return self._gradients.get(self._group(key).key, name)

    def drop_gradients(self, key: str) -> None:
        """Forget all fragments of a sub-group: its update has consumed them."""
        self._gradients.drop(self._group(key).key)

    # -- metadata

    def set_meta(self, key: str, meta: bytes) -> None:
        """Small bytes that are written with the sub-group's next writeback (tie lists)."""
        self._meta[key] = meta

    def meta(self, key: str) -> bytes:
        """The bytes of the last `set_meta`, or those found on storage."""
        store = self._store
        if key not in self._meta and store is not None and key in self._stored:
            self._meta[key] = store.meta(key) if store.is_written(key) else b""
        return self._meta.get(key, b"")

    # -- checks ------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Make the swapper FAILED: every verb but `read`, `stats` and `close` raises from now on.

        For a caller whose update of some sub-groups was cut short. The first error stays.
        """
        if self._failure is None:
            self._failure = error

    def _fail(self, error: BaseException) -> None:
        self.fail(error)

    @property
    def failure(self) -> BaseException | None:
        """The first error that made the swapper FAILED, or None."""
        return self._failure

    def _check(self, *, failed_ok: bool = False) -> None:
        if self._closed or os.getpid() != self._pid:
            where = "is closed" if self._closed else "belongs to the parent of this forked process"
            raise ClosedError(f"this swapper {where}; create a new one")
        if self._failure is not None and not failed_ok:
            raise SwapioError(
                "the swapper failed earlier and its state in RAM may be ahead of storage; the "
                f"first error was {describe_error(self._failure)}"
            ) from self._failure

    def _group(self, key: str, *, failed_ok: bool = False) -> SubGroup:
        self._check(failed_ok=failed_ok)
        try:
            return self._groups[key]
        except KeyError:
            raise ConfigError(f"no sub-group {key!r} is registered") from None

    def _spec(self, group: SubGroup, record: str) -> RecordSpec:
        try:
            return group.specs[record]
        except KeyError:
            raise ConfigError(
                f"sub-group {group.key!r} has no record {record!r}, only {sorted(group.specs)}"
            ) from None

    def _require_store(self) -> SwapStore:
        if self._store is None:
            raise SwapStateError("this swapper keeps everything in RAM: it has no storage")
        return self._store
