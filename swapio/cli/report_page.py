# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: no script, no network, pictures as inline SVG."""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Sequence
from typing import Any

from swapio.cli.report_run import TracedRun
from swapio.cli.report_svg import bandwidth_chart, division_bar, step_bars, time_line
from swapio.config_values import format_size

_STYLE = """
:root{color-scheme:light dark;--fg:#1c2430;--dim:#667085;--bg:#fff;--card:#f4f6f9;--line:#d5dae2}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ef;--dim:#98a2b3;--bg:#12161d;--card:#1c222c;
--line:#3a4352}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:2rem auto;
max-width:1080px;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p,figcaption{color:var(--dim);margin:.3rem 0}figure{margin:0;
overflow-x:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.7rem;
margin:1.2rem 0}
.tile{background:var(--card);border-radius:8px;padding:.7rem .9rem}
.tile b{display:block;font-size:1.35rem}.tile span{color:var(--dim);font-size:.85rem}
svg{width:100%;min-width:40rem;height:auto;display:block}
svg text{fill:var(--fg);font:12px system-ui,sans-serif}
svg text.dim{fill:var(--dim)}svg .axis{stroke:var(--line)}svg .bed{fill:var(--card)}
table{border-collapse:collapse;font-size:.9rem}td{padding:.15rem 1.2rem .15rem 0;
border-bottom:1px solid var(--line)}td:last-child{text-align:right;padding-right:0;
font-variant-numeric:tabular-nums}details{margin-top:.7rem}summary{cursor:pointer}
"""


def page(runs: Sequence[TracedRun]) -> str:
    """Return the page of one or more traces (ranks)."""
    body = "\n".join(part for run in runs for part in _sections(run))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>swapio report: {html.escape(runs[0].name)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def _sections(run: TracedRun) -> Iterable[str]:
    yield _header(run)
    yield _tiles(run.summary())
    yield _figure(
        "Bandwidth over the run",
        bandwidth_chart(run),
        "Bytes of state read from and written to storage. Dashed: what the device was measured to "
        "do, where that is known.",
    )
    yield _figure(
        "Steps",
        step_bars(run),
        "Each bar is one step(): how much of it the caller waited for storage, and the rest. The "
        "first step reads what later ones find in the buffers.",
    )
    yield _figure(
        "Time line of the last step",
        time_line(run),
        "Rows of a lane overlap in time. Open the trace itself in ui.perfetto.dev for all of it.",
    )
    yield _figure("What host_memory holds", division_bar(run.plan), _residency(run.plan))
    yield _wear(run)
    yield _numbers(run)


def _header(run: TracedRun) -> str:
    summary = run.summary()
    began = datetime.datetime.fromtimestamp(run.began, datetime.UTC)
    config = run.about.get("config", {})
    path = config.get("path") or "RAM"
    where = path if isinstance(path, str) else ", ".join(path)
    facts = [
        f"{summary['optimizer'] or 'swapper'} on {summary['parameters']:,} parameters",
        f"state in {where}",
        f"engine {run.about.get('engine') or 'none'}",
        f'durability "{config.get("durability", "?")}"',
        f"{summary['steps']} steps in {run.seconds:.1f} s",
        f"began {began:%Y-%m-%d %H:%M:%S} UTC",
    ]
    lost = run.about.get("events_lost", 0)
    if lost:
        facts.append(f"the oldest {lost:,} events are not in the trace")
    return f"<h1>{html.escape(run.name)}</h1><p>{html.escape(' · '.join(facts))}</p>"


def _tiles(summary: dict[str, Any]) -> str:
    share, ratio = summary["device_share"], summary["prediction_ratio"]
    tiles = [
        (f"{summary['step_seconds'] * 1e3:,.1f} ms", "median step()"),
        (f"{summary['wait_share']:.0%}", "of it waiting for storage"),
        (f"{share:.0%}" if share else "not known", "of the device's speed, in step()"),
        (f"{ratio:.2f} x" if ratio else "not known", "mean step() / prediction"),
        (f"{summary['read_bytes_per_step'] / 1e9:.3f} GB", "read per step"),
        (f"{summary['write_bytes_per_step'] / 1e9:.3f} GB", "written per step"),
        (format_size(int(summary["host_bytes"])), "RAM held by swapio"),
        (f"{summary['written_bytes_per_day'] / 1e12:.2f} TB", "written per day at this pace"),
    ]
    cells = (f'<div class="tile"><b>{html.escape(v)}</b><span>{k}</span></div>' for v, k in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _figure(title: str, svg: str, caption: str) -> str:
    picture = svg or "<p>nothing was traced</p>"
    caption = html.escape(caption)
    return f"<h2>{title}</h2><figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _residency(plan: dict[str, Any]) -> str:
    if not plan:
        return ""
    resident, count = len(plan["resident"]), plan["num_sub_groups"]
    return (
        f"{resident} of {count} sub-groups stay in RAM; {format_size(plan['kept_bytes'])} of the "
        f"buffers keep the end of a step for the next. The slots on storage take "
        f"{format_size(plan['disk_bytes'])} ({plan['num_slots']} for each sub-group)."
    )


def _wear(run: TracedRun) -> str:
    stats = run.stats
    day = stats.get("written_bytes_per_day", 0.0)
    rows = [
        ("written in total", f"{stats.get('total_written_bytes', 0) / 1e9:,.2f} GB"),
        ("  of it once, to make the slots", f"{stats.get('bytes_allocated', 0) / 1e9:,.2f} GB"),
        ("a day at this pace", f"{day / 1e12:,.3f} TB"),
        ("a year at this pace", f"{day * 365 / 1e15:,.3f} PB"),
    ]
    return f"<h2>Wear of the drive</h2>{_table(rows)}"


def _numbers(run: TracedRun) -> str:
    rows = [(name, f"{value:,.6g}") for name, value in sorted(run.stats.items())]
    return f"<details><summary>All numbers of stats()</summary>{_table(rows)}</details>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"
