# SPDX-License-Identifier: Apache-2.0
"""The other end of crash_child.py: many short training processes, killed at chosen points."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import crash_child


class Crashes:
    """A server that forks training processes; a context manager."""

    def __init__(self, folder):
        self._log = Path(folder) / "child.log"
        script = Path(crash_child.__file__)
        self._server = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(script.parent.parent), "OMP_NUM_THREADS": "1"},
        )
        assert self._server.stdout.readline() == "ready\n"

    def run(self, job, *, kill_after=None):
        """Run a job; returns (whether it was killed, the lines it told)."""
        self._log.unlink(missing_ok=True)
        self._server.stdin.write(json.dumps({**job, "log": str(self._log)}) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline().split()[1])
        if kill_after is not None:
            self._wait_for("ready")
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it failed: its status says so
                os.kill(pid, signal.SIGKILL)
        status = int(self._server.stdout.readline().split()[1])
        lines = self._log.read_text().splitlines()
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert was_killed or status == 0, "\n".join(lines)
        return was_killed, lines

    def _wait_for(self, word):
        for _ in range(6000):
            if self._log.exists() and word in (text := self._log.read_text()):
                return
            if self._log.exists() and "error" in text:
                return
            time.sleep(0.01)
        raise AssertionError(f"the child never told {word!r}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def last_number(lines, *words):
    """The number on the last line that begins with one of the words."""
    found = [line for line in lines if line.startswith(words)]
    return int(found[-1].split()[1]) if found else 0
