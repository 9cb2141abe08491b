# SPDX-License-Identifier: Apache-2.0
"""Gradients of all ranks, averaged in buckets while backward goes on.

    stage 2   p.grad -> send buffer -> reduce-scatter -> this rank's shard, fp32; p.grad is freed,
              and what stands there raises when it is read (`stream_guard`)
    stage 1   p.grad -> send buffer -> all-reduce -> p.grad, before backward() returns

A *cycle* reduces each bucket once, in the same order on every rank. During backward a bucket goes
as soon as those before it have and all its gradients are there; the rest follows when the cycle is
closed: at the end of backward in stage 1 and with accumulate="shard", else in step().

Invariants:
- which collectives a rank makes, and in which order, does not depend on which of its parameters
  have gradients: what is missing is sent as zeros;
- an error in between is kept until all ranks can hear of it, and the collectives go on.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.errors import ConfigError, SwapStateError
from swapio.optim.layout import flat, is_dense
from swapio.optim.stream_guard import SHARDED, StreamedGradient
from swapio.optim.zero.comm import Comm, Pending
from swapio.optim.zero.spans import BucketSpans
from swapio.partition import plan_buckets, shard_bounds

Accumulate = Literal["local", "shard"]
Traced = Callable[[str, str, float, float], None]

NUM_BUFFERS = 2


class _Buffers(NamedTuple):
    """Memory of a bucket in flight: what is sent, what is received, and this rank's sum."""

    given: torch.Tensor
    received: torch.Tensor
    row: torch.Tensor


class _Flight(NamedTuple):
    """A bucket on its way."""

    number: int
    buffers: _Buffers
    pending: Pending
    began: float


class Reducer:
    """Averages the gradients of some parameters over all ranks.

    Args:
        comm: The ranks.
        params: The parameters, the same on every rank.
        names: Their names, for messages.
        scatter: Whether each rank gets its shards only (stage 2).
        accumulate: When micro-batches are reduced; see the module.
        dtype: Of the buckets, and so of the sums.
        bucket_bytes: Most bytes of a send buffer.

    Attributes:
        stall_seconds: Time spent waiting for collectives, in backward and in steps.
        trace: Called with lane, name, begin and end of each bucket's collective, and of the time in
            which gradients arrived; or None.
    """

    def __init__(
        self,
        comm: Comm,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        scatter: bool,
        accumulate: Accumulate,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        self._comm = comm
        self._params = list(params)
        self._names = list(names)
        self._scatter = scatter
        self._closes_in_backward = not scatter or accumulate == "shard"
        self._is_eager_again = accumulate == "shard" or not scatter
        self.stall_seconds = 0.0
        self.trace: Traced | None = None
        numels = [param.numel() for param in params]
        buckets = plan_buckets(numels, comm.world_size, max(1, bucket_bytes // dtype.itemsize))
        self.buckets = [BucketSpans(bucket, has_flags=True) for bucket in buckets]
        self._buckets_of: list[list[int]] = [[] for _ in params]
        for number, bucket in enumerate(self.buckets):
            for index in bucket.params:
                self._buckets_of[index].append(number)
        self._make_buffers(dtype)
        self._make_shards(numels)
        self._flights: deque[_Flight] = deque()
        self._error: BaseException | None = None
        self._is_open = True
        self._is_dirty = False
        self._is_scaled = False
        self.present = np.zeros(len(params), bool)
        self.num_cycles = 0
        self._next = 0
        self._first_arrival = self._last_arrival = 0.0
        self._queued = False
        self._seen = np.zeros(len(params), bool)
        self._held: dict[int, torch.Tensor | None] = {}  # of which some buckets have gone
        self._is_freed = np.zeros(len(params), bool)  # a stand-in was put in p.grad
        self._missing: list[int] = []
        self._begin_cycle()
        self._index = {id(param): index for index, param in enumerate(params)}
        self._hooks = [param.register_post_accumulate_grad_hook(self._arrived) for param in params]

    def _make_buffers(self, dtype: torch.dtype) -> None:
        device = self._params[0].device if self._params else torch.device("cpu")
        largest = max((bucket.numel for bucket in self.buckets), default=0)
        row = max((bucket.row_numel for bucket in self.buckets), default=0)
        scattered = self._scatter
        self._free = [
            _Buffers(
                torch.empty(largest, dtype=dtype, device=device),
                torch.empty(largest if scattered and device.type == "cpu" else 0, dtype=dtype),
                # Sums of fewer bits are added in fp32 where they are added here.
                torch.empty(
                    row if scattered else 0,
                    dtype=torch.float32 if device.type == "cpu" else dtype,
                    device=device,
                ),
            )
            for _ in range(min(NUM_BUFFERS, len(self.buckets)))
        ]

    def _make_shards(self, numels: Sequence[int]) -> None:
        rank, size = self._comm.rank, self._comm.world_size
        bounds = [shard_bounds(numel, size, rank) for numel in numels]
        self._starts = [bound.start for bound in bounds]
        ends = np.cumsum([0, *(bound.numel for bound in bounds)]).tolist()
        device = self._params[0].device if self._params else torch.device("cpu")
        total = ends[-1] if self._scatter else 0
        self._memory = torch.zeros(total, dtype=torch.float32, device=device)
        self._in_ram = torch.empty(0)  # a copy of shards on a device, for the kernels
        self.shards = [
            self._memory[first:stop] if self._scatter else self._memory
            for first, stop in pairwise(ends)
        ]

    @staticmethod
    def nbytes_of(
        numels: Sequence[int], world_size: int, *, scatter: bool, dtype: torch.dtype, bucket: int
    ) -> int:
        """Memory that a reducer of parameters of these sizes takes on each rank, in bytes."""
        rows = sum(-(-numel // world_size) for numel in numels)
        flags = len(numels) * world_size * dtype.itemsize
        given = min(bucket, rows * world_size * dtype.itemsize) + flags
        if not scatter:
            return NUM_BUFFERS * given
        row = 4 * given // world_size // dtype.itemsize
        return NUM_BUFFERS * (2 * given + row) + 4 * rows

    # -- during backward ---------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside local, unless accumulate is "shard"."""
        before, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = before

    def _arrived(self, param: torch.Tensor) -> None:
        index = self._index[id(param)]
        self._last_arrival = time.perf_counter()
        self._first_arrival = self._first_arrival or self._last_arrival
        self._take_further(index, param)
        if not (self._is_open or (self._scatter and self._closes_in_backward)):
            self._is_dirty = True
            return
        if not self._seen[index]:
            self._seen[index] = True
            for number in self._buckets_of[index]:
                self._missing[number] -= 1
        if self._closes_in_backward and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.num_cycles == 0 or self._is_eager_again:
            while self._next < len(self.buckets) and self._missing[self._next] == 0:
                self._launch()

    def _take_further(self, index: int, param: torch.Tensor) -> None:
        """Have in p.grad what a further pass brought, where a stand-in for earlier ones is."""
        if not self._is_freed[index]:
            return
        self._check_stand_in(index, param)
        grad = param.grad
        if isinstance(grad, StreamedGradient):
            # Autograd may have given the same tensor to others, and adds to p.grad in place.
            param.grad = None if grad.arrived is None else grad.arrived.clone()
        self._is_freed[index] = False

    def _check_stand_in(self, index: int, param: torch.Tensor) -> None:
        """Note, as an error of the step, that somebody discarded what is in the shards already."""
        grad = param.grad
        if isinstance(grad, StreamedGradient) and not grad.was_zeroed:
            return
        self._error = self._error or SwapStateError(
            f"p.grad of {self._names[index]} was removed or zeroed after its sum over the ranks "
            "had been formed, which would be stepped all the same: discard gradients by "
            "optimizer.zero_grad(), not the module's, on every rank. Nothing was stepped"
        )

    def _end_backward(self) -> None:
        self._queued = False
        with torch.no_grad():
            self.close_cycle()

    # -- cycles ------------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        self._queued = False  # an exception in backward may have kept the callback from running
        self._first_arrival = self._last_arrival = 0.0
        self._next = 0
        self._seen[:] = False
        self._missing = [len(set(bucket.params)) for bucket in self.buckets]

    def close_cycle(self) -> None:
        """Reduce what is left of the cycle; blocks until its results are there. Collective."""
        while self._next < len(self.buckets):
            self._launch()
        while self._flights:
            self._land()
        if self.trace is not None and self._first_arrival:
            self.trace("backward", "gradients arrive", self._first_arrival, self._last_arrival)
        self.num_cycles += 1
        self._is_dirty = False
        self._begin_cycle()

    def close_first(self) -> None:
        """Close the cycle that backward began; blocks. Collective.

        Nothing else may be exchanged before: a rank may have begun more of it than others.
        """
        if self.num_cycles == 0 or self._next:
            self.close_cycle()

    def finish(self) -> None:
        """Have the gradients of all backward passes reduced; blocks. Collective."""
        self.close_first()
        if self._comm.exchange(float(self._has_more())).any():
            self.close_cycle()
        for index in np.flatnonzero(self._is_freed).tolist():
            self._check_stand_in(index, self._params[index])
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _has_more(self) -> bool:
        """Whether gradients came that no cycle has reduced."""
        if not self._scatter:
            return self._is_dirty
        return any(
            param.grad is not None and not isinstance(param.grad, StreamedGradient)
            for param in self._params
        )

    def scaled_shards(self) -> list[torch.Tensor]:
        """This rank's shards of the averaged gradients, in fp32 and in RAM; after `finish`."""
        if not self._is_scaled:
            self._memory.mul_(1.0 / self._comm.world_size)
            self._is_scaled = True
        if self._memory.device.type == "cpu":
            return self.shards
        if self._in_ram.numel() != self._memory.numel():
            self._in_ram = torch.empty(self._memory.numel(), pin_memory=True)
        self._in_ram.copy_(self._memory)
        return list(self._in_ram.split([shard.numel() for shard in self.shards]))

    def shard_start(self, index: int) -> int:
        """First element of this rank's shard of a parameter."""
        return self._starts[index]

    def release(self) -> None:
        """Forget the gradients: they were used, or are not wanted. Collective in mid-cycle."""
        if self._next or self._flights:
            self.close_cycle()
        if self.num_cycles and self._scatter:
            self._memory.zero_()
        self._remove_stand_ins()
        self._held.clear()
        self._error = None
        self._is_scaled = False
        self.present[:] = False
        self.num_cycles = 0
        self._is_dirty = False
        self._begin_cycle()

    def _remove_stand_ins(self) -> None:
        for index in np.flatnonzero(self._is_freed).tolist():
            if isinstance(self._params[index].grad, StreamedGradient):
                self._params[index].grad = None
        self._is_freed[:] = False

    # -- buckets -----------------------------------------------------------------------------

    def _launch(self) -> None:
        number, self._next = self._next, self._next + 1
        bucket = self.buckets[number]
        if not self._free:
            self._land()
        buffers = self._free.pop()
        buffer = buffers.given[: bucket.numel]
        try:
            bucket.pack(self._piece_of, buffer)
        except Exception as error:  # told to all ranks by `finish`; the collectives go on
            self._error = self._error or error
            buffer.zero_()
        if self._scatter:
            row, received = buffers.row[: bucket.row_numel], buffers.received[: bucket.numel]
            pending = self._comm.reduce_scatter(row, buffer, received)
            for index in bucket.params:
                if self._buckets_of[index][0] == number:  # what a later pass brings stays
                    self._free_gradient(index)
        else:
            pending = self._comm.all_reduce(buffer)
        for index in bucket.params:
            if self._buckets_of[index][-1] == number:
                self._held.pop(index, None)
        self._flights.append(_Flight(number, buffers, pending, time.perf_counter()))

    def _piece_of(self, index: int) -> torch.Tensor | None:
        """The gradient as it was when the first of its buckets went: a further pass may follow."""
        if index not in self._held:
            self._held[index] = self._gradient(index)
        return self._held[index]

    def _free_gradient(self, index: int) -> None:
        param = self._params[index]
        if param.grad is not None and not isinstance(param.grad, StreamedGradient):
            param.grad = StreamedGradient(param, SHARDED)
            self._is_freed[index] = True

    def _gradient(self, index: int) -> torch.Tensor | None:
        param = self._params[index]
        grad = param.grad
        if grad is None or isinstance(grad, StreamedGradient):
            return None
        if not param.numel():
            return flat(param)[:0]
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {self._names[index]} is {grad.layout}; swapio reduces dense "
                "gradients only (for an embedding pass sparse=False)"
            )
        if grad.stride() == param.stride() and is_dense(grad):
            return grad.resolve_neg()  # the negative bit is not in memory
        copy = torch.empty_strided(
            param.shape, param.stride(), dtype=grad.dtype, device=grad.device
        )
        return copy.copy_(grad)

    def _land(self) -> None:
        flight = self._flights.popleft()
        began = time.perf_counter()
        flight.pending.wait()
        ended = time.perf_counter()
        self.stall_seconds += ended - began
        if self.trace is not None:
            self.trace("reduce", f"bucket {flight.number}", flight.began, ended)
        bucket = self.buckets[flight.number]
        if self._scatter:
            row = flight.buffers.row[: bucket.row_numel]
            self._note(bucket, bucket.flags(row))
            if self._is_scaled:  # a backward pass after the norm was asked for
                row.mul_(1.0 / self._comm.world_size)
            for index, first, at, numel in bucket.pieces(self._comm.rank):
                start = first - self._starts[index]
                self.shards[index][start : start + numel] += row[at : at + numel]
        else:
            buffer = flight.buffers.given[: bucket.numel]
            found = bucket.flags(buffer[: bucket.row_numel])
            self._note(bucket, found)
            buffer.mul_(1.0 / self._comm.world_size)
            there = dict(zip(bucket.params, found.tolist(), strict=True))
            bucket.unpack(buffer, lambda index: self._target(index) if there[index] else None)
        self._free.append(flight.buffers)

    def _target(self, index: int) -> torch.Tensor | None:
        """The p.grad that an average goes to, laid out as its parameter."""
        param = self._params[index]
        if not param.numel():
            return None
        if param.grad is None or param.grad.stride() != param.stride():
            dtype = param.dtype if param.grad is None else param.grad.dtype
            param.grad = torch.empty_strided(
                param.shape, param.stride(), dtype=dtype, device=param.device
            )
        return param.grad

    def _note(self, bucket: BucketSpans, found: npt.NDArray[np.bool_]) -> None:
        for index, there in zip(bucket.params, found.tolist(), strict=True):
            self.present[index] |= there

    def close(self) -> None:
        """Remove the hooks and give up the memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._remove_stand_ins()
        self._held.clear()
        self._flights.clear()
        self._free, self.shards = [], []
        self._memory = self._in_ram = torch.empty(0)
