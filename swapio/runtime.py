# SPDX-License-Identifier: Apache-2.0
"""Engine, pool, store and swapper of one optimizer or training engine, put together from a config.

Invariant: what is opened is closed in reverse order, also when a later part cannot be opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from swapio.aio import Engine
from swapio.align import BLOCK_BYTES, HUGE_PAGE_BYTES, round_up
from swapio.buffers import BufferPool
from swapio.config import SwapConfig
from swapio.errors import ConfigError
from swapio.filestore import FileStore
from swapio.pipeline import PipelinedSwapper
from swapio.subgroup import RecordSpec, SubGroup, place
from swapio.swapper import PartitionedSwapper

# Buffers the pipelined swapper cannot do without: one being updated, one read, one written.
_STREAM_CHUNKS_MIN = 3
_CHUNK_BYTES = 12 << 20
# Virtual memory until sub-groups are added that must be streamed.
_SPARE_STREAM = 8 * _CHUNK_BYTES


@dataclass(frozen=True)
class GroupRequest:
    """A sub-group to register: the arguments of `add_sub_group`."""

    key: str
    records: Mapping[str, RecordSpec]
    resident: frozenset[str] = frozenset()
    meta_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(spec.nbytes for spec in self.records.values())


@dataclass(frozen=True)
class Budget:
    """How host_memory is divided, in bytes.

    Attributes:
        total: What was asked for; None without a limit (state in RAM).
        resident: Records that stay in RAM.
        stream: Buffers of the pipelined swapper, or the largest sub-group of the partitioned one.
        tables: Checksums, tie lists and other small records.
    """

    total: int | None
    resident: int
    stream: int
    tables: int

    @property
    def pool(self) -> int:
        """Bytes of the buffer pool."""
        return round_up(self.resident + self.stream, HUGE_PAGE_BYTES)


class SwapRuntime:
    """An opened swapper with everything under it; a context manager.

    Attributes:
        config: The settings it was opened with.
        budget: How the memory was divided.
        swapper: The swapper, with all requested sub-groups registered and allocated.
        engine: The I/O engine; None with state in RAM.
        store: The file store; None with state in RAM.
    """

    def __init__(self, config: SwapConfig, requests: Sequence[GroupRequest]) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.store: FileStore | None = None
        self._stack = ExitStack()
        self._extra_pools: list[BufferPool] = []
        with ExitStack() as stack:
            self.budget, everything = divide(config, requests)
            self._pool = stack.enter_context(BufferPool(self.budget.pool, name="host_memory"))
            stack.callback(self._close_extra_pools)
            if config.paths:
                self._open_storage(stack, register=not everything)
            self.swapper = self._open_swapper(stack)
            for request in requests:
                self._register(request, everything)
            self.swapper.allocate()
            self._stack = stack.pop_all()

    def add(self, requests: Sequence[GroupRequest]) -> list[SubGroup]:
        """Register and allocate further sub-groups.

        With state in RAM they get a pool of their own; else they are streamed unless they are
        small or tagged, and must fit beside what the budget holds already.
        """
        pool = None
        if self.engine is None and requests:
            pool = BufferPool(divide(self.config, requests)[0].pool, name="host_memory")
            self._extra_pools.append(pool)
        added = [self._register(request, False) for request in requests]
        self.swapper.allocate(pool=pool)
        return added

    def _close_extra_pools(self) -> None:
        for pool in self._extra_pools:
            pool.close()

    def _register(self, request: GroupRequest, everything: bool) -> SubGroup:
        resident: frozenset[str] | None = request.resident or None
        if everything:
            resident = frozenset(request.records)
        return self.swapper.add_sub_group(
            request.key, request.records, resident=resident, meta_bytes=request.meta_bytes
        )

    def _open_storage(self, stack: ExitStack, *, register: bool) -> None:
        config = self.config
        self.engine = stack.enter_context(
            Engine(
                config.engine,
                queue_depth=config.queue_depth,
                block_size=config.block_size,
                direct=config.direct,
                on_fallback=config.on_fallback,
                num_threads=config.io_threads,
            )
        )
        for address, nbytes in self._pool.regions if register else ():
            self.engine.register(address, nbytes)
        self.store = stack.enter_context(
            FileStore(
                config.paths,
                self.engine,
                durability=config.durability,
                spare_slots=config.spare_slots,
                checksum=config.checksum,
                lock_timeout=config.lock_timeout,
                weights=config.path_weights,
                namespace=config.namespace,
            )
        )

    def _open_swapper(self, stack: ExitStack) -> PartitionedSwapper:
        config = self.config
        chunk_bytes = chunk_bytes_of(config, self.budget.stream)
        writes_through = config.durability != "checkpoint"
        swapper: PartitionedSwapper
        if self.store is None or config.swapper == "partitioned":
            swapper = PartitionedSwapper(
                self.store,
                self._pool,
                chunk_bytes=chunk_bytes,
                min_swap_bytes=config.min_swap_bytes,
                swap_gradients=config.swap_gradients,
                writes_through=writes_through,
            )
        else:
            swapper = PipelinedSwapper(
                self.store,
                self._pool,
                stream_bytes=self.budget.stream,
                pipeline_read=config.pipeline_read,
                pipeline_write=config.pipeline_write,
                chunk_bytes=chunk_bytes,
                min_swap_bytes=config.min_swap_bytes,
                swap_gradients=config.swap_gradients,
                writes_through=writes_through,
            )
        return stack.enter_context(swapper)

    def close(self) -> None:
        """Close swapper, store, engine and pool. Blocks until transfers in flight are done."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def chunk_bytes_of(config: SwapConfig, stream_bytes: int) -> int:
    """Bytes of one chunk: the configured elements at 10 bytes, or what the budget carries."""
    if config.chunk_numel != "auto":
        return config.chunk_numel * 10
    return min(_CHUNK_BYTES, max(BLOCK_BYTES, stream_bytes // 8))


def _whole_bytes(request: GroupRequest, names: Sequence[str]) -> int:
    return place(request.records, names, 0, None)[1] if names else 0


def divide(config: SwapConfig, requests: Sequence[GroupRequest]) -> tuple[Budget, bool]:
    """Divide host_memory. Returns the budget, and whether all state stays in RAM.

    Raises:
        ConfigError: The budget is too small; the message gives the number that would do.
    """
    everything = sum(_whole_bytes(request, list(request.records)) for request in requests)
    tables = sum(16 * (-(-request.nbytes // BLOCK_BYTES) + 4) for request in requests)
    if not config.paths:
        return Budget(None, everything, 0, tables), True
    total = config.resolve_host_memory()
    if everything + tables <= total:
        return Budget(
            total, everything, min(total - everything - tables, _SPARE_STREAM), tables
        ), True
    resident = 0
    largest = chunk = 0
    for request in requests:
        small = not request.resident and request.nbytes < config.min_swap_bytes
        names = (
            list(request.records)
            if small
            else [n for n in request.records if n in request.resident]
        )
        swapped = [n for n in request.records if n not in names]
        resident += _whole_bytes(request, names)
        largest = max(largest, _whole_bytes(request, swapped))
        chunk = max(chunk, _least_chunk(request, swapped))
    need = largest if config.swapper == "partitioned" else _STREAM_CHUNKS_MIN * chunk
    if resident + tables + need > total:
        raise ConfigError(
            f"host_memory={total} bytes is too small: {resident} for resident state, {tables} for "
            f"tables and at least {need} for buffers make {resident + tables + need}; raise "
            "host_memory, or lower sub_group_numel or chunk_numel"
        )
    return Budget(total, resident, total - resident - tables, tables), False


def _least_chunk(request: GroupRequest, swapped: Sequence[str]) -> int:
    """Bytes of the smallest chunk a sub-group can be streamed in (all of it if it cannot)."""
    if not swapped:
        return 0
    group = SubGroup(request.key, dict(request.records))
    if not group.streamed:
        return _whole_bytes(request, swapped)
    stop = min(group.numel, group.chunk_unit_numel)
    return place(request.records, swapped, 0, stop)[1]
