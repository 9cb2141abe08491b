# SPDX-License-Identifier: Apache-2.0
"""An I/O error that does not repeat is survived: each transfer of a step is tried once more."""

from __future__ import annotations

import errno

import pytest

import swapio.runtime
from support.training import assert_same, make_parameters, snapshot, swap_of, train
from swapio.aio import OP_READ, OP_WRITE, Engine
from swapio.errors import AioError
from swapio.optim import AdamW

SIZES = [700_000, 600_000, 5]
# Chunks are dropped as soon as they are written: nobody above the store could write them again.
MORE = {"durability": "step", "host_memory": "10MiB"}


class NeverMoved:
    """The future of a submission that has failed without moving a byte."""

    wait_seconds = 0.0

    def __init__(self, request):
        self.error = AioError(
            errno.EIO, ("pread", "pwrite")[request.op], request.file.path, offset=request.offset,
            length=request.nbytes, hint="injected",
        )  # fmt: skip

    def result(self, timeout=None):  # noqa: ARG002
        raise self.error

    def exception(self, timeout=None):  # noqa: ARG002
        return self.error

    def done(self):
        return True


@pytest.fixture
def faults(monkeypatch):
    """Counts the submissions of all engines made from now on, and fails those in `failing`."""

    class Faults:
        count, failing, kinds = 0, (), []

        def arm(self, *failing):
            self.count, self.failing, self.kinds = 0, failing, []

    found = Faults()

    class FlakyEngine(Engine):
        def submit(self, requests, *, owner=None):
            number = found.count
            found.count += 1
            found.kinds.append(requests[0].op)
            if number in found.failing:
                return NeverMoved(requests[0])
            return super().submit(requests, owner=owner)

    monkeypatch.setattr(swapio.runtime, "Engine", FlakyEngine)
    return found


def start(path, faults):
    params = make_parameters(SIZES)
    opt = AdamW(params, swap=swap_of("pipelined", path, **MORE))
    train(opt, params, 2)
    opt.synchronize()
    faults.arm()
    return params, opt


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_each_transfer_of_a_step_may_fail_once(tmp_path, faults, caplog, every):
    whole = make_parameters(SIZES)
    resident = AdamW(whole)
    train(resident, whole, 4)
    params, opt = start(tmp_path / "count", faults)
    train(opt, params, 1, first=3)
    opt.synchronize()
    kinds = list(faults.kinds)
    opt.close()
    assert {OP_READ, OP_WRITE} <= set(kinds)
    numbers = [i for i, op in enumerate(kinds) if op in (OP_READ, OP_WRITE)]
    for number in numbers[::every]:
        params, opt = start(tmp_path / str(number), faults)
        caplog.clear()
        faults.arm(number)
        train(opt, params, 2, first=3)
        opt.synchronize()
        assert_same(snapshot(opt, params), snapshot(resident, whole))
        assert "trying this transfer once more" in caplog.text
        opt.close()


def test_an_error_that_repeats_is_raised(tmp_path, faults):
    params, opt = start(tmp_path, faults)
    faults.arm(*range(1000))

    def steps():
        train(opt, params, 2, first=3)
        opt.synchronize()

    with pytest.raises(AioError, match="injected"):
        steps()
    faults.arm()
    opt.close()
