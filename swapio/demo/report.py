# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: what differs (nothing), what each run cost, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swapio.demo.observe import Device, Run, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def differences(first: Run, second: Run) -> list[str]:
    """Say what differs between two runs, bit by bit; an empty list means nothing."""
    found = []
    pairs = zip(first.losses, second.losses, strict=True)
    unequal = [index for index, (a, b) in enumerate(pairs) if a != b]
    if unequal:
        found.append(f"{len(unequal)} losses differ, the first at step {unequal[0] + 1}")
    pairs_of_tensors = zip(first.parameters, second.parameters, strict=True)
    changed = sum(not torch.equal(a, b) for a, b in pairs_of_tensors)
    if changed:
        found.append(f"{changed} of {len(first.parameters)} parameters differ")
    return found


def summary(run: Run, device: Device) -> dict[str, Any]:
    """Return a run's figures by name, medians of the settled steps, in SI units."""

    def median(value: Callable[[Step], float]) -> float:
        return statistics.median(map(value, run.settled))

    read, written = median(lambda step: step.read_bytes), median(lambda step: step.write_bytes)
    update = median(lambda step: step.update_seconds)
    inside = median(lambda step: step.update_read_bytes + step.update_write_bytes)
    return {
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "state_bytes_in_ram": run.state_bytes,
        "process_bytes": run.process_bytes,
        "read_bytes_per_parameter": read / run.num_parameters,
        "written_bytes_per_parameter": written / run.num_parameters,
        "step_seconds": median(lambda step: step.end - step.start),
        "update_seconds": update,
        "stall_seconds": median(lambda step: step.stall_seconds),
        "gb_per_second": inside / update / 1e9,
        "share_of_device": median(
            lambda s: device.share(s.update_read_bytes, s.update_write_bytes, s.update_seconds)
        ),
    }


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f} MB"


ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss of the first step", "first_loss", repr),
    ("loss of the last step", "last_loss", repr),
    ("RAM held for optimizer state", "state_bytes_in_ram", _megabytes),
    ("RAM of the process, all included", "process_bytes", _megabytes),
    ("read per parameter and step", "read_bytes_per_parameter", lambda v: f"{v:.2f} bytes"),
    ("written per parameter and step", "written_bytes_per_parameter", lambda v: f"{v:.2f} bytes"),
    ("whole step", "step_seconds", lambda v: f"{v * 1e3:.1f} ms"),
    ("  of it in optimizer.step()", "update_seconds", lambda v: f"{v * 1e3:.1f} ms"),
    ("  of it waiting for I/O", "stall_seconds", lambda v: f"{v * 1e3:.1f} ms"),
    ("moved during optimizer.step()", "gb_per_second", lambda v: f"{v:.2f} GB/s"),
    ("  share of the device", "share_of_device", lambda v: f"{v:.0%}" if v else "-"),
)


def table(runs: list[Run], device: Device) -> str:
    """Return the final table as text."""
    figures = [summary(run, device) for run in runs]
    cells = [["", *(run.label for run in runs)]]
    cells += [[title, *(form(figure[key]) for figure in figures)] for title, key, form in ROWS]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def draw(runs: list[Run], file: Path) -> bool:
    """Write a PNG with the loss curves and one step's time line.

    Returns:
        Whether matplotlib was there to draw it.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, line) = pyplot.subplots(
        2, 1, figsize=(10, 8), height_ratios=(3, 2), layout="constrained"
    )
    _draw_losses(losses, runs)
    _draw_time_line(line, runs[-1])
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return True


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    # The first curve is wide and pale, so that the second is seen to lie on it.
    for run, width, alpha in zip(runs, (5.0, 1.5), (0.35, 1.0), strict=True):
        steps = range(1, len(run.losses) + 1)
        axes.plot(steps, run.losses, label=run.label, linewidth=width, alpha=alpha)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training, twice")
    axes.grid(alpha=0.3)
    axes.legend()


LANES = ("model", "step()", "update", "wait", "read", "write")


def _draw_time_line(axes: Axes, run: Run) -> None:
    """Draw the last step: what the training thread did, and the optimizer's lanes below."""
    step = run.steps[-1]
    spans: list[tuple[str, float, float, str]] = [
        ("model", step.start, step.forward_end, "tab:blue"),
        ("model", step.forward_end, step.update_start, "tab:purple"),
        ("step()", step.update_start, step.update_end, "tab:green"),
    ]
    colors = {"update": "tab:green", "wait": "tab:gray", "read": "tab:orange", "write": "tab:red"}
    for lane, begin, end in run.events:
        if lane in colors and end > step.start and begin < step.end:
            spans.append((lane, begin, end, colors[lane]))
    for lane, begin, end, color in spans:
        begin, end = max(begin, step.start), min(end, step.end)
        bar = [((begin - step.start) * 1e3, (end - begin) * 1e3)]
        axes.broken_barh(bar, (LANES.index(lane) - 0.4, 0.8), color=color, alpha=0.55, linewidth=0)
    for name, begin, end, _ in (("forward", *spans[0][1:]), ("backward", *spans[1][1:])):
        axes.text(((begin + end) / 2 - step.start) * 1e3, 0, name, ha="center", va="center")
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds since the step began", title=f"The last step, {run.label}")
    axes.set_xlim(0, (step.end - step.start) * 1e3)
