# SPDX-License-Identifier: Apache-2.0
"""Runs of trainer_child.py: to their end, or until they are killed; and what they must equal."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from support import trainer_child
from support.trainer_child import everything, make_params, train
from swapio.optim import AdamW

CHILD = Path(trainer_child.__file__)
# One sub-group of one chunk at a time is in RAM: operations come in one order.
ONE_AT_A_TIME = {
    "sub_group_numel": 1 << 18,
    "chunk_numel": 1 << 18,
    "min_swap_bytes": 0,
    "host_memory": "4MiB",
    "pipeline_read": False,
    "pipeline_write": False,
    "cpu_threads": 1,
}


def _environment():
    return {**os.environ, "PYTHONPATH": str(CHILD.parent.parent), "OMP_NUM_THREADS": "1"}


def run_child(job):
    """Run a job to its end; returns the lines it told."""
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


class KilledRun:
    """A job that is killed with SIGKILL at some point."""

    def __init__(self, job):
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self.lines = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.strip())
                self._changed.notify_all()
        with self._changed:
            self.lines.append("end")
            self._changed.notify_all()

    def wait_for(self, word, timeout=100.0):
        """Wait until a line begins with `word`."""
        with self._changed:
            met = self._changed.wait_for(
                lambda: any(line.startswith((word, "end")) for line in self.lines), timeout
            )
        found = any(line.startswith(word) for line in self.lines)
        assert met
        assert found, self._process.stderr.read()

    @property
    def last_number(self):
        """The last step that was told."""
        with self._changed:
            return int([x for x in self.lines if x.startswith(("ready", "step"))][-1].split()[1])

    def kill_after(self, seconds):
        """Kill the process, unless it has ended."""
        time.sleep(seconds)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill_after(0)
        self._process.stdout.close()
        self._process.stderr.close()


def reference(sizes, dtype, steps, master):
    """The state after `steps` uninterrupted steps in RAM."""
    return _reference(tuple(sizes), dtype, steps, master)


@functools.cache
def _reference(sizes, dtype, steps, master):
    params = make_params(sizes, getattr(torch, dtype))
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    with AdamW(named, lr=1.0, swap={"master": master, "cpu_threads": 1}) as opt:
        train(opt, params, 1, steps)
        return everything(opt, params)


def assert_same(found, expected):
    """Compare two results of `everything` bit for bit."""
    assert found["lr"] == expected["lr"]
    for index, (a, b) in enumerate(zip(found["params"], expected["params"], strict=True)):
        assert torch.equal(a, b), f"parameter {index}"
    for index, (a, b) in enumerate(zip(found["state"], expected["state"], strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{name} of parameter {index}"
