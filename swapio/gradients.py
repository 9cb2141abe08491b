# SPDX-License-Identifier: Apache-2.0
"""Gradient fragments that a swapper keeps for its sub-groups, in RAM or on storage.

A fragment is the piece of one parameter's gradient that falls in a sub-group of this rank.
Fragments of at least `min_swap_bytes` go to storage when there is one; smaller ones stay in RAM,
owned by the sub-group, until its update has consumed them (`drop`).

Invariant: `put` replaces a fragment wherever it lives, so that a rewrite between swap-in and
update reaches both kinds, and `drop` is the only thing that loses one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swapio.buffers import Lease
from swapio.errors import ConfigError
from swapio.store import Piece, RecordLayout, SwapStore

_RECORD = "gradient"


@dataclass
class _Fragment:
    offset: int
    dtype: torch.dtype
    numel: int
    value: torch.Tensor | None  # None: on storage under `store_key`
    store_key: str = ""


class GradientFragments:
    """Fragments by sub-group and name. All methods block; safe from several threads."""

    def __init__(
        self, store: SwapStore | None, lease: Callable[[int], Lease], *, min_swap_bytes: int
    ) -> None:
        self._store = store
        self._lease = lease
        self._min_swap_bytes = min_swap_bytes
        self._fragments: dict[str, dict[str, _Fragment]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, name: str, offset: int, tensor: torch.Tensor) -> None:
        """Copy a fragment in; it replaces an earlier one of the same name."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ConfigError(
                f"gradient fragment {name!r} must be a dense CPU tensor, got {tensor.layout} on "
                f"{tensor.device}"
            )
        flat = tensor.detach().reshape(-1)
        fragment = _Fragment(offset, flat.dtype, flat.numel(), None)
        if self._store is not None and flat.numel() * flat.itemsize >= self._min_swap_bytes:
            # A sum of several may be wider than the first of them.
            fragment.store_key = f"{key}/gradient/{name}/{flat.itemsize}"
            self._write(fragment, flat)
        else:
            fragment.value = flat.clone()
        with self._lock:
            self._fragments.setdefault(key, {})[name] = fragment

    def names(self, key: str) -> dict[str, int]:
        """Names of the fragments of a sub-group, with their offsets in it."""
        with self._lock:
            return {name: f.offset for name, f in self._fragments.get(key, {}).items()}

    def get(self, key: str, name: str) -> torch.Tensor:
        """The fragment as a 1-D tensor: the kept one itself, or a copy read from storage."""
        with self._lock:
            try:
                fragment = self._fragments[key][name]
            except KeyError:
                raise ConfigError(f"sub-group {key!r} has no gradient fragment {name!r}") from None
        if fragment.value is not None:
            return fragment.value
        return self._read(fragment)

    def drop(self, key: str) -> None:
        """Forget the fragments of a sub-group."""
        with self._lock:
            self._fragments.pop(key, None)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._fragments.clear()

    def _write(self, fragment: _Fragment, flat: torch.Tensor) -> None:
        store = self._store
        if store is None:
            return
        nbytes = flat.numel() * flat.itemsize
        if fragment.store_key not in store.keys:
            store.add(fragment.store_key, [RecordLayout(_RECORD, nbytes)], 0)
            store.allocate()
        with self._lease(nbytes) as lease:
            lease.tensor(flat.dtype, (flat.numel(),)).copy_(flat)
            transaction = store.begin_write(fragment.store_key, 0)
            transaction.write([Piece(_RECORD, 0, nbytes, lease.address)], owner=lease).result()
            transaction.seal().result()

    def _read(self, fragment: _Fragment) -> torch.Tensor:
        store = self._store
        out = torch.empty(fragment.numel, dtype=fragment.dtype)
        if store is None:
            return out
        nbytes = fragment.numel * fragment.dtype.itemsize
        with self._lease(nbytes) as lease:
            piece = Piece(_RECORD, 0, nbytes, lease.address)
            store.read(fragment.store_key, [piece], owner=lease).result()
            out.copy_(lease.tensor(fragment.dtype, (fragment.numel,)))
        return out
