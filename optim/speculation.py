# SPDX-License-Identifier: Apache-2.0
"""Early steps: sub-groups are stepped during backward, as soon as their gradients are there.

    hook: all gradients of a sub-group have arrived -> worker thread: step into an image
    step(): the norm is known -> keep the image | drop it, and step with the right factor

An early step assumes that no clipping will come, that every gradient is finite, and that nobody
changes a hyperparameter. step() compares all that it assumed with what is so, bit for bit.

Invariants:
- an early step writes to memory of its own only: parameters, state, ties, digests and counts are
  as before until step() keeps it;
- dropping it is exact, and stepping again gives what a run without early steps gives;
- the worker is idle whenever the optimizer does anything but backward.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.context import Elsewhere, StepContext
from swapio.optim.cuda_weights import DeviceWeights, runs, virtual_addresses
from swapio.optim.layout import MUON_RULE, Layout, MasterForm, PackedGroup
from swapio.optim.masters import Masters
from swapio.optim.speculation_images import DeviceImages, Image, Images
from swapio.optim.speculation_stats import SpeculationStats
from swapio.optim.stream_source import GradientSource
from swapio.provisional import ProvisionalSwapper
from swapio.subgroup import SubGroup, SubGroupState
from swapio.swapper import PartitionedSwapper
from swapio.views import Chunk, SubGroupView

# A larger sum of squares may overflow in the second moment, which could not be told from inf.
_SQUARE_SUM_MAX = 3e38

# For how long another thread may keep the interpreter while backward runs.
_SWITCH_SECONDS = 2e-4


class EarlyOwner(Protocol):
    """What early steps ask of an optimizer."""

    _masters: Masters

    @property
    def swapper(self) -> PartitionedSwapper: ...  # noqa: D102
    def assumed_step(self, scale: float) -> StepContext: ...  # noqa: D102
    def may_step_early(self, packed: PackedGroup) -> bool: ...  # noqa: D102
    def early_update(  # noqa: D102
        self, packed: PackedGroup, chunk: Chunk, step: StepContext
    ) -> bool: ...


@dataclass
class EarlyStep:
    """An early step that was taken, and what it assumed."""

    packed: PackedGroup
    image: Image
    view: SubGroupView
    context: StepContext
    rows: npt.NDArray[np.int64]
    is_resident: bool
    ties: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]] = field(default_factory=list)
    digests: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = field(
        default_factory=list
    )
    weights: npt.NDArray[np.uint64] | None = None

    def fits(self, step: StepContext, params: npt.NDArray[np.int64]) -> bool:
        """Whether the step proper would have computed the same."""
        mine = self.context
        stepped = params[step.gradients.present[params]]
        return (
            mine.scale == step.scale
            and np.array_equal(mine.gradients.present[params], step.gradients.present[params])
            and np.array_equal(mine.gradients.address[params], step.gradients.address[params])
            and np.array_equal(mine.param_address[params], step.param_address[params])
            and np.array_equal(
                mine.hypers[mine.hyper_index[stepped]], step.hypers[step.hyper_index[stepped]]
            )
        )


class Speculation:
    """The early steps of one optimizer.

    Args:
        owner: The optimizer.
        layout: Its sub-groups.
        source: Its gradients, which are streamed.
        images: Memory for results.
        on_device: Memory on a device for weights of its parameters.
        weights: The way to that device.

    Attributes:
        stats: Counters.

    Thread-safety: `arrived` and `dropped` are called by hooks; everything else by the optimizer.
    """

    def __init__(
        self,
        owner: EarlyOwner,
        layout: Layout,
        source: GradientSource,
        images: Images,
        on_device: DeviceImages | None = None,
        weights: DeviceWeights | None = None,
    ) -> None:
        self._owner = owner
        self._layout = layout
        self._source = source
        self._images = images
        self._on_device = on_device
        self._weights = weights
        self._threads = max(1, kernels.num_threads() - 1)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="swapio-early")
        self._lock = threading.RLock()
        self._keys_of: dict[int, list[str]] = {}
        self._params_of: dict[str, npt.NDArray[np.int64]] = {}
        self._expected: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._context: StepContext | None = None
        self._is_active = False
        self._left: dict[str, int] = {}
        self._spoiled: set[str] = set()
        self._futures: dict[str, Future[EarlyStep | None]] = {}
        self._partial = 0.0
        self._order: list[str] = []
        self._interval: float | None = None
        self.is_on = True
        self.stats = SpeculationStats()

    # -- during backward ---------------------------------------------------------------------

    def arrived(self, index: int, count: int) -> None:
        """Parameter `index` got its `count`-th gradient of this step. Called by hooks."""
        with self._lock:
            if self._context is None:
                self._begin()
            if not self._is_active:
                return
            if not self._expected[index]:
                self.dropped(index, 0)  # what was stepped without it must not be kept
            if count != self._expected[index]:
                return
            for key in self._keys(index):
                self._left[key] = self._left.get(key, 0) - 1
                if self._left[key] == 0 and key not in self._spoiled:
                    self._order.append(key)
                    self._futures[key] = self._executor.submit(self._run, key)

    def dropped(self, index: int, count: int) -> None:
        """The `count` gradients of a parameter are dropped, or another is added to them.

        If they were thought to be all, the parameter's sub-groups are stepped late.
        """
        with self._lock:
            if self._context is None or count < self._expected[index]:
                return
            for key in self._keys(index):
                self._spoiled.add(key)
                future = self._futures.pop(key, None)
                if future is not None and not future.cancel():
                    early = future.result()
                    if early is not None:
                        self._close_early(early)
                        self.stats.num_undone += 1

    def _begin(self) -> None:
        """The first gradient of a step: assume what the step will be."""
        num_params = len(self._layout.infos)
        if len(self._expected) != num_params:
            more = np.ones(num_params - len(self._expected), np.int32)
            self._expected = np.concatenate([self._expected, more])
            self._keys_of.clear()
            self._params_of.clear()
        self._context = self._owner.assumed_step(self._source.expected_unscale)
        self._context.threads = self._threads
        self._is_active = self.is_on
        if not self._is_active:
            return
        self._partial = 0.0
        self._order.clear()
        for key, packed in self._layout.groups.items():
            if packed.bucket.rule != MUON_RULE and self._owner.may_step_early(packed):
                expected = self._expected[self._params(packed)]
                self._left[key] = int(np.count_nonzero(expected))
        if self._weights is not None:
            self._weights.begin()
        # The worker needs the interpreter only for moments, but between two calls of kernels:
        # whoever runs backward in Python would keep it waiting for 5 ms each time.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, _SWITCH_SECONDS))

    def _restore_interval(self) -> None:
        if self._interval is not None:
            sys.setswitchinterval(self._interval)
            self._interval = None

    def _keys(self, index: int) -> list[str]:
        if index not in self._keys_of:
            self._keys_of[index] = [span.key for span in self._layout.spans(index)]
        return self._keys_of[index]

    def _params(self, packed: PackedGroup) -> npt.NDArray[np.int64]:
        if packed.key not in self._params_of:
            self._params_of[packed.key] = np.unique(packed.units.param).astype(np.int64)
        return self._params_of[packed.key]

    # -- on the worker -----------------------------------------------------------------------

    def _run(self, key: str) -> EarlyStep | None:
        """Step one sub-group early; None if it turned out that it must not be."""
        packed = self._layout.groups[key]
        params = self._params(packed)
        stream, assumed = self._source.stream, self._context
        if stream is None or assumed is None:
            return None
        with torch.autograd.profiler.record_function("swapio: wait for gradients"):
            stream.settle(params)
        if not self._looks_normal(stream.square_sums_of(params)):
            return None
        early = self._open_early(packed, assumed)
        if early is None:
            self.stats.num_without_memory += 1
            return None
        try:
            with torch.autograd.profiler.record_function("swapio: early step"):
                done = self._step_chunks(early)
        except BaseException:
            self._close_early(early)
            raise
        if not done:
            self._close_early(early)
            return None
        self.stats.num_early += 1
        return early

    def _open_early(self, packed: PackedGroup, assumed: StepContext) -> EarlyStep | None:
        """Reserve what an early step needs; None if there is not enough of it."""
        swapper, stream = self._owner.swapper, self._source.stream
        if stream is None:
            return None
        is_resident = swapper.state(packed.key) is SubGroupState.RESIDENT
        on_host = packed.bucket.device == "cpu"
        nbytes = packed.numel * packed.bucket.dtype.itemsize if on_host else 0
        image = self._images.take(swapper.home(packed.key) if is_resident else None, nbytes)
        if image is None:
            return None
        view: SubGroupView | None = None
        if is_resident:
            view = swapper.swap_in(packed.key)
        elif isinstance(swapper, ProvisionalSwapper):
            view = swapper.begin_provisional(packed.key)
        if view is None:
            self._images.give_back(image)
            return None
        context = copy(assumed)
        context.gradients = stream.gradients_of(self._params(packed), assumed.param_address)
        rows = context.rows_of(packed, 0, packed.numel)
        return EarlyStep(packed, image, view, context, rows, is_resident)

    def _close_early(self, early: EarlyStep) -> None:
        """Undo an early step."""
        self._images.give_back(early.image)
        swapper = self._owner.swapper
        if not early.is_resident and isinstance(swapper, ProvisionalSwapper):
            swapper.drop_provisional(early.packed.key)

    def _looks_normal(self, sums: npt.NDArray[np.float64]) -> bool:
        """Whether the gradients can be stepped now, and a clip is not certain already."""
        scale = self._source.expected_unscale
        total = float(sums.sum()) * scale * scale
        if not total < _SQUARE_SUM_MAX:
            return False
        self._partial += total
        limit = self._source.limit
        return limit is None or self._partial <= limit * limit

    def _step_chunks(self, early: EarlyStep) -> bool:
        packed, state = early.packed, early.image.state
        for chunk in early.view.chunks():
            away: Chunk | None = None
            if state is not None:
                away = Chunk(chunk.group, chunk.start, chunk.stop, [state])
            if packed.bucket.device == "cpu":
                done = self._step_on_host(early, chunk, away)
            else:
                done = self._step_for_device(early, chunk, away)
            if not early.is_resident:
                chunk.mark_dirty()
            if not done:
                return False
        return True

    def _step_on_host(self, early: EarlyStep, chunk: Chunk, away: Chunk | None) -> bool:
        packed, lease = early.packed, early.image.weights
        if lease is None:
            return False
        if early.weights is None:
            parts = runs(packed.units, np.arange(len(packed.units.param)))
            early.weights = early.context.param_address.copy()
            early.weights[[part.index for part in parts]] = virtual_addresses(
                parts, lease.address, 0, packed.bucket.dtype.itemsize
            )
        return self._step_chunk(early, early.context, chunk, Elsewhere(away, early.weights))

    def _step_for_device(self, early: EarlyStep, chunk: Chunk, away: Chunk | None) -> bool:
        packed = early.packed
        if self._weights is None or self._on_device is None:
            return False
        span = packed.units.slice_of(chunk.start, chunk.stop)
        parts = runs(packed.units, np.arange(span.start, span.stop))
        waiting = self._on_device.of(packed)
        with self._weights.aside(packed, chunk.start, chunk.stop, parts, waiting) as address:
            context = copy(early.context)
            weights = early.context.param_address.copy()
            weights[[part.index for part in parts]] = virtual_addresses(
                parts, address, chunk.start, packed.bucket.dtype.itemsize
            )
            if packed.bucket.form is MasterForm.SPLIT:
                context.param_address = weights
            return self._step_chunk(early, context, chunk, Elsewhere(away, weights))

    def _step_chunk(
        self, early: EarlyStep, context: StepContext, chunk: Chunk, to: Elsewhere
    ) -> bool:
        """Step a chunk; units without gradient are copied to the image, if there is one."""
        packed, masters = early.packed, self._owner._masters
        context = copy(context)
        context.elsewhere = to
        if not self._owner.early_update(packed, chunk, context):
            return False
        early.ties += to.ties
        rows = context.rows_of(packed, chunk.start, chunk.stop)
        digests = masters.digests_at(packed, rows, to.weights)
        if digests is not None:
            early.digests.append((rows, digests))
        span = packed.units.slice_of(chunk.start, chunk.stop)
        resting = np.setdiff1d(np.arange(span.start, span.stop), rows)
        if to.chunk is not None:
            copy_records(packed, chunk, to.chunk, resting)
        mixed = to.weights.copy()
        absent = packed.units.param[resting]
        mixed[absent] = context.param_address[absent]
        masters.copy_params(packed, to.chunk or chunk, mixed)
        return True

    # -- in the step -------------------------------------------------------------------------

    def settle(self) -> dict[str, EarlyStep]:
        """Stop the worker, and return the early steps that were taken; blocks shortly.

        Raises:
            BaseException: The error of an early step; all of them are dropped then.
        """
        with self._lock:
            futures, self._futures = self._futures, {}
            stream = self._source.stream
            if stream is not None and self._context is not None:
                self._expected = np.maximum(stream.arrived, 0).astype(np.int32)
            self._restore_interval()
            self._context = None
            self._is_active = False
            self._left.clear()
            self._spoiled.clear()
        for future in futures.values():
            future.cancel()
        found: dict[str, EarlyStep] = {}
        error: BaseException | None = None
        for key, future in futures.items():
            if future.cancelled():
                continue
            failed = future.exception()
            early = None if failed is not None else future.result()
            error = error or failed
            if early is not None:
                found[key] = early
        if error is not None:
            self.drop(found)
            raise error
        return found

    def next_order(self, keys: list[str]) -> list[str]:
        """The sub-groups in the order in which the next step will want them: as in this one."""
        if not self.is_on or not self._order:
            return keys
        first = [key for key in self._order if key in keys]
        return first + [key for key in keys if key not in set(first)]

    def wait(self) -> None:
        """Block until the worker has taken every early step it was given; for measurements."""
        for future in list(self._futures.values()):
            future.exception()

    def drop(self, early: dict[str, EarlyStep]) -> None:
        """Undo early steps."""
        for one in early.values():
            self._close_early(one)
        self.stats.num_undone += len(early)

    def retreat(self) -> None:
        """Undo everything: somebody wants to see or change the state before the step."""
        if self._futures:
            self.drop(self.settle())

    def keep(self, early: dict[str, EarlyStep], step: StepContext) -> set[str]:
        """Make early steps count whose assumptions hold; return the keys of their sub-groups."""
        kept: list[EarlyStep] = []
        for one in early.values():
            if one.fits(step, self._params(one.packed)):
                kept.append(one)
            else:
                self._close_early(one)
                self.stats.num_redone += 1
        if any(one.packed.bucket.device != "cpu" for one in kept) and self._weights is not None:
            self._weights.end()
        for one in kept:
            self._publish(one, step)
        self.stats.num_kept += len(kept)
        return {one.packed.key for one in kept}

    def _publish(self, one: EarlyStep, step: StepContext) -> None:
        packed, masters, swapper = one.packed, self._owner._masters, self._owner.swapper
        for rows, ties in one.ties:
            masters.replace_ties(packed, rows, ties)
        for rows, digests in one.digests:
            masters.adopt_digests(packed, rows, digests)
        replaced = None
        if one.image.state is not None:
            replaced = swapper.exchange_home(packed.key, one.image.state)
        elif isinstance(swapper, ProvisionalSwapper):
            swapper.keep_provisional(packed.key)
        units, width = packed.units, packed.bucket.dtype.itemsize
        if one.weights is not None:
            offset = (units.offset[one.rows] * width).astype(np.uint64)
            params = units.param[one.rows]
            kernels.copy_spans(
                one.weights[params] + offset,
                step.param_address[params] + offset,
                units.numel[one.rows] * width,
            )
        elif self._on_device is not None and self._weights is not None:
            self._weights.publish(self._on_device.of(packed), runs(units, one.rows))
        self._images.give_back(one.image, replaced)

    def close(self) -> None:
        """Undo what is in flight, end the worker and give memory back."""
        with self._lock:
            self._restore_interval()
            self._is_active = False
            futures, self._futures = self._futures, {}
        for future in futures.values():
            future.cancel()
        self._executor.shutdown(wait=True)
        for future in futures.values():
            if not future.cancelled() and future.exception() is None:
                early = future.result()
                if early is not None:
                    self._close_early(early)
        self._images.close()


def copy_records(
    packed: PackedGroup, source: Chunk, target: Chunk, rows: npt.NDArray[np.int64]
) -> None:
    """Copy all records of some units from one chunk to another, except `param`."""
    if not len(rows):
        return
    units, group = packed.units, source.group
    for name, spec in _records(group):
        place = ((units.position[rows] - source.start) * spec).astype(np.uint64)
        kernels.copy_spans(
            place + np.uint64(source.address(name)),
            place + np.uint64(target.address(name)),
            units.numel[rows] * spec,
        )


def _records(group: SubGroup) -> list[tuple[str, int]]:
    return [(name, spec.dtype.itemsize) for name, spec in group.specs.items() if name != "param"]
