# SPDX-License-Identifier: Apache-2.0
"""The trace of a run, and the page that is made of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from swapio.cli import main
from swapio.cli.report_run import TracedRun
from swapio.config import SwapConfig
from swapio.optim import AdamW
from swapio.runtime import GroupRequest, SwapRuntime
from swapio.subgroup import RecordSpec

VOID = {"meta", "line", "rect", "polygon", "polyline"}


class Balance(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):  # noqa: ARG002
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    params = [torch.nn.Parameter(torch.randn(3 << 20).bfloat16())]
    swap = {"path": folder / "state", "host_memory": "24MiB", "sub_group_numel": 1 << 20,
            "durability": "step", "trace": folder / "run.json", "read_bandwidth": "1GB/s",
            "write_bandwidth": "1GB/s"}  # fmt: skip
    with AdamW(params, swap=swap) as opt:
        for _ in range(3):
            params[0].grad = torch.ones_like(params[0])
            opt.step()
        assert not (folder / "run.json").exists()
    return folder / "run.json"


def test_the_trace_is_what_perfetto_reads(trace):
    document = json.loads(trace.read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    lanes = {event["cat"] for event in events}
    assert lanes >= {"step", "update", "read", "write", "seal", "commit", "checksum"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    rows: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        # Complete events of one row must not overlap, or viewers drop them.
        assert event["ts"] >= rows.get(event["tid"], 0.0) - 0.2
        rows[event["tid"]] = event["ts"] + event["dur"]
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert {"step", "read", "write", "wait"} & names


def test_the_bytes_of_the_trace_are_those_of_the_counters(trace):
    run = TracedRun("run", json.loads(trace.read_text()))
    stats = run.stats
    moved = {lane: sum(s.nbytes for s in run.spans if s.lane == lane) for lane in ("read", "write")}
    assert moved["read"] == stats["bytes_read"]
    assert moved["write"] >= stats["write_bytes"] > 0
    assert len(run.steps) == stats["num_calls"] == 3
    whole = run.rates(0.0, run.seconds + 1, 50)
    width = (run.seconds + 1) / 50
    assert sum(whole["read"]) * width == pytest.approx(moved["read"], rel=1e-6)


def test_the_page_needs_nothing_else(trace, capsys):
    assert main(["report", str(trace.parent)]) == 0
    page = trace.with_suffix(".html").read_text()
    assert "1 trace" in capsys.readouterr().out
    assert not re.search(r"https?://|<script|src=|@import", page)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    for word in ("Bandwidth", "Time line", "Wear", "host_memory", "AdamW", "3,145,728 parameters"):
        assert word in page


def test_the_summary_as_json(trace, capsys):
    assert main(["report", str(trace), "--json"]) == 0
    (summary,) = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3
    assert summary["device_share"] > 0
    assert summary["total_written_bytes"] > 0


def test_what_is_no_trace_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    for source in (tmp_path / "other.json", tmp_path, tmp_path / "missing"):
        assert main(["report", str(source)]) == 1
        assert "trace" in capsys.readouterr().err


def test_a_runtime_alone_is_traced(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    config = SwapConfig(path=tmp_path, host_memory="16MiB", trace=str(tmp_path / "t.json"))
    records = {"x": RecordSpec((8 << 20,), torch.float32)}
    with SwapRuntime(config, [GroupRequest("g", records)]) as runtime:
        with runtime.swapper.swap_in("g") as view:
            for chunk in view.chunks():
                chunk["x"].add_(1)
                chunk.mark_dirty()
        runtime.swapper.drain()
    run = TracedRun("t", json.loads((tmp_path / "t.rank1.json").read_text()))
    assert {span.lane for span in run.spans} >= {"update", "read", "write", "seal"}
    assert run.summary()["steps"] == 0
