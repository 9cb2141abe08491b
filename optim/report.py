# SPDX-License-Identifier: Apache-2.0
"""What an optimizer says about itself: numbers of the run, and a table of what lives where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapio.optim.stepstats import StepStats
from swapio.runstats import share_of_device

if TYPE_CHECKING:
    from swapio.optim.layout import Layout
    from swapio.runtime import SwapRuntime


def step_stats(runtime: SwapRuntime, steps: StepStats) -> dict[str, float]:
    """Return the numbers of the steps, and how they compare with device and prediction."""
    numbers = steps.as_dict()
    plan = runtime.plan
    numbers["device_share"] = share_of_device(
        plan.time.rates, steps.step_read_bytes, steps.step_write_bytes, steps.step_seconds
    )
    # The first step reads what later ones find in the buffers.
    settled = steps.num_calls - 1
    mean = (steps.step_seconds - steps.first_step_seconds) / settled if settled > 0 else 0.0
    numbers["mean_step_seconds"] = mean or steps.first_step_seconds
    predicted = plan.time.step or 0.0
    numbers["prediction_ratio"] = numbers["mean_step_seconds"] / predicted if predicted else 0.0
    return numbers


def about_run(name: str, layout: Layout, counts: dict[str, Any]) -> dict[str, Any]:
    """Return what `swapio report` shows of an optimizer."""
    return {
        "optimizer": name,
        "num_parameters": sum(packed.numel for packed in layout.groups.values()),
        "step_stats": counts,
    }


def describe(runtime: SwapRuntime, layout: Layout) -> str:
    """Return the table of `opt.describe()`."""
    rows = [["rule", "parameters", "dtype", "master", "elements", "sub-groups", "state lives",
             "B/param read", "B/param written"]]  # fmt: skip
    rows += _bucket_rows(runtime, layout)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    where = ", ".join(runtime.config.paths) or "RAM (no path was given)"
    return "\n".join([f"state in {where}", "", *lines, "", runtime.plan.table()])


def _bucket_rows(runtime: SwapRuntime, layout: Layout) -> list[list[str]]:
    resident = set(runtime.plan.resident)
    buckets: dict[Any, list[tuple[int, int]]] = {}
    for index, packed in enumerate(layout.groups.values()):
        buckets.setdefault(packed.bucket, []).append((index, packed.numel))
    members: dict[Any, int] = {}
    for info in layout.infos:
        members[info.bucket] = members.get(info.bucket, 0) + 1
    rows = []
    for bucket, groups in buckets.items():
        numel = sum(size for _, size in groups)
        in_ram = sum(index in resident for index, _ in groups)
        read, written = runtime.bytes_per_element([index for index, _ in groups])
        rows.append(
            [
                bucket.rule,
                f"{members.get(bucket, 0):,}",
                str(bucket.dtype).removeprefix("torch."),
                bucket.form.value,
                f"{numel:,}",
                f"{len(groups)}",
                _where(in_ram, len(groups), sorted(bucket.resident)),
                f"{read:.2f}",
                f"{written:.2f}",
            ]
        )
    return rows


def _where(in_ram: int, count: int, tagged: list[str]) -> str:
    if in_ram == count:
        return "RAM"
    text = "storage" if not in_ram else f"RAM {in_ram}, storage {count - in_ram}"
    return text + (f"; RAM: {', '.join(tagged)}" if tagged else "")
