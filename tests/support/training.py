# SPDX-License-Identifier: Apache-2.0
"""Small trainings with seeded gradients, for tests of the optimizers."""

from __future__ import annotations

import torch

# With N parameters below state exceeds host_memory: sub-groups are streamed, several in flight.
_SMALL = {"sub_group_numel": 1 << 19, "min_swap_bytes": 0, "lock_timeout": 2}
MODES = {
    "ram": None,
    "partitioned": {
        **_SMALL,
        "host_memory": "7MiB",
        "pipeline_read": False,
        "pipeline_write": False,
    },
    "pipelined": {**_SMALL, "host_memory": "7MiB"},
}


def swap_of(mode, path, **more):
    """Return the `swap` argument of a mode, with state in `path`."""
    settings = MODES[mode]
    return None if settings is None else {**settings, "path": path, **more}


def make_parameters(sizes, dtype=torch.float32, seed=0):
    """Return seeded parameters of these shapes or sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def set_gradients(params, step, scale=1.0):
    """Give each parameter the gradient of a step number."""
    for number, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + number)
        value = torch.randn(param.shape, generator=generator) * scale
        param.grad = value.to(param.dtype)


def train(opt, params, steps, first=1):
    """Take some steps with seeded gradients."""
    for step in range(first, first + steps):
        set_gradients(params, step)
        opt.step()


def snapshot(opt, params):
    """Copies of parameters and all their state."""
    values = [param.detach().clone() for param in params]
    return values, [{k: v.clone() for k, v in opt.state_of(p).items()} for p in params]


def assert_same(left, right):
    """Both snapshots are equal to the bit."""
    for number, (a, b) in enumerate(zip(left[0], right[0], strict=True)):
        assert torch.equal(a, b), f"parameter {number}"
    for number, (one, other) in enumerate(zip(left[1], right[1], strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), f"{name} of parameter {number}"
