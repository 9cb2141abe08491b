# SPDX-License-Identifier: Apache-2.0
"""Importing swapio is quick, starts no thread and opens no file or ring."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys, time
import torch

def look():
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    files = sorted(os.readlink(link) for link in links if os.path.lexists(link))
    return len(os.listdir("/proc/self/task")), files

before = look()
start = time.process_time()  # a busy machine would stretch the time on the wall
__import__(sys.argv[1])
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "before": before, "after": look()}))
"""


def look_at_import(module: str) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    result: dict[str, object] = json.loads(done.stdout)
    return result


MODULES = (
    "swapio",
    "swapio.optim",
    "swapio.cli",
    "swapio.integrations.accelerate",
    "swapio.integrations.deepspeed",
)


@pytest.mark.parametrize("module", MODULES)
def test_import_starts_nothing(module: str) -> None:
    result = look_at_import(module)
    assert result["before"] == result["after"]


def test_import_of_the_package_alone_does_not_load_torch() -> None:
    script = "import sys, swapio; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=100, check=False).returncode == 0


def test_import_takes_less_than_a_fifth_of_a_second() -> None:
    # The first try warms the page cache; a machine whose caches others share gets two more.
    seconds = [look_at_import("swapio")["seconds"] for _ in range(2)]
    while min(map(float, map(str, seconds))) >= 0.2 and len(seconds) < 4:
        seconds.append(look_at_import("swapio")["seconds"])
    assert min(map(float, map(str, seconds))) < 0.2
