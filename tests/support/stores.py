# SPDX-License-Identifier: Apache-2.0
"""Short ways to put bytes into a store and to get them back."""

from __future__ import annotations

import numpy as np

from swapio.store import Piece, RecordLayout

MIB = 1 << 20


def layouts(**sizes):
    return [RecordLayout(name, nbytes) for name, nbytes in sizes.items()]


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def piece(record, array, start=0):
    return Piece(record, start, array.nbytes, array.ctypes.data)


def write(store, key, generation, contents, meta=b""):
    """Write `{record: array}` whole, or `{record: (start, array)}`, and seal."""
    transaction = store.begin_write(key, generation)
    for record, content in contents.items():
        start, array = content if isinstance(content, tuple) else (0, content)
        transaction.write([piece(record, array, start)], owner=array)
    transaction.seal(meta).result()


def read(source, key, record, nbytes, start=0):
    """Read from a store or a hold, into memory that was poisoned."""
    array = np.full(nbytes, 0xAB, dtype=np.uint8)
    source.read(key, [piece(record, array, start)], owner=array).result()
    return array
