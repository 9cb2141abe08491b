# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1 and ZeRO-2: whole parameters on every rank, state and updates sharded.

Each parameter's elements, in memory order, are cut into one run a rank. The run that a rank owns
is a view of the parameter itself: its update writes where the model reads, and the other runs come
from their owners in one all-gather a bucket.

Invariant: outside step() a parameter has the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from swapio.checkpoint.placement import PlacedRun, Placement
from swapio.errors import ConfigError
from swapio.optim.gradients import Gradients
from swapio.optim.layout import ParameterInfo, check_parameter, flat, memory_order
from swapio.optim.parameters import ParameterTable
from swapio.optim.ranks import Ranks
from swapio.optim.zero.agreement import CommAgreement
from swapio.optim.zero.comm import Comm
from swapio.optim.zero.reduction import Accumulate, Reducer
from swapio.optim.zero.spans import BucketSpans
from swapio.partition import plan_buckets, shard_bounds

T = TypeVar("T")


class SharedRanks(Ranks):
    """Ranks that can fail one by one: what ZeRO's stages have in common.

    Args:
        comm: Their collectives.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.agreement = CommAgreement(comm)
        self.shards = comm

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail; if it fails on one rank, raise on all of them.

        Raises:
            SwapioError: It failed on another rank; says on which, and how.
        """
        try:
            result = work()
        except BaseException as error:
            if self.comm.failure is None and error is not self.comm.told:
                self.comm.exchange(error=error)
            raise
        self.comm.exchange()
        return result

    def tell(self, error: BaseException) -> None:
        """Leave a note of a failure that the others have not heard of."""
        self.comm.tell(error)

    def total(self, value: float) -> float:
        """Return the sum over all ranks, added up in the order of ranks."""
        return float(sum(self.comm.exchange(value).tolist()))

    def stats(self) -> dict[str, Any]:
        """Collectives so far, by name."""
        return {f"num_{name}": count for name, count in sorted(self.comm.counts.items())}

    def close(self) -> None:
        """Give up the connections."""
        self.comm.close()


class FlatRanks(SharedRanks):
    """Ranks with whole parameters and flat shards.

    Args:
        comm: Their collectives.
        stage: 1 or 2.
        reduces: Whether gradients must be averaged here; False under DistributedDataParallel.
        accumulate: "local" or "shard"; see Reducer.
        reduce_dtype: Dtype of the sums.
        bucket_bytes: Most bytes of a send buffer.
    """

    def __init__(
        self,
        comm: Comm,
        *,
        stage: int,
        reduces: bool,
        accumulate: Accumulate,
        reduce_dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        super().__init__(comm)
        self.stage = stage
        self.reduces = reduces
        self.accumulate: Accumulate = accumulate
        self.reduce_dtype = reduce_dtype
        self.bucket_bytes = bucket_bytes
        self.reducer: Reducer | None = None
        self.gather = self._gather
        self._infos: list[ParameterInfo] = []
        self._addresses: list[int] = []
        self._buckets: list[tuple[list[ParameterInfo], BucketSpans]] = []

    def largest_numel(self, listed: torch.Tensor) -> int | None:
        """The padded length of a run."""
        return -(-listed.numel() // self.world_size)

    def bounds(self, listed: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """First and last element of each rank's run."""
        numel, size = listed.numel(), self.world_size
        return tuple(shard_bounds(numel, size, rank)[:2] for rank in range(size))

    def local(self, name: str, listed: torch.Tensor) -> tuple[torch.Tensor, Placement | None]:
        """Return the view of this rank's run, and where it belongs."""
        check_parameter(name, listed)
        start, stop, _ = shard_bounds(listed.numel(), self.world_size, self.rank)
        runs = (PlacedRun(start, 0, stop - start),) if stop > start else ()
        place = Placement(tuple(listed.shape), memory_order(listed), runs)
        return flat(listed)[start:stop], place

    def follow(self, infos: Sequence[ParameterInfo]) -> None:
        """Reduce and gather these parameters, all there are, from now on."""
        self._infos = list(infos)
        self._addresses = [info.listed.data_ptr() for info in infos]
        if self.reducer is not None:
            self.reducer.close()
        if self.reduces:
            self.reducer = Reducer(
                self.comm,
                [info.listed for info in infos],
                [info.name for info in infos],
                scatter=self.stage == 2,
                accumulate=self.accumulate,
                dtype=self.reduce_dtype,
                bucket_bytes=self.bucket_bytes,
            )
        self._buckets = []
        kinds = dict.fromkeys((info.listed.dtype, info.listed.device) for info in infos)
        for dtype, device in kinds:
            members = [i for i in infos if (i.listed.dtype, i.listed.device) == (dtype, device)]
            numel = max(1, self.bucket_bytes // dtype.itemsize)
            numels = [info.listed.numel() for info in members]
            self._buckets += [
                (members, BucketSpans(bucket, has_flags=False))
                for bucket in plan_buckets(numels, self.world_size, numel)
            ]

    def planned_collectives(self) -> dict[str, int]:
        """Collectives of one step without accumulation and late gradients, by name."""
        planned = {"all_gather": len(self._buckets)}
        if self.reducer is not None:
            name = "reduce_scatter" if self.stage == 2 else "all_reduce"
            planned[name] = len(self.reducer.buckets)
        return planned

    def scratch_bytes(self, params: Sequence[torch.Tensor]) -> int:
        """Buffers of the collectives, and shards of gradients in stage 2."""
        numels = [param.numel() for param in params]
        total = 0
        if self.reduces:
            total += Reducer.nbytes_of(
                numels,
                self.world_size,
                scatter=self.stage == 2,
                dtype=self.reduce_dtype,
                bucket=self.bucket_bytes,
            )
        largest = sum(param.nbytes for param in params) + self.world_size * len(numels) * 4
        gathered = min(self.bucket_bytes, largest)
        return total + 2 * (gathered + gathered // self.world_size)

    # -- gradients ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Reduce what backward left: how much that is differs over the ranks. Collective."""
        if self.reducer is not None:
            self.reducer.close_first()

    def _gather(self, table: ParameterTable) -> Gradients:
        """The averaged gradients of this rank's runs; blocks. Collective."""
        reducer = self.reducer
        if reducer is not None:
            reducer.finish()
        self._follow_moves()
        parameters = table.refresh()
        count = len(self._infos)
        result = Gradients(parameters, np.zeros(count, np.uint64), np.zeros(count, bool))
        if reducer is not None and self.stage == 2:
            shards = reducer.scaled_shards()
            result.address = np.array([shard.data_ptr() for shard in shards], np.uint64)
            result.present = reducer.present.copy()
            result.dtype = torch.float32 if result.present.any() else None
            result.keep += shards
            return result
        for info in self._infos:
            grad = info.listed.grad
            if grad is not None:
                self._add(result, info, grad)
        return result

    def _add(self, result: Gradients, info: ParameterInfo, grad: torch.Tensor) -> None:
        listed = info.listed
        if grad.shape != listed.shape or grad.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {info.name} is {grad.layout} of {tuple(grad.shape)}; swapio "
                f"steps dense gradients of the parameter's shape {tuple(listed.shape)}"
            )
        if grad.stride() != listed.stride():
            laid = torch.empty_strided(
                listed.shape, listed.stride(), dtype=grad.dtype, device=grad.device
            )
            grad = laid.copy_(grad)
        start, stop, _ = shard_bounds(listed.numel(), self.world_size, self.rank)
        run = flat(grad.resolve_neg())[start:stop].cpu()
        result.keep.append(run)
        result.present[info.index] = True
        result.address[info.index] = run.data_ptr()
        if result.dtype is None:
            result.dtype = grad.dtype
        if grad.dtype is not result.dtype:
            result.dtypes[info.index] = grad.dtype

    def _follow_moves(self) -> None:
        """Let the runs follow parameters whose memory the user has replaced."""
        for at, info in enumerate(self._infos):
            address = info.listed.data_ptr()
            if address != self._addresses[at]:
                run, place = self.local(info.name, info.listed)
                if place is None or info.part is None or place[:2] != info.part[:2]:
                    raise ConfigError(
                        f"parameter {info.name} no longer fits its state: its shape or strides "
                        "changed. Convert or reshape a model before its optimizer is made"
                    )
                info.param.data = run
                self._addresses[at] = address

    # -- parameters --------------------------------------------------------------------------

    def announce(self, listed: Sequence[torch.Tensor]) -> None:
        """Nothing: the runs are stepped, and the listed parameters change in `publish`."""

    def publish(self, infos: Iterable[ParameterInfo]) -> None:
        """Gather the runs of all ranks into whole parameters; blocks. Collective."""
        self._exchange_runs()
        torch.autograd.graph.increment_version([info.listed for info in infos])

    def _exchange_runs(self) -> None:
        flights: list[Any] = []
        free: list[torch.Tensor] = []
        for members, bucket in self._buckets:
            if len(flights) == 2:
                free += self._land(*flights.pop(0))

            def tensor_of(index: int, members: list[ParameterInfo] = members) -> torch.Tensor:
                return members[index].listed

            sample = members[0].listed
            numel = bucket.numel
            rows = next((t for t in free if t.dtype is sample.dtype and len(t) >= numel), None)
            if rows is None:
                rows = torch.empty(numel, dtype=sample.dtype, device=sample.device)
            else:
                free = [tensor for tensor in free if tensor is not rows]
            row = rows.new_zeros(bucket.row_numel)
            bucket.pack_row(tensor_of, row, self.rank)
            pending = self.comm.all_gather(rows[:numel], row)
            flights.append((bucket, tensor_of, rows, pending))
        for flight in flights:
            self._land(*flight)

    def _land(
        self, bucket: BucketSpans, tensor_of: Any, rows: torch.Tensor, pending: Any
    ) -> list[torch.Tensor]:
        pending.wait()
        bucket.unpack(rows[: bucket.numel], tensor_of, without=self.rank)
        return [rows]

    def stats(self) -> dict[str, Any]:
        """Collectives so far, and seconds that gradients were waited for."""
        more = {} if self.reducer is None else {"reduce_stall_seconds": self.reducer.stall_seconds}
        return super().stats() | more

    def close(self) -> None:
        """Remove hooks, and give up memory and connections."""
        if self.reducer is not None:
            self.reducer.close()
        super().close()
