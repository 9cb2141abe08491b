# SPDX-License-Identifier: Apache-2.0
"""The pictures of the report: SVG as text, in a coordinate system of 1000 units across."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from swapio.cli.report_run import Span, TracedRun
from swapio.config_values import format_size

# Told apart also by those who do not see all colours (Tol's bright scheme).
COLORS = {
    "step": "#8a94a6",
    "update": "#228833",
    "wait": "#ccbb44",
    "checksum": "#66ccee",
    "read": "#4477aa",
    "write": "#ee6677",
    "seal": "#aa3377",
    "commit": "#dd7711",
}
_LEFT, _RIGHT = 70, 990
_BINS = 230
_ROW = 14


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    inner = "".join(parts)
    return (
        f'<svg viewBox="0 0 1000 {height:g}" role="img" aria-label="{html.escape(label)}">'
        f"{inner}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", dim: bool = False) -> str:
    style = ' class="dim"' if dim else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    tip = f"<title>{html.escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{max(0.4, width):.2f}" height="{height:g}" '
        f'fill="{fill}">{tip}</rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, more: str = 'class="axis"') -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" {more}/>'


def _legend(y: float, names: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = float(_LEFT)
    for color, name in names:
        yield _rect(x, y - 10, 12, 12, color)
        yield _text(x + 17, y, name)
        x += 40 + 7 * len(name)


def bandwidth_chart(run: TracedRun) -> str:
    """Return GB/s read and written over the run, with the device's as dashed lines."""
    moved = [span for span in run.spans if span.lane in ("read", "write")]
    if not moved:
        return ""
    begin, end = moved[0].begin, max(span.end for span in moved)
    rates = run.rates(begin, end, _BINS)
    limits = run.plan.get("time", {}).get("rates", {})
    lines = {name: (limits.get(name) or 0) / 1e9 for name in ("read", "write")}
    top = max(max(values) / 1e9 for values in rates.values())
    top = max(top, *lines.values(), 1e-3) * 1.08
    height, base = 230, 190

    def at(value: float) -> float:
        return base - value / top * (base - 15)

    parts = [_line(_LEFT, base, _RIGHT, base)]
    for tick in range(5):
        value = top * tick / 4
        label = f"{value:.2f}" + (" GB/s" if tick == 4 else "")
        parts.append(_text(_LEFT - 8, at(value) + 4, label, anchor="end", dim=True))
        parts.append(_line(_LEFT, at(value), _RIGHT, at(value)))
    width = (_RIGHT - _LEFT) / _BINS
    for lane in ("read", "write"):
        color = COLORS[lane]
        points = " ".join(
            f"{_LEFT + (i + 0.5) * width:.1f},{at(value / 1e9):.1f}"
            for i, value in enumerate(rates[lane])
        )
        area = f"{_LEFT},{base} {points} {_RIGHT},{base}"
        parts.append(f'<polygon points="{area}" fill="{color}" fill-opacity=".18"/>')
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        )
        if lines[lane]:
            dashed = f'stroke="{color}" stroke-dasharray="6 4"'
            parts.append(_line(_LEFT, at(lines[lane]), _RIGHT, at(lines[lane]), dashed))
    parts += _time_axis(begin, end, base)
    parts += _legend(height - 4, [(COLORS["read"], "read"), (COLORS["write"], "written")])
    return _svg(height, parts, "bandwidth over time")


def _time_axis(begin: float, end: float, y: float) -> Iterator[str]:
    scale, unit = (1e3, "ms") if end - begin < 2 else (1.0, "s")
    for tick in range(6):
        x = _LEFT + (_RIGHT - _LEFT) * tick / 5
        anchor = "end" if tick == 5 else "middle"
        value = (end - begin) * tick / 5 * scale
        yield _text(x, y + 16, f"{value:,.1f} {unit}", anchor=anchor, dim=True)


def step_bars(run: TracedRun) -> str:
    """Return a bar for each step (at most the last 200): waiting, and the rest."""
    steps = run.steps[-200:]
    if not steps:
        return ""
    top = max(step.end - step.begin for step in steps)
    base, height = 130, 165
    width = (_RIGHT - _LEFT) / len(steps)
    parts = [_line(_LEFT, base, _RIGHT, base)]
    for tick in (0.0, 0.5, 1.0):
        y = base - tick * 115
        parts.append(_text(_LEFT - 8, y + 4, f"{top * tick * 1e3:,.0f} ms", anchor="end", dim=True))
        parts.append(_line(_LEFT, y, _RIGHT, y))
    for index, step in enumerate(steps):
        seconds = step.end - step.begin
        waited = min(seconds, run.inside("wait", step))
        x, bar = _LEFT + index * width + width * 0.1, width * 0.8
        tall, idle = seconds / top * 115, waited / top * 115
        title = f"{step.name}: {seconds * 1e3:.1f} ms, {waited * 1e3:.1f} ms waiting"
        parts.append(_rect(x, base - tall, bar, tall - idle, COLORS["update"], title))
        parts.append(_rect(x, base - idle, bar, idle, COLORS["wait"], title))
    names = [(COLORS["update"], "update and the rest"), (COLORS["wait"], "waiting for storage")]
    parts += _legend(height - 4, names)
    return _svg(height, parts, "steps")


def time_line(run: TracedRun) -> str:
    """Return the lanes of the last step, and of what was in flight around it."""
    if run.steps:
        step = run.steps[-1]
        margin = 0.06 * (step.end - step.begin)
        begin, end = step.begin - margin, step.end + 4 * margin
    elif run.spans:
        begin, end = run.spans[0].begin, run.spans[-1].end
    else:
        return ""
    shown = [span for span in run.spans if span.end > begin and span.begin < end]
    lanes = [lane for lane in COLORS if any(span.lane == lane for span in shown)]
    parts: list[str] = []
    y = 4.0
    for lane in lanes:
        rows = 1 + max(span.row for span in shown if span.lane == lane)
        parts.append(_text(_LEFT - 8, y + 11, lane, anchor="end"))
        bed = f'<rect class="bed" x="{_LEFT}" y="{y:g}" width="{_RIGHT - _LEFT}" '
        parts.append(bed + f'height="{rows * _ROW - 1}"/>')
        parts += (_span(span, begin, end, y) for span in shown if span.lane == lane)
        y += rows * _ROW + 6
    parts += _time_axis(begin, end, y)
    return _svg(y + 22, parts, "time line of the last step")


def _span(span: Span, begin: float, end: float, y: float) -> str:
    scale = (_RIGHT - _LEFT) / (end - begin)
    x = _LEFT + (max(begin, span.begin) - begin) * scale
    width = (min(end, span.end) - max(begin, span.begin)) * scale
    title = f"{span.name}: {(span.end - span.begin) * 1e3:.2f} ms"
    if span.nbytes:
        rate = span.nbytes / max(1e-9, span.end - span.begin) / 1e9
        title += f", {span.nbytes / 1e6:.2f} MB, {rate:.2f} GB/s"
    return _rect(x, y + span.row * _ROW, width - 0.3, _ROW - 3, COLORS[span.lane], title)


def division_bar(plan: dict[str, Any]) -> str:
    """Return one bar: how host_memory is divided."""
    if not plan or not plan["host_memory"]:
        return ""
    parts_of = [
        ("#228833", "resident state", plan["resident_bytes"]),
        ("#66ccee", "buffers that keep state", plan["kept_bytes"]),
        ("#4477aa", "other buffers", max(0, plan["staging_bytes"] - plan["kept_bytes"])),
        ("#aa3377", "tables", plan["small_bytes"]),
        ("#ccbb44", "workspace", plan["workspace_bytes"] + plan["gradient_bytes"]),
        ("#c3c9d4", "spare", plan["spare_bytes"]),
    ]
    parts: list[str] = []
    x = float(_LEFT)
    names = []
    for color, name, nbytes in parts_of:
        if not nbytes:
            continue
        width = (_RIGHT - _LEFT) * nbytes / plan["host_memory"]
        parts.append(_rect(x, 4, width, 30, color, f"{name}: {format_size(nbytes)}"))
        x += width
        names.append((color, f"{name} {format_size(nbytes)}"))
    parts.append(_text(_LEFT - 8, 24, format_size(plan["host_memory"]), anchor="end"))
    parts += _legend(54, names[:3])
    parts += _legend(74, names[3:])
    return _svg(80, parts, "division of host_memory")
