# SPDX-License-Identifier: Apache-2.0
"""Where a step gets its gradients and its factor from, whichever way gradients are kept.

    gradients="keep"      p.grad, until step() has read it
    gradients="stream"    swapio's memory, filled during backward

One factor reaches the kernels: 1 / loss scale, times the clip factor. The limit is
`max_grad_norm`, or what `clip_grad_norm_` was given since the last step if that is lower.

Invariant: asking for the norm changes nothing; a limit or loss scale given for a step is used by
that step, taken or skipped, and by no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from swapio.errors import ConfigError
from swapio.optim.gradients import (
    OVERFLOWED,
    Decision,
    Gradients,
    collect,
    decide,
    first_nonfinite,
    square_sum,
)
from swapio.optim.layout import PackedGroup, ParameterInfo
from swapio.optim.parameters import ParameterTable
from swapio.optim.ranks import Ranks
from swapio.optim.stream import GradientStream

GRADIENT_MODES = ("keep", "stream")


class GradientSource:
    """The gradients of one optimizer.

    Args:
        table: Its parameters.
        nonfinite: "propagate", "skip", "raise", or None: "skip" where norms are looked at anyway.
        watched: Norms are looked at anyway.

    Attributes:
        stream: Takes gradients during backward; None leaves them in `p.grad`.
        max_grad_norm: The limit of every step, or None.
        scale_to_come: Gives the loss scale that the next step will be told; a loss scaler's.
        ranks: The processes that share the optimizer.
    """

    def __init__(
        self, table: ParameterTable, nonfinite: str | None, *, watched: bool = False
    ) -> None:
        self._table = table
        self._is_watched = watched
        self._nonfinite = nonfinite
        self._limit: float | None = None
        self._loss_scale: float | None = None
        self.stream: GradientStream | None = None
        self.max_grad_norm: float | None = None
        self.scale_to_come: Callable[[], float | None] | None = None
        self.ranks = Ranks()

    @property
    def nonfinite(self) -> str:
        """What inf or nan in a gradient does in the step to come."""
        if self._nonfinite is not None:
            return self._nonfinite
        watched = self.limit is not None or self._loss_scale is not None
        return "skip" if watched or self._is_watched else "propagate"

    @property
    def limit(self) -> float | None:
        """The norm that the step to come is clipped to, or None."""
        limits = [limit for limit in (self.max_grad_norm, self._limit) if limit is not None]
        return min(limits, default=None)

    @property
    def unscale(self) -> float:
        """The factor that undoes the loss scale."""
        return 1.0 if self._loss_scale is None else 1.0 / self._loss_scale

    @property
    def expected_unscale(self) -> float:
        """What `unscale` will be in the step to come, as far as it is known during backward."""
        if self._loss_scale is None and self.scale_to_come is not None:
            scale = self.scale_to_come()
            return 1.0 if scale is None else 1.0 / scale
        return self.unscale

    def set_loss_scale(self, scale: float) -> None:
        """Divide the gradients of the step to come by `scale`."""
        self._loss_scale = scale

    def gather(self) -> Gradients:
        """The gradients of the step; blocks until they are in RAM."""
        return self.ranks.together(self._gather)

    def _gather(self) -> Gradients:
        if self.ranks.gather is not None:
            return self.ranks.gather(self._table)
        return collect(self._table) if self.stream is None else self.stream.gather()

    def square_sum(self, gradients: Gradients) -> float:
        """The sum of the squares of all gradients as they are, over all processes."""
        if self.stream is None:
            return self.ranks.total(square_sum(self._table, self.ranks.counted(gradients)))
        sums = self.stream.square_sums(gradients.present)
        return self.ranks.total(float(np.cumsum(sums)[-1]) if len(sums) else 0.0)

    def decide(self, gradients: Gradients) -> Decision:
        """Decide on the step; see `gradients.decide`."""
        if gradients.dtype is None:
            return Decision(True, self.unscale, None)
        return decide(
            lambda: self.square_sum(gradients),
            limit=self.limit,
            nonfinite=self.nonfinite,
            unscale=self.unscale,
            culprit=lambda: self._culprit(gradients),
        )

    def clip(self, max_norm: float) -> float:
        """Clip the step to come, and return the norm before that. Blocks."""
        if not max_norm > 0:
            raise ConfigError(f"max_norm={max_norm!r} must be positive")
        self._limit = max_norm if self._limit is None else min(self._limit, max_norm)
        return self.norm()

    def norm(self) -> float:
        """The global norm of the gradients so far, unscaled. Blocks."""
        return float(np.sqrt(self.square_sum(self.gather()))) * self.unscale

    @contextmanager
    def loaded(self, packed: PackedGroup, gradients: Gradients) -> Iterator[None]:
        """Have the gradients of a sub-group in RAM while it is stepped."""
        stream = self.stream
        if stream is not None and stream.fragments is not None:
            with stream.fragments.loaded(packed, gradients):
                yield
        elif stream is not None and stream.kept is not None and packed.bucket.device != "cpu":
            with stream.kept.loaded(packed, gradients):
                yield
        else:
            yield

    def gradient(self, info: ParameterInfo) -> torch.Tensor:
        """A parameter's gradient, where it is; for parameters on a device."""
        if self.stream is None:
            raise ConfigError(f"the gradient of {info.name} is not on its way from a device")
        return self.stream.gradient(info)

    def prefetch(self, packed: PackedGroup) -> None:
        """Start to bring a sub-group's gradients to RAM; does not block."""
        if self.stream is not None and self.stream.kept is not None:
            self.stream.kept.prefetch(packed)

    def release(self) -> None:
        """Forget streamed gradients, limit and loss scale: the step is over."""
        self._limit = None
        self._loss_scale = None
        if self.stream is not None:
            self.stream.release()

    def close(self) -> None:
        """Remove hooks and memory."""
        if self.stream is not None:
            self.stream.close()

    def _culprit(self, gradients: Gradients) -> str:
        if self.stream is None:
            return first_nonfinite(self._table.infos)
        bad = np.flatnonzero(~np.isfinite(self.stream.square_sums(gradients.present)))
        return self._table.infos[bad[0]].name if len(bad) else OVERFLOWED
