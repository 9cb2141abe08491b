# SPDX-License-Identifier: Apache-2.0
"""A process that trains with Muon under durability "step", and waits to be killed.

muon_child.py FOLDER DTYPE: tells "step N" after each step, for ever.
"""

from __future__ import annotations

import itertools
import sys

import torch

from support.muon_training import build, gradients, parameters

SHAPES = [(17, 33), (256, 256), (130, 500), (300,), (5,)]
NUM_MUON = 3
ROWS = gradients(SHAPES, 6)


def make(folder, dtype, **kwargs):
    """The parameters, and an optimizer of them with its state in `folder` (None: RAM)."""
    params = parameters(SHAPES, dtype)
    swap = None
    if folder is not None:
        swap = {
            "path": folder,
            "namespace": "run",
            "durability": "step",
            "sub_group_numel": 1 << 16,
            "min_swap_bytes": 0,
            "host_memory": "8MiB",
        }
    return params, build(params, swap, num_muon=NUM_MUON, **kwargs)


def take_steps(params, opt, first, last):
    """Take steps `first` to `last`, counted from 0; gradients repeat after the last row."""
    for at in range(first, last):
        for param, grad in zip(params, ROWS[at % len(ROWS)], strict=True):
            param.grad = grad.to(param.dtype)
        opt.step()


def main(folder, dtype):
    torch.set_num_threads(1)
    params, opt = make(folder, getattr(torch, dtype))
    for at in itertools.count():
        take_steps(params, opt, at, at + 1)
        print("step", at + 1, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
