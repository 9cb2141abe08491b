# SPDX-License-Identifier: Apache-2.0
"""Forks a training process for each job, and lets it kill itself at a numbered operation.

    crash_child.py            one JSON job per line on standard input; answers one line each

The job is that of trainer_child.py, and `log` (a file for what the child tells), `kill`: [phase,
number]: SIGKILL before operation `number` of the phase "step", "save" or "load" (0 is the first),
or [phase, -1]: count. Operations are submissions to the engine, links, renames, unlinks and syncs.
The answer is the child's wait status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

# torch's first optimizer imports this, which takes seconds: once here, not in every child.
import torch._dynamo  # noqa: F401

import swapio.aio
from support import trainer_child
from swapio.optim import AdamW


class Killer:
    """Counts operations while a phase lasts, and kills at one of them."""

    def __init__(self, phase, number):
        self.phase = phase
        self.number = number
        self.is_on = False
        self.count = 0

    def wrap(self, owner, name):
        inner = getattr(owner, name)

        def counted(*args, **kwargs):
            if self.is_on:
                if self.count == self.number:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.count += 1
            return inner(*args, **kwargs)

        setattr(owner, name, counted)

    def during(self, owner, name, phase):
        """Count while a method of `owner` runs, the `after`-th time and later."""
        if phase != self.phase:
            return
        inner = getattr(owner, name)

        def watched(*args, **kwargs):
            self.is_on = True
            try:
                return inner(*args, **kwargs)
            finally:
                self.is_on = False

        setattr(owner, name, watched)


def install(killer):
    for owner, name in (
        (swapio.aio.Engine, "submit"),
        (os, "link"),
        (os, "fsync"),
        (Path, "rename"),
        (Path, "unlink"),
        (Path, "mkdir"),
    ):
        killer.wrap(owner, name)
    killer.during(AdamW, "step", "step")
    killer.during(AdamW, "save", "save")
    killer.during(AdamW, "load", "load")


def run(job):
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    killer = Killer(*job.get("kill", ("nothing", -1)))
    install(killer)
    trainer_child.main(job)
    print("operations", killer.count, flush=True)


def serve():
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(job)
                status = 0
            except BaseException as error:
                print("error", repr(error), flush=True)
            finally:
                os._exit(status)
        print("pid", pid, flush=True)
        print("status", os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
