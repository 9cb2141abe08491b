# SPDX-License-Identifier: Apache-2.0
"""SwapOptimizer: a torch optimizer whose state lives where a swapper keeps it.

    closure -> gather gradients -> decide (norm, finite) -> sweep over the sub-groups -> commit

Subclasses give the update rule; everything else (packing, masters, digests, state access, the
lifecycle) is here and in the modules beside this one.

Invariants:
- hyperparameters are read from `param_groups` at each step, step counts are per parameter;
- a skipped step changes nothing, not even a counter;
- a parameter without gradient is left alone: no decay, no count, no write.
"""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable
from copy import copy
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from swapio.config import SwapConfig
from swapio.errors import ClosedError, ConfigError, SwapioError, describe_error
from swapio.optim import kernels
from swapio.optim.context import StepContext
from swapio.optim.gradients import Gradients
from swapio.optim.interrupt import delayed_interrupt
from swapio.optim.layout import PackedGroup
from swapio.optim.report import about_run, describe, step_stats
from swapio.optim.speculation_owner import EarlySteps
from swapio.optim.speculation_policy import check_mode
from swapio.optim.speculation_steps import EarlyStep
from swapio.optim.state import StateMapping
from swapio.optim.stepstats import StepStats
from swapio.optim.stream_open import is_on_device
from swapio.optim.stream_ranges import profiled
from swapio.optim.stream_source import GRADIENT_MODES, GradientSource
from swapio.plan import Plan
from swapio.views import Chunk

SwapSetting = SwapConfig | dict[str, Any] | str | os.PathLike[str] | None


class SwapOptimizer(EarlySteps):
    """Base of all swapio optimizers; see AdamW for the arguments that users give.

    Args:
        params: As for torch optimizers; named parameters are welcome.
        defaults: Default hyperparameters of the param groups.
        swap: Where state lives: a path, a dict, a SwapConfig, or None for RAM.
        max_grad_norm: Clip the global gradient norm inside the step.
        gradients: "keep" leaves them in `p.grad`; "stream" copies each to memory of swapio's
            during backward and frees it, and is implied by `speculate`.
        speculate: Step sub-groups during backward: "always", "adaptive" (where that is faster), or
            False.
        undo: How early steps are undone: "exact", or "algebraic", which needs less memory.
        ratio: Share of the state that is offloaded; the rest stays on the parameters' device.
        nonfinite: What inf or nan in a gradient does: "propagate", "skip" or "raise"; the default
            is "skip" with `max_grad_norm` or a loss scale, else "propagate" as in torch.
        resume: Continue from the last committed step in the folder, if there is one.

    Attributes:
        recovered_step: The step that `resume` or `recover` continued from, or None.
        commit_payload: Bytes of the user's that go into the commit of the next step.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        swap: SwapSetting = None,
        max_grad_norm: float | None = None,
        gradients: str = "keep",
        speculate: str | bool = False,
        undo: str = "exact",
        ratio: float = 1.0,
        nonfinite: str | None = None,
        resume: bool = False,
    ) -> None:
        gradients = "stream" if speculate and gradients == "keep" else gradients
        check_mode(speculate, gradients, undo, ratio)
        self.speculate, self.undo, self.ratio = speculate, undo, ratio
        self._begin_registration(_checked_config(SwapConfig.coerce(swap), gradients))
        self._closed = False
        self._pid = os.getpid()
        if nonfinite not in (None, "propagate", "skip", "raise"):
            raise ConfigError(f"nonfinite={nonfinite!r} is none of 'propagate', 'skip', 'raise'")
        self.gradients = gradients
        self._source = GradientSource(self._table, nonfinite, watched=bool(speculate))
        self._source.max_grad_norm = _checked_norm(max_grad_norm)
        self._stats = StepStats()
        self._num_steps = 0
        self.grad_norm: float | None = None
        self.step_skipped = False
        self.commit_payload = b""
        super().__init__(params, defaults)
        kernels.set_threads(self.config.resolve_cpu_threads(), self.config.cpu_affinity or ())
        groups = self._register_all()
        self._source.ranks = self._ranks
        self._open_runtime(groups, resume=resume)
        try:
            self._open_ways()
        except BaseException:
            self._close_ways()
            self._runtime.close()
            raise
        self.state = StateMapping(self)  # type: ignore[assignment]
        self._ready = True

    # -- what a rule gives -------------------------------------------------------------------

    @abc.abstractmethod
    def update_chunk(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        """Step the parameters of one chunk in place; False if nothing was changed."""

    def sweep_keys(self, step: StepContext, done: set[str]) -> list[str]:
        """Sub-groups that a step visits, but for those that are done."""
        groups = self._layout.groups
        return [key for key in groups if key not in done and step.touches(groups[key])]

    def sweep_order(self, keys: list[str]) -> list[str]:
        """Order in which sub-groups are stepped, and every second time in reverse."""
        return keys

    @abc.abstractmethod
    def fill_hyper(self, row: Any, group: dict[str, Any]) -> None:
        """Write a group's hyperparameters into a row of the kernels' table."""

    # -- the step ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step.

        Blocks until every parameter is updated; writes of state may go on afterwards. A
        KeyboardInterrupt is delivered after the step.

        Args:
            closure: Re-evaluates the model and returns the loss, as in torch.

        Returns:
            What the closure returned, or None.

        Raises:
            AioError, CorruptionError: A transfer failed; the optimizer is FAILED from then on.
            ClosedError: After close(), or in a forked child.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with delayed_interrupt(), self._runtime.step(self._num_steps + 1, self._stats.add_step):
            self._step()
        return loss

    def _step(self) -> None:
        self._ranks.begin_step()
        groups = self._ranks.together(self._prepare)
        began = time.perf_counter()
        with profiled("wait for gradients"):
            gradients = self._source.gather()
        gradients.present &= groups >= 0
        with profiled("decide"):
            decision = self._source.decide(gradients)
        self.grad_norm = decision.norm
        self.step_skipped = not decision.take
        early = self._take_early()
        num_early, num_kept = len(early), 0
        try:
            if decision.take:
                scale = decision.scale
                step = self._ranks.together(lambda: self._begin_update(groups, gradients, scale))
                num_kept = self._update(step, early)
        finally:
            self._drop_early(early)  # whatever was not kept or stepped again
        self._source.release()
        self._note_step(began, num_early, num_kept)

    def _update(self, step: StepContext, early: dict[str, EarlyStep]) -> int:
        """Step everything that has a gradient, and commit; return how many early steps counted."""
        self._agree_on_commits()
        listed = self._table.listed
        complete = step.gradients.complete
        try:
            # Now rather than at the end: what this touches of each tensor is still in the cache.
            self._ranks.announce(listed if complete else [listed[i] for i in step.indices])
            kept = self._ranks.together(lambda: self._sweep_all(step, early))
            self._counts = step.counts
            infos = self._layout.infos
            self._ranks.publish(infos if complete else [infos[i] for i in step.indices])
            self._masters.versions.note()
            self._num_steps += 1
            if self._device_state is not None and self.is_committing:
                self._device_state.flush(keep=True)
            self._commit_step()
        except BaseException as error:
            # Some sub-groups are a step ahead of the others, whatever the reason was.
            self._runtime.swapper.fail(error)
            raise
        self._masters.warn()
        return len(kept)

    def _prepare(self) -> npt.NDArray[np.int64]:
        """Make state for parameters that became trainable; return each parameter's group."""
        if self._frozen:
            self._thaw()
        return self._group_index()

    def _begin_update(
        self, groups: npt.NDArray[np.int64], gradients: Gradients, scale: float
    ) -> StepContext:
        """Look at all settings and parameters of a step, before anything is changed."""
        step = StepContext(self, groups, self._counts, gradients, scale)
        self._masters.begin_step(step)
        return step

    def _sweep_all(self, step: StepContext, early: dict[str, EarlyStep]) -> set[str]:
        """Step everything; return the sub-groups whose early steps counted."""
        if self._weights is not None:
            self._weights.begin()
        kept = self._keep_early(early, step)
        self._sweep(step, kept)
        if self._weights is not None:
            self._weights.end()
        return kept

    def _sweep(self, step: StepContext, done: set[str]) -> None:
        """Stream the sub-groups that are not done yet through RAM; every second sweep backwards."""
        swapper = self._runtime.swapper
        self._snapshots.settle()
        keys = self.sweep_order(self.sweep_keys(step, done))
        if self._num_steps % 2:
            keys.reverse()
        groups, kept = self._layout.groups, self._device_state or ()
        swapped = [key for key in keys if key in groups and key not in kept]
        swapper.set_order(swapped)
        for key, following in zip_longest(keys, keys[1:]):
            for near in (key, following):
                if near in groups and near not in kept:
                    self._source.prefetch(groups[near])
            self.sweep_group(key, step)
        # What has room in the buffers is read during the next forward and backward.
        swapper.set_order(self._prepare_next(swapped[::-1], done))

    def sweep_group(self, key: str, step: StepContext) -> None:
        """Stream one sub-group through RAM."""
        packed, swapper = self._layout.groups[key], self._runtime.swapper
        if self._device_state is not None and key in self._device_state:
            with profiled("update on the device"):
                self._device_state.step(packed, step, self._masters, self._source.gradient)
            return
        with self._source.loaded(packed, step.gradients), swapper.swap_in(key) as view:
            for chunk in view.chunks():
                began = time.perf_counter()
                with profiled("update"):
                    changed = self._step_chunk(packed, chunk, step)
                self._stats.compute_seconds += time.perf_counter() - began
                if changed:
                    chunk.mark_dirty()

    def _step_chunk(self, packed: PackedGroup, chunk: Chunk, step: StepContext) -> bool:
        if self._weights is None or not is_on_device(packed):
            changed = self.update_chunk(packed, chunk, step)
            if changed:
                self._masters.copy_params(packed, chunk, step.param_address)
            return changed
        rows = step.rows_of(packed, chunk.start, chunk.stop)
        if not len(rows):
            return False
        span = (chunk.start, chunk.stop)
        with self._weights.staged(packed, *span, rows, step.param_address) as (addresses, upload):
            staged = copy(step)
            staged.param_address = addresses
            self.update_chunk(packed, chunk, staged)
            self._masters.copy_params(packed, chunk, addresses)
            upload()
        return True

    # -- gradients ---------------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | None:
        """The global gradient norm that every step is clipped to; may be set at any time."""
        return self._source.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._source.max_grad_norm = _checked_norm(value)

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients have left `p.grad` when step() is called."""
        return self.gradients == "stream"

    @property
    def nonfinite(self) -> str:
        """What inf or nan in a gradient does: "propagate", "skip" or "raise"."""
        return self._source.nonfinite

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the global norm of the next step, as torch.nn.utils.clip_grad_norm_.

        Gradients stay as they are: the step multiplies them. Works wherever gradients are; blocks
        until all of them are in RAM.

        Args:
            max_norm: The limit; with `max_grad_norm` or another call, the lowest counts.

        Returns:
            The norm before clipping, unscaled, as a float64 tensor on the CPU.

        Raises:
            ConfigError: `max_norm` is not positive.
        """
        self._check_usable()
        return torch.tensor(self._source.clip(max_norm), dtype=torch.float64)

    def set_loss_scale(self, scale: float) -> None:
        """Divide the gradients by `scale` within the next step; a loss scaler's part.

        Raises:
            ConfigError: The scale is not a positive number.
        """
        self._check_usable()
        if not 0 < scale < float("inf"):
            raise ConfigError(f"a loss scale must be a positive number, not {scale!r}")
        self._source.set_loss_scale(scale)

    def expect_loss_scale(self, scale: Callable[[], float | None]) -> None:
        """Have early steps assume what `scale()` gives during backward; a loss scaler's part."""
        self._source.scale_to_come = scale

    # -- reports and end ---------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Numbers since construction: bytes, seconds, shares; docs/stats.md explains each name."""
        numbers = self._runtime.stats() | step_stats(self._runtime, self._stats)
        early = {} if self._early is None else self._early.stats.as_dict()
        return numbers | early | self._ranks.stats() | {"num_steps": self._num_steps}

    def planned_collectives(self) -> dict[str, int]:
        """Exchanges of tensors over ranks in a step of all parameters, by name."""
        return self._ranks.planned_collectives()

    @property
    def plan(self) -> Plan:
        """What was decided at construction: residency, buffers, predicted bytes and seconds."""
        return self._runtime.plan

    def describe(self) -> str:
        """Return a table for people: what lives where, bytes of a step, budget, prediction."""
        return describe(self._runtime, self._layout)

    def synchronize(self) -> None:
        """Block until every write of state that was started is complete; raise its error.

        Raises:
            AioError: A write, or a commit, failed; the optimizer is FAILED from then on.
        """
        self._check_open()
        try:
            self._runtime.swapper.drain()
        except (SwapioError, OSError) as error:
            self._runtime.swapper.fail(error)
            raise

    def close(self) -> None:
        """Wait for transfers, give up memory and files. Parameters stay usable. Idempotent."""
        if self._closed or not self._ready or os.getpid() != self._pid:
            return
        self._closed = True
        if self._runtime.swapper.failure is not None:
            self._ranks.tell(self._runtime.swapper.failure)
        self._close_ways()
        self._close_saving()
        if self._runtime.tracer is not None:
            name, counts = type(self).__name__, step_stats(self._runtime, self._stats)
            self._runtime.describe_in_trace(**about_run(name, self._layout, counts))
        self._runtime.close()
        self._ranks.close()

    def __enter__(self) -> SwapOptimizer:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _check_open(self, *, failed_ok: bool = False) -> None:
        """As `_check_usable`, for whoever sees or changes the state: early steps are undone."""
        self._check_usable(failed_ok=failed_ok)
        if self._ready:
            self._retreat()

    def _check_usable(self, *, failed_ok: bool = False) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this optimizer belongs to the parent of this forked process; create a new one here"
            )
        if self._closed:
            raise ClosedError("this optimizer is closed")
        failure = self._runtime.swapper.failure if self._ready else None
        if failure is not None and not failed_ok:
            self._ranks.tell(failure)
            raise SwapioError(
                f"a step failed earlier ({describe_error(failure)}); parameters and state may be "
                "of different steps: close this optimizer and load the last checkpoint into a new "
                "one, or recover() under durability 'step'"
            ) from failure

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: two optimizers cannot own the same files."""
        raise TypeError(_NO_COPY.format("deepcopied"))

    def __reduce__(self) -> NoReturn:
        """Refuse: state is on storage."""
        raise TypeError(_NO_COPY.format("pickled"))

    def __getstate__(self) -> NoReturn:
        """Refuse, as __reduce__."""
        raise TypeError(_NO_COPY.format("pickled"))


_NO_COPY = (
    "a swapio optimizer cannot be {}: its state lives in files and page-locked memory that one "
    "object owns. Use save(dir) and load(dir), or state_dict() and load_state_dict()"
)


def _checked_config(config: SwapConfig, gradients: str) -> SwapConfig:
    """Refuse settings that do not fit together."""
    if gradients not in GRADIENT_MODES:
        raise ConfigError(f"gradients={gradients!r} is neither 'keep' nor 'stream'")
    if gradients == "keep" and config.accumulation_dtype != "float32":
        raise ConfigError(
            f"accumulation_dtype={config.accumulation_dtype!r} is about streamed gradients, but "
            "with gradients='keep' they stay in p.grad, where autograd accumulates them in the "
            "parameter's dtype; leave it at 'float32', or pass gradients='stream'"
        )
    if gradients == "keep" and config.swap_gradients:
        raise ConfigError(
            "swap_gradients=True keeps streamed gradients on storage, but with gradients='keep' "
            "they stay in p.grad; set it to False, or pass gradients='stream'"
        )
    return config


def _checked_norm(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ConfigError(f"max_grad_norm={value!r} must be positive, or None")
    return value
