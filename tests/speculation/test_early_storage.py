# SPDX-License-Identifier: Apache-2.0
"""Early steps with state on storage: waiting in RAM, written to a spare slot, or not taken."""

from __future__ import annotations

import pytest
import torch

from support.early import Run, batch, check_equal, odd_limit, wait
from support.faulty import FaultyStore
from swapio.errors import SwapioError
from swapio.optim import AdamW, GradScaler
from swapio.optim.speculation_steps import EarlyStepper

STORED = {"min_swap_bytes": 0, "host_memory": "12MiB", "sub_group_numel": 1 << 16}
WIDE = 384  # of a model whose state does not fit into that beside its gradients
KINDS = {
    "ram": {},  # everything waits in RAM
    "step": {"durability": "step"},
    "threads": {"engine": "threads", "direct": "off"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clipped", [False, True])
def test_equals_the_run_without(tmp_path, kind, clipped, accumulation):
    before = odd_limit if clipped else None
    runs = []
    for name in (False, "always"):
        swap = {"path": tmp_path / str(name), **STORED, **KINDS[kind]}
        run = Run(name, swap=swap, width=WIDE)
        assert run.num_stored() > 0
        runs.append(run.train(accumulation=accumulation, before=before))
    if not clipped:
        runs[1].norms = runs[0].norms
    check_equal(runs[1], runs[0])
    assert runs[1].stats["speculation_num_kept"] > 12
    if clipped:
        in_ram = Run(False, width=WIDE, swap={"sub_group_numel": 1 << 16})
        check_equal(runs[1], in_ram.train(accumulation=accumulation, before=before))


@pytest.mark.parametrize("master", ["split", "separate"])
@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_masters_skips_and_commits(tmp_path, master, durability):
    runs = []
    for name in (False, "always"):
        swap = {"path": tmp_path / str(name), **STORED, "master": master, "durability": durability}
        run = Run(name, dtype=torch.bfloat16, max_grad_norm=1e6, swap=swap, width=WIDE)
        assert run.num_stored() > 0
        run.poison = 4
        runs.append(run.train())
    check_equal(runs[1], runs[0])
    assert runs[1].stats["speculation_num_kept"] > 12


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_fp16_with_a_scaler_whose_scale_changes(tmp_path, durability):
    runs = []
    for name in (False, "always"):
        swap = {"path": tmp_path / str(name), **STORED, "durability": durability}
        run = Run(name, dtype=torch.float16, max_grad_norm=1e6, swap=swap, width=WIDE)
        assert run.num_stored() > 0
        run.poison = 6
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3)
        runs.append(run.train(scaler=scaler))
        assert scaler.get_scale() != 64.0
    check_equal(runs[1], runs[0])
    assert runs[1].stats["speculation_num_kept"] > 0


@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.0)])
def test_betas_with_zeros(tmp_path, betas):
    def before(_step, run):
        run.opt.max_grad_norm = 1e6
        for group in run.opt.param_groups:
            group["betas"] = betas

    runs = []
    for name in (False, "always"):
        swap = {"path": tmp_path / str(name), **STORED}
        run = Run(name, swap=swap, width=WIDE)
        assert run.num_stored() > 0
        runs.append(run.train(before=before))
    check_equal(runs[1], runs[0])
    assert runs[1].stats["speculation_num_kept"] > 0


def open_large(speculate, path, *, host_memory="28MiB", undo="exact", **more):
    """Sub-groups of several chunks, more of them than the buffers hold."""
    swap = {
        "path": path,
        "min_swap_bytes": 0,
        "host_memory": host_memory,
        "sub_group_numel": 1 << 19,
        "chunk_numel": 1 << 18,
        **more,
    }
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (1_500_000, 700_001)]
    opt = AdamW(params, lr=1e-2, gradients="stream", speculate=speculate, undo=undo, swap=swap)
    return opt, params, generator


def go_back(params, generator):
    sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()


def large(speculate, path, *, steps=5, redone=(), **more):
    opt, params, generator = open_large(speculate, path, **more)
    with opt:
        for step in range(steps):
            opt.max_grad_norm = 1e9
            go_back(params, generator)
            wait(opt)
            if step in redone:
                opt.param_groups[0]["lr"] *= 0.7
            opt.step()
        found = [p.detach().clone() for p in params]
        found += [value for p in params for value in opt.state_of(p).values()]
        numbers = opt.stats()
    return found, numbers


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_undoing_on_storage_is_always_exact(tmp_path, durability):
    """What is on storage is the state before: undo="algebraic" has nothing to save there."""
    # With this budget no sub-group is kept in RAM: the test would see rounding otherwise.
    more = {"redone": (1, 2, 4), "durability": durability, "host_memory": "26MiB"}
    plain, _ = large(False, tmp_path / "a", **more)
    early, numbers = large("always", tmp_path / "b", undo="algebraic", **more)
    assert all(map(torch.equal, early, plain))
    assert numbers["speculation_num_redone"] > 0
    assert numbers["speculation_num_kept"] > 0


@pytest.mark.parametrize("redone", [(), (1, 2, 4)])
@pytest.mark.parametrize(
    "more",
    [{}, {"durability": "step"}, {"spare_slots": 0}, {"host_memory": "26MiB"}],
)
def test_what_does_not_wait_in_ram_goes_to_a_spare_slot(tmp_path, more, redone):
    plain, _ = large(False, tmp_path / "a", redone=redone, **more)
    early, numbers = large("always", tmp_path / "b", redone=redone, **more)
    for mine, theirs in zip(early, plain, strict=True):
        assert torch.equal(mine, theirs)
    assert numbers["speculation_num_early"] > 0
    assert (numbers["speculation_num_redone"] > 0) == bool(redone)


def test_a_failed_read_of_an_early_step_surfaces_in_step(tmp_path, monkeypatch):
    opt, params, generator = open_large("always", tmp_path)
    go_back(params, generator)
    wait(opt)
    opt.step()
    opt.synchronize()
    swapper = opt._runtime.swapper
    monkeypatch.setattr(swapper, "_store", FaultyStore(swapper._store, seed=1, eio=1.0))
    go_back(params, generator)
    wait(opt)
    with pytest.raises(SwapioError, match=r"EIO|failed"):
        opt.step()
    with pytest.raises(SwapioError, match="failed earlier"):
        opt.step()
    monkeypatch.undo()
    opt.close()


def test_an_exception_within_an_early_step_takes_it_back(tmp_path, monkeypatch):
    original = EarlyStepper._step_chunk
    broken = {"now": False}

    def step_chunk(self, early, *args):
        done = original(self, early, *args)
        if broken["now"]:
            raise ArithmeticError("broken on purpose, after the bytes were changed")
        return done

    monkeypatch.setattr(EarlyStepper, "_step_chunk", step_chunk)
    results = []
    for speculate in (False, "always"):
        run = Run(speculate, swap={"path": tmp_path / str(speculate), **STORED}, width=WIDE)
        for step in range(3):
            broken["now"] = step == 1 and bool(speculate)
            run.model(batch(step)).backward()
            wait(run.opt)
            if broken["now"]:
                with pytest.raises(ArithmeticError, match="on purpose"):
                    run.opt.step()
                broken["now"] = False
            run.opt.step()
        results.append([p.detach().clone() for p in run.model.parameters()])
        run.opt.close()
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("host_memory", ["26MiB", "28MiB"])
def test_a_chunk_that_an_early_step_left_half_changed_is_read_again(
    tmp_path, monkeypatch, host_memory
):
    original, broken = EarlyStepper._step_chunk, []

    def step_chunk(self, early, *args):
        done = original(self, early, *args)
        if broken and not early.is_resident and not broken.pop():
            raise ArithmeticError("broken on purpose, after the bytes were changed")
        return done

    monkeypatch.setattr(EarlyStepper, "_step_chunk", step_chunk)
    results = []
    for speculate in (False, "always"):
        where = tmp_path / str(speculate)
        opt, params, generator = open_large(speculate, where, host_memory=host_memory)
        with opt:
            for step in range(3):
                # The second chunk of the first sub-group that is stepped.
                broken[:] = [False, True] if step == 1 and speculate else []
                go_back(params, generator)
                wait(opt)
                if step == 1 and speculate:
                    with pytest.raises(ArithmeticError, match="on purpose"):
                        opt.step()
                opt.step()
            results.append([p.detach().clone() for p in params])
            results[-1] += [value for p in params for value in opt.state_of(p).values()]
    assert all(map(torch.equal, *results))


def test_close_and_looking_in_mid_flight(tmp_path):
    run = Run("always", swap={"path": tmp_path, **STORED}, width=WIDE)
    for step in range(2):
        run.model(batch(step)).backward()
        wait(run.opt)
        run.opt.step()
    weight = run.model.wide.weight
    before = run.opt.state_of(weight)
    run.model(batch(2)).backward()
    wait(run.opt)
    seen = run.opt.state_of(weight)
    for name, value in before.items():
        assert torch.equal(seen[name], value), name
    run.model(batch(3)).backward()
    run.opt.close()


def test_recovery_forgets_early_steps(tmp_path, caplog):
    run = Run("always", swap={"path": tmp_path, **STORED, "durability": "step"}, width=WIDE)
    for step in range(3):
        run.model(batch(step)).backward()
        wait(run.opt)
        run.opt.step()
    run.opt.synchronize()
    expected = [p.detach().clone() for n, p in run.model.named_parameters() if n != "unused"]
    run.model(batch(3)).backward()
    wait(run.opt)
    assert run.opt.recover() == 3
    assert "opening storage" not in caplog.text  # nothing was left of the old swapper's memory
    found = [p.detach() for n, p in run.model.named_parameters() if n != "unused"]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    run.opt.step()
    run.model(batch(4)).backward()
    run.opt.step()
    run.opt.close()
