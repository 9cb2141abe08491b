# SPDX-License-Identifier: Apache-2.0
"""The order of writes, syncs, links and renames as the kernel sees it, on which power loss rests.

A process trains with durability "power" and the thread engine, whose transfers are system calls,
and saves once; strace writes down what it does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from support import trainer_child
from support.trainer import ONE_AT_A_TIME

CALLS = "fsync,fdatasync,rename,renameat,renameat2,link,linkat,pwrite64,pwritev,pwritev2,write"
SIZES = [(5,), (300, 1000), (700_001,)]


class Call(NamedTuple):
    """One system call: lines of the trace on which it began and ended, name, and paths."""

    began: int
    ended: int
    name: str
    paths: list[str]


def parse(text):
    calls, open_calls = [], {}
    for number, line in enumerate(text.splitlines()):
        head = re.match(r"(\d+) +(?:<\.\.\. )?(\w+)(?:\(| resumed>)(.*)", line)
        if head is None:
            continue
        pid, name, rest = head.groups()
        paths = re.findall(r"\d+<([^>]+)>", rest) + re.findall(r'"(/[^"]*)"', rest)
        if "resumed>" in line:
            began, first = open_calls.pop(pid)
            calls.append(Call(began, number, name, first + paths))
        elif "<unfinished" in line:
            open_calls[pid] = (number, paths)
        else:
            calls.append(Call(number, number, name, paths))
    return calls


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The calls of a run, and its folder."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("syscalls")
    job = {
        "swap": {
            "path": str(folder / "swap"),
            "durability": "power",
            "engine": "threads",
            **ONE_AT_A_TIME,
        },
        "sizes": SIZES,
        "steps": 3,
        "save_every": 3,
        "save": str(folder / "c"),
    }
    output = folder / "trace"
    done = subprocess.run(
        [
            *("strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-e", f"trace={CALLS}"),
            *("-o", str(output), sys.executable, trainer_child.__file__, json.dumps(job)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(trainer_child.__file__).parent.parent)},
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("this system does not let processes be traced")
    assert done.returncode == 0, done.stderr
    return parse(output.read_text()), folder


WRITES = ("pwrite64", "pwritev", "pwritev2")
SYNCS = ("fsync", "fdatasync")


def test_a_commit_record_is_written_between_two_syncs(trace):
    calls, folder = trace
    slots = str(folder / "swap")
    first = min(c.began for c in calls if c.name in WRITES and "/commit-" in c.paths[0])
    # The manifest says that the slots are made; what was written to make them vouches for nothing.
    renames = [c for c in calls if c.name.startswith("rename") and c.paths[-1].startswith(slots)]
    made = max(call.ended for call in renames if call.ended < first)
    unsynced: set[str] = set()
    records = syncs_of_records = 0
    for call in sorted((c for c in calls if c.began > made), key=lambda call: call.ended):
        path = call.paths[0] if call.paths else ""
        if not path.startswith(slots) or not path.endswith(".bin"):
            continue
        is_record = "/commit-" in path
        if call.name in WRITES and not is_record:
            unsynced.add(path)
        elif call.name in SYNCS and is_record:
            syncs_of_records += 1
        elif call.name in SYNCS:
            unsynced.discard(path)
        elif call.name in WRITES and is_record:
            records += 1
            # A write that was still going on when the record's began would count, too.
            assert not unsynced, f"record {records} vouches for bytes that were not synced"
    assert records == syncs_of_records == 3


def test_a_checkpoint_is_published_when_all_of_it_is_on_storage(trace):
    calls, folder = trace
    root = folder / "c"
    tag = root / "step-3"
    renames = [call for call in calls if call.name.startswith("rename")]
    (publish,) = [call for call in renames if call.paths[-1] == str(tag / "manifest.json")]
    temporary = publish.paths[0]
    assert temporary != publish.paths[-1]
    links = [call for call in calls if call.name.startswith("link") and str(tag) in call.paths[-1]]
    assert links
    assert all(link.ended < publish.began for link in links)

    def synced_before(path, mark):
        """End of the last sync of a path before a line."""
        ends = [
            call.ended
            for call in calls
            if call.name in SYNCS and call.paths == [path] and call.ended < mark
        ]
        return max(ends, default=-1)

    def written_last(path):
        return max(c.ended for c in calls if c.name in (*WRITES, "write") and c.paths[:1] == [path])

    (data,) = tag.glob("data-*")
    # What lived in RAM, and the names of all files.
    assert written_last(str(data / "rank0-data.bin")) < synced_before(
        str(data / "rank0-data.bin"), publish.began
    )
    assert links[-1].ended < synced_before(str(data), publish.began)
    # The slots that were linked, by their own names.
    for link in links:
        slot = link.paths[0]
        assert synced_before(slot, publish.began) > 0, slot
    # The manifest itself, its folder's name before, and its own name after.
    assert written_last(temporary) < synced_before(temporary, publish.began)
    assert synced_before(str(root), publish.began) > 0
    after = [c for c in calls if c.name == "fsync" and c.began > publish.ended]
    assert str(tag) in after[0].paths
