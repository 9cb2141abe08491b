# SPDX-License-Identifier: Apache-2.0
"""Watches a training run from outside: times, bytes and memory, through torch's own hooks.

Invariant: the training loop and the optimizer are the same with and without it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Device:
    """What the device gave in a short measurement, in bytes per second; zeros if not measured."""

    read: float = 0.0
    write: float = 0.0
    mixed: float = 0.0

    def share(self, read_bytes: float, write_bytes: float, seconds: float) -> float:
        """Return the fraction of the device that moving these bytes in `seconds` is.

        1.0 means that nothing could have been faster: the bytes of both directions at the rate
        measured for both at once, and what one direction has more at its own rate.
        """
        if not (self.mixed and seconds > 0):
            return 0.0
        both = 2 * min(read_bytes, write_bytes)
        rest = (read_bytes - both / 2) / self.read + (write_bytes - both / 2) / self.write
        return (both / self.mixed + rest) / seconds


@dataclass
class Step:
    """One training step: moments in seconds on `perf_counter`, bytes, and the loss.

    `update_*_bytes` were moved inside optimizer.step(); the rest of a step's bytes moves while the
    model computes.
    """

    loss: float = 0.0
    start: float = 0.0
    forward_end: float = 0.0
    update_start: float = 0.0
    update_end: float = 0.0
    end: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    stall_seconds: float = 0.0
    update_read_bytes: float = 0.0
    update_write_bytes: float = 0.0

    @property
    def update_seconds(self) -> float:
        """Time inside optimizer.step()."""
        return self.update_end - self.update_start


class Event(NamedTuple):
    """What a lane ("update", "read", "write", "wait", ...) did, in seconds on `perf_counter`."""

    lane: str
    begin: float
    end: float


@dataclass
class Run:
    """What one training run left behind."""

    label: str
    num_parameters: int
    tokens_per_step: int
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    state_bytes: float = 0.0
    process_bytes: int = 0

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def settled(self) -> list[Step]:
        """The steps without the first two, which also pay for first uses of memory and files."""
        return self.steps[2:] or self.steps


def process_bytes() -> int:
    """Return the memory of this process that no file backs (RssAnon + RssShmem)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return sum(1024 * int(kib) for kib in re.findall(r"Rss(?:Anon|Shmem):\s*(\d+) kB", status))


def counters_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's counters; a torch optimizer has none."""
    stats = getattr(optimizer, "stats", None)
    return dict(stats()) if callable(stats) else {}


class Observer:
    """Records a run's steps and shows a progress bar; call it with each step's loss.

    Args:
        run: Filled while training.
        model: Its forward pass is timed.
        optimizer: Its `step` is timed and its counters are read.
        device: For the share of the device; zeros leave it out.
        num_steps: Length of the bar.
        quiet: No bar.
    """

    def __init__(
        self,
        run: Run,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: Device,
        num_steps: int,
        quiet: bool = False,
    ) -> None:
        self._run, self._optimizer, self._device = run, optimizer, device
        self._bar = tqdm(total=num_steps, desc=run.label, unit="step", disable=quiet)
        self._hooks = [
            model.register_forward_hook(self._on_forward_end),
            optimizer.register_step_pre_hook(self._on_update_start),
            optimizer.register_step_post_hook(self._on_update_end),
        ]
        self._counters = self._before_update = counters_of(optimizer)
        self._step = Step(start=time.perf_counter())

    def __call__(self, loss: float) -> None:
        """End the current step."""
        step = self._step
        step.end, step.loss = time.perf_counter(), loss
        counters = counters_of(self._optimizer)
        begin, self._counters = self._counters, counters
        step.read_bytes = _growth("read_bytes", begin, counters)
        step.write_bytes = _growth("write_bytes", begin, counters)
        step.stall_seconds = _growth("stall_seconds", begin, counters)
        self._run.steps.append(step)
        self._run.process_bytes = max(self._run.process_bytes, process_bytes())
        self._show(step)
        self._step = Step(start=time.perf_counter())

    def close(self) -> None:
        """Take the hooks away and end the bar."""
        for hook in self._hooks:
            hook.remove()
        self._bar.close()

    def _on_forward_end(self, *_: object) -> None:
        self._step.forward_end = time.perf_counter()

    def _on_update_start(self, *_: object) -> None:
        self._before_update = counters_of(self._optimizer)
        self._step.update_start = time.perf_counter()

    def _on_update_end(self, *_: object) -> None:
        step, before = self._step, self._before_update
        step.update_end = time.perf_counter()
        after = counters_of(self._optimizer)
        step.update_read_bytes = _growth("read_bytes", before, after)
        step.update_write_bytes = _growth("write_bytes", before, after)

    def _show(self, step: Step) -> None:
        seconds = step.end - step.start
        text = f"loss {step.loss:.4f}, {self._run.tokens_per_step / seconds:,.0f} tokens/s"
        if step.read_bytes or step.write_bytes:
            read, written, seconds = (
                step.update_read_bytes, step.update_write_bytes, step.update_seconds
            )  # fmt: skip
            text += f", read {read / seconds / 1e9:.2f}, written {written / seconds / 1e9:.2f} GB/s"
            share = self._device.share(read, written, seconds)
            text += f", {share:.0%} of the device" if share else ""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()


def _growth(name: str, before: dict[str, Any], after: dict[str, Any]) -> float:
    return float(after.get(name, 0)) - float(before.get(name, 0))


def read_trace(file: Path) -> list[Event]:
    """Read the time line that an optimizer wrote under `trace`."""
    document = json.loads(file.read_text(encoding="utf-8"))
    began = document["otherData"]["began"] - time.time() + time.perf_counter()
    return [
        Event(event["cat"], began + event["ts"] / 1e6, began + (event["ts"] + event["dur"]) / 1e6)
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]
