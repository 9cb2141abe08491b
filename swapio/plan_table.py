# SPDX-License-Identifier: Apache-2.0
"""A Plan as text for people. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swapio.config_values import format_size

if TYPE_CHECKING:
    from swapio.plan import Plan


def render(plan: Plan, steps_per_day: float | None = None) -> str:
    """Return the plan as a table, one line a fact, notes below.

    Args:
        plan: What to show.
        steps_per_day: Also shows bytes written in a day.
    """
    rows = [*_memory(plan), *_storage(plan, steps_per_day), *_time(plan)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows]
    return "\n".join(lines + [f"note: {note}" for note in plan.notes])


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{plan.numel:,} in {plan.num_sub_groups} sub-groups"
    minimum = format_size(plan.minimum_host_memory)
    yield "host memory", f"{format_size(plan.host_memory)} (at least {minimum})"
    resident = f"{len(plan.resident)} of {plan.num_sub_groups} sub-groups stay in RAM"
    yield "  resident state", f"{format_size(plan.resident_bytes)}, {resident}"
    buffers = (
        f"{plan.num_buffers} buffers of {format_size(plan.buffer_bytes)} "
        f"(read-ahead {plan.read_ahead}, update 1, writing {plan.writing})"
    )
    yield (
        "  staging",
        f"{format_size(plan.staging_bytes)}" + (f", {buffers}" if plan.num_buffers else ""),
    )
    if plan.num_buffers:
        yield "  chunk", f"{plan.chunk_numel:,} elements"
    if plan.kept_bytes:
        yield "  kept", f"{format_size(plan.kept_bytes)} of staging, from one step to the next"
    yield "  tables and ties", format_size(plan.small_bytes)
    if plan.workspace_bytes:
        yield "  workspace", format_size(plan.workspace_bytes)
    if plan.gradient_bytes:
        yield "  streamed gradients", format_size(plan.gradient_bytes)
    yield "  spare", format_size(plan.spare_bytes)


def _storage(plan: Plan, steps_per_day: float | None) -> Iterator[tuple[str, str]]:
    free = plan.disk_free_bytes
    space = "" if free is None else f", {format_size(free)} free"
    yield "storage", f"{format_size(plan.disk_bytes)} in {plan.num_slots} slots each{space}"
    yield "  read", _moved(plan.read_bytes, plan.read_bytes_per_param)
    yield "  written", _moved(plan.write_bytes, plan.write_bytes_per_param)
    if steps_per_day is not None:
        day = plan.write_bytes_per_day(steps_per_day)
        yield "  wear", f"{day / 1e12:.3f} TB a day at {steps_per_day:,.0f} steps a day"


def _moved(nbytes: int, per_param: float) -> str:
    return f"{nbytes / 1e9:.3f} GB a step, {per_param:.2f} bytes a parameter"


def _time(plan: Plan) -> Iterator[tuple[str, str]]:
    time = plan.time
    for name, value in (
        ("drive", time.device),
        ("update", time.compute),
        ("products", time.products),
        ("checksums", time.checksum),
    ):
        if name == "products" and value == 0:
            continue  # only Muon has any
        yield f"  {name}", "not known" if value is None else f"{value:.3f} s"
    step = "not known: give the bandwidths" if time.step is None else f"{time.step:.3f} s"
    bound = f", bound by {time.bound}" if time.bound and time.step is not None else ""
    ns = (
        f", {time.step / plan.numel * 1e9:.2f} ns a parameter"
        if time.step is not None and plan.numel
        else ""
    )
    yield "step", step + ns + bound
    exposed = plan.exposed_seconds()
    if exposed is not None:
        yield "  not hidden", f"{exposed:.3f} s at least, behind any forward and backward"
