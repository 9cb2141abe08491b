# SPDX-License-Identifier: Apache-2.0
"""Early steps: sub-groups are stepped during backward, as soon as their gradients are there.

    hook: all gradients of a sub-group have arrived -> worker thread: step into an image
    step(): the norm is known -> keep the image | drop it, and step with the right factor
                                 (undo="algebraic": rescale it to the right factor)

An early step assumes that no clipping will come, that every gradient is finite, and that nobody
changes a hyperparameter. step() compares all that it assumed with what is so, bit for bit.

Invariants:
- an early step writes to memory of its own: parameters, state, ties, digests and counts are
  as before until step() keeps it;
- dropping it is exact, and stepping again gives what a run without early steps gives (but for
  what `undo="algebraic"` steps in place: see speculation_undo);
- the worker is idle whenever the optimizer does anything but backward.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from swapio.optim import kernels
from swapio.optim.context import StepContext
from swapio.optim.cuda_versions import Stamp, stamp_of
from swapio.optim.cuda_weights import DeviceWeights
from swapio.optim.layout import MUON_RULE, Layout, PackedGroup
from swapio.optim.speculation_stats import SpeculationStats
from swapio.optim.speculation_steps import EarlyOwner, EarlyStep, EarlyStepper
from swapio.optim.speculation_switching import QUICK_SWITCHES
from swapio.optim.speculation_undo import FAR_RATIO
from swapio.optim.stream_ranges import profiled
from swapio.optim.stream_source import GradientSource

# A larger sum of squares may overflow in the second moment, which could not be told from inf.
_SQUARE_SUM_MAX = 3e38


class Speculation:
    """The early steps of one optimizer.

    Args:
        owner: The optimizer.
        layout: Its sub-groups.
        source: Its gradients, which are streamed.
        stepper: Takes the steps.
        weights: The way to a device, if there is one.

    Attributes:
        stats: Counters.

    Thread-safety: `arrived` and `dropped` are called by hooks; everything else by the optimizer.
    """

    def __init__(
        self,
        owner: EarlyOwner,
        layout: Layout,
        source: GradientSource,
        stepper: EarlyStepper,
        weights: DeviceWeights | None = None,
    ) -> None:
        self._owner = owner
        self._layout = layout
        self._source = source
        self._stepper = stepper
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
        self._counted: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._order: list[str] = []
        self._end_quick_switches: weakref.finalize[[], Speculation] | None = None
        self.is_on = True
        self.stats = SpeculationStats()

    # -- during backward ---------------------------------------------------------------------

    def arrived(self, index: int, count: int) -> None:
        """Parameter `index` got its `count`-th gradient of this step. Called by hooks."""
        with self._lock:
            if self._context is None and self.is_on:
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
                if future is None or future.cancel():
                    continue
                if future.exception() is not None:  # step() raises it, not backward
                    self._futures[key] = future
                elif (early := future.result()) is not None:
                    self._stepper.drop(early)
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
        self._is_active = True
        self._partial = 0.0
        self._counted = np.zeros(num_params, np.bool_)
        self._order.clear()
        for key, packed in self._layout.groups.items():
            if packed.bucket.rule != MUON_RULE and self._owner.may_step_early(packed):
                expected = self._expected[self._params(packed)]
                self._left[key] = int(np.count_nonzero(expected))
        if self._weights is not None:
            self._weights.begin()
        QUICK_SWITCHES.begin()
        self._end_quick_switches = weakref.finalize(self, QUICK_SWITCHES.end)
        self._end_quick_switches.atexit = False

    def _restore_interval(self) -> None:
        if self._end_quick_switches is not None:
            self._end_quick_switches()
            self._end_quick_switches = None

    def _keys(self, index: int) -> list[str]:
        if index not in self._keys_of:
            self._keys_of[index] = [span.key for span in self._layout.spans(index)]
        return self._keys_of[index]

    def _params(self, packed: PackedGroup) -> npt.NDArray[np.int64]:
        if packed.key not in self._params_of:
            self._params_of[packed.key] = np.unique(packed.units.param).astype(np.int64)
        return self._params_of[packed.key]

    def _stamps(self, params: npt.NDArray[np.int64]) -> list[Stamp]:
        """What torch counts of writes to some parameters."""
        return [stamp_of(self._layout.infos[index]) for index in params.tolist()]

    def _is_foreign(self, one: EarlyStep, step: StepContext) -> bool:
        """Whether somebody else wrote to a parameter on the host, also through `.data`."""
        masters, packed, rows = self._owner._masters, one.packed, one.rows
        if packed.bucket.device != "cpu":
            return False
        own = masters.digests_of_own(packed, rows, step)
        if own is not None:
            return one.own is None or not np.array_equal(one.own, own)
        return masters.is_changed(packed, rows, step)

    # -- on the worker -----------------------------------------------------------------------

    def _run(self, key: str) -> EarlyStep | None:
        """Step one sub-group early; None if it turned out that it must not be."""
        packed = self._layout.groups[key]
        params = self._params(packed)
        stream, assumed = self._source.stream, self._context
        if stream is None or assumed is None:
            return None
        with profiled("wait for gradients"):
            stream.settle(params)
        if not self._looks_normal(params, stream.square_sums_of(params)):
            return None
        gradients = stream.gradients_of(params, assumed.param_address)
        early = self._stepper.open(packed, assumed, gradients)
        if early is None:
            self.stats.num_without_memory += 1
            return None
        early.stamps = self._stamps(params)
        try:
            with profiled("early step"):
                done = self._stepper.take(early)
        except BaseException:
            self._stepper.drop(early)
            raise
        if not done:
            self._stepper.drop(early)
            return None
        self.stats.num_early += 1
        return early

    def _looks_normal(self, params: npt.NDArray[np.int64], sums: npt.NDArray[np.float64]) -> bool:
        """Whether the gradients can be stepped now, and a clip is not certain already."""
        sums = sums * self._source.expected_unscale**2
        if not float(sums.sum()) < _SQUARE_SUM_MAX:
            return False
        # A parameter that lies in several sub-groups counts once.
        self._partial += float(sums[~self._counted[params]].sum())
        self._counted[params] = True
        limit = self._source.limit
        return limit is None or self._partial <= limit * limit

    # -- in the step -------------------------------------------------------------------------

    def settle(self) -> dict[str, EarlyStep]:
        """Stop the worker, and return the early steps that were taken; blocks shortly.

        Raises:
            BaseException: The error of an early step; all of them are dropped then.
        """
        with self._lock:
            futures, self._futures = self._futures, {}
            stream = self._source.stream
            if stream is not None and stream.arrived.any():
                self._expected = stream.arrived.copy()
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
                # Before the step announces what it is about to write itself.
                params = self._params(early.packed)
                early.is_touched = early.stamps != self._stamps(params)
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
            self._stepper.drop(one)
        self.stats.num_undone += len(early)

    def retreat(self) -> None:
        """Undo everything: somebody wants to see or change the state before the step."""
        if self._futures:
            self.drop(self.settle())

    def keep(self, early: dict[str, EarlyStep], step: StepContext) -> set[str]:
        """Make early steps count whose assumptions hold; return the keys of their sub-groups.

        What was kept or dropped is taken out of `early`.
        """
        kept: list[EarlyStep] = []
        for key in list(early):
            one = early.pop(key)
            params = self._params(one.packed)
            untouched = not one.is_touched and not self._is_foreign(one, step)
            fits = untouched and one.fits(step, params)
            if fits and one.context.scale != step.scale and one.calls:
                self.stats.num_far_rescaled += step.scale < FAR_RATIO * one.context.scale
                self._stepper.rescale(one, step.scale)
                self.stats.num_rescaled += 1
            if fits and one.context.scale == step.scale:
                kept.append(one)
            else:
                self._stepper.drop(one)
                self.stats.num_redone += 1
        if any(one.packed.bucket.device != "cpu" for one in kept) and self._weights is not None:
            self._weights.end()
        with profiled("keep early steps"):
            for one in kept:
                self._stepper.keep(one, step)
        self.stats.num_kept += len(kept)
        return {one.packed.key for one in kept}

    def forget_memory(self) -> None:
        """Give back what images have taken over from the swapper, which is about to be replaced."""
        self._stepper.forget_memory()

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
                    self._stepper.drop(early)
        self._stepper.close()
