# SPDX-License-Identifier: Apache-2.0
"""xxh3-64 checksums of blocks of memory.

The native kernels hash with their own threads; without them the xxhash wheel does it in this one.
Both compute the same function: the values are part of the format on storage.

Invariant: the last block of a record is hashed over its logical bytes only, never over padding.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from swapio.align import BLOCK_BYTES

Hashes = npt.NDArray[np.uint64]
_HashSpans = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.int64]], Hashes]
_HashBlocks = Callable[[Sequence[tuple[int, int]], int], Hashes]


def _hash_spans_in_python(
    addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.int64]
) -> Hashes:
    hashes = np.empty(len(addresses), dtype=np.uint64)
    for index, (address, length) in enumerate(
        zip(addresses.tolist(), nbytes.tolist(), strict=True)
    ):
        memory = (ctypes.c_char * length).from_address(address) if length else b""
        hashes[index] = xxhash.xxh3_64_intdigest(memory)
    return hashes


def _native(name: str) -> Any:
    """The kernel of that name, or None if this build has none that hashes."""
    try:
        kernels = importlib.import_module("swapio._kernels")
    except ImportError:
        return None
    return getattr(kernels, name, None) if kernels.has_xxh3 else None


_hash_spans: _HashSpans = _native("hash_spans") or _hash_spans_in_python


def _hash_blocks_as_spans(ranges: Sequence[tuple[int, int]], block_bytes: int) -> Hashes:
    return _hash_spans(*block_spans(ranges, block_bytes))


_hash_blocks: _HashBlocks = _native("hash_blocks") or _hash_blocks_as_spans


def block_spans(
    ranges: Iterable[tuple[int, int]], block_bytes: int = BLOCK_BYTES
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Cut `(address, nbytes)` ranges in blocks; the last block of each may be short.

    Returns:
        Two arrays with one entry per block: its address and its length in bytes.
    """
    addresses = []
    lengths = []
    for address, nbytes in ranges:
        starts = np.arange(0, nbytes, block_bytes, dtype=np.uint64)
        sizes = np.full(len(starts), block_bytes, dtype=np.int64)
        if len(sizes):
            sizes[-1] = nbytes - int(starts[-1])
        addresses.append(starts + np.uint64(address))
        lengths.append(sizes)
    if len(addresses) == 1:
        return addresses[0], lengths[0]
    if not addresses:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    return np.concatenate(addresses), np.concatenate(lengths)


def span_hashes(addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.int64]) -> Hashes:
    """Return the xxh3-64 (seed 0) of each span of memory, `uint64[n]`.

    Args:
        addresses: First byte of each span, `uint64[n]`.
        nbytes: Length of each span in bytes, `int64[n]`.

    The caller keeps the memory alive and unchanged meanwhile.
    """
    return _hash_spans(addresses, nbytes)


def block_hashes(address: int, nbytes: int, block_bytes: int = BLOCK_BYTES) -> Hashes:
    """Return the xxh3-64 of each block of the memory at `address`, the last one possibly short."""
    return _hash_blocks([(address, nbytes)], block_bytes)


def range_hashes(ranges: Sequence[tuple[int, int]]) -> Hashes:
    """Return the xxh3-64 of each block of `(address, nbytes)` ranges, in order.

    Every range begins a block, and its last one may be short. The caller keeps the memory alive and
    unchanged meanwhile.
    """
    return _hash_blocks(ranges, BLOCK_BYTES)


def hash_bytes(data: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


@functools.cache
def measure_hash_rate() -> int:
    """Return how many bytes all threads hash in a second; takes milliseconds, once a process."""
    memory = np.ones(16 << 20, dtype=np.uint8)  # more than a core's own cache
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        block_hashes(memory.ctypes.data, memory.nbytes)
        seconds.append(time.perf_counter() - started)
    return int(memory.nbytes / min(seconds))
