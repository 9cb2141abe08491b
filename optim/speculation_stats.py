# SPDX-License-Identifier: Apache-2.0
"""Counters of early steps.

Invariant: num_kept + num_redone + num_undone is num_early once step() has returned.
"""

from __future__ import annotations


class SpeculationStats:
    """Numbers since construction.

    Attributes:
        num_early: Early steps of sub-groups.
        num_kept: Of those, how many counted.
        num_rescaled: Of the kept ones, those that were turned into steps with another factor.
        num_far_rescaled: Of those, how many by less than 1/32, where the second moment loses bits.
        num_redone: Done again, with another factor or hyperparameter.
        num_undone: Dropped: a skipped step, a gradient that came afterwards, a look at the state.
        num_late: Sub-groups that were stepped within step().
        num_without_memory: Early steps that were left out for want of memory.
        num_steps_on: Steps that speculated.
        exposed_seconds: Time in step(), which backward does not hide.
    """

    def __init__(self) -> None:
        self.num_early = 0
        self.num_kept = 0
        self.num_rescaled = 0
        self.num_far_rescaled = 0
        self.num_redone = 0
        self.num_undone = 0
        self.num_late = 0
        self.num_without_memory = 0
        self.num_steps_on = 0
        self.exposed_seconds = 0.0

    def as_dict(self) -> dict[str, float]:
        """All of them, by name with the prefix `speculation_`."""
        return {f"speculation_{name}": value for name, value in vars(self).items()}
