# SPDX-License-Identifier: Apache-2.0
"""Gradient fragments that a swapper keeps for its sub-groups, in RAM or on storage.

A fragment is the piece of one parameter's gradient that falls in a sub-group of this rank.
Fragments of at least `min_swap_bytes` go to storage when there is one; smaller ones stay in RAM,
owned by the sub-group, until its update has consumed them (`drop`).

    reserved, in RAM       |........|gggggggg|     a region; a wider sum takes all of it
    reserved, on storage   a record, and room to read the fragments of one sub-group at a time
    not reserved           memory of its own for each `put`, a copy for each `get`

Invariants:
- `put` replaces a fragment wherever it lives, so that a rewrite between swap-in and update reaches
  both kinds, and `drop` is the only thing that loses one;
- for fragments that are reserved no memory is taken later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool, Lease
from swapio.errors import ConfigError, PoolExhaustedError
from swapio.store import Piece, RecordLayout, SwapStore

Look = Callable[[torch.Tensor], None]


class FragmentSize(NamedTuple):
    """Bytes of one gradient, of the sum of several, and of an element of the one."""

    first_bytes: int
    sum_bytes: int
    itemsize: int

    def in_ram(self, min_swap_bytes: int | None) -> int:
        """Bytes of it that are kept in RAM at most."""
        if min_swap_bytes is None or self.sum_bytes < min_swap_bytes:
            return self.sum_bytes
        return self.first_bytes if self.first_bytes < min_swap_bytes else 0

    def on_storage(self, min_swap_bytes: int | None) -> int:
        """Bytes of it that are on storage at most."""
        swapped = min_swap_bytes is not None and self.sum_bytes >= min_swap_bytes
        return self.sum_bytes if swapped else 0


# By sub-group and name.
FragmentSizes = Mapping[str, Mapping[str, FragmentSize]]

_RECORD = "gradient"
_REGION_ALIGNMENT = 64
_SUM_NUMEL = 1 << 18


@dataclass
class _Fragment:
    offset: int
    dtype: torch.dtype
    numel: int
    value: torch.Tensor | None  # None: on storage under `store_key`
    store_key: str = ""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class GradientFragments:
    """Fragments by sub-group and name. All methods block; safe from several threads.

    Args:
        store: Where large ones live; None keeps all in RAM.
        lease: Lends memory that a large fragment is transferred through.
        min_swap_bytes: From how many bytes on a fragment is large.
    """

    def __init__(
        self, store: SwapStore | None, lease: Callable[[int], Lease], *, min_swap_bytes: int
    ) -> None:
        self._store = store
        self._lease = lease
        self._min_swap_bytes = min_swap_bytes
        self._fragments: dict[str, dict[str, _Fragment]] = {}
        self._lock = threading.Lock()
        self._pools: list[BufferPool] = []
        self._regions: dict[tuple[str, str], torch.Tensor] = {}
        self._read: dict[tuple[str, str], Lease] = {}

    def reserve(self, sizes: FragmentSizes, open_pool: Callable[[int], BufferPool]) -> None:
        """Take memory for fragments, and space on storage for the first gradients."""
        least = None if self._store is None else self._min_swap_bytes
        small, reading = reserved_bytes(sizes, least)
        if small:
            slab = self._open(open_pool, small).lease(small).tensor(torch.uint8, small)
            self._regions |= dict(_cut(slab, sizes, least))
        if reading and self._store is not None:
            self._open(open_pool, reading)
            for key, names in sizes.items():
                for name, (nbytes, _, itemsize) in names.items():
                    if nbytes >= self._min_swap_bytes:
                        self._add_record(_store_key(key, name, itemsize), nbytes)
            self._store.allocate()

    def put(
        self, key: str, name: str, offset: int, tensor: torch.Tensor, look: Look | None = None
    ) -> None:
        """Copy a fragment in; it replaces an earlier one of the same name.

        Args:
            key: The sub-group.
            name: Tells its fragments apart.
            offset: First element within the sub-group.
            tensor: The fragment.
            look: Called with its elements while they are in RAM.
        """
        flat = _checked(name, tensor)
        self._keep(key, name, _Fragment(offset, flat.dtype, flat.numel(), None), flat, None, look)

    def add(
        self,
        key: str,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        look: Look | None = None,
    ) -> None:
        """Add to a fragment, in `dtype` or in a wider one of those that are added."""
        flat = _checked(name, tensor)
        fragment, kept = self._find(key, name), self.get(key, name)
        total = torch.promote_types(torch.promote_types(fragment.dtype, flat.dtype), dtype)
        new = _Fragment(fragment.offset, total, fragment.numel, None)
        self._keep(key, name, new, kept, flat, look)

    def names(self, key: str) -> dict[str, int]:
        """Names of the fragments of a sub-group, with their offsets in it."""
        with self._lock:
            return {name: f.offset for name, f in self._fragments.get(key, {}).items()}

    def get(self, key: str, name: str) -> torch.Tensor:
        """The fragment as a 1-D tensor: the kept one itself, or a copy read from storage.

        A reserved one is valid until it is put again or dropped.
        """
        fragment = self._find(key, name)
        if fragment.value is not None:
            return fragment.value
        return self._fetch(key, name, fragment)

    def drop(self, key: str) -> None:
        """Forget the fragments of a sub-group."""
        with self._lock:
            for name in self._fragments.pop(key, {}):
                self._give_back(key, name)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._fragments.clear()
            self._regions.clear()
            self._read.clear()
            for pool in self._pools:
                pool.close(force=True)
            self._pools.clear()

    def _open(self, open_pool: Callable[[int], BufferPool], nbytes: int) -> BufferPool:
        self._pools.append(open_pool(round_up(nbytes, PAGE_BYTES)))
        return self._pools[-1]

    def _find(self, key: str, name: str) -> _Fragment:
        with self._lock:
            try:
                return self._fragments[key][name]
            except KeyError:
                raise ConfigError(f"sub-group {key!r} has no gradient fragment {name!r}") from None

    def _keep(
        self,
        key: str,
        name: str,
        new: _Fragment,
        first: torch.Tensor,
        second: torch.Tensor | None,
        look: Look | None,
    ) -> None:
        """Keep `first`, or the sum of both."""
        if self._store is not None and new.nbytes >= self._min_swap_bytes:
            # A sum of several may be wider than the first of them.
            new.store_key = _store_key(key, name, new.dtype.itemsize)
            self._write(new, first, second, look)
        else:
            new.value = self._region(key, name, new)
            if second is None:
                new.value.copy_(first)
            else:
                add_into(new.value, first, second)
            if look is not None:
                look(new.value)
        with self._lock:
            self._give_back(key, name)
            self._fragments.setdefault(key, {})[name] = new

    def _region(self, key: str, name: str, new: _Fragment) -> torch.Tensor:
        """Memory for a fragment in RAM: at the end of its region, or its own."""
        region = self._regions.get((key, name))
        if region is None or region.numel() < new.nbytes:
            return torch.empty(new.numel, dtype=new.dtype)
        return region[region.numel() - new.nbytes :].view(new.dtype)

    def _add_record(self, store_key: str, nbytes: int) -> bool:
        if self._store is None or store_key in self._store.keys:
            return False
        self._store.add(store_key, [RecordLayout(_RECORD, nbytes)], 0)
        return True

    def _write(
        self,
        fragment: _Fragment,
        first: torch.Tensor,
        second: torch.Tensor | None,
        look: Look | None,
    ) -> None:
        store, nbytes = self._store, fragment.nbytes
        if store is None:
            return
        if self._add_record(fragment.store_key, nbytes):
            store.allocate()
        with self._lease(nbytes) as lease:
            total = lease.tensor(fragment.dtype, (fragment.numel,)).copy_(first)
            if second is not None:
                total.add_(second)
            if look is not None:
                look(total)
            transaction = store.begin_write(fragment.store_key, 0)
            transaction.write([Piece(_RECORD, 0, nbytes, lease.address)], owner=lease).result()
            transaction.seal().result()

    def _fetch(self, key: str, name: str, fragment: _Fragment) -> torch.Tensor:
        """Read a fragment into reserved memory, or into memory of its own."""
        with self._lock:
            lease = self._read.get((key, name))
        if lease is not None:
            return lease.tensor(fragment.dtype, (fragment.numel,))
        lease = self._reading(fragment.nbytes)
        if lease is None:
            with self._lease(fragment.nbytes) as passing:
                return self._load(fragment, passing).clone()
        value = self._load(fragment, lease)
        with self._lock:
            self._read[key, name] = lease
        return value

    def _reading(self, nbytes: int) -> Lease | None:
        for pool in self._pools:
            try:
                return pool.lease(nbytes)
            except PoolExhaustedError:
                continue
        return None

    def _load(self, fragment: _Fragment, lease: Lease) -> torch.Tensor:
        value = lease.tensor(fragment.dtype, (fragment.numel,))
        if self._store is not None:
            piece = Piece(_RECORD, 0, fragment.nbytes, lease.address)
            self._store.read(fragment.store_key, [piece], owner=lease).result()
        return value

    def _give_back(self, key: str, name: str) -> None:
        lease = self._read.pop((key, name), None)
        if lease is not None:
            lease.release()


def reserved_bytes(sizes: FragmentSizes, min_swap_bytes: int | None) -> tuple[int, int]:
    """Bytes that `reserve` takes: for fragments in RAM, and to read those of one sub-group.

    Args:
        sizes: As there.
        min_swap_bytes: As in GradientFragments; None if there is no storage.
    """
    small = sum(
        round_up(size.in_ram(min_swap_bytes), _REGION_ALIGNMENT)
        for names in sizes.values()
        for size in names.values()
    )
    large = [
        sum(round_up(size.on_storage(min_swap_bytes), PAGE_BYTES) for size in names.values())
        for names in sizes.values()
    ]
    return round_up(small, PAGE_BYTES), max(large, default=0)


def add_into(total: torch.Tensor, kept: torch.Tensor, new: torch.Tensor) -> None:
    """Write the sum of two 1-D tensors to `total`, which is `kept` or ends where it ends."""
    if total.data_ptr() == kept.data_ptr() and total.dtype is kept.dtype:
        kept.add_(new)
        return
    for start in range(0, kept.numel(), _SUM_NUMEL):
        part = slice(start, min(kept.numel(), start + _SUM_NUMEL))
        total[part] = kept[part].to(total.dtype) + new[part].to(total.dtype)


def _cut(
    slab: torch.Tensor, sizes: FragmentSizes, least: int | None
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    start = 0
    for key, names in sizes.items():
        for name, size in names.items():
            stop = start + round_up(size.in_ram(least), _REGION_ALIGNMENT)
            yield (key, name), slab[start:stop]
            start = stop


def _store_key(key: str, name: str, itemsize: int) -> str:
    return f"{key}/gradient/{name}/{itemsize}"


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ConfigError(
            f"gradient fragment {name!r} must be a dense CPU tensor, got {tensor.layout} on "
            f"{tensor.device}"
        )
    return tensor.detach().reshape(-1)
