# SPDX-License-Identifier: Apache-2.0
"""Draw docs/timeline.svg: one optimizer step of a real run, from the trace that it wrote.

    python docs/make_timeline.py --path DIR       # a folder on the drive to use; a few seconds

The picture is committed; figures differ from machine to machine, what happens when does not.
"""

from __future__ import annotations

import argparse
import html
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from swapio.optim import AdamW

PAGE = Path(__file__).with_name("timeline.svg")
LANES = (
    ("phase", "training loop", "#8a94a6"),
    ("read", "reads", "#4477aa"),
    ("update", "kernel", "#228833"),
    ("wait", "waits", "#ccbb44"),
    ("write", "writes", "#ee6677"),
)
LEFT, RIGHT, TOP, ROW = 110.0, 985.0, 34.0, 44.0


class Bar(NamedTuple):
    """Something that took from `begin` to `end`, in seconds."""

    lane: str
    name: str
    begin: float
    end: float


def trace_run(folder: Path, trace: Path) -> list[Bar]:
    """Train a few steps of a model whose state does not fit, and return what happened when."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(1536, 1536) for _ in range(12)])
    swap = {
        "path": str(folder),
        "host_memory": "80MiB",
        "sub_group_numel": "4Mi",
        "durability": "step",
        "trace": str(trace),
    }
    phases: list[Bar] = []
    optimizer = AdamW(model.parameters(), swap=swap)
    for _ in range(4):
        begin = time.perf_counter()
        loss = model(torch.randn(16, 1536)).square().mean()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(Bar("phase", "forward", begin, middle))
        phases.append(Bar("phase", "backward", middle, end))
        phases.append(Bar("phase", "step", end, time.perf_counter()))
    optimizer.close()
    document = json.loads(trace.read_text(encoding="utf-8"))
    # The trace counts from its beginning on the wall clock.
    began = document["otherData"]["began"] - time.time() + time.perf_counter()
    bars = [Bar(b.lane, b.name, b.begin - began, b.end - began) for b in phases]
    for event in document["traceEvents"]:
        if event.get("ph") == "X":
            start = event["ts"] / 1e6
            bars.append(Bar(event["cat"], event["name"], start, start + event["dur"] / 1e6))
    return bars


def window_of(bars: list[Bar]) -> tuple[float, float]:
    """Return the third iteration and half of the forward pass after it."""
    phases = [bar for bar in bars if bar.lane == "phase"]
    third, following = phases[6:9], phases[9]
    return third[0].begin, following.end


def picture(bars: list[Bar]) -> str:
    """Return the lanes between the ends of `window_of`, as SVG text."""
    begin, end = window_of(bars)
    scale = (RIGHT - LEFT) / (end - begin)
    height = TOP + ROW * len(LANES) + 46

    def at(seconds: float) -> float:
        return LEFT + (min(max(seconds, begin), end) - begin) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height:g}" role="img" '
        'aria-label="time line of an optimizer step" font-family="sans-serif" font-size="13">',
        f'<rect width="1000" height="{height:g}" fill="#ffffff"/>',
    ]
    for row, (lane, label, color) in enumerate(LANES):
        y = TOP + row * ROW
        parts.append(f'<text x="{LEFT - 12}" y="{y + 20:g}" text-anchor="end">{label}</text>')
        parts.append(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y + 34:g}" y2="{y + 34:g}" stroke="#d8dde6"/>'
        )
        for bar in bars:
            if bar.lane != lane or bar.end <= begin or bar.begin >= end:
                continue
            parts += _bar(bar, at(bar.begin), at(bar.end), y, color)
    parts += _axis(begin, end, scale, TOP + ROW * len(LANES))
    return "\n".join([*parts, "</svg>", ""])


def _bar(bar: Bar, left: float, right: float, y: float, color: str) -> list[str]:
    width = max(1.0, right - left - 0.6)
    tip = f"{bar.name}: {(bar.end - bar.begin) * 1e3:.1f} ms"
    shade = {"forward": "#b8c0cf", "backward": "#98a2b5", "step": "#5f6b80"}.get(bar.name, color)
    shown = [
        f'<rect x="{left:.1f}" y="{y + 4:g}" width="{width:.1f}" height="26" rx="2" '
        f'fill="{shade}"><title>{html.escape(tip)}</title></rect>'
    ]
    if bar.lane == "phase" and width > 40:
        shown.append(
            f'<text x="{left + width / 2:.1f}" y="{y + 22:g}" text-anchor="middle" '
            f'fill="#ffffff">{bar.name}</text>'
        )
    return shown


def _axis(begin: float, end: float, scale: float, y: float) -> list[str]:
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (end - begin) / s <= 12)
    ticks = []
    number = 0
    while number * step <= end - begin:
        x = LEFT + number * step * scale
        label = f"{number * step * 1e3:.0f}" + (" ms" if number == 0 else "")
        ticks.append(f'<text x="{x:.1f}" y="{y + 18:g}" text-anchor="middle">{label}</text>')
        number += 1
    return ticks


def main() -> None:
    """Run, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--path", default=".", help="folder on the drive to use")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        bars = trace_run(Path(folder) / "state", Path(folder) / "trace.json")
    args.output.write_text(picture(bars), encoding="utf-8")


if __name__ == "__main__":
    main()
