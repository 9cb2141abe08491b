# SPDX-License-Identifier: Apache-2.0
"""Swappers over real files, for tests."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch

from swapio.aio import Engine
from swapio.buffers import BufferPool
from swapio.filestore import FileStore
from swapio.pipeline import PipelinedSwapper
from swapio.subgroup import RecordSpec
from swapio.swapper import PartitionedSwapper

KINDS = ["partitioned", "pipelined", "read-only-pipelined", "write-only-pipelined"]
SWITCHES = {
    "pipelined": (True, True),
    "read-only-pipelined": (True, False),
    "write-only-pipelined": (False, True),
}


def specs_of(numel, names=("exp_avg", "exp_avg_sq"), dtype=torch.float32):
    return {name: RecordSpec((numel,), dtype) for name in names}


class Opened:
    def __init__(self, swapper, store, pool, engine):
        self.swapper = swapper
        self.store = store
        self.pool = pool
        self.engine = engine

    def add(self, key, records, **kwargs):
        self.swapper.add_sub_group(key, records, **kwargs)
        self.swapper.allocate()
        return self.swapper


@contextmanager
def open_swapper(
    folder,
    kind,
    *,
    pool_bytes=64 << 20,
    stream_bytes=16 << 20,
    chunk_bytes=2 << 20,
    durability="checkpoint",
    engine="auto",
    wrap=lambda store: store,
    swap_gradients=False,
    min_swap_bytes=1 << 20,
    spare_slots=None,
):
    with ExitStack() as stack:
        made = stack.enter_context(Engine(engine))
        pool = stack.enter_context(BufferPool(pool_bytes))
        files = FileStore([folder], made, durability=durability, spare_slots=spare_slots)
        store = wrap(stack.enter_context(files))
        common = {
            "chunk_bytes": chunk_bytes,
            "writes_through": durability != "checkpoint",
            "swap_gradients": swap_gradients,
            "min_swap_bytes": min_swap_bytes,
        }
        if kind == "partitioned":
            swapper = PartitionedSwapper(store, pool, **common)
        else:
            read, write = SWITCHES[kind]
            swapper = PipelinedSwapper(
                store,
                pool,
                stream_bytes=stream_bytes,
                pipeline_read=read,
                pipeline_write=write,
                **common,
            )
        yield Opened(stack.enter_context(swapper), store, pool, made)
