# SPDX-License-Identifier: Apache-2.0
"""Wall-clock counters of an optimizer's steps.

Invariant: `compute_seconds` and the swapper's `stall_seconds` are parts of `step_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepStats:
    """Seconds spent in step() and in its update kernels, and the bytes moved meanwhile."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.first_step_seconds = 0.0
        self.last_step_seconds = 0.0
        self.compute_seconds = 0.0
        self.step_read_bytes = 0
        self.step_write_bytes = 0
        self.num_calls = 0

    def add_step(self, seconds: float, read_bytes: int, write_bytes: int) -> None:
        """Count one step()."""
        if not self.num_calls:
            self.first_step_seconds = seconds
        self.num_calls += 1
        self.step_seconds += seconds
        self.last_step_seconds = seconds
        self.step_read_bytes += read_bytes
        self.step_write_bytes += write_bytes

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Time one update of a chunk."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.compute_seconds += time.perf_counter() - began

    def as_dict(self) -> dict[str, float]:
        """All counters by name."""
        return dict(vars(self))
