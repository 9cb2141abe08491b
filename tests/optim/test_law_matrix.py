# SPDX-License-Identifier: Apache-2.0
"""Law 1 over fifty steps: swapper, master form, budget, chunk size, paths, engine, durability.

By default every pair of two settings' values occurs in some run; all combinations are the soak
run's. The reference is the same training with all state in RAM.
"""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch

from support.pairwise import pairs_of, pairwise
from support.training import assert_same, make_parameters, snapshot
from support.training import train as train_some
from swapio.errors import ConfigError
from swapio.optim import AdamW

STEPS = 50
BLOCK_NUMEL = 1 << 18  # of fp32; rounded up to a block of the smallest record
SIZES = [900_001, (600, 999), 5, 700_000]
FORMS = {
    "param": (torch.float32, "param"),
    "split": (torch.bfloat16, "split"),
    "separate": (torch.bfloat16, "separate"),
}
SWAPPERS = {
    "partitioned": {"pipeline_read": False, "pipeline_write": False},
    "read": {"pipeline_write": False},
    "write": {"pipeline_read": False},
    "both": {},
}
SETTINGS = {
    "form": [*FORMS],
    "swapper": [*SWAPPERS],
    "budget": ["least", "more", "everything"],
    "chunk": ["one block", "auto"],
    "paths": [1, 3],
    "engine": ["auto", "threads"],
    "durability": ["checkpoint", "step"],
}
CORE = pairwise(SETTINGS)


def case_id(case):
    return "-".join(str(value) for value in case.values())


@functools.cache
def gradients(dtype):
    """Gradients of seven steps, which come again and again: drawing them takes most of the time."""
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(size, generator=generator).to(dtype) for size in SIZES] for _ in range(7)]


def train(opt, params):
    given = gradients(params[0].dtype)
    for step in range(STEPS):
        for param, grad in zip(params, given[step % len(given)], strict=True):
            param.grad = grad
        opt.step()


@functools.cache
def in_ram(form):
    dtype, master = FORMS[form]
    params = make_parameters(SIZES, dtype)
    opt = AdamW(params, lr=0.01, swap={"master": master})
    train(opt, params)
    return snapshot(opt, params)


def budget_of(case, params, swap):
    """Bytes of host_memory: the least that construction accepts, a little more, or plenty."""
    if case["budget"] == "everything":
        return "1GiB"
    with pytest.raises(ConfigError, match="the least that does is") as caught:
        AdamW(params, swap={**swap, "host_memory": "1MiB"})
    least = int(re.search(r"the least that does is (\d+) bytes", str(caught.value))[1])
    return least if case["budget"] == "least" else least + (4 << 20)


def run(tmp_path, case):
    dtype, master = FORMS[case["form"]]
    params = make_parameters(SIZES, dtype)
    swap = {
        "path": [str(tmp_path / str(number)) for number in range(case["paths"])],
        "master": master,
        "engine": case["engine"],
        "durability": case["durability"],
        "sub_group_numel": 1 << 20,
        "min_swap_bytes": 0,
        "spare_slots": 0,
        **SWAPPERS[case["swapper"]],
    }
    if case["chunk"] == "one block":
        swap["chunk_numel"] = BLOCK_NUMEL
    swap["host_memory"] = budget_of(case, params, swap)
    with AdamW(params, lr=0.01, swap=swap) as opt:
        train(opt, params)
        found, stats = snapshot(opt, params), opt.stats()
    if case["budget"] == "least":
        assert stats["read_bytes"] > 0
    if case["budget"] == "least" or case["durability"] == "step":
        assert stats["write_bytes"] > 0
    assert_same(found, in_ram(case["form"]))


@pytest.mark.parametrize("case", CORE, ids=case_id)
def test_fifty_steps_are_the_same_to_the_bit(tmp_path, case):
    run(tmp_path, case)


@pytest.mark.slow
def test_fifty_steps_in_every_combination(tmp_path):
    rows = itertools.product(*SETTINGS.values())
    for number, values in enumerate(rows):
        case = dict(zip(SETTINGS, values, strict=True))
        try:
            run(tmp_path / str(number), case)
        except BaseException as error:
            error.add_note(case_id(case))
            raise


def test_the_core_has_every_pair():
    rows = itertools.product(*SETTINGS.values())
    everything = set().union(*(pairs_of(dict(zip(SETTINGS, v, strict=True))) for v in rows))
    assert everything == set().union(*map(pairs_of, CORE))
    assert len(CORE) < 25


@pytest.mark.filterwarnings("ignore:master='none'")
@pytest.mark.parametrize("streams", [False, True])
def test_noise_does_not_depend_on_sub_groups(tmp_path, streams):
    """Stochastic rounding took its noise from the position in the sub-group, whatever its size."""
    sizes = [70_000, (33, 7), 5, 130_000]
    results = []
    for numel in (1 << 24, 1 << 16):
        params = make_parameters(sizes, torch.bfloat16)
        swap = {"master": "none", "stochastic_rounding": True, "sub_group_numel": numel}
        if streams:
            swap |= {"path": str(tmp_path / str(numel)), "min_swap_bytes": 0}
        with AdamW(params, lr=0.01, swap=swap) as opt:
            train_some(opt, params, 3)
            results.append(snapshot(opt, params))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:master='none'")
def test_parameters_do_not_share_their_noise():
    """As those at the same place of two sub-groups once did."""
    numel = 1 << 16
    values = torch.ones(numel, dtype=torch.bfloat16)
    params = [torch.nn.Parameter(values.clone()) for _ in range(3)]
    swap = {"master": "none", "stochastic_rounding": True, "sub_group_numel": numel}
    with AdamW(params, lr=1e-3, swap=swap) as opt:
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
    one, two, three = (param.detach() for param in params)
    for a, b in ((one, two), (two, three), (one, three)):
        share = (a == b).double().mean().item()
        up = (1 - 1e-3 - 1e-5 - a.min().item()) / (1 - a.min().item())
        alike = up**2 + (1 - up) ** 2
        assert abs(share - alike) < 0.02, "independent noise agrees this often"
