# SPDX-License-Identifier: Apache-2.0
"""Several ranks: one checkpoint of all, resume on other world sizes, commits that all have.

Each rank is a process of its own, in a gloo process group. Updates are elementwise, so whatever
the world size the result must equal one process's uninterrupted run, bit for bit.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from support.crashes import last_number
from support.shards import assert_parts_same
from support.trainer import ONE_AT_A_TIME, assert_same, reference
from swapio.aio import Engine
from swapio.checkpoint import find_checkpoint, list_checkpoints, verify_checkpoint
from swapio.errors import CheckpointError
from swapio.optim.agreeing import CommonCommits, _Offer
from swapio.store import CommitRecord

# A parameter with fewer elements than ranks, one cut in the middle of a row, an empty one.
SIZES = [(2,), (300, 1000), (1_500_001,), (64, 64), (0,)]
SWAP = {**ONE_AT_A_TIME, "take_turns": "off"}


def job_of(folder, ranks, dtype="float32", durability="checkpoint", **more):
    swap = {"path": str(folder / f"swap-{ranks}"), "durability": durability, **SWAP}
    job = {"swap": swap, "sizes": SIZES, "dtype": dtype, "steps": 2, **more}
    if ranks > 1:
        job["ranks"] = ranks
    return job


def check_dump(job, steps, form):
    expected = reference(SIZES, job["dtype"], steps, form)
    if "ranks" not in job:
        assert_same(torch.load(job["dump"]), expected)
        return
    dumps = [torch.load(f"{job['dump']}.{r}", weights_only=False) for r in range(job["ranks"])]
    assert_parts_same(dumps, SIZES, expected)


FORMS = {"float32": "param", "bfloat16": "split"}
CASES = [(1, 2, "rows"), (2, 3, "flat"), (3, 1, "columns"), (3, 3, "flat")]
ALL = list(itertools.product((1, 2, 3), (1, 2, 3), ("flat", "rows", "columns")))


def resume_elsewhere(crashes, tmp_path, dtype, saved, loaded, cut):
    """Saved by some ranks, loaded by others, then two more steps."""
    folder, dump = tmp_path / "c", tmp_path / "end.pt"
    more = {"save_every": 2, "save": str(folder), "cut": cut}
    crashes.run_ranks(job_of(tmp_path / "a", saved, dtype, **more))
    path, manifest = find_checkpoint(folder)
    assert manifest.world_size == saved
    with Engine() as engine:
        assert verify_checkpoint(path, manifest, engine) == []
    others = {"flat": "rows", "rows": "columns", "columns": "flat"}
    more = {"load": str(folder), "cut": others[cut], "dump": str(dump), "steps": 4}
    job = job_of(tmp_path / "b", loaded, dtype, **more)
    if loaded == 2:
        job["swap"] = {"path": None, "cpu_threads": 1}
    crashes.run_ranks(job)
    check_dump(job, 4, FORMS[dtype])


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize(("saved", "loaded", "cut"), CASES)
def test_other_world_sizes_go_on_from_a_checkpoint(crashes, tmp_path, dtype, saved, loaded, cut):
    resume_elsewhere(crashes, tmp_path, dtype, saved, loaded, cut)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize(("saved", "loaded", "cut"), ALL)
def test_every_pair_of_world_sizes(crashes, tmp_path, dtype, saved, loaded, cut):
    resume_elsewhere(crashes, tmp_path, dtype, saved, loaded, cut)


def test_a_rank_reads_its_own_part(crashes, tmp_path):
    """Growing the world must not read the whole state on every rank."""
    folder, size = tmp_path / "c", 3_000_001
    common = {"sizes": [(size,)], "steps": 1}
    crashes.run_ranks(job_of(tmp_path / "a", 2, save_every=1, save=str(folder), **common))
    job = job_of(tmp_path / "b", 3, load=str(folder), **common)
    _, lines = crashes.run_ranks(job)
    read = [last_number(told, "loaded") for told in lines]
    # Records of 1 MiB are read whole, at both ends of each rank's part of three records.
    assert 12 * size <= sum(read) <= 12 * size + 3 * 6 * (1 << 20)
    assert max(read) <= 4 * size + 3 * 2 * (1 << 20)


def test_ranks_that_see_different_folders_are_told_so(crashes, tmp_path):
    job = job_of(tmp_path / "a", 2, save_every=2, save="c", own_folder=True)
    _, lines = crashes.run_ranks(job, may_fail=True)
    for told in lines:
        assert "one folder" in told[-1]
        assert last_number(told, "saving") == 2
        assert last_number(told, "saved") == 0
    assert not list(tmp_path.rglob("c/*/manifest.json"))
    assert not list(tmp_path.rglob("data-*"))


@pytest.mark.parametrize("phase", ["hold", "write", "copy", "publish"])
def test_a_failing_rank_leaves_no_manifest_and_all_raise(crashes, tmp_path, phase):
    folder = tmp_path / "c"
    job = job_of(tmp_path / "a", 3, save_every=1, save=str(folder), steps=3, keep_going=True)
    job["fail_save"] = {"rank": 0 if phase == "publish" else 1, "step": 2, "phase": phase}
    _, lines = crashes.run_ranks(job)
    for told in lines:
        assert any(line.startswith("failed 2") for line in told), told
    assert sorted(m.step for _, m in list_checkpoints(folder)) == [1, 3]
    for path, manifest in list_checkpoints(folder):
        assert [p.name for p in path.glob("data-*")] == [manifest.data]
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-3"}


def resume_after_kill(crashes, job, number, kill_rank):
    """Kill one rank at an operation of a step, and the others with it; all resume together."""
    killed, lines = crashes.run_ranks({**job, "kill": ["step", number], "kill_rank": kill_rank})
    done = max(last_number(told, "step") for told in lines)
    steps = done + 2
    again = {**job, "resume": True, "steps": steps, "delays": [0, 0, 0]}
    _, lines = crashes.run_ranks(again)
    begun = {last_number(told, "ready") for told in lines}
    assert len(begun) == 1
    # Nobody begins a step before all have committed the last but one.
    (first,) = begun
    assert max(0, done - 2) <= first <= done + 1
    assert any(killed) or first == done
    check_dump(again, steps, FORMS[job["dtype"]])


def kill_ranks(crashes, tmp_path, count, durability, seed):
    generator = random.Random(seed)
    job = job_of(tmp_path / "count", 3, durability=durability, steps=4, dump=str(tmp_path / "end"))
    _, lines = crashes.run_ranks({**job, "kill": ["step", -1]})
    total = last_number(lines[0], "operations")
    assert total > 10
    for turn in range(count):
        folder = tmp_path / str(turn)
        dtype = generator.choice(list(FORMS))
        job = job_of(folder, 3, dtype, durability, steps=4, dump=str(tmp_path / "end"))
        slow = generator.randrange(3)
        job["delays"] = [0.15 * (rank == slow) for rank in range(3)]
        kill_rank = generator.choice([rank for rank in range(3) if rank != slow])
        resume_after_kill(crashes, job, generator.randrange(total), kill_rank)


def test_kill_one_rank_while_another_is_late(crashes, tmp_path):
    kill_ranks(crashes, tmp_path, 4, "step", 5)


@pytest.mark.slow
def test_kill_one_rank_many_times(crashes, tmp_path):
    kill_ranks(crashes, tmp_path, 40, "step", 6)
    (tmp_path / "power").mkdir()
    kill_ranks(crashes, tmp_path / "power", 10, "power", 7)


def kill_saving_ranks(crashes, tmp_path, count, seed):
    """After a kill of one rank within a save every checkpoint is whole, and the latest loads."""
    generator = random.Random(seed)

    def job_in(folder):
        more = {"save_every": 1, "save": str(folder / "c"), "keep_last": 2, "steps": 3}
        return job_of(folder, 3, "bfloat16", **more, dump=str(folder / "end"))

    _, lines = crashes.run_ranks({**job_in(tmp_path / "count"), "kill": ["save", -1]})
    total = last_number(lines[0], "operations")
    assert total > 10
    for turn in range(count):
        folder = tmp_path / str(turn)
        job, rank = job_in(folder), generator.randrange(3)
        number = generator.randrange(total)
        _, lines = crashes.run_ranks({**job, "kill": ["save", number], "kill_rank": rank})
        saved = max(last_number(told, "saved") for told in lines)
        found = list_checkpoints(folder / "c")
        assert max((manifest.step for _, manifest in found), default=0) >= saved
        with Engine() as engine:
            for path, manifest in found:
                assert verify_checkpoint(path, manifest, engine) == [], (number, rank)
        again = {**job, "steps": 4, **({"load": str(folder / "c")} if found else {})}
        crashes.run_ranks(again)
        check_dump(again, 4, "split")
        for path, manifest in list_checkpoints(folder / "c"):
            assert [p.name for p in path.glob("data-*")] == [manifest.data]


def test_kill_one_rank_within_saves(crashes, tmp_path):
    kill_saving_ranks(crashes, tmp_path, 3, 8)


@pytest.mark.slow
def test_kill_one_rank_within_many_saves(crashes, tmp_path):
    kill_saving_ranks(crashes, tmp_path, 40, 9)


def test_commits_are_taken_up_by_the_same_ranks_only(crashes, tmp_path):
    job = job_of(tmp_path, 2, durability="step", steps=4)
    crashes.run_ranks(job)
    # One rank's folder is gone.
    lost = next((tmp_path / "swap-2").glob("*rank1*"))
    lost.rename(tmp_path / "lost")
    _, lines = crashes.run_ranks({**job, "resume": True}, may_fail=True)
    assert "no committed step" in lines[1][-1]
    assert "rank 1 could not open" in lines[0][-1] or "in common" in lines[0][-1]
    (tmp_path / "lost").rename(lost)
    _, lines = crashes.run_ranks({**job, "resume": True, "steps": 5})
    assert [last_number(told, "ready") for told in lines] == [4, 4]
    # Three ranks cannot resume what two committed.
    job3 = {**job, "ranks": 3, "resume": True}
    _, lines = crashes.run_ranks(job3, may_fail=True)
    for told in lines:
        assert "CheckpointError" in told[-1], json.dumps(told)


class Others:
    """An agreement in which the other ranks' first answers are given."""

    def __init__(self, rank, offers):
        self.rank, self.world_size, self._offers = rank, len(offers), offers

    def gather(self, value):
        return [value if rank == self.rank else self._offers[rank] for rank in range(3)]


def record(session, number):
    return CommitRecord(number, b"", {"session": session, "commit": number}, ())


@pytest.mark.parametrize(
    ("commits", "chosen"),
    [
        # Killed in the second step: rank 0 had not committed the first one yet.
        ([[], [("a", 1)], [("a", 2), ("a", 1)]], None),
        ([[("a", 1)], [("a", 1)], [("a", 2), ("a", 1)]], 1),
        # One step ahead, and the files hold three.
        ([[("a", 7), ("a", 6), ("a", 5)], [("a", 6), ("a", 5)], [("a", 7), ("a", 6)]], 6),
        # The same number in two sessions is not the same commit.
        ([[("b", 6), ("a", 5)], [("a", 6), ("a", 5)], [("b", 6), ("a", 5)]], 5),
        ([[], [("a", 57)], [("a", 57)]], "no committed step in common"),
        ([[("a", 1)], [("b", 1)], [("b", 1)]], "no committed step in common"),
    ],
)
def test_the_newest_commit_that_all_have_is_chosen(commits, chosen):
    offers = [_Offer(None, tuple((s, n, n) for s, n in mine)) for mine in commits]
    for rank, mine in enumerate(commits):
        common = CommonCommits(Others(rank, offers))
        if not mine:
            continue
        found = [record(*which) for which in mine]
        if isinstance(chosen, str):
            with pytest.raises(CheckpointError, match=chosen):
                common.choose(found)
        else:
            taken = common.choose(found)
            assert (None if taken is None else taken.step) == chosen


def test_a_run_that_no_rank_can_take_up_starts_anew(crashes, tmp_path):
    """As above, through real storage: rank 0 has no commit, the others have the first."""
    job = job_of(tmp_path, 3, durability="step", steps=1)
    crashes.run_ranks(job)
    for path in (tmp_path / "swap-3" / "swapio-rank0").glob("commit-*"):
        path.unlink()
    more = {"resume": True, "steps": 3, "dump": str(tmp_path / "end")}
    _, lines = crashes.run_ranks({**job, **more})
    assert {last_number(told, "ready") for told in lines} == {0}
    check_dump({**job, **more}, 3, "param")
