# SPDX-License-Identifier: Apache-2.0
"""How one early step is taken, kept, or taken back.

    state in RAM         read the state, write an image; keep: exchange the two; drop: forget it
      undo="algebraic"   update it in place; keep: nothing is left to do; drop: roll it back
    state on storage     update the buffers; keep: write them; drop: forget them
    new weights          to memory beside the image, or to waiting memory on their device

Invariant: until an early step is kept, parameters, ties and digests are as before.

With `undo="algebraic"` a kept step may have been rescaled to another factor before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swapio.optim import kernels
from swapio.optim.context import Elsewhere, StepContext
from swapio.optim.cuda_versions import Stamp
from swapio.optim.cuda_weights import DeviceWeights, RunCache, runs
from swapio.optim.gradients import Gradients
from swapio.optim.layout import MasterForm, PackedGroup
from swapio.optim.masters import Masters
from swapio.optim.speculation_images import (
    DeviceImages,
    Image,
    Images,
    is_split,
    low_offset,
    weight_bytes,
)
from swapio.optim.speculation_undo import EarlyCall, is_undoable
from swapio.provisional import ProvisionalSwapper
from swapio.subgroup import SubGroup, SubGroupState
from swapio.swapper import PartitionedSwapper
from swapio.views import Chunk, SubGroupView


class EarlyOwner(Protocol):
    """What early steps ask of an optimizer."""

    _masters: Masters

    @property
    def swapper(self) -> PartitionedSwapper: ...  # noqa: D102
    def assumed_step(self, scale: float) -> StepContext: ...  # noqa: D102
    def may_step_early(self, packed: PackedGroup) -> bool: ...  # noqa: D102
    def steps_in_place(self, packed: PackedGroup) -> bool: ...  # noqa: D102
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
    own: npt.NDArray[np.uint64] | None = None
    weights: npt.NDArray[np.uint64] | None = None
    stamps: list[Stamp] = field(default_factory=list)
    is_touched: bool = False  # somebody else wrote to a parameter before step()
    calls: list[EarlyCall] | None = None

    def fits(self, step: StepContext, params: npt.NDArray[np.int64]) -> bool:
        """Whether the step proper would have computed the same, but for the factor."""
        mine = self.context
        stepped = params[step.gradients.present[params]]
        return (
            np.array_equal(mine.gradients.present[params], step.gradients.present[params])
            and np.array_equal(mine.gradients.address[params], step.gradients.address[params])
            and np.array_equal(mine.param_address[params], step.param_address[params])
            and np.array_equal(
                mine.hypers[mine.hyper_index[stepped]], step.hypers[step.hyper_index[stepped]]
            )
        )


class EarlyStepper:
    """Takes early steps, keeps them, or takes them back. One caller at a time.

    Args:
        owner: The optimizer.
        images: Memory for results.
        on_device: Memory on a device for weights of its parameters.
        weights: The way to that device.
    """

    def __init__(
        self,
        owner: EarlyOwner,
        images: Images,
        on_device: DeviceImages | None,
        weights: DeviceWeights | None,
    ) -> None:
        self._owner = owner
        self._images = images
        self._on_device = on_device
        self._weights = weights
        self._runs = RunCache()

    def open(
        self, packed: PackedGroup, assumed: StepContext, gradients: Gradients
    ) -> EarlyStep | None:
        """Reserve what an early step needs; None if there is not enough of it."""
        swapper = self._owner.swapper
        is_resident = swapper.state(packed.key) is SubGroupState.RESIDENT
        on_host = packed.bucket.device == "cpu"
        context = copy(assumed)
        context.gradients = gradients
        rows = context.rows_of(packed, 0, packed.numel)
        in_place = is_resident and self._owner.steps_in_place(packed)
        if in_place:
            used = np.unique(context.hyper_index[packed.units.param[rows]])
            in_place = is_undoable(context.hypers[used])
        if not on_host and (self._on_device is None or packed not in self._on_device):
            return None  # it was added after construction
        like = swapper.home(packed.key) if is_resident and not in_place else None
        image = self._images.take(like, weight_bytes(packed, in_place=in_place))
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
        early = EarlyStep(packed, image, view, context, rows, is_resident)
        early.calls = [] if in_place else None
        early.own = self._owner._masters.digests_of_own(packed, rows, context) if on_host else None
        return early

    def drop(self, early: EarlyStep) -> None:
        """Take an early step back; its gradients must still be where they were."""
        for call in early.calls or ():
            call.roll_back(early.context.scale)
        early.calls = None
        self._images.give_back(early.image)
        swapper = self._owner.swapper
        if not early.is_resident and isinstance(swapper, ProvisionalSwapper):
            swapper.drop_provisional(early.packed.key)

    def take(self, early: EarlyStep) -> bool:
        """Step a sub-group; False if it must not be stepped early, and is to be dropped."""
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
            found = self._runs.of(packed, 0, packed.numel)
            early.weights = early.context.param_address.copy()
            early.weights[found.indices] = found.addresses(lease.address)
        to = Elsewhere(away, early.weights, calls=early.calls)
        if early.calls is not None and is_split(packed):
            to.low = lease.address + low_offset(packed)
        return self._step_chunk(early, early.context, chunk, to)

    def _step_for_device(self, early: EarlyStep, chunk: Chunk, away: Chunk | None) -> bool:
        if self._weights is None or self._on_device is None:
            return False
        with self._new_weights(early, chunk.start, chunk.stop) as weights:
            context = copy(early.context)
            if early.packed.bucket.form is MasterForm.SPLIT:
                context.param_address = weights
            to = Elsewhere(away, weights, calls=early.calls)
            return self._step_chunk(early, context, chunk, to)

    def rescale(self, early: EarlyStep, scale: float) -> None:
        """Turn an early step in place into one with another factor, in one pass."""
        old, early.context.scale = early.context.scale, scale
        early.ties.clear()
        early.digests.clear()
        for bounds, calls in groupby(early.calls or (), key=attrgetter("bounds")):
            with self._new_weights(early, *bounds) as weights:
                for call in calls:
                    call.rescale(old, scale, weights)
                    self._note_results(early, call, weights)

    @contextmanager
    def _new_weights(
        self, early: EarlyStep, start: int, stop: int
    ) -> Iterator[npt.NDArray[np.uint64]]:
        """Where new weights of a chunk go: beside the image, or up to their device afterwards."""
        packed = early.packed
        if early.weights is not None or self._weights is None or self._on_device is None:
            yield early.context.param_address if early.weights is None else early.weights
            return
        found, waiting = self._runs.of(packed, start, stop), self._on_device.of(packed)
        with self._weights.aside(packed, start, stop, found.parts, waiting) as address:
            weights = early.context.param_address.copy()
            weights[found.indices] = found.addresses(address)
            yield weights

    def _note_results(
        self, early: EarlyStep, call: EarlyCall, weights: npt.NDArray[np.uint64]
    ) -> None:
        rows = call.cut.row_numbers()
        if call.ties is not None:
            early.ties.append((rows, call.ties))
        digests = self._owner._masters.digests_at(early.packed, rows, weights)
        if digests is not None:
            early.digests.append((rows, digests))

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
        weights = to.weights
        if len(rows) < span.stop - span.start:
            resting = np.setdiff1d(np.arange(span.start, span.stop), rows)
            if to.chunk is not None:
                copy_records(packed, chunk, to.chunk, resting)
            weights, absent = to.weights.copy(), packed.units.param[resting]
            weights[absent] = context.param_address[absent]
        masters.copy_params(packed, to.chunk or chunk, weights)
        return True

    def keep(self, one: EarlyStep, step: StepContext) -> None:
        """Make an early step count."""
        packed, masters, swapper = one.packed, self._owner._masters, self._owner.swapper
        for rows, ties in one.ties:
            masters.replace_ties(packed, rows, ties)
        for rows, digests in one.digests:
            masters.adopt_digests(packed, rows, digests)
        replaced = None
        if one.calls is not None:
            swapper.mark_dirty(packed.key)
        elif one.image.state is not None:
            replaced = swapper.exchange_home(packed.key, one.image.state)
        elif isinstance(swapper, ProvisionalSwapper):
            swapper.keep_provisional(packed.key)
        if one.weights is not None:
            self._publish(one, one.weights, step)
        elif self._on_device is not None and self._weights is not None:
            self._weights.publish(self._on_device.of(packed), runs(packed.units, one.rows))
        self._images.give_back(one.image, replaced)

    def _publish(self, one: EarlyStep, weights: npt.NDArray[np.uint64], step: StepContext) -> None:
        """Copy new weights to their parameters on the host, and lower halves to the state."""
        packed, home = one.packed, self._owner.swapper.home(one.packed.key)
        units, width = packed.units, packed.bucket.dtype.itemsize
        param, numel = units.param[one.rows], units.numel[one.rows]
        offset = (units.offset[one.rows] * width).astype(np.uint64)
        kernels.copy_spans(
            weights[param] + offset, step.param_address[param] + offset, numel * width
        )
        lease = one.image.weights
        if one.calls is not None and is_split(packed) and home is not None and lease is not None:
            at = units.position[one.rows].astype(np.uint64) * np.uint64(2)
            source = np.uint64(lease.address + low_offset(packed))
            kernels.copy_spans(at + source, at + np.uint64(home.address("master_low")), numel * 2)

    def forget_memory(self) -> None:
        """Give back the swapper's memory that images have taken over."""
        self._images.forget()

    def close(self) -> None:
        """Give the memory back."""
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
