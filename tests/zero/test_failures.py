# SPDX-License-Identifier: Apache-2.0
"""A rank fails, or is late, at each collective and each transfer: all raise, or all go on."""

from __future__ import annotations

import pytest
import torch

from support.rank_pool import RankPool
from support.zero_cases import break_one, fail_between_steps, leave_early
from support.zero_faults import disturb, kill_one

COLLECTIVES = ["exchange", "gather", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@pytest.mark.parametrize("name", [*COLLECTIVES, "broadcast"])
def test_a_collective_that_fails_on_one_rank_fails_on_all(ranks, name) -> None:
    found = ranks.run(break_one, 3, timeout=30, name=name, culprit=1)
    for error in found:
        assert f"rank 1 of 3 could not take part in {name}" in error
        assert "injected" in error


def test_ranks_wait_for_one_that_is_late(ranks) -> None:
    found = ranks.run(break_one, 3, timeout=30, name="all_to_all", culprit=2, delay=0.7)
    assert found == [None, None, None]


def test_a_rank_that_left_is_named(ranks) -> None:
    """Its peer showed gloo's "Connection closed by peer", with an address."""
    left, *others = ranks.run(leave_early, 3, timeout=30)
    assert left is None
    for error in others:
        assert "gone: rank 0 of 3" in error
        assert "last commit or checkpoint" in error
        assert "gloo" not in error


def test_a_failure_between_steps_is_heard_in_the_next_one(ranks) -> None:
    """The failed rank raised; its peer waited for it as long as its process lived."""
    mine, theirs = ranks.run(fail_between_steps, 2, timeout=30)
    assert "a step failed earlier (OSError: [Errno 5] injected)" in mine
    assert "rank 0 of 2 failed: OSError: [Errno 5] injected" in theirs


@pytest.mark.parametrize("where", ["reduce_scatter", "exchange", "all_to_all", "all_gather"])
def test_a_killed_rank_is_noticed(tmp_path, where) -> None:
    """In backward, before the step, in the exchange of matrices, and after it."""
    pool = RankPool(3, tmp_path)
    try:
        answers = pool.try_run(kill_one, 3, where=where, timeout=30)
    finally:
        pool.close()
    assert answers[1][0] == "the process died"
    for error, errors in (answers[0], answers[2]):
        assert error is None
        assert "gone" in errors[0]
        assert "last commit or checkpoint" in errors[0]
        assert len(errors) == 2


CASES = [
    # stage, world size, mode, where, Muon, how many operations at least
    pytest.param(2, 2, "ram", "collective", True, 16, id="muon"),
    pytest.param(1, 2, "ram", "collective", False, 999, id="adamw", marks=pytest.mark.slow),
    pytest.param(2, 3, "ram", "collective", True, 999, id="muon-3", marks=pytest.mark.slow),
    pytest.param(2, 2, "pipelined", "file", False, 6, id="files"),
    pytest.param(2, 2, "pipelined", "file", False, 999, id="all-files", marks=pytest.mark.slow),
    pytest.param(2, 2, "partitioned", "file", True, 999, id="files-muon", marks=pytest.mark.slow),
]
SHAPES = [(17, 33), (5,), (120, 130)]
LARGE = [(17, 33), (5,), (700, 1000)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "world_size", "mode", "where", "muon", "most"), CASES)
def test_every_rank_raises_whatever_fails_on_one(
    ranks, tmp_path, stage, world_size, mode, where, muon, most
) -> None:
    settings = {
        "stage": stage,
        "shapes": SHAPES if where == "collective" else LARGE,
        "mode": mode,
        "where": where,
        "muon": muon,
    }
    quiet = ranks.run(
        disturb, world_size, folder=tmp_path / "quiet", number=-1, culprit=0, **settings
    )
    assert all(error is None for error, *_ in quiet)
    operations = quiet[1][1]
    assert len(operations) >= 4
    # A run takes a second where nothing else runs; the soak run takes every operation.
    stride = max(1, len(operations) // most)
    num_raised = 0
    for number in range(0, len(operations), stride):
        culprit = number % world_size
        found = ranks.run(
            disturb,
            world_size,
            timeout=60,
            folder=tmp_path / f"{number}",
            number=number,
            culprit=culprit,
            **settings,
        )
        if where == "file" and not any(error for error, *_ in found):
            # A write that failed once is tried again elsewhere: then nobody notices. How many
            # transfers there are depends on what was read ahead.
            seen = found[culprit][1]
            assert len(seen) <= number or seen[number] == "pwrite"
            assert_same_parameters(found, quiet)
            continue
        num_raised += 1
        for rank, (error, _, again, _) in enumerate(found):
            what = f"{operations[number]} number {number} on rank {culprit}, seen by {rank}"
            assert error is not None, what
            assert again, what
            # Who failed, and how; or, if that rank had left by then, who is gone.
            known = ("injected", f"gone: rank {culprit} of {world_size}")
            assert any(words in error for words in known), f"{what}: {error}"
    assert num_raised
    late = ranks.run(
        disturb,
        world_size,
        folder=tmp_path / "late",
        number=len(operations) // 2,
        culprit=1,
        delay=0.5,
        **settings,
    )
    assert_same_parameters(late, quiet)


def assert_same_parameters(found, quiet):
    """No rank raised, and all have what an undisturbed training gives."""
    for (error, _, _, mine), (*_, wanted) in zip(found, quiet, strict=True):
        assert error is None
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
