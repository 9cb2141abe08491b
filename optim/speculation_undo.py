# SPDX-License-Identifier: Apache-2.0
"""Early steps that write to the state in place, and are taken back by arithmetic.

    undo="exact"       the state is left as it is, the new one is an image: dropping it is exact
    undo="algebraic"   moments (and separate masters) are stepped in place; the kernels' rollback
                       takes that back, close to what was there, and their rescale turns the step
                       into one with another factor

What an undone step leaves is within the bound of `kernels.adam_rollback`, not bit for bit what was
there: that is the price of having no image.

Invariants:
- parameters are never stepped in place, nor is a master that is made of its parameter: the halves
  of a split one must fit each other, so its lower half waits beside the new upper half;
- a call of the step kernel either wrote nothing or is on the list of what must be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.layout import Bucket, MasterForm
from swapio.optim.unit_cut import UnitCut

# A rescale by less forgets too much of the second moment; see kernels.adam_rescale.
FAR_RATIO = 1 / 32


@dataclass
class EarlyCall:
    """A call of the step kernel that wrote to the state in place.

    Attributes:
        form: Of the call.
        plain_form: The same without new weights beside an fp32 master.
        spans: Where its results lie.
        hypers: The hyperparameters that the spans name.
        ties: Of a split master, as the call left them.
        cut: The units that were stepped.
        bounds: First element of their chunk, and the one after its last.
        is_copied: New weights are a copy of an fp32 master, made after the call.
    """

    form: int
    plain_form: int
    spans: npt.NDArray[np.void]
    hypers: npt.NDArray[np.void]
    ties: npt.NDArray[np.uint32] | None
    cut: UnitCut
    bounds: tuple[int, int]
    is_copied: bool

    def rescale(self, old_scale: float, new_scale: float, weights: npt.NDArray[np.uint64]) -> None:
        """Make it a step with another factor.

        Args:
            old_scale: The factor that it was taken with.
            new_scale: The factor.
            weights: Address that element 0 of each parameter would have where new weights go.
        """
        to = weights[self.cut.param] + self.cut.model_offset
        if self.form != self.plain_form:
            self.spans["out"] = to
        self.ties = kernels.adam_rescale_spans(
            self.form,
            self.spans,
            self.hypers,
            old_scale=old_scale,
            new_scale=new_scale,
            ties=self.ties,
        )
        if self.is_copied:
            kernels.copy_spans(self.spans["param"], to, self.cut.numel * 4)

    def roll_back(self, scale: float) -> None:
        """Take it back. What was made of the parameter or of its half becomes undefined."""
        kernels.adam_rollback_spans(
            self.plain_form, self.spans, self.hypers, grad_scale=scale, ties=self.ties
        )


def results_of(spans: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Spans that find the results of a call where it wrote them."""
    found = spans.copy()
    for name in ("param", "exp_avg", "exp_avg_sq", "low"):
        to = found[f"{name}_to"]
        found[name] = np.where(to != 0, to, found[name])
        found[f"{name}_to"] = 0
    return found


def has_rollback(bucket: Bucket, state: torch.dtype) -> bool:
    """Whether sub-groups of a bucket can be stepped in place and rolled back."""
    if state is not torch.float32 or bucket.form is MasterForm.NONE:
        return False
    # The upper halves of a split master on a device are in RAM during an update only.
    return bucket.form is not MasterForm.SPLIT or bucket.device == "cpu"


def is_undoable(hypers: npt.NDArray[np.void]) -> bool:
    """Whether steps with these hyperparameters can be rolled back and rescaled."""
    is_decoupled = (hypers["flags"] & kernels.DECOUPLED) != 0
    decay = hypers["weight_decay"]
    remembers = (hypers["beta1"] > 0) & (hypers["beta2"] > 0) & (hypers["lr"] * decay != 1)
    return bool((remembers & (is_decoupled | (decay == 0))).all())
