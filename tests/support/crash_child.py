# SPDX-License-Identifier: Apache-2.0
"""Forks a training process for each job, and lets it kill itself at a numbered operation.

    crash_child.py            one JSON job per line on standard input; answers one line each

The job is that of trainer_child.py, and `log` (a file for what the child tells), `kill`: [phase,
number]: SIGKILL before operation `number` of the phase "step", "save" or "load" (0 is the first),
or [phase, -1]: count. Operations are submissions to the engine, links, renames, unlinks and syncs.
The answer is the child's wait status.

With `ranks` so many children are forked, which log to `<log>.<rank>`; `kill_rank` (0 by default) is
the one that `kill` is about, and when one has died the others are killed too, as launchers do.
`delays`: seconds by rank that each commit record is held back. The answer is all wait statuses.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

# torch's first optimizer imports this, which takes seconds: once here, not in every child.
import torch._dynamo  # noqa: F401

import swapio.aio
from support import trainer_child
from swapio.commitlog import CommitLog
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
    for name in ("step", "save", "load"):
        killer.during(AdamW, name, name)


def delay_commits(seconds):
    write = CommitLog.write

    def delayed(*args, **kwargs):
        time.sleep(seconds)
        return write(*args, **kwargs)

    CommitLog.write = delayed


def run(job):
    rank = job.get("rank", 0)
    log = os.open(log_of(job, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if "ranks" in job:
        names = {"RANK": str(rank), "WORLD_SIZE": str(job["ranks"]), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= names
    is_chosen = rank == job.get("kill_rank", 0)
    killer = Killer(*(job.get("kill") if is_chosen and "kill" in job else ("nothing", -1)))
    install(killer)
    if "delays" in job:
        delay_commits(job["delays"][rank])
    trainer_child.main(job)
    print("operations", killer.count, flush=True)


def log_of(job, rank):
    return job["log"] if "ranks" not in job else f"{job['log']}.{rank}"


def start(job):
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
    return pid


def wait_for_all(pids):
    """Wait statuses; when one was killed so are the others."""
    statuses = {}
    while len(statuses) < len(pids):
        pid, status = os.wait()
        statuses[pid] = status
        if os.WIFSIGNALED(status):
            for other in set(pids) - set(statuses):
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in pids]


def serve():
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "ranks" in job:
            job["meet"] = f"{job['log']}.meet"
            Path(job["meet"]).unlink(missing_ok=True)
            pids = [start({**job, "rank": rank}) for rank in range(job["ranks"])]
        else:
            pids = [start(job)]
        print("pid", *pids, flush=True)
        print("status", *wait_for_all(pids), flush=True)


if __name__ == "__main__":
    serve()
