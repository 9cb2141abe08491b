# SPDX-License-Identifier: Apache-2.0
"""Small training runs with swapio's Muon: full-rank gradients, and budgets that force swapping."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swapio.errors import ConfigError
from swapio.optim import Muon

# Matrices of at least 1 MiB, small ones that share a sub-group with one, and an odd one.
SHAPES = ((64, 64), (17, 33), (512, 512), (270, 1000), (1040, 256), (264, 1000), (500, 530))
BIASES = (600, 5)
NUM_MATRICES = len(SHAPES)
SWAP = {"sub_group_numel": 270_000, "min_swap_bytes": 1 << 20}
MODES: dict[str, dict[str, Any]] = {
    "partitioned": {"pipeline_read": False, "pipeline_write": False},
    "pipelined": {},
    "read": {"pipeline_write": False},
    "write": {"pipeline_read": False},
    "step": {"durability": "step"},
}


@dataclass
class Trained:
    """What a run left behind."""

    params: list[Tensor]
    start: list[Tensor]
    states: list[dict[str, Tensor]]
    stats: dict[str, Any]
    grads: list[list[Tensor | None]] = field(default_factory=list)

    def updates(self) -> list[Tensor]:
        """Final minus initial weights, of the fp32 masters where there are any."""
        final = [s.get("master", p).float() for s, p in zip(self.states, self.params, strict=True)]
        return [end - begin.float() for end, begin in zip(final, self.start, strict=True)]


def parameters(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [torch.nn.Parameter((value / 8).to(dtype)) for value in made]


def gradients(shapes, steps, dtype=torch.float32, seed=1):
    """Random gradients: of full rank, and different in each step."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        for _ in range(steps)
    ]


def tight(make, swap):
    """Call `make(swap)` with the least host_memory that does, which the error names."""
    try:
        return make({**swap, "host_memory": 1 << 20})
    except ConfigError as error:
        message = str(error)
    found = re.search(r"the least that does is (\d+) bytes", message)
    assert found, message
    return make({**swap, "host_memory": int(found.group(1))})


def build(params, swap=None, *, num_muon=NUM_MATRICES, **kwargs):
    """Muon for the first parameters, AdamW for the rest."""
    groups = [{"params": params[:num_muon]}]
    if params[num_muon:]:
        more = {"use_muon": False, "lr": 1e-3, "weight_decay": 0.01}
        groups.append({"params": params[num_muon:], **more})
    return Muon(groups, **{"lr": 0.02, "swap": swap, **kwargs})


def train(swap=None, *, dtype=torch.float32, grad_dtype=None, steps=3, scale=1.0, **kwargs):
    """Train the matrices and biases above for some steps."""
    shapes = [*SHAPES, *[(numel,) for numel in BIASES]]
    params = parameters(shapes, dtype)
    start = [param.detach().clone() for param in params]
    grads = gradients(shapes, steps, grad_dtype or dtype)

    def make(setting):
        return build(params, setting, **kwargs)

    opt = make(None) if swap is None else tight(make, {**SWAP, **swap})
    with opt:
        for row in grads:
            for param, grad in zip(params, row, strict=True):
                param.grad = (grad * scale).to(dtype)
            opt.step()
        return trained(opt, params, start, grads)


def trained(opt, params, start, grads=()):
    """Note weights, state and counters of an optimizer that is still open."""
    opt.synchronize()
    stats = opt.stats()
    states = [{k: v.clone() for k, v in opt.state_of(p).items()} for p in params]
    return Trained([p.detach().clone() for p in params], start, states, stats, list(grads))


def assert_same(left: Trained, right: Trained) -> None:
    """Equal to the bit: weights and all state."""
    for a, b in zip(left.params, right.params, strict=True):
        assert torch.equal(a, b)
    for one, other in zip(left.states, right.states, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
