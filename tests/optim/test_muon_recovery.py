# SPDX-License-Identifier: Apache-2.0
"""Muon after SIGKILL and after a failed transfer: the last committed step, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import swapio.runtime
from support import muon_child
from support.crashes import last_number, whole_lines
from support.faulty import FaultyStore
from support.muon_child import make, take_steps
from support.muon_training import assert_same, trained
from swapio.errors import AioError, SwapioError
from swapio.filestore import FileStore

DTYPES = [torch.float32, torch.bfloat16]


def killed_after(folder, dtype, steps, delay):
    """Let a child train, and kill it `delay` seconds after a step; the last step it told."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(muon_child.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, muon_child.__file__, str(folder), str(dtype).removeprefix("torch.")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        for line in child.stdout:
            if line == f"step {steps}\n":
                break
        time.sleep(delay)
        child.kill()
        told = whole_lines(child.stdout.read())
    return max(steps, last_number(told, "step"))


def unbroken(dtype, steps):
    params, opt = make(None, dtype)
    start = [param.detach().clone() for param in params]
    with opt:
        take_steps(params, opt, 0, steps)
        return trained(opt, params, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_a_killed_run_goes_on_from_its_last_commit(tmp_path, dtype, delay):
    told = killed_after(tmp_path, dtype, 3, delay)
    params, opt = make(tmp_path, dtype, resume=True)
    start = [param.detach().clone() for param in params]
    with opt:
        found = opt.recovered_step
        assert max(1, told - 2) <= found <= told + 1
        assert [int(opt.state[param]["step"]) for param in params] == [found] * len(params)
        take_steps(params, opt, found, found + 2)
        assert_same(trained(opt, params, start), unbroken(dtype, found + 2))


class TransfersFail:
    """Fails every transfer while it is on."""

    is_active = True
    is_on = False

    def error(self, op, what, nbytes):
        if not self.is_on:
            return None
        return AioError(5, op, what, length=nbytes, transferred=0, hint="injected")

    def is_torn(self):
        return False

    def wait(self):
        pass


@pytest.mark.parametrize("dtype", DTYPES)
def test_recover_after_a_failed_step(tmp_path, monkeypatch, dtype):
    faults = TransfersFail()

    def opened(*args, **kwargs):
        store = FaultyStore(FileStore(*args, **kwargs), seed=0)
        store.faults = faults
        return store

    monkeypatch.setattr(swapio.runtime, "FileStore", opened)
    params, opt = make(tmp_path, dtype)
    start = [param.detach().clone() for param in params]
    with opt:
        take_steps(params, opt, 0, 2)
        opt.synchronize()
        faults.is_on = True
        with pytest.raises(SwapioError):
            take_steps(params, opt, 2, 4)
        faults.is_on = False
        found = opt.recover()
        assert found == 2
        take_steps(params, opt, found, 5)
        assert_same(trained(opt, params, start), unbroken(dtype, 5))
