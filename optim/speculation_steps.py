# SPDX-License-Identifier: Apache-2.0
"""How one early step is taken, kept, or taken back.

    state in RAM         read the state, write an image; keep: exchange the two; drop: forget it
    state on storage     update the buffers; keep: write them; drop: forget them
    new weights          to memory beside the image, or to waiting memory on their device

Invariant: until an early step is kept, parameters, ties and digests are as before.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
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
from swapio.optim.speculation_images import DeviceImages, Image, Images
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
    stamps: list[Stamp] = field(default_factory=list)

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
        if not on_host and (self._on_device is None or packed not in self._on_device):
            return None  # it was added after construction
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
        context.gradients = gradients
        rows = context.rows_of(packed, 0, packed.numel)
        return EarlyStep(packed, image, view, context, rows, is_resident)

    def drop(self, early: EarlyStep) -> None:
        """Take an early step back."""
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
        return self._step_chunk(early, early.context, chunk, Elsewhere(away, early.weights))

    def _step_for_device(self, early: EarlyStep, chunk: Chunk, away: Chunk | None) -> bool:
        packed = early.packed
        if self._weights is None or self._on_device is None:
            return False
        found, waiting = self._runs.of(packed, chunk.start, chunk.stop), self._on_device.of(packed)
        span = (chunk.start, chunk.stop)
        with self._weights.aside(packed, *span, found.parts, waiting) as address:
            context = copy(early.context)
            weights = early.context.param_address.copy()
            weights[found.indices] = found.addresses(address)
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
