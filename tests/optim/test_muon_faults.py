# SPDX-License-Identifier: Apache-2.0
"""An I/O error on each transfer of a Muon step: rewritten, or raised, and never a wrong weight."""

from __future__ import annotations

import errno

import pytest
import torch

import swapio.runtime
from support.faulty import FaultyStore
from support.muon_training import (
    MODES,
    assert_same,
    gradients,
    parameters,
    tight,
    trained,
)
from swapio.errors import AioError, SwapioError
from swapio.filestore import FileStore
from swapio.optim import Muon

SHAPES = [(256, 256), (128, 512), (250, 260), (512, 128), (200, 320), (300,)]
ROWS = gradients(SHAPES, 3, torch.bfloat16)


class OneFault:
    """Fails the transfer of the given number, counted from 0 after `arm`."""

    def __init__(self):
        self.is_active = True
        self.arm(-1)

    def arm(self, number):
        self.number, self.seen = number, []

    def error(self, op, what, nbytes):
        self.seen.append(op)
        if len(self.seen) - 1 != self.number:
            return None
        return AioError(errno.EIO, op, what, length=nbytes, transferred=0, hint="injected")

    def is_torn(self):
        return False

    def wait(self):
        pass


@pytest.fixture
def fault(monkeypatch):
    """Wrap the store of every optimizer made from now on."""
    one = OneFault()

    def opened(*args, **kwargs):
        store = FaultyStore(FileStore(*args, **kwargs), seed=0)
        store.faults = one
        return store

    monkeypatch.setattr(swapio.runtime, "FileStore", opened)
    return one


def step(opt, params, row):
    for param, grad in zip(params, row, strict=True):
        param.grad = grad
    opt.step()
    opt.synchronize()


def attempt(folder, mode, fault, number):
    """Two good steps, one with a fault, one more: (error, what is left, operations).

    A read ahead of the step that failed is told by the next one.
    """
    params = parameters(SHAPES, torch.bfloat16)
    start = [param.detach().clone() for param in params]
    groups = [{"params": params[:5]}, {"params": params[5:], "use_muon": False}]
    swap = {"path": folder, "sub_group_numel": 65_536, "min_swap_bytes": 0, **MODES[mode]}
    with tight(lambda setting: Muon(groups, lr=0.02, swap=setting), swap) as opt:
        for row in ROWS[:2]:
            step(opt, params, row)
        fault.arm(number)
        try:
            step(opt, params, ROWS[2])
            seen = list(fault.seen)
            fault.arm(-1)
            step(opt, params, ROWS[0])
        except SwapioError as error:
            fault.arm(-1)
            with pytest.raises(SwapioError, match="failed earlier"):
                opt.step()
            return error, None, []
        return None, trained(opt, params, start), seen


@pytest.mark.parametrize("mode", ["partitioned", "pipelined"])
def test_a_failed_transfer_is_repaired_or_raised(tmp_path, fault, mode):
    error, want, operations = attempt(tmp_path / "good", mode, fault, -1)
    assert error is None
    assert {"pread", "pwrite"} <= set(operations)
    for number, op in enumerate(operations):
        error, got, _ = attempt(tmp_path / f"{number}", mode, fault, number)
        if op == "pread" and mode == "partitioned":  # reads ahead come in another order each time
            assert isinstance(error, AioError)
        if error is None:
            assert_same(got, want)
        else:
            assert "injected" in str(error) or "injected" in str(error.__cause__)
