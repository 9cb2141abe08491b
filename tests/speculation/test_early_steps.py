# SPDX-License-Identifier: Apache-2.0
"""Early steps: what they assume may turn out false in every way, and no bit may tell."""

from __future__ import annotations

import sys
import threading
import warnings

import pytest
import torch

from support.early import SMALL, Run, batch, check_equal, odd_limit, wait
from swapio.errors import ConfigError, SwapStateError
from swapio.optim import AdamW, GradScaler, Muon, kernels, muon_param_groups
from swapio.optim.speculation_steps import EarlyStepper


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_run_without(dtype, clipped, accumulation):
    before = odd_limit if clipped else None
    kwargs = {"accumulation": accumulation, "before": before}
    plain = Run(False, dtype=dtype).train(**kwargs)
    early = Run("always", dtype=dtype).train(**kwargs)
    # Without clipping the plain run has no need of a norm.
    early.norms = plain.norms if not clipped else early.norms
    check_equal(early, plain)
    assert early.stats["speculation_num_kept"] > 12
    if accumulation == 4:  # learnt in the first step, not announced
        assert early.stats["speculation_num_undone"] > 0


@pytest.mark.parametrize("master", ["split", "separate", "none"])
def test_every_form_of_master(master):
    kwargs = {"dtype": torch.bfloat16, "swap": {"master": master}, "max_grad_norm": 0.3}
    check_equal(Run("always", **kwargs).train(), Run(False, **kwargs).train())


@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_betas_with_zeros(betas, limit):
    def before(_step, run):
        run.opt.max_grad_norm = limit
        for group in run.opt.param_groups:
            group["betas"] = betas

    check_equal(Run("always").train(before=before), Run(False).train(before=before))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_with_inf_in_one_parameter_changes_nothing(accumulation):
    runs = []
    for speculate in (False, "always"):
        run = Run(speculate, max_grad_norm=1e6)
        run.poison = 5
        runs.append(run.train(accumulation=accumulation))
    assert runs[0].skipped.index(True) == 5
    check_equal(runs[1], runs[0])


def test_fp16_with_a_scaler_whose_scale_changes():
    runs = []
    for speculate in (False, "always"):
        run = Run(speculate, dtype=torch.float16, max_grad_norm=1e6)
        run.poison = 6
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3)
        runs.append(run.train(scaler=scaler))
        run.scale = scaler.get_scale()
        assert run.scale == float(scaler._scale)
    check_equal(runs[1], runs[0])
    assert runs[1].scale == runs[0].scale != 64.0
    assert runs[1].stats["speculation_num_kept"] > 0


def test_a_scale_that_is_set_between_backward_and_step():
    results = []
    for speculate in (False, "always"):
        run = Run(speculate)
        for step in range(3):
            run.opt.expect_loss_scale(lambda: 2.0)
            (run.model(batch(step)) * 4.0).backward()
            wait(run.opt)
            run.opt.set_loss_scale(4.0)
            run.opt.step()
        run.opt.close()
        results.append([p.detach().clone() for p in run.model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "betas"])
def test_a_hyperparameter_that_changes_after_backward(key):
    """A scheduler that is stepped between backward and step()."""
    value = {"lr": 0.5, "eps": 1e-3, "weight_decay": 0.7, "betas": (0.5, 0.6)}[key]
    results = []
    for speculate in (False, "always"):
        run = Run(speculate)
        for step in range(3):
            run.model(batch(step)).backward()
            wait(run.opt)
            run.opt.param_groups[0][key] = value
            run.opt.step()
        stats = run.opt.stats()
        run.opt.close()
        results.append([p.detach().clone() for p in run.model.parameters()])
    assert stats["speculation_num_redone"] > 0
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_tied_weights_under_checkpointing_see_no_early_weight(use_reentrant):
    """The embedding is also the head: its gradient comes in parts, or is still read by backward."""
    kwargs = {"use_reentrant": use_reentrant}
    plain = Run(False, max_grad_norm=1e6).train(**kwargs)
    early = Run("always", max_grad_norm=1e6).train(**kwargs)
    check_equal(early, plain)  # the norms are those of equal gradients


@pytest.mark.parametrize("look", ["state_of", "state_dict", "save", "describe", "synchronize"])
def test_who_looks_between_backward_and_step_sees_the_state_before(tmp_path, look):
    run = Run("always")
    weight = run.model.wide.weight
    run.model(batch(0)).backward()
    run.opt.step()
    before = {k: v.clone() for k, v in run.opt.state_of(weight).items()}
    value = weight.detach().clone()
    run.model(batch(1)).backward()
    wait(run.opt)
    seen = {
        "state_of": lambda: run.opt.state_of(weight),
        "state_dict": lambda: run.opt.state_dict()["state"][1],
        "save": lambda: run.opt.save(tmp_path).result(),
    }.get(look, getattr(run.opt, look))()
    assert torch.equal(weight, value)
    if isinstance(seen, dict) and look == "state_of":
        for name, kept in before.items():
            assert torch.equal(seen[name], kept), name
    run.opt.step()
    run.opt.close()
    plain = Run(False)
    for step in range(2):
        plain.model(batch(step)).backward()
        plain.opt.step()
    plain.opt.close()
    for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_zeroed_gradients_take_their_early_steps_with_them():
    results = []
    for speculate in (False, "always"):
        run = Run(speculate)
        for step in range(4):
            run.model(batch(step)).backward()
            wait(run.opt)
            run.opt.zero_grad(set_to_none=step % 2 == 0)
            if step % 2 == 0:
                run.opt.step()
            run.model(batch(step + 40)).backward()
            run.opt.step()
        run.opt.close()
        results.append([p.detach().clone() for p in run.model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_parameter_that_somebody_changes_is_resynced():
    results = []
    for speculate in (False, "always"):
        run = Run(speculate, dtype=torch.bfloat16)
        run.model(batch(0)).backward()
        run.opt.step()
        run.model.wide.weight.data.mul_(0.5)
        run.model(batch(1)).backward()
        wait(run.opt)
        with pytest.warns(UserWarning, match="wide.weight"):
            run.opt.step()
        run.opt.close()
        results.append([p.detach().clone() for p in run.model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_parameter_that_changes_between_backward_and_step(dtype, through_data):
    """Such as a weight that is clamped then: what was stepped early started from another value."""
    results = []
    for speculate in (False, "always"):
        run = Run(speculate, dtype=dtype)
        for step in range(3):
            run.model(batch(step)).backward()
            wait(run.opt)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                weight = run.model.wide.weight
                (weight.data if through_data else weight).mul_(0.9)
                run.opt.step()
        run.opt.close()
        results.append([p.detach().clone() for p in run.model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_that_is_refused_gives_images_back():
    run = Run("always", dtype=torch.bfloat16, swap={"on_param_change": "error"})
    for step in range(2):
        run.model(batch(step)).backward()
        wait(run.opt)
        run.opt.step()
    kept = run.opt.stats()["speculation_num_kept"]
    run.model(batch(2)).backward()
    wait(run.opt)
    run.model.wide.weight.data.mul_(0.5)
    with pytest.raises(SwapStateError, match=r"wide\.weight was changed"):
        run.opt.step()
    run.model.wide.weight.data.mul_(2.0)
    run.opt.step()
    run.model(batch(3)).backward()
    wait(run.opt)
    run.opt.step()
    stats = run.opt.stats()
    assert stats["speculation_num_kept"] > kept
    assert stats["speculation_num_without_memory"] == 0
    run.opt.close()


def test_an_exception_in_an_early_step_surfaces_in_step(monkeypatch):
    run = Run("always")
    original = EarlyStepper.take

    def broken(self, early):
        if early.packed.numel > 4000 and step == 1:
            raise ArithmeticError("broken on purpose")
        return original(self, early)

    monkeypatch.setattr(EarlyStepper, "take", broken)
    for step in range(3):
        run.model(batch(step)).backward()
        if step == 1:
            before = [p.detach().clone() for p in run.model.parameters()]
            wait(run.opt)
            with pytest.raises(ArithmeticError, match="on purpose"):
                run.opt.step()
            for mine, kept in zip(run.model.parameters(), before, strict=True):
                assert torch.equal(mine, kept)
        run.opt.step()  # again: the gradients are still there
    run.opt.close()
    plain = Run(False)
    for step in range(3):
        plain.model(batch(step)).backward()
        plain.opt.step()
    plain.opt.close()
    for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_error_of_an_early_step_that_is_dropped_surfaces_in_step(monkeypatch):
    """Not in backward, which would lose the gradient that came after it."""
    runs = []
    for speculate in (False, "always"):
        run = Run(speculate)
        for micro in range(2):
            if micro:
                wait(run.opt)
            with monkeypatch.context() as patch:
                patch.setattr(EarlyStepper, "take", lambda *_: 1 // 0)
                run.model(batch(micro)).backward()
                wait(run.opt)
        if speculate:
            with pytest.raises(ZeroDivisionError):
                run.opt.step()
        run.opt.step()
        run.opt.close()
        runs.append([p.detach().clone() for p in run.model.parameters()])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_the_switch_interval_is_as_before_when_all_have_stepped(ends):
    """Two optimizers, as of a generator and its critic, whose backward passes overlap."""
    usual = sys.getswitchinterval()
    runs = [Run("always") for _ in range(2)]
    for run in runs:
        run.model(batch(0)).backward()
        assert sys.getswitchinterval() < usual
    for left, at in zip((1, 0), ends, strict=True):
        runs[at].opt.step()
        assert (sys.getswitchinterval() < usual) == bool(left)
    run = Run("always")
    run.model(batch(0)).backward()
    run.opt.close()
    assert sys.getswitchinterval() == pytest.approx(usual)
    for run in runs:
        run.opt.close()


def test_close_in_mid_flight_leaves_no_thread_and_no_hook():
    run = Run("always")
    before = [p.detach().clone() for p in run.model.parameters()]
    run.model(batch(0)).backward()
    run.opt.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("swapio-early")]
    for mine, kept in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(mine, kept)
        assert mine.grad is None
    torch.optim.SGD(run.model.parameters(), lr=0.1).step()


def test_muon_groups_are_stepped_late():
    def make(model):
        return muon_param_groups(model)

    kwargs = {"cls": Muon, "make": make, "max_grad_norm": 1e6}
    early = Run("always", **kwargs).train()
    check_equal(early, Run(False, **kwargs).train())
    assert early.stats["speculation_num_kept"] > 0


def test_a_budget_limits_what_is_stepped_early():
    kwargs = {"swap": {"host_memory": "1MiB"}, "max_grad_norm": 1e6}
    early = Run("always", **kwargs).train()
    check_equal(early, Run(False, **kwargs).train())
    assert early.stats["speculation_num_without_memory"] > 0


def test_a_sweep_of_steps_with_growing_models():
    results = []
    for speculate in (False, "always"):
        run = Run(speculate)
        more = torch.nn.Parameter(torch.ones(700))
        for step in range(4):
            if step == 2:
                run.opt.add_param_group({"params": [("more", more)]})
            (run.model(batch(step)) + more.square().sum()).backward()
            run.opt.step()
            more.grad = None
        run.opt.close()
        results.append([p.detach().clone() for p in [*run.model.parameters(), more]])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_arguments():
    param = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match="speculate='sometimes'"):
        AdamW([param], speculate="sometimes")
    with pytest.raises(ConfigError, match="undo='hope'"):
        AdamW([param], undo="hope")
    with pytest.raises(ConfigError, match=r"ratio=1\.5"):
        AdamW([param], ratio=1.5)
    with AdamW([param], speculate="always") as opt:
        assert (opt.gradients, opt.nonfinite) == ("stream", "skip")
    assert kernels.num_threads() >= 1


def test_a_profiler_sees_what_happens():
    run = Run("always", max_grad_norm=1e6)
    with torch.profiler.profile() as profile:
        run.model(batch(0)).backward()
        wait(run.opt)
        run.opt.step()
    run.opt.close()
    names = {event.key for event in profile.key_averages()}
    for name in ("take gradient", "wait for gradients", "decide", "keep early steps"):
        assert f"swapio: {name}" in names
    assert run.opt.stats()["speculation_exposed_seconds"] > 0


def test_a_gradient_in_several_sub_groups_counts_once_against_the_limit():
    param = torch.nn.Parameter(torch.zeros(1 << 14))
    with AdamW([param], speculate="always", max_grad_norm=1.05 * 2**7, swap=SMALL) as opt:
        param.sum().backward()
        wait(opt)
        opt.step()
        assert opt.grad_norm == 2**7
        assert opt.stats()["speculation_num_kept"] == 4
