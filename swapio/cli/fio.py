# SPDX-License-Identifier: Apache-2.0
"""Runs `fio` as the ceiling that the engine is compared with.

The job is what is known to be fastest on NVMe: io_uring with registered buffers and files,
O_DIRECT, and buffers in transparent huge pages, which glibc gives when asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from swapio.errors import SwapioError

FIO_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}


def find_fio() -> str | None:
    """Return the program's path, None when it is not installed."""
    return shutil.which("fio")


def fio_rate(folder: Path, pattern: str, *, nbytes: int, seconds: float) -> float:
    """Return fio's rate for a pattern in bytes per second, both directions together; blocks.

    Args:
        folder: Where its scratch file goes.
        pattern: "read", "write" or "mixed".
        nbytes: Size of the file, which is written before it is measured.
        seconds: How long to measure.

    Raises:
        SwapioError: fio failed; the message carries its own.
    """
    with tempfile.TemporaryDirectory(prefix="swapio-fio-", dir=folder) as scratch:
        file = ["--filename=" + str(Path(scratch) / "a"), f"--size={nbytes}"]
        job = ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--direct=1"]
        job += ["--bs=512k", "--iodepth=32", "--iomem_align=2m", "--thread=1", "--invalidate=0"]
        _run(["--name=layout", "--rw=write", *file, *job])
        timed = ["--time_based=1", f"--runtime={max(1, round(seconds))}"]
        result = _run(["--name=job", f"--rw={FIO_PATTERNS[pattern]}", *file, *job, *timed])
    jobs = result["jobs"]
    return float(sum(job[way]["bw_bytes"] for job in jobs for way in ("read", "write")))


def _run(arguments: list[str]) -> dict[str, list[dict[str, dict[str, float]]]]:
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    command = ["fio", "--output-format=json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SwapioError(f"fio failed ({done.returncode}): {(done.stderr or done.stdout)[-300:]}")
    result: dict[str, list[dict[str, dict[str, float]]]] = json.loads(
        done.stdout[done.stdout.index("{") :]
    )
    return result
