# SPDX-License-Identifier: Apache-2.0
"""The part of an optimizer that has early steps: memory, assumptions, and when they are undone.

Invariant: whoever uses the optimizer between backward and step() sees it as before the backward.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from swapio.align import PAGE_BYTES, placed_bytes
from swapio.errors import ConfigError
from swapio.optim.context import StepContext
from swapio.optim.cuda_weights import DeviceWeights
from swapio.optim.device_state import DeviceState
from swapio.optim.durable import Durable
from swapio.optim.gradients import Gradients
from swapio.optim.layout import MUON_RULE, MasterForm, PackedGroup, ParameterInfo
from swapio.optim.speculation import Speculation
from swapio.optim.speculation_images import DeviceImages, Images, image_bytes
from swapio.optim.speculation_policy import Policy
from swapio.optim.speculation_steps import EarlyStep, EarlyStepper
from swapio.optim.speculation_undo import has_rollback
from swapio.optim.stream_open import (
    device_of,
    grow_ways,
    on_device,
    open_stream,
    open_weights,
    page_locked,
    stream_bytes,
)
from swapio.optim.stream_source import GradientSource
from swapio.provisional import ProvisionalSwapper
from swapio.subgroup import SubGroupState
from swapio.swapper import PartitionedSwapper
from swapio.views import Chunk

# With a path: the part of host_memory that holds images.
_IMAGES_SHARE = 8


class EarlySteps(Durable):
    """Ways of gradients and weights, and early steps; see SwapOptimizer for the arguments."""

    gradients: str
    speculate: str | bool
    undo: str
    _source: GradientSource
    _weights: DeviceWeights | None = None
    _early: Speculation | None = None
    _policy: Policy | None = None
    _step_ended: float | None = None
    _device_state: DeviceState | None = None

    # -- what early steps ask ----------------------------------------------------------------

    @property
    def swapper(self) -> PartitionedSwapper:
        """The swapper that holds the state; recovery replaces it."""
        return self._runtime.swapper

    @abc.abstractmethod
    def fill_hyper(self, row: object, group: dict[str, object]) -> None:
        """Write a group's hyperparameters into a row of the kernels' table."""

    @abc.abstractmethod
    def early_update(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Step the parameters of one chunk elsewhere; False if that must not be done early."""

    def assumed_step(self, scale: float) -> StepContext:
        """The step that comes if every parameter gets a gradient and nothing is changed."""
        groups = self._group_index()
        parameters = self._table.refresh()
        gradients = Gradients(parameters, np.zeros(len(parameters), np.uint64), groups >= 0)
        return StepContext(self, groups, self._counts, gradients, scale)

    def may_step_early(self, packed: PackedGroup) -> bool:
        """Whether a sub-group's state is where an image of it can be made."""
        swapper = self.swapper
        if self._device_state is not None and packed.key in self._device_state:
            return False
        if swapper.state(packed.key) is SubGroupState.RESIDENT:
            return True
        all_swapped = len(swapper.swapped_records(packed.key)) == len(swapper.records(packed.key))
        return isinstance(swapper, ProvisionalSwapper) and all_swapped

    def steps_in_place(self, packed: PackedGroup) -> bool:
        """Whether early steps of a sub-group in RAM write to its state, and are rolled back."""
        if self.undo != "algebraic":
            return False
        if self.config.paths and self.config.durability != "checkpoint":
            return False  # the parameter is a record too, which nothing would roll back
        widths = self.state_records(packed.bucket.rule)
        return has_rollback(packed.bucket, widths.get("exp_avg", torch.bfloat16))

    # -- memory ------------------------------------------------------------------------------

    def scratch_bytes(self, groups: Iterable[PackedGroup]) -> int:
        """As Registration, with gradients and weights on their way, and images of early steps."""
        streamed = self.gradients == "stream"
        ways = stream_bytes(self._layout, self.config, streamed=streamed)
        return super().scratch_bytes(groups) + ways + self._image_bytes(super_bytes=ways)

    def _image_bytes(self, super_bytes: int) -> int:
        """Memory for images: of everything, or what a stated budget leaves beside the state.

        State on storage is stepped in its buffers, and an image of it is the new weights only.
        """
        early = [
            packed
            for packed in self._layout.groups.values()
            if packed.bucket.rule != MUON_RULE and not _stays_on_device(packed)
        ]
        if not self.speculate:
            return 0
        wanted = sum(
            image_bytes(packed, self._state_bytes(packed), in_place=self.steps_in_place(packed))
            for packed in early
        )
        if self.config.paths:
            return min(wanted, self.config.resolve_host_memory() // _IMAGES_SHARE)
        if self.config.host_memory == "auto":
            return wanted
        state = sum(self._state_bytes(packed) for packed in self._layout.groups.values())
        left = self.config.resolve_host_memory() - state - super_bytes - 16 * PAGE_BYTES
        return max(0, min(wanted, left))

    def _state_bytes(self, packed: PackedGroup) -> int:
        widths = [dtype.itemsize for dtype in self.state_records(packed.bucket.rule).values()]
        if packed.bucket.form is MasterForm.SEPARATE:
            widths.append(4)
        elif packed.bucket.form is MasterForm.SPLIT:
            widths.append(2)
        return placed_bytes([packed.numel * width for width in widths])

    def _open_ways(self) -> None:
        """Open the ways of gradients to the kernels, and of weights back to a device."""
        layout, config = self._layout, self.config
        streamed = self.gradients == "stream"
        is_sharded = self._ranks.shards is not None
        if is_sharded and (streamed or self.speculate):
            raise ConfigError(
                "gradients='stream' and speculate= are for one process: gradients that are "
                "averaged over ranks are not final when they arrive. Stage 2 of ZeroOptimizer "
                "frees p.grad during backward"
            )
        self._weights = open_weights(layout, config)
        self._open_device_state()
        if is_sharded:
            return
        self._source.stream = open_stream(
            layout, self._table, config, lambda: self.swapper, streamed=streamed
        )
        nbytes = self._image_bytes(stream_bytes(layout, config, streamed=streamed))
        if not self.speculate or self._source.stream is None:
            return
        device = device_of(layout.infos)
        away = [packed for packed in on_device(layout) if not _stays_on_device(packed)]
        self._policy = Policy(str(self.speculate))
        self._early = Speculation(
            self,
            layout,
            self._source,
            EarlyStepper(
                self,
                Images(page_locked(config, max(PAGE_BYTES, nbytes), "images", pin=False)),
                None if device is None else DeviceImages(away, device),
                self._weights,
            ),
            self._weights,
        )
        self._early.is_on = self._policy.is_on
        self._source.stream.on_arrival = self._early.arrived
        self._source.stream.on_drop = self._early.dropped

    def _open_device_state(self) -> None:
        """Make room on the device for the state that stays there."""
        layout = self._layout
        kept = [packed for packed in layout.groups.values() if _stays_on_device(packed)]
        device = device_of(layout.infos) if kept else None
        if device is None:
            return
        if self._ranks.shards is not None or self.config.swap_gradients:
            raise ConfigError(
                f"ratio={self.ratio!r} steps some state on {device}: that is for one process whose "
                "gradients are in RAM; leave it at 1, and swap_gradients at False"
            )
        records = self.state_records(kept[0].bucket.rule) | {"master": torch.float32}
        self._device_state = DeviceState(kept, layout.infos, records, lambda: self.swapper, device)

    def _reopen(self, *, resume: bool) -> None:
        if self._device_state is not None:
            self._device_state.forget()
        if self._early is not None:
            self._early.forget_memory()
        super()._reopen(resume=resume)

    def _enlarge(self, infos: Sequence[ParameterInfo]) -> None:
        if infos and self._ready:
            self._check_devices(infos)
            if self._early is not None:
                self._early.retreat()
        super()._enlarge(infos)

    def _check_devices(self, infos: Sequence[ParameterInfo]) -> None:
        """Refuse to add parameters on a device that there is no way to."""
        known = {info.bucket.device for info in self._layout.infos}
        for info in infos:
            if info.bucket.device not in {"cpu", *known}:
                raise ConfigError(
                    f"parameter {info.name} lies on {info.bucket.device}, where none did when the "
                    "optimizer was made; make one optimizer for each device"
                )

    def _follow_table(self) -> None:
        grow_ways(self._layout, self.config, self._source.stream, self._weights)

    def _close_ways(self) -> None:
        if self._early is not None:
            self._early.close()
        self._source.close()
        if self._weights is not None:
            self._weights.close()

    # -- in the step -------------------------------------------------------------------------

    def _take_early(self) -> dict[str, EarlyStep]:
        """The early steps of this step; their worker is idle afterwards."""
        return {} if self._early is None else self._early.settle()

    def _drop_early(self, early: dict[str, EarlyStep]) -> None:
        if self._early is not None:
            self._early.drop(early)

    def _keep_early(self, early: dict[str, EarlyStep], step: StepContext) -> set[str]:
        """Keep what fits the step; return the keys of the sub-groups that are done."""
        return set() if self._early is None else self._early.keep(early, step)

    def _prepare_next(self, late: list[str], early: set[str]) -> list[str]:
        """Make the next step's early steps possible; return the order it wants sub-groups in.

        What was stepped late may wait in RAM, unsaved, for the next sweep: but the state before an
        early step must be on storage. Where early steps go on it is written now.
        """
        if self._early is None:
            return late
        self._early.stats.num_late += len(late)
        if self._early.is_on:
            for key in late:
                if self.swapper.state(key) is SubGroupState.DIRTY:
                    self.swapper.writeback(key, wait=False)
        return self._early.next_order([*late, *early])

    def _note_step(self, began: float, num_early: int, num_kept: int) -> None:
        """Tell the policy what became of a step's early steps, and how long the iteration took."""
        if self._early is None or self._policy is None:
            return
        now = time.perf_counter()
        self._early.stats.exposed_seconds += now - began
        seconds = None if self._step_ended is None else now - self._step_ended
        self._step_ended = now
        self._early.stats.num_steps_on += int(self._early.is_on)
        self._policy.end_step(seconds, wasted=num_kept < num_early)
        self._early.is_on = self._policy.is_on

    def _retreat(self) -> None:
        """Undo early steps: the optimizer is used before step()."""
        self._masters.versions.look()
        if self._early is not None:
            self._early.retreat()
        if self._device_state is not None:
            self._device_state.flush(keep=False)


def _stays_on_device(packed: PackedGroup) -> bool:
    """Whether the state is stepped on a device that is not the CPU."""
    return packed.bucket.is_kept and packed.bucket.device != "cpu"
