# SPDX-License-Identifier: Apache-2.0
"""gradients="stream": each gradient is copied to swapio's memory as soon as backward has made it.

    autograd accumulates p.grad -> hook: copy, put a StreamedGradient in its place -> ... -> step()

So a model never has all its gradients on its device, and what is copied can be stepped while
backward goes on. A second gradient of a parameter in the same step (accumulation over several
backward passes, reentrant checkpointing) is added in the accumulation dtype.

Invariants:
- a gradient is counted once: it is in swapio's memory or in `p.grad`, never in both;
- whoever zeroes `p.grad`, or sets it to None, drops what was copied for it;
- a sum that could not be completed is never stepped: it is dropped so, or the step raises;
- hooks keep the optimizer alive no longer than anybody else does, and `close` removes them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from swapio.errors import ConfigError, SwapStateError
from swapio.gradients import add_into
from swapio.optim import kernels
from swapio.optim.gradients import GRADIENT_DTYPES, Gradients
from swapio.optim.layout import ParameterInfo
from swapio.optim.parameters import ParameterTable
from swapio.optim.stream_fragments import SwappedFragments
from swapio.optim.stream_guard import StreamedGradient
from swapio.optim.stream_memory import GradientMemory, in_memory_order
from swapio.optim.stream_ranges import profiled

if TYPE_CHECKING:
    from swapio.optim.cuda_gradients import KeptGradients

_CODES = {dtype: code for code, dtype in enumerate(GRADIENT_DTYPES)}


class Copier(Protocol):
    """Who moves gradients to the host; `HostCopier`, or the one of a device."""

    def reserve(self, num_params: int) -> None:
        """Be ready for parameters with indices below `num_params`."""

    def fetch(self, index: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy a gradient (1-D) to the host; `target` is 1-D there."""

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """The gradient on the host, at once; blocks."""

    def add(
        self, index: int, source: torch.Tensor, kept: torch.Tensor, total: torch.Tensor
    ) -> bool:
        """Start to add a gradient to what is kept on the host; the sum goes to `total` there.

        Returns:
            False if the host must do it.
        """

    def watch(self, index: int, source: torch.Tensor) -> None:
        """Start to work out the sum of squares of a gradient that is not copied yet."""

    def settle(self, indices: Sequence[int]) -> None:
        """Block until the copies of some parameters' gradients are complete."""

    def square_sums(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
        """The sums of squares of settled gradients, as the device worked them out; nan: not."""

    def forget(self, index: int) -> None:
        """The gradient was dropped, or changed on the host: its sum of squares is void."""

    def close(self) -> None:
        """Wait for what is in flight and give everything up."""


class HostCopier:
    """Gradients that are on the host already: a copy is complete when it returns."""

    def reserve(self, num_params: int) -> None:
        """Nothing is kept for a parameter."""

    def fetch(self, index: int, source: torch.Tensor, target: torch.Tensor) -> None:  # noqa: ARG002
        """Copy a gradient."""
        target.copy_(source)

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """The gradient itself."""
        return source

    def add(
        self,
        index: int,  # noqa: ARG002
        source: torch.Tensor,  # noqa: ARG002
        kept: torch.Tensor,  # noqa: ARG002
        total: torch.Tensor,  # noqa: ARG002
    ) -> bool:
        """The host adds."""
        return False

    def watch(self, index: int, source: torch.Tensor) -> None:
        """Whoever asks for it works it out."""

    def settle(self, indices: Sequence[int]) -> None:
        """Nothing is in flight."""

    def square_sums(
        self,
        indices: npt.NDArray[np.int64],  # noqa: ARG002
    ) -> npt.NDArray[np.float64] | None:
        """Nobody has worked them out."""
        return None

    def forget(self, index: int) -> None:
        """Nothing is known of it."""

    def close(self) -> None:
        """Nothing to give up."""


class GradientStream:
    """Takes gradients out of `p.grad` during backward, and hands them to the step.

    Args:
        table: The optimizer's parameters.
        memory: Where gradients are put; unused with `fragments`.
        copier: Who moves them there.
        fragments: Where they go instead under `swap_gradients=True`.
        kept: Takes care of gradients on a device that are not taken during backward: `p.grad`
            keeps them. None takes all gradients in hooks.

    Attributes:
        on_arrival: Called in the hook with a parameter's index when its gradient was taken, and
            the number of gradients of this step so far; for early steps.
        on_drop: Called with a parameter's index, and how many gradients were taken for it, before
            they are dropped or another is added.

    Thread-safety: hooks run in autograd's threads; everything else is called by the optimizer.
    """

    def __init__(
        self,
        table: ParameterTable,
        memory: GradientMemory,
        copier: Copier,
        fragments: SwappedFragments | None = None,
        *,
        kept: KeptGradients | None = None,
    ) -> None:
        self.kept = kept
        self._hooked = kept is None
        self._table = table
        self._memory = memory
        self._copier = copier
        self.fragments = fragments
        self._lock = threading.RLock()
        self._hooks: list[Any] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._incomplete: dict[int, BaseException] = {}
        self._num_arrived: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._codes: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self._address: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._square_sums: npt.NDArray[np.float64] = np.zeros(0, np.float64)
        self.on_arrival: Callable[[int, int], None] | None = None
        self.on_drop: Callable[[int, int], None] | None = None

    def attach(self) -> None:
        """Follow the table: hook parameters that are new in it, and reserve their memory."""
        first = len(self._num_arrived)
        infos = self._table.infos[first:]
        if self.fragments is None:
            self._memory.add(infos if self._hooked else ())
        else:
            self.fragments.reserve()
        self._copier.reserve(len(self._table.infos))
        more = len(infos)
        self._num_arrived = np.concatenate([self._num_arrived, np.zeros(more, np.int32)])
        self._codes = np.concatenate([self._codes, np.zeros(more, np.int8)])
        self._address = np.concatenate([self._address, np.zeros(more, np.uint64)])
        self._square_sums = np.concatenate([self._square_sums, np.full(more, np.nan)])
        this = weakref.ref(self)
        for info in infos if self._hooked else ():
            hook = _hook(this, info.index)
            self._hooks.append(info.param.register_post_accumulate_grad_hook(hook))

    # -- during backward ---------------------------------------------------------------------

    def take_arrived(self, index: int, param: torch.Tensor) -> None:
        """Move what autograd has just put in `param.grad` to swapio's memory."""
        grad = param.grad
        if grad is None:
            return
        with self._lock:
            if isinstance(grad, StreamedGradient):
                if grad.was_zeroed:
                    self._drop(index)
                    grad.was_zeroed = False
                arrived, grad.arrived = grad.arrived, None
                if arrived is None:
                    return
                try:
                    self._accept(index, arrived)
                except BaseException as error:  # nobody else has it
                    self._incomplete[index] = error
                    raise
            else:
                self._incomplete.pop(index, None)
                if self._num_arrived[index]:  # set to None, or replaced, since it was taken
                    self._drop(index)
                self._accept(index, grad)
                param.grad = StreamedGradient(param)
            count = int(self._num_arrived[index])
        if self.on_arrival is not None:
            self.on_arrival(index, count)

    def _accept(self, index: int, grad: torch.Tensor) -> None:
        with profiled("take gradient"):
            self._move(index, grad)

    def _move(self, index: int, grad: torch.Tensor) -> None:
        info = self._table.infos[index]
        check_gradient(info, grad)
        source = in_memory_order(info, grad.detach())
        is_first = not self._num_arrived[index]
        if not is_first and self.on_drop is not None:
            self.on_drop(index, int(self._num_arrived[index]))
        if self.fragments is not None:
            host = self._copier.to_host(source)
            dtype, total = self.fragments.put(index, host, add=not is_first)
            self._square_sums[index] = total
        elif is_first:
            kept = self._memory.place(index, source.numel(), source.dtype)
            self._copier.fetch(index, source, kept)
            dtype = self._keep(index, kept)
        else:
            kept = self._kept[index]
            where = self._memory.place_sum(index, kept, source)
            if not self._copier.add(index, source, kept, where):
                self._copier.settle([index])
                self._copier.forget(index)
                add_into(where, kept, self._copier.to_host(source))
            dtype = self._keep(index, where)
        self._codes[index] = _CODES[dtype]
        self._num_arrived[index] += 1

    def _keep(self, index: int, kept: torch.Tensor) -> torch.dtype:
        self._kept[index] = kept
        self._address[index] = kept.data_ptr()
        self._square_sums[index] = np.nan
        return kept.dtype

    def _drop(self, index: int) -> None:
        """Forget what was taken for a parameter in this step."""
        if self.on_drop is not None:
            self.on_drop(index, int(self._num_arrived[index]))
        self._copier.settle([index])
        self._copier.forget(index)
        self._kept.pop(index, None)
        self._incomplete.pop(index, None)
        self._num_arrived[index] = 0
        self._address[index] = 0
        self._square_sums[index] = np.nan

    # -- in the step -------------------------------------------------------------------------

    @property
    def arrived(self) -> npt.NDArray[np.int32]:
        """How many gradients each parameter got since the last step."""
        return self._num_arrived

    def gather(self) -> Gradients:
        """The gradients of this step; blocks until all of them are in RAM.

        Gradients that lie in `p.grad`, because no backward put them there, are taken too.

        Raises:
            ConfigError: As `gradients.collect`.
            SwapStateError: Adding to a gradient failed during backward, and nobody zeroed it since.
        """
        parameters = self._table.refresh()
        if self.kept is not None:
            self.kept.begin()
        for info in self._table.infos:
            (self._take_left if self._hooked else self._note_kept)(info)
        for index, error in self._incomplete.items():
            raise SwapStateError(
                f"the gradient of {self._table.infos[index].name} is not whole: adding to it "
                f"failed during backward ({error!r}). Nothing was stepped; zero the gradients and "
                "go through backward again"
            ) from error
        self._copier.settle(list(self._kept))
        return self._addressed(parameters, self._num_arrived > 0)

    def _addressed(
        self, parameters: npt.NDArray[np.uint64], present: npt.NDArray[np.bool_]
    ) -> Gradients:
        result = Gradients(parameters, self._address.copy(), present)
        codes = self._codes[present]
        if len(codes):
            common = int(codes[0])
            result.dtype = GRADIENT_DTYPES[common]
            for index in np.flatnonzero(present & (self._codes != common)).tolist():
                result.dtypes[index] = GRADIENT_DTYPES[self._codes[index]]
        return result

    def _take_left(self, info: ParameterInfo) -> None:
        """Look at `p.grad` of one parameter: it may have been set, zeroed or removed by hand."""
        index, param = info.index, info.param
        grad = param.grad
        if grad is None:
            self._incomplete.pop(index, None)
            if self._num_arrived[index]:
                with self._lock:
                    self._drop(index)
        elif not isinstance(grad, StreamedGradient) or grad.arrived is not None:
            self.take_arrived(index, param)
        elif grad.was_zeroed:
            with self._lock:
                self._drop(index)
                self._accept(index, torch.zeros_like(param))
                grad.was_zeroed = False

    def _note_kept(self, info: ParameterInfo) -> None:
        """Take note of a gradient anew each time: it may have been changed."""
        index, grad = info.index, info.param.grad
        self._drop(index)
        if grad is None:
            return
        check_gradient(info, grad)
        source = in_memory_order(info, grad.detach())
        self._codes[index] = _CODES[self._keep(index, source)]
        self._num_arrived[index] = 1
        if self.kept is not None and info.bucket.device != "cpu":
            self._address[index] = 0  # until its sub-group's turn
            self.kept.note(index, source)
            self._copier.watch(index, source)

    def gradient(self, info: ParameterInfo) -> torch.Tensor:
        """A parameter's gradient of the step under way, 1-D in memory order, wherever it is."""
        return self._kept[info.index]

    def square_sums(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """The float64 sum of squares of each chosen parameter's gradient; 0 for the others.

        The order of addition is fixed, so that it does not matter who asks first, or when.
        """
        unknown = chosen & np.isnan(self._square_sums)
        wanted = np.flatnonzero(unknown)
        found = self._copier.square_sums(wanted)
        if found is not None:
            self._square_sums[wanted] = found
            unknown[wanted] = np.isnan(found) & (self._address[wanted] > 0)
        for code, dtype in enumerate(GRADIENT_DTYPES):
            rows = np.flatnonzero(unknown & (self._codes == code))
            if len(rows):
                self._square_sums[rows] = kernels.square_sum_spans(
                    self._address[rows], self._table.numels[rows], dtype
                )
        return np.where(chosen, self._square_sums, 0.0)

    def square_sums_of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """As `square_sums`, of a few parameters whose gradients are settled."""
        chosen = np.zeros(len(self._num_arrived), np.bool_)
        chosen[indices] = self._num_arrived[indices] > 0
        return self.square_sums(chosen)[indices]

    def settle(self, indices: npt.NDArray[np.int64]) -> None:
        """Block until the gradients of some parameters are in RAM."""
        self._copier.settle(indices.tolist())

    def gradients_of(
        self, indices: npt.NDArray[np.int64], parameters: npt.NDArray[np.uint64]
    ) -> Gradients:
        """The gradients of some parameters, as addresses; no other parameter has one.

        Args:
            indices: The parameters; their gradients are settled.
            parameters: Address of each of all parameters.
        """
        present = np.zeros(len(self._num_arrived), np.bool_)
        present[indices] = self._num_arrived[indices] > 0
        return self._addressed(parameters, present)

    def release(self) -> None:
        """Forget the gradients: the step has consumed them."""
        with self._lock:
            if self.fragments is not None:
                self.fragments.drop()
            for index in np.flatnonzero(self._num_arrived).tolist():
                self._copier.forget(index)
                param = self._table.tensors[index]
                if self._hooked and isinstance(param.grad, StreamedGradient):
                    param.grad = None
            if self.kept is not None:
                self.kept.release()
            self._kept.clear()
            self._incomplete.clear()
            self._num_arrived[:] = 0
            self._address[:] = 0
            self._square_sums[:] = np.nan

    def close(self) -> None:
        """Remove the hooks and give all memory back; parameters can be used as before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for param in self._table.tensors:
            if isinstance(param.grad, StreamedGradient):
                param.grad = None
        self._copier.close()
        if self.kept is not None:
            self.kept.close()
        self._kept.clear()
        self._memory.close()


def _hook(this: weakref.ref[GradientStream], index: int) -> Callable[[torch.Tensor], None]:
    pid = os.getpid()

    def take(param: torch.Tensor) -> None:
        stream = this()
        if stream is not None and os.getpid() == pid:
            stream.take_arrived(index, param)
        elif isinstance(param.grad, StreamedGradient):
            # The optimizer was dropped, or is the parent's: the gradient is autograd's again.
            param.grad = param.grad.arrived

    return take


def check_gradient(info: ParameterInfo, grad: torch.Tensor) -> None:
    """Raise ConfigError unless the gradient is dense, of the parameter's shape and device."""
    param = info.param
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {info.name} is {grad.layout}; swapio steps dense gradients only "
            "(for an embedding pass sparse=False)"
        )
    if (
        grad.dtype not in GRADIENT_DTYPES
        or grad.shape != param.shape
        or grad.device != param.device
    ):
        raise ConfigError(
            f"the gradient of {info.name} is {tuple(grad.shape)}, {grad.dtype} on {grad.device}; "
            f"the parameter {tuple(param.shape)} on {param.device}, and there are kernels for "
            f"{', '.join(map(str, GRADIENT_DTYPES))}"
        )
