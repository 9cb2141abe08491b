# SPDX-License-Identifier: Apache-2.0
"""Run Python source in a process of its own, possibly under a restriction."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DENY_IO_URING = Path(__file__).resolve().parents[2] / "scripts" / "deny_io_uring.py"


def run_script(
    source: str, *arguments: object, prefix: tuple[str, ...] = (), timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run the source with `arguments` in sys.argv, behind the commands of `prefix`."""
    return subprocess.run(
        (*prefix, sys.executable, "-c", source, *map(str, arguments)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def denied(errno_name: str) -> tuple[str, ...]:
    """Return the prefix that denies io_uring with an errno."""
    return (sys.executable, str(DENY_IO_URING), errno_name)


def memlock(nbytes: int) -> tuple[str, ...]:
    """Return the prefix that limits locked memory, also for root."""
    missing = [tool for tool in ("prlimit", "setpriv") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < nbytes:
        pytest.skip(f"the memory lock limit is {hard} bytes already")
    prefix = ("prlimit", f"--memlock={nbytes}:{nbytes}")
    if os.geteuid() != 0:
        return prefix
    return (*prefix, "setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
