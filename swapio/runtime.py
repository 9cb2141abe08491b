# SPDX-License-Identifier: Apache-2.0
"""Engine, pool, store and swapper of one optimizer or training engine, put together from a config.

Invariant: what is opened is closed in reverse order, also when a later part cannot be opened.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from swapio.aio import Engine
from swapio.align import PAGE_BYTES, num_blocks, placed_bytes, round_up
from swapio.buffers import BufferPool
from swapio.config import SwapConfig
from swapio.config_values import format_size
from swapio.errors import ConfigError
from swapio.filestore import FileStore
from swapio.host_limits import rank_name
from swapio.path_rates import measure_weights
from swapio.plan import Plan, PlanRequest, evaluate_plan, make_plan
from swapio.plan_devices import free_bytes
from swapio.plan_forms import TIE_BYTES_PER_BLOCK, RecordSize, SubGroupSize
from swapio.plan_rates import rates_of
from swapio.plan_request import must_stay, ram_bytes, small_bytes, step_bytes, tagged
from swapio.plan_staging import NO_STAGING, Staging, stagings
from swapio.provisional import ProvisionalSwapper
from swapio.resume import take_up_commit
from swapio.runstats import runtime_stats
from swapio.store import ChooseCommit, CommitRecord, SwapStore
from swapio.subgroup import RecordSpec, SubGroup
from swapio.swapper import PartitionedSwapper
from swapio.tracing import Tracer, trace_path
from swapio.turns import TurnTakingEngine

# Virtual memory for streaming what is added after all fitted.
_SPARE_STREAM_BYTES = 96 << 20
_SPARE_BUFFERS_MIN = 3


@dataclass(frozen=True)
class GroupRequest:
    """A sub-group to register: the arguments of `add_sub_group`, and what the planner asks.

    Attributes:
        key: Unique and stable name.
        records: Record specifications by name.
        resident: Names of records that stay in RAM whatever the budget.
        meta_bytes: Room for small bytes that travel with the records.
        touched_bytes: RAM traffic of the update of one element, for predictions.
        streamed: Whether it may be cut in chunks.
        flops: Operations of the matrix products of its update, for predictions.
    """

    key: str
    records: Mapping[str, RecordSpec]
    resident: frozenset[str] = frozenset()
    meta_bytes: int = 0
    touched_bytes: int = 0
    streamed: bool = True
    flops: int = 0

    @property
    def size(self) -> SubGroupSize:
        """What the planner needs to know."""
        numels = [spec.numel for spec in self.records.values()]
        numel, is_whole = max(numels, default=0), not self.streamed or len(set(numels)) > 1
        records = tuple(
            RecordSize(
                name,
                spec.dtype.itemsize,
                is_read=spec.is_read,
                is_resident=name in self.resident,
                numel=spec.numel if is_whole else 0,
            )
            for name, spec in self.records.items()
        )
        ties = min(self.meta_bytes, num_blocks(2 * numel) * TIE_BYTES_PER_BLOCK)
        return SubGroupSize(numel, records, self.touched_bytes, ties, is_whole, self.flops)


class SwapRuntime:
    """An opened swapper with everything under it; a context manager.

    Args:
        config: The settings.
        requests: The sub-groups, in the order in which they are stepped.
        workspace_bytes: Scratch memory of the caller that host_memory must cover too.
        resume: Take up the last commit instead of filling in first contents.
        step: The commit to take up, where ranks must agree on one; None is the newest.

    Attributes:
        config: The settings it was opened with.
        plan: What was decided from them: what is resident, chunks, buffers, bytes, seconds.
        swapper: The swapper, with all requested sub-groups registered and allocated.
        engine: The I/O engine; None with state in RAM.
        store: The file store; None with state in RAM.
        tracer: Collects the time line under `trace`, else None.
        recovered: The commit that was taken up; None without `resume`, or if there was none.

    Raises:
        ConfigError: The budget is too small; the message gives the number that would do.
        CheckpointError: With `resume`: there are commits, but none that is whole and fits.
    """

    def __init__(
        self,
        config: SwapConfig,
        requests: Sequence[GroupRequest],
        *,
        workspace_bytes: int = 0,
        resume: bool = False,
        step: int | None = None,
        choose: ChooseCommit | None = None,
        confirm_commits: bool = False,
    ) -> None:
        self.config = config
        self._confirm_commits = confirm_commits
        self.recovered: CommitRecord | None = None
        self.tracer = None if config.trace is None else Tracer(trace_path(config.trace))
        self.engine: Engine | None = None
        self.store: FileStore | None = None
        self._stack = ExitStack()
        self._began = time.perf_counter()
        self._about: dict[str, Any] = {}
        self._extra_pools: list[BufferPool] = []
        with ExitStack() as stack:
            self._request = plan_request(config, requests, workspace_bytes)
            self.plan = make_plan(self._request)
            self._staging = staging_of(self.plan, self._request)
            pool_bytes = self.plan.resident_bytes + self._staging.nbytes
            self._pool = stack.enter_context(self._open_pool(pool_bytes))
            stack.callback(self._close_extra_pools)
            if config.paths:
                self._open_storage(stack, register=self.plan.staging_bytes > 0)
            self.swapper = self._open_swapper(stack)
            if config.swap_gradients and self.engine is not None:
                self._open_gradients(stack, self.engine, requests)
            resident = set(self.plan.resident)
            for index, request in enumerate(requests):
                self._register(request, whole=index in resident)
            record = take_up_commit(self.store, step, resume=resume, choose=choose)
            if record is not None and resume:
                self.recovered = record
                self.swapper.take_up(record.step)
            else:
                self.swapper.allocate()
            self._stack = stack.pop_all()

    def add(self, requests: Sequence[GroupRequest], *, workspace_bytes: int = 0) -> list[SubGroup]:
        """Register and allocate further sub-groups.

        They stay in RAM if what is left of host_memory holds all of them; else they are streamed
        through the buffers there are, except what is tagged or small. `workspace_bytes` is what
        the caller needs with them, as for the constructor.

        Raises:
            ConfigError: They do not fit; the message gives the host_memory that would do. Nothing
                has changed.
        """
        if not requests:
            return []
        sizes = [request.size for request in requests]
        resident, pool_bytes = self._place_added(sizes, workspace_bytes)
        pool = None
        if pool_bytes:
            pool = self._open_pool(pool_bytes)
            self._extra_pools.append(pool)
        first = len(self._request.sub_groups) - len(requests)
        added = [
            self._register(request, whole=first + index in resident)
            for index, request in enumerate(requests)
        ]
        self.swapper.allocate(pool=pool)
        return added

    def _place_added(
        self, sizes: Sequence[SubGroupSize], workspace_bytes: int
    ) -> tuple[set[int], int]:
        """Decide where added sub-groups live: (indices of resident ones, bytes of their pool)."""
        old, plan = self._request, self.plan
        workspace = max(old.workspace_bytes, workspace_bytes)
        request = dataclasses.replace(
            old, sub_groups=(*old.sub_groups, *sizes), workspace_bytes=workspace
        )
        new = range(len(old.sub_groups), len(request.sub_groups))
        tables = sum(small_bytes(size, request) for size in sizes)
        tables += workspace - old.workspace_bytes
        need = sum(ram_bytes(size) for size in sizes)
        missing = need + tables - plan.spare_bytes
        resident = set(new)
        if missing > 0 and not self.config.paths and self.config.host_memory == "auto":
            request = dataclasses.replace(request, host_memory=request.host_memory + missing)
        elif missing > 0:
            resident = {i for i in new if must_stay(request.sub_groups[i], request)}
            ram = [s if i in resident else tagged(s) for i, s in zip(new, sizes, strict=True)]
            need = sum(ram_bytes(size) for size in ram)
            streamed = [s for i, s in zip(new, sizes, strict=True) if i not in resident]
            taken = 0 if plan.staging_bytes else self._staging.nbytes
            if need + tables + taken > plan.spare_bytes or not self._can_stream(streamed, request):
                least = request.host_memory + missing
                raise ConfigError(
                    f"host_memory={request.host_memory} bytes is too small for the added "
                    f"parameters; {least} bytes ({format_size(least)}) hold their state in RAM"
                )
        resident |= set(plan.resident)
        is_swapped = len(resident) < len(request.sub_groups)
        staging = self._staging if is_swapped or plan.staging_bytes else NO_STAGING
        self._request = request
        self.plan = evaluate_plan(request, resident, staging, plan.minimum_host_memory)
        return resident, need

    def _can_stream(self, sizes: Sequence[SubGroupSize], request: PlanRequest) -> bool:
        """Whether the buffers there are suffice to stream sub-groups of these sizes."""
        if not sizes or not request.has_storage or not self._staging.nbytes:
            return not sizes
        *_, least = stagings(
            sizes, dataclasses.replace(request, chunk_numel=self._staging.chunk_numel)
        )
        return least.nbytes <= self._staging.nbytes

    def _close_extra_pools(self) -> None:
        for pool in self._extra_pools:
            pool.close()

    def _open_pool(self, nbytes: int) -> BufferPool:
        config = self.config
        # "auto" locks what a device copies from or to, and that is not here.
        pin = config.pin_memory is True
        pool = BufferPool(
            max(PAGE_BYTES, nbytes), huge_pages=config.huge_pages, pin=pin, name="host_memory"
        )
        if pin and not pool.is_pinned and config.on_fallback == "error":
            pool.close()
            raise ConfigError(
                "pin_memory=True, but the buffers cannot be page-locked (no CUDA device, or "
                "`ulimit -l` is too low); set pin_memory='auto' or on_fallback='log'"
            )
        return pool

    def _register(self, request: GroupRequest, *, whole: bool) -> SubGroup:
        return self.swapper.add_sub_group(
            request.key,
            request.records,
            resident=request.records if whole else request.resident,
            meta_bytes=request.meta_bytes,
            streamed=request.streamed,
        )

    def _open_storage(self, stack: ExitStack, *, register: bool) -> None:
        config = self.config
        options: dict[str, Any] = {
            "queue_depth": config.queue_depth,
            "block_size": config.block_size,
            "direct": config.direct,
            "on_fallback": config.on_fallback,
            "num_threads": config.io_threads,
        }
        if config.resolve_take_turns():
            engine: Engine = TurnTakingEngine(config.paths, config.engine, **options)
        else:
            engine = Engine(config.engine, **options)
        self.engine = stack.enter_context(engine)
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
                weights=self._weights(engine),
                # Ranks may be given the same folder: each has its own part of the state.
                namespace=config.namespace or rank_name(),
                confirm_commits=self._confirm_commits,
            )
        )

    def _open_gradients(
        self, stack: ExitStack, engine: Engine, requests: Sequence[GroupRequest]
    ) -> None:
        """Give gradient fragments a folder of their own, in which nothing is kept."""
        config = self.config
        store = FileStore(
            config.paths,
            engine,
            spare_slots=0,
            checksum=config.checksum,
            lock_timeout=config.lock_timeout,
            weights=self._weights(engine),
            namespace=f"{config.namespace or rank_name()}-gradients",
        )
        self.swapper.keep_gradients_in(
            stack.enter_context(store),
            stack.enter_context(
                BufferPool(gradient_buffer_bytes(requests), pin=False, name="gradients")
            ).lease,
        )

    def _weights(self, engine: Engine) -> Sequence[float] | Callable[[], Sequence[float]] | None:
        """Shares of the paths; measured when they are needed and not given."""
        config = self.config
        if config.path_weights is not None or len(config.paths) < 2:
            return config.path_weights
        return lambda: measure_weights(config.paths, engine)

    def _open_swapper(self, stack: ExitStack) -> PartitionedSwapper:
        config = self.config
        chunk_bytes = max(PAGE_BYTES, self._staging.buffer_bytes)
        writes_through = config.durability != "checkpoint"
        swapper: PartitionedSwapper
        store: SwapStore | None = self.store
        if store is not None and self.tracer is not None:
            store = self.tracer.trace(store)
        if store is None or config.swapper == "partitioned":
            swapper = PartitionedSwapper(
                store,
                self._pool,
                chunk_bytes=chunk_bytes,
                min_swap_bytes=config.min_swap_bytes,
                swap_gradients=config.swap_gradients,
                writes_through=writes_through,
            )
        else:
            swapper = ProvisionalSwapper(
                store,
                self._pool,
                stream_bytes=self._staging.nbytes,
                pipeline_read=config.pipeline_read,
                pipeline_write=config.pipeline_write,
                chunk_bytes=chunk_bytes,
                min_swap_bytes=config.min_swap_bytes,
                swap_gradients=config.swap_gradients,
                writes_through=writes_through,
            )
        swapper.chunk_numel = self._staging.chunk_numel or None
        tracer = self.tracer
        if tracer is not None:
            swapper.observe_chunks = lambda key, chunks: tracer.items("update", key, chunks)
        return stack.enter_context(swapper)

    def stats(self) -> dict[str, float]:
        """Return the numbers of the run so far; docs/stats.md explains each."""
        return runtime_stats(self, self._began)

    def bytes_per_element(self, indices: Sequence[int]) -> tuple[float, float]:
        """Bytes read and written for an element of these sub-groups in a step.

        What the buffers keep from step to step is shared out evenly over all that is swapped.
        """
        resident, chosen, plan = set(self.plan.resident), set(indices), self.plan
        moved, all_moved = [0, 0], [0, 0]
        for index, group in enumerate(self._request.sub_groups):
            read, written = step_bytes(group, index in resident, self._request)
            all_moved = [all_moved[0] + read, all_moved[1] + written]
            if index in chosen:
                moved = [moved[0] + read, moved[1] + written]
        numel = max(1, sum(self._request.sub_groups[index].numel for index in indices))
        shares = [
            planned / total if total else 0.0
            for planned, total in zip((plan.read_bytes, plan.write_bytes), all_moved, strict=True)
        ]
        return moved[0] * shares[0] / numel, moved[1] * shares[1] / numel

    @contextmanager
    def step(self, number: int, count: Callable[[float, int, int], None]) -> Iterator[None]:
        """Time the step of this number, for the trace too. Does not block by itself.

        Args:
            number: Of the step, for the trace.
            count: Called at the end with (seconds, bytes read, bytes written).
        """
        read, written = self.swapper.moved_bytes
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            moved = self.swapper.moved_bytes
            count(ended - began, moved[0] - read, moved[1] - written)
            if self.tracer is not None:
                self.tracer.add("step", f"step {number}", began, ended)

    def describe_in_trace(self, **about: Any) -> None:
        """Add what the caller knows of the run (JSON values) to the trace; kept until close."""
        self._about.update(about)

    def close(self) -> None:
        """Close swapper, store, engine and pool. Blocks until transfers in flight are done.

        Then the trace is written, if there is one.
        """
        tracer, self.tracer = self.tracer, None
        about = {} if tracer is None else self._about_run()
        self._stack.close()
        if tracer is not None:
            tracer.close(about)

    def _about_run(self) -> dict[str, Any]:
        return {
            "stats": self.stats(),
            "plan": self.plan.to_dict(),
            "config": self.config.to_dict(),
            "engine": "" if self.engine is None else self.engine.kind,
            "pid": os.getpid(),
            "seconds": time.perf_counter() - self._began,
        } | self._about

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


def gradient_buffer_bytes(requests: Sequence[GroupRequest]) -> int:
    """Return the bytes of the buffer that the largest gradient fragment is transferred through."""
    numel = max((request.size.numel for request in requests), default=0)
    return max(PAGE_BYTES, round_up(4 * numel, PAGE_BYTES))


def plan_request(
    config: SwapConfig, requests: Sequence[GroupRequest], workspace_bytes: int = 0
) -> PlanRequest:
    """Return what the planner is asked for these sub-groups.

    Without a path, host_memory="auto" has no limit: all state is in RAM because the user said so.
    """
    sizes = [request.size for request in requests]
    more: dict[str, Any] = {
        "rates": rates_of(config, has_products=any(request.flops for request in requests)),
        "disk_free_bytes": free_bytes(config.paths),
    }
    if not config.paths and config.host_memory == "auto":
        request = PlanRequest.from_config(config, sizes, host_memory=0)
        more["host_memory"] = workspace_bytes + sum(
            ram_bytes(size) + small_bytes(size, request) for size in sizes
        )
    return PlanRequest.from_config(config, sizes, workspace_bytes=workspace_bytes, **more)


def staging_of(plan: Plan, request: PlanRequest) -> Staging:
    """Return the buffers of a plan, or of spare memory those for what may be added later."""
    if plan.staging_bytes or not request.has_storage:
        return Staging(plan.chunk_numel, plan.buffer_bytes, plan.read_ahead, plan.writing)
    unit = 1 << 19  # whole blocks of every record that optimizers have
    numel = unit if request.chunk_numel == "auto" else round_up(request.chunk_numel, unit)
    nbytes = placed_bytes([4 * numel] * 3)
    count = min(plan.spare_bytes, _SPARE_STREAM_BYTES) // nbytes
    if not request.is_pipelined or count < _SPARE_BUFFERS_MIN:
        return NO_STAGING
    return Staging(numel, nbytes, count - 2, 1)
