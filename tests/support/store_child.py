# SPDX-License-Identifier: Apache-2.0
"""A process that uses a store until it is told to end, or is killed.

    store_child.py MODE PATH DURABILITY

Modes: "hold" waits with the folder locked; "commit" writes and commits step after step, telling
each on standard output; "flood" writes without waiting; "once" does one step and closes.
"""

from __future__ import annotations

import sys

import numpy as np

from swapio.aio import Engine
from swapio.filestore import FileStore
from swapio.store import Piece, RecordLayout

MIB = 1 << 20
SIZES = {"a": 3 * MIB + 100, "b": MIB, "c": 50}


def content(step, key):
    """What sub-group `key` holds after `step`."""
    pattern = np.arange(SIZES[key], dtype=np.uint64) * np.uint64(2 * step + 1) + np.uint64(step)
    return (pattern >> np.uint64(3)).astype(np.uint8)


def declare(store, scale=1):
    for key, size in SIZES.items():
        store.add(key, [RecordLayout("x", size * scale)])


def tell(*words):
    print(*words, flush=True)


def write_step(store, step, *, is_awaited=True):
    for key in SIZES:
        array = content(step, key)
        transaction = store.begin_write(key, step)
        transaction.write([Piece("x", 0, array.nbytes, array.ctypes.data)], owner=array)
        seal = transaction.seal()
        if is_awaited:
            seal.result()


def flood(store):
    array = np.ones(64 * MIB, dtype=np.uint8)
    pieces = [Piece("x", 0, 64 * MIB, array.ctypes.data)]
    transactions = [store.begin_write(key, 1) for key in store.keys]
    for turn in range(1000):
        futures = [transaction.write(pieces, owner=array) for transaction in transactions]
        tell("writing", turn)
        for future in futures:
            future.result()


def main(mode, path, durability):
    with Engine() as engine, FileStore(path, engine, durability=durability) as store:
        if mode == "flood":
            for key in ("a", "b", "c", "d"):
                store.add(key, [RecordLayout("x", 64 * MIB)])
        else:
            declare(store)
        step = 0
        record = store.recover() if mode == "commit" else None
        if record is None:
            store.allocate()
        else:
            step = record.step
        tell("ready", step)
        if mode == "hold":
            sys.stdin.read()
        elif mode == "flood":
            flood(store)
        elif mode == "once":
            write_step(store, 1)
            if durability != "checkpoint":
                store.commit(1).result()
        while mode == "commit":
            step += 1
            write_step(store, step, is_awaited=step % 2 == 0)
            future = store.commit(step, str(step).encode())
            if step % 3:
                future.result()
                tell("committed", step)


if __name__ == "__main__":
    main(*sys.argv[1:])
