# SPDX-License-Identifier: Apache-2.0
"""A trace as the report needs it: events by lane, figures of the run, rates over time."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple


class Span(NamedTuple):
    """An event: seconds since the run began, and the bytes it moved."""

    lane: str
    row: int
    name: str
    begin: float
    end: float
    nbytes: int


class TracedRun:
    """One trace.

    Attributes:
        name: The file's name.
        about: What the run said of itself: stats, plan, config, ...
        spans: All events, by their beginning.
        steps: The events of whole steps.
    """

    def __init__(self, name: str, document: dict[str, Any]) -> None:
        self.name = name
        self.began = float(document["otherData"].get("began", 0.0))
        self.about: dict[str, Any] = document["otherData"]["swapio"]
        self.spans = sorted(
            (
                Span(
                    str(e["cat"]),
                    int(e["tid"]) % 1000,
                    str(e["name"]),
                    e["ts"] / 1e6,
                    (e["ts"] + e["dur"]) / 1e6,
                    int(e.get("args", {}).get("bytes", 0)),
                )
                for e in document["traceEvents"]
                if e.get("ph") == "X"
            ),
            key=lambda span: span.begin,
        )
        self.steps = [span for span in self.spans if span.lane == "step"]

    @property
    def stats(self) -> dict[str, float]:
        """The counters at the end, the optimizer's included."""
        return {**self.about.get("stats", {}), **self.about.get("step_stats", {})}

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as plain values."""
        return dict(self.about.get("plan", {}))

    @property
    def seconds(self) -> float:
        """How long the run was open."""
        return float(self.about.get("seconds", 0.0)) or max(
            (s.end for s in self.spans), default=0.0
        )

    def rates(self, begin: float, end: float, bins: int) -> dict[str, list[float]]:
        """Return bytes per second read and written in equal bins of a stretch of time."""
        width = max(1e-9, (end - begin) / bins)
        found = {"read": [0.0] * bins, "write": [0.0] * bins}
        for span in self.spans:
            if span.lane not in found or span.end < begin or span.begin > end:
                continue
            length = max(1e-9, span.end - span.begin)
            first = max(0, int((span.begin - begin) / width))
            last = min(bins - 1, int((span.end - begin) / width))
            for index in range(first, last + 1):
                low, high = begin + index * width, begin + (index + 1) * width
                overlap = min(high, span.end) - max(low, span.begin)
                found[span.lane][index] += max(0.0, overlap) / length * span.nbytes / width
        return found

    def inside(self, lane: str, outer: Span) -> float:
        """Return the seconds of a lane's events that lie within another event."""
        return sum(
            max(0.0, min(span.end, outer.end) - max(span.begin, outer.begin))
            for span in self.spans
            if span.lane == lane and span.begin < outer.end and span.end > outer.begin
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures at the top of the page; 0 where something is not known."""
        stats, settled = self.stats, self.steps[1:] or self.steps
        seconds = [span.end - span.begin for span in settled]
        waits = [self.inside("wait", span) for span in settled]
        count = max(1, int(stats.get("num_calls", len(self.steps))))
        total = sum(seconds)
        return {
            "trace": self.name,
            "optimizer": self.about.get("optimizer", ""),
            "parameters": self.about.get("num_parameters", self.plan.get("numel", 0)),
            "steps": int(stats.get("num_calls", len(self.steps))),
            "step_seconds": statistics.median(seconds) if seconds else 0.0,
            "wait_share": min(1.0, sum(waits) / total) if total else 0.0,
            "read_bytes_per_step": stats.get("read_bytes", 0) / count,
            "write_bytes_per_step": stats.get("write_bytes", 0) / count,
            "device_share": stats.get("device_share", 0.0),
            "host_bytes": stats.get("host_bytes", 0),
            "total_written_bytes": stats.get("total_written_bytes", 0),
            "written_bytes_per_day": stats.get("written_bytes_per_day", 0),
            "prediction_ratio": stats.get("prediction_ratio", 0.0),
        }
