# SPDX-License-Identifier: Apache-2.0
"""An I/O error on each transfer of a step, and Ctrl-C at fifty points of it."""

from __future__ import annotations

import errno
import re
import signal
import threading

import pytest
import torch

import swapio.runtime
from support.faulty import FaultyStore
from support.training import assert_same, make_parameters, set_gradients, snapshot, swap_of, train
from swapio.errors import AioError, SwapioError
from swapio.filestore import FileStore
from swapio.optim import AdamW

SIZES = [700_000, 600_000, 5]


@pytest.fixture(params=[pytest.param("partitioned", marks=pytest.mark.slow), "pipelined"])
def mode(request):
    return request.param


class Numbered:
    """Fails the transfers whose numbers are given; counts from 0 after `arm`."""

    def __init__(self):
        self.is_active = True
        self.count = 0
        self.failing = set()
        self.seen = []

    def arm(self, *failing):
        self.count, self.failing, self.seen = 0, set(failing), []

    def error(self, op, what, nbytes):
        number = self.count
        self.count += 1
        self.seen.append(op)
        if number not in self.failing:
            return None
        return AioError(errno.EIO, op, what, length=nbytes, transferred=0, hint="injected")

    def is_torn(self):
        return False

    def wait(self):
        pass


@pytest.fixture
def faults(monkeypatch):
    """Wrap the store of every optimizer made from now on."""
    numbered = Numbered()

    def opened(*args, **kwargs):
        store = FaultyStore(FileStore(*args, **kwargs), seed=0)
        store.faults = numbered
        return store

    monkeypatch.setattr(swapio.runtime, "FileStore", opened)
    return numbered


def start(tmp_path, mode, faults, **more):
    params = make_parameters(SIZES)
    opt = AdamW(params, swap=swap_of(mode, tmp_path, **more))
    train(opt, params, 2)
    opt.synchronize()
    faults.arm()
    return params, opt


def resident_after(steps):
    params = make_parameters(SIZES)
    opt = AdamW(params)
    train(opt, params, steps)
    return snapshot(opt, params)


def count_transfers(tmp_path, mode, faults, **more):
    params, opt = start(tmp_path / "count", mode, faults, **more)
    train(opt, params, 1, first=3)
    opt.synchronize()
    operations = list(faults.seen)
    faults.arm()
    opt.close()
    assert {"pread", "pwrite"} <= set(operations)
    return operations


def outcome(opt, params, steps=1):
    """Take steps and wait for their writes; the error, or None."""
    try:
        for step in range(3, 3 + steps):
            set_gradients(params, step)
            opt.step()
            opt.synchronize()
    except SwapioError as error:
        return error
    return None


def check_failed(opt, params, before):
    for call in (opt.step, opt.synchronize, lambda: opt.set_state(params[2], "exp_avg", 0)):
        with pytest.raises(SwapioError, match=r"failed earlier.*(injected|not written whole)"):
            call()
    assert opt.stats()["num_steps"] >= 2
    state = opt.state_of(params[2])
    assert int(state["step"]) in (2, 3)
    if int(state["step"]) == 2 and torch.equal(params[2], before[0][2]):
        assert torch.equal(state["exp_avg"], before[1][2]["exp_avg"])


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_an_error_on_each_transfer_is_raised_or_survived(tmp_path, mode, faults, durability):
    """A read error ends the step, a failed commit too; another write is done anew, to the bit."""
    more = {"durability": durability, "host_memory": "10MiB" if durability == "step" else "7MiB"}
    operations = count_transfers(tmp_path, mode, faults, **more)
    whole = resident_after(3)
    outcomes = {"raised": 0, "survived": 0}
    for number in range(len(operations)):
        params, opt = start(tmp_path / str(number), mode, faults, **more)
        before = snapshot(opt, params)
        faults.arm(number)
        error = outcome(opt, params)
        if error is not None:
            assert re.search(r"injected|was not written whole", str(error)), error
            outcomes["raised"] += 1
            faults.arm()
            check_failed(opt, params, before)
        else:
            if faults.seen[number : number + 1] == ["pread"]:  # ahead of the next step: it raises
                assert "injected" in str(outcome(opt, params))
            else:
                outcomes["survived"] += len(faults.seen) > number
                faults.arm()
                assert_same(snapshot(opt, params), whole)
                train(opt, params, 1, first=4)
        opt.close()
    assert outcomes["raised"]
    # Pipelined, a commit is on its way when its writes fail: it fails too, and no step follows.
    assert bool(outcomes["survived"]) == ((mode, durability) != ("pipelined", "step"))


def test_a_write_error_that_repeats_is_raised_and_nothing_is_read_back(tmp_path, mode, faults):
    params, opt = start(tmp_path, mode, faults)
    before = snapshot(opt, params)
    faults.error = fail_writes
    assert "injected" in str(outcome(opt, params, steps=6))
    check_failed(opt, params, before)
    opt.close()


def fail_writes(op, what, nbytes):
    if op != "pwrite":
        return None
    return AioError(errno.EIO, op, what, length=nbytes, transferred=0, hint="injected")


class Interrupts:
    """Raises SIGINT in the main thread at transfer number `at` (twice if asked)."""

    def __init__(self, at, times):
        self.at, self.times, self.count = at, times, 0

    def __call__(self):
        if self.count == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        self.count += 1


@pytest.fixture
def points(monkeypatch):
    """Call `points.hit` at every kernel call and every transfer of the optimizer."""

    class Points:
        hit = staticmethod(lambda: None)

    for owner, name in (
        (FileStore, "read"),
        (FileStore, "begin_write"),
        (AdamW, "update_chunk"),
        (AdamW, "fill_hyper"),
    ):
        inner = getattr(owner, name)

        def wrapped(self, *args, inner=inner, **kwargs):
            Points.hit()
            result = inner(self, *args, **kwargs)
            Points.hit()
            return result

        monkeypatch.setattr(owner, name, wrapped)
    return Points


def test_an_interrupt_waits_for_the_end_of_the_step(tmp_path, mode, points):
    whole = resident_after(2 + 50)
    params = make_parameters(SIZES)
    opt = AdamW(params, swap=swap_of(mode, tmp_path))
    train(opt, params, 2)
    delivered = 0
    for number in range(50):
        set_gradients(params, 3 + number)
        points.hit = Interrupts(number, 1)
        was_delivered = False
        try:
            opt.step()
        except KeyboardInterrupt:
            was_delivered = True
        assert was_delivered == (points.hit.count > number)
        delivered += was_delivered
        points.hit = lambda: None
        assert int(opt.state[params[0]]["step"]) == 3 + number
    assert delivered >= 10
    assert_same(snapshot(opt, params), whole)
    opt.close()


@pytest.mark.parametrize("mode", ["pipelined"])
def test_an_interrupt_at_random_times(tmp_path, mode):
    whole = resident_after(2 + 30)
    params = make_parameters(SIZES)
    opt = AdamW(params, swap=swap_of(mode, tmp_path))
    train(opt, params, 2)
    delivered = 0
    for number in range(30):
        set_gradients(params, 3 + number)
        timer = threading.Timer(0.0005 * number, signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            opt.step()
            timer.join()
            signal.pthread_sigmask(signal.SIG_BLOCK, [])  # lets a pending signal be handled
        except KeyboardInterrupt:
            delivered += 1
            timer.join()
        if int(opt.state[params[0]]["step"]) < 3 + number:  # it came before the step began
            opt.step()
        assert int(opt.state[params[0]]["step"]) == 3 + number
    assert delivered == 30
    assert_same(snapshot(opt, params), whole)
    opt.close()


def test_a_second_interrupt_aborts_to_failed(tmp_path, mode, points):
    params = make_parameters(SIZES)
    opt = AdamW(params, swap=swap_of(mode, tmp_path))
    train(opt, params, 2)
    set_gradients(params, 3)
    points.hit = Interrupts(3, 2)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    points.hit = lambda: None
    with pytest.raises(SwapioError, match=r"failed earlier \(KeyboardInterrupt.*checkpoint"):
        opt.step()
    assert opt.state_of(params[2])["exp_avg"].shape == (5,)
    opt.close()


def test_a_handler_of_the_user_runs_after_the_step(tmp_path, mode, points):
    params, seen = make_parameters(SIZES), []
    opt = AdamW(params, swap=swap_of(mode, tmp_path))

    def handler(*_):
        seen.append(int(opt.state[params[0]]["step"]))
        raise RuntimeError("stop, says the user")

    previous = signal.signal(signal.SIGINT, handler)
    try:
        set_gradients(params, 1)
        points.hit = Interrupts(2, 1)
        with pytest.raises(RuntimeError, match="says the user"):
            opt.step()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)
        points.hit = lambda: None
    assert seen == [1]
    train(opt, params, 1, first=2)
    assert_same(snapshot(opt, params), resident_after(2))
    opt.close()
