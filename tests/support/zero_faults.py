# SPDX-License-Identifier: Apache-2.0
"""A training on several ranks with an error, or a delay, at one chosen operation of one rank."""

from __future__ import annotations

import errno
import os
import signal
import time
from unittest import mock

import torch

import swapio.runtime
from support.faulty import FaultyStore
from support.training import swap_of
from support.zero_cases import raised, tight
from support.zero_training import groups_of, loss_of, make, rank_gradients, train
from swapio.errors import AioError, SwapioError
from swapio.filestore import FileStore
from swapio.optim import AdamW, Muon, ZeroOptimizer


class Trigger:
    """Counts operations once it is armed, and fails or delays the one of a given number."""

    def __init__(self, number, delay):
        self.number, self.delay = number, delay
        self.is_active = True
        self.is_armed = False
        self.seen = []

    def __call__(self, what):
        """Note an operation; return whether it must fail."""
        if not self.is_armed:
            return False
        number = len(self.seen)
        self.seen.append(what)
        if number != self.number:
            return False
        if self.delay:
            time.sleep(self.delay)
        return not self.delay

    # As the faults of a FaultyStore.
    def error(self, op, what, nbytes):
        if not self(op):
            return None
        return AioError(errno.EIO, op, what, length=nbytes, transferred=0, hint="injected")

    def is_torn(self):
        return False

    def wait(self):
        pass


def disturb(
    rank, group, *, stage, shapes, mode, folder, where, number, culprit, delay=0.0, muon=False
):
    """Train two steps; at operation `number` of the second one rank fails or is late.

    `where` is "collective" or "file". Returns the error or None, the operations seen by this rank,
    whether a further step raises, and the parameters.
    """
    trigger = Trigger(number if rank == culprit else -1, delay)

    def opened(*args, **kwargs):
        store = FaultyStore(FileStore(*args, **kwargs), seed=0)
        if where == "file":
            store.faults = trigger
        return store

    def before(name):
        if where == "collective" and trigger(name):
            raise OSError(errno.EIO, "injected")

    params = make(shapes)
    options = {"stage": stage, "process_group": group, "bucket_bytes": 1 << 19, "lr": 0.01}
    kind = Muon if muon else AdamW

    def build(swap):
        return ZeroOptimizer(groups_of(params, muon=muon), kind, **options, swap=swap)

    error, again = None, None
    with mock.patch.object(swapio.runtime, "FileStore", opened):
        opt = tight(build, mode, folder) if mode != "ram" else build(swap_of(mode, folder))
        try:
            train(opt, params, rank, steps=1)
            opt.synchronize()
            opt._ranks.comm.before = before
            trigger.is_armed = True
            train(opt, params, rank, steps=1, first=2)
            opt.synchronize()
            trigger.is_armed = False
            train(opt, params, rank, steps=1, first=3)
            opt.synchronize()
        except (SwapioError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            again = raises(lambda: train(opt, params, rank, steps=1, first=9))
        finally:
            trigger.is_armed = False
            close(opt)
    return error, trigger.seen, again, [param.detach() for param in params]


def raises(call):
    """Whether a call raises one of swapio's errors."""
    try:
        call()
    except (SwapioError, OSError):
        return True
    return False


def close(opt):
    """Close an optimizer that may have failed."""
    try:
        opt.close()
    except (SwapioError, OSError):
        opt._ranks.close()
    torch.manual_seed(0)


def kill_one(rank, group, *, where):
    """Kill rank 1 at its next collective of a kind; return what the others raise."""
    params = make([(300, 40), (17, 33), (33,)])
    opt = ZeroOptimizer(groups_of(params, muon=True), Muon, stage=2, process_group=group, lr=0.01)
    train(opt, params, rank, steps=1)

    def before(name):
        if rank == 1 and name == where:
            os.kill(os.getpid(), signal.SIGKILL)

    opt._ranks.comm.before = before

    def step():
        loss_of(params, rank_gradients(params, 2, 0, rank)).backward()
        opt.step()

    errors = [raised(step), raised(opt.step)]
    opt.close()
    return errors
