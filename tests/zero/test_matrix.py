# SPDX-License-Identifier: Apache-2.0
"""All stages train as one process does, whatever the ranks, their shards, and where state lives.

By default every pair of two settings' values occurs in some case; all combinations are the soak
run's. The reference accumulates every rank's micro-batches in one process, with state in RAM.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from support.pairwise import pairwise
from support.zero_cases import run_stage
from support.zero_training import alone, make

# A padded last shard (17 x 33), an empty one (3 elements on 4 ranks; one row under FSDP2), a param
# group and a matrix of fewer elements than ranks, matrices that straddle shards, sub-groups and
# buckets.
SHAPES = [(17, 33), (300, 40), (40, 300), (1, 3), (320, 480), (33,), (3,), (1,), (500_001,)]
NUM_MATRICES = 5
UNUSED = 2
SETTINGS = {
    "rule": ["adamw", "muon"],
    "stage": ["1", "2", "2 shard", "3"],
    "world_size": [1, 2, 3, 4],
    "mode": ["ram", "partitioned", "pipelined"],
    "resident": [False, True],
    "micros": [1, 4],
    "dtype": ["float32", "bfloat16"],
}
COMMON = {"lr": 0.02, "weight_decay": 0.1}
RESIDENT = {"adamw": "exp_avg", "muon": "momentum_buffer"}


def cases():
    """Some combinations, and all others for the soak run."""
    core = list(map(possible, pairwise(SETTINGS)))
    for values in itertools.product(*SETTINGS.values()):
        case = dict(zip(SETTINGS, values, strict=True))
        if case == possible(case):
            marks = [] if case in core else [pytest.mark.slow]
            yield pytest.param(case, marks=marks, id="-".join(map(str, values)))


def possible(case):
    """The case, or one like it: in RAM everything is resident, and thirds need more bits."""
    dtype = "float32" if case["world_size"] == 3 else case["dtype"]
    return {**case, "dtype": dtype, "resident": case["resident"] and case["mode"] != "ram"}


def training_of(world_size, micros, stage):
    """Five steps with all that may happen to gradients.

    FSDP2 itself waits for ever for a gradient that one rank does not have.
    """
    unused = {(3, rank, UNUSED) for rank in range(world_size)}
    return {
        "steps": 5,
        "micros": micros,
        "clip_on": (2, 4, 5),
        "unused": unused if stage == 3 else {(2, 0, 1), *unused},
        "overflow": {(4, world_size - 1, 0)},
    }


@functools.cache
def reference(rule, world_size, micros, dtype, *, is_sharded):
    """The same in one process, wherever state is."""
    training = training_of(world_size, micros, 3 if is_sharded else 1)
    return alone(rule, SHAPES, world_size, training, settings=COMMON, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("case", list(cases()))
def test_training_is_that_of_one_process(ranks, tmp_path, case) -> None:
    stage, _, accumulate = case["stage"].partition(" ")
    zero = {"accumulate": accumulate} if accumulate else {}
    rule, world_size, micros = case["rule"], case["world_size"], case["micros"]
    found = ranks.run(
        run_stage,
        world_size,
        stage=int(stage),
        rule=rule,
        shapes=SHAPES,
        mode=case["mode"],
        resident=[RESIDENT[rule]] if case["resident"] else [],
        folder=tmp_path,
        dtype=getattr(torch, case["dtype"]),
        settings=COMMON,
        zero=zero,
        training=training_of(world_size, micros, int(stage)),
    )
    is_sharded = stage == "3"
    wanted = reference(rule, world_size, micros, case["dtype"], is_sharded=is_sharded)
    exact = case["stage"] == "2" or (stage == "1" and world_size <= 2)
    for rank in found:
        assert all(map(torch.equal, rank["params"], found[0]["params"]))
        check_values(rank, wanted, rule, exact=exact)
    check_shards([rank["local"] for rank in found], world_size, int(stage))
    check_figures(found, case)


def check_values(rank, wanted, rule, *, exact):
    """Parameters and state are those of one process: to the bit, or as close as sums allow."""
    params, state, norm = wanted
    assert rank["norm"] == pytest.approx(norm, rel=1e-6)
    bound = 1e-4 if rule == "muon" else 1e-5
    for index, initial in enumerate(make(SHAPES, params[0].dtype)):
        mine, theirs = rank["state"][index], state[index]
        assert mine.keys() == theirs.keys()
        assert torch.equal(mine["step"], theirs["step"])
        if exact:
            assert torch.equal(rank["params"][index], params[index]), f"parameter {index}"
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        else:
            one = mine.get("master", rank["params"][index])
            other = theirs.get("master", params[index])
            assert_moved_alike(one, other, initial, bound)


def assert_moved_alike(mine, wanted, initial, bound):
    """The bound of rescaled and sharded steps, norm-wise."""
    moved = wanted.double() - initial.detach().double()
    error = mine.double() - wanted.double()
    assert error.norm() <= bound * moved.norm() + 2**-23 * wanted.norm()


def check_shards(local, world_size, stage):
    """Cases have what they claim to have: padding, empty shards, and all elements once."""
    for index, shape in enumerate(SHAPES):
        assert sum(rank[index] for rank in local) == torch.Size(shape).numel()
    if world_size == 4:
        assert local[3][0] < local[0][0]
        assert local[3][6] == 0
    if world_size > 1 and stage == 3:
        assert local[1][3] == 0


def check_figures(found, case):
    """State was swapped if it was to be; collectives and products were those of the plan."""
    for rank in found:
        stats = rank["stats"]
        assert not rank["skipped"]
        assert stats["num_steps"] == 4  # one of five was skipped
        assert (stats.get("bytes_read", 0) > 0) == (case["mode"] != "ram")
        cycles = 5 * (case["micros"] if case["stage"] == "2 shard" else 1)
        for name, count in rank["planned"].items():
            times = stats["num_steps"] if name == "all_gather" else cycles
            assert stats[f"num_{name}"] == times * count
    if case["rule"] == "muon":
        total = sum(rank["stats"]["num_newton_schulz"] for rank in found)
        num_unused = 2 if case["world_size"] == 1 and case["stage"] != "3" else 1
        assert total == 4 * NUM_MATRICES - num_unused
