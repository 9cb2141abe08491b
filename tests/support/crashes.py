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
        killed, lines = self.run_ranks(job, kill_after=kill_after)
        return killed[0], lines[0]

    def run_ranks(self, job, *, kill_after=None, may_fail=False):
        """Run a job of one process or of several: (killed, lines) of each rank."""
        logs = [self._log]
        if "ranks" in job:
            logs = [self._log.with_name(f"{self._log.name}.{r}") for r in range(job["ranks"])]
        for log in logs:
            log.unlink(missing_ok=True)
        self._server.stdin.write(json.dumps({**job, "log": str(self._log)}) + "\n")
        self._server.stdin.flush()
        pids = [int(word) for word in self._server.stdout.readline().split()[1:]]
        if kill_after is not None:
            self._wait_for(logs[0], "ready")
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it failed: its status says so
                os.kill(pids[0], signal.SIGKILL)
        statuses = [int(word) for word in self._server.stdout.readline().split()[1:]]
        lines = [whole_lines(log.read_text()) for log in logs]
        killed = [os.WIFSIGNALED(s) and os.WTERMSIG(s) == signal.SIGKILL for s in statuses]
        told = "\n".join("\n".join([f"-- rank {r}", *part]) for r, part in enumerate(lines))
        # A rank may notice that another was killed, and fail, before it is killed itself.
        assert may_fail or any(killed) or not any(statuses), told
        return killed, lines

    def _wait_for(self, log, word):
        for _ in range(6000):
            text = log.read_text() if log.exists() else ""
            if word in text or "error" in text:
                return
            time.sleep(0.01)
        raise AssertionError(f"the child never told {word!r}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def whole_lines(text):
    """The lines that were told to their end: a process may be killed within one."""
    return [line[:-1] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_number(lines, *words):
    """The number on the last line that begins with one of the words."""
    found = [line for line in lines if line.startswith(words)]
    return int(found[-1].split()[1]) if found else 0
