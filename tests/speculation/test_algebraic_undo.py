# SPDX-License-Identifier: Apache-2.0
"""undo="algebraic": equal to the bit where nothing is undone, within documented bounds where it is.

The bounds: the design's norm-wise one after a rescale, and that of kernels.adam_rollback after an
undo. Parameters are never stepped early, so an undone step leaves them as they were, to the bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.adam_reference import ulp32
from support.early import Run, batch, check_equal, wait
from swapio.errors import ConfigError
from swapio.optim import Adam, AdamW, GradScaler, Muon, muon_param_groups
from swapio.optim.speculation_steps import EarlyStepper

FORMS = [
    (torch.float32, "param"),
    (torch.float32, "separate"),
    (torch.bfloat16, "split"),
    (torch.bfloat16, "separate"),
]
ALGEBRAIC = {"speculate": "always", "undo": "algebraic"}


def pair(*, train=None, poison=None, **kwargs):
    """A run without early steps, and one that rolls them back, of the same arguments."""
    runs = []
    for how in ({"speculate": False}, ALGEBRAIC):
        run = Run(**how, **kwargs)
        if poison is not None:
            run.poison = poison
        runs.append(run.train(**(train or {})))
    return runs


def clip_late(step, run):
    """Clip every second step when everything was stepped early, by between 0.05 and 0.9."""
    if step % 2:
        norm = float(run.opt.clip_grad_norm_(1e9))
        run.opt.clip_grad_norm_(norm * (0.05, 0.3, 0.9)[step // 2 % 3])


def check_close(mine, theirs, begin):
    """||d - d_ref|| <= 1e-5 ||d_ref|| + 2^-23 ||p|| for what is kept in fp32."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.endswith(":step"):
            assert torch.equal(mine[name], value)
            continue
        start = begin[name].double() if name in begin else torch.zeros(())
        size = torch.linalg.vector_norm(value.double())
        bound = 1e-5 * torch.linalg.vector_norm(value.double() - start) + 2.0**-23 * size
        if value.dtype is not torch.float32:  # one element in a thousand rounds to a neighbour
            bound = bound + 1e-3**0.5 * 2.0**-8 * size
        assert torch.linalg.vector_norm(mine[name].double() - value.double()) <= bound, name


def train_apart(how, dtype, master, sizes=(5000, (70, 90), 33)):
    """Twelve steps with gradients that do not depend on the parameters, clipped after backward."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
    begin = {f"{at}": p.detach().clone() for at, p in enumerate(params)}
    begin |= {f"{name}:master": value.float() for name, value in begin.items()}
    swap = {"master": master, "sub_group_numel": 1 << 12}
    found = {}
    with AdamW(params, lr=1e-2, weight_decay=0.1, swap=swap, max_grad_norm=1e6, **how) as opt:
        run = SimpleNamespace(opt=opt)
        for step in range(12):
            for param in params:
                factor = torch.randn(param.shape, generator=generator).to(dtype)
                (param * factor).sum().backward()
            wait(opt)
            clip_late(step, run)
            opt.step()
        for at, param in enumerate(params):
            found[f"{at}"] = param.detach().clone()
            found |= {f"{at}:{k}": v.clone() for k, v in opt.state_of(param).items()}
        return begin, found, opt.stats()


@pytest.mark.parametrize(("dtype", "master"), FORMS)
def test_equals_the_run_without_where_nothing_clips(dtype, master):
    plain, early = pair(dtype=dtype, swap={"master": master}, max_grad_norm=1e6)
    check_equal(early, plain)
    assert early.stats["speculation_num_kept"] > 12
    assert not early.stats["speculation_num_rescaled"]


@pytest.mark.parametrize(("dtype", "master"), FORMS)
def test_a_clipped_step_is_rescaled_in_one_pass(dtype, master):
    _, plain, _ = train_apart({"gradients": "stream"}, dtype, master)
    begin, early, stats = train_apart(ALGEBRAIC, dtype, master)
    assert stats["speculation_num_rescaled"] >= 6
    assert stats["speculation_num_kept"] == stats["speculation_num_early"]
    assert not stats["speculation_num_far_rescaled"]
    check_close(early, plain, begin)


def test_a_model_that_is_clipped_late_follows_the_run_without():
    begin = {n: p.detach().clone() for n, p in Run(False).model.named_parameters()}
    plain, early = pair(max_grad_norm=1e6, train={"after": clip_late})
    assert early.skipped == plain.skipped
    assert early.stats["speculation_num_rescaled"] >= 6
    check_close(early.found, plain.found, begin)


def test_a_rescale_by_much_is_counted():
    def after(_step, run):
        run.opt.clip_grad_norm_(float(run.opt.clip_grad_norm_(1e9)) / 40)

    _, early = pair(train={"after": after})
    assert (
        early.stats["speculation_num_far_rescaled"] == early.stats["speculation_num_rescaled"] > 0
    )


def near(value, before, after, factor):
    """Whether a value is within adam_rollback's bound of what was before."""
    size = torch.maximum(before.abs(), after.abs()).double().numpy()
    allowed = (1.5 + 1.5 / factor) * ulp32(size)
    return bool((np.abs(value.double().numpy() - before.double().numpy()) <= allowed).all())


@pytest.mark.parametrize(("dtype", "master"), FORMS)
def test_an_undone_step_leaves_parameters_and_is_near_in_state(dtype, master):
    """A look at the state undoes what was stepped early."""
    run = Run(**ALGEBRAIC, dtype=dtype, swap={"master": master}, betas=(0.9, 0.99))
    opt, params = run.opt, dict(run.model.named_parameters())
    with opt:
        for step in range(3):
            run.model(batch(step)).backward()
            wait(opt)
            opt.step()
        before = {n: {k: v.clone() for k, v in opt.state_of(p).items()} for n, p in params.items()}
        weights = {name: p.detach().clone() for name, p in params.items()}
        run.model(batch(3)).backward()
        wait(opt)
        early = opt.stats()["speculation_num_early"]
        undone = {n: {k: v.clone() for k, v in opt.state_of(p).items()} for n, p in params.items()}
        assert opt.stats()["speculation_num_undone"] > 0
        assert early == opt.stats()["speculation_num_early"]
        opt.step()
        moved = 0
        for name, param in params.items():
            after = opt.state_of(param)
            for key, factor in (("exp_avg", 0.9), ("exp_avg_sq", 0.99), ("master", 0.99)):
                if key in after and name != "unused":
                    mine, was = undone[name][key], before[name][key]
                    assert near(mine, was, after[key], factor), (name, key)
                    moved += int((mine != was).sum())
            assert torch.equal(undone[name]["step"], before[name]["step"])
            if master == "split":
                assert torch.equal(undone[name]["master"], before[name]["master"])
        assert moved > 0, "nothing was rolled back"
        assert any(not torch.equal(p, weights[n]) for n, p in params.items())


@pytest.mark.parametrize(("dtype", "master"), FORMS)
def test_a_skipped_step_leaves_every_parameter(dtype, master):
    run = Run(**ALGEBRAIC, dtype=dtype, swap={"master": master}, max_grad_norm=1e6)
    run.poison = 1
    params = list(run.model.parameters())
    with run.opt as opt:
        for step in range(2):
            loss = run.model(batch(step))
            if step:
                loss = loss + (run.model.wide.bias * float("inf")).sum()
                before = [p.detach().clone() for p in params]
            loss.backward()
            wait(opt)
            opt.step()
        assert opt.step_skipped
        assert opt.stats()["speculation_num_undone"] > 0
        assert all(map(torch.equal, params, before))


def test_training_goes_on_after_skipped_steps_and_changed_scales():
    runs = []
    for how in ({"speculate": False}, ALGEBRAIC):
        run = Run(**how, swap={"master": "separate"}, max_grad_norm=1e6)
        run.poison = 6
        runs.append(run.train(scaler=GradScaler("cpu", init_scale=64.0, growth_interval=3)))
    plain, early = runs
    assert early.skipped == plain.skipped
    assert early.skipped[6]
    for name, value in plain.found.items():
        torch.testing.assert_close(early.found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", ["lr", "gradient", "parameter", "betas"])
def test_what_does_not_fit_is_rolled_back_and_stepped_again(change):
    runs = []
    for how in ({"speculate": False}, ALGEBRAIC):
        run = Run(**how, swap={"on_param_change": "resync"})
        with run.opt as opt:
            for step in range(4):
                run.model(batch(step)).backward()
                wait(opt)
                if change == "gradient":  # one more than was expected
                    run.model(batch(step + 9)).backward()
                elif change == "parameter":
                    run.model.wide.weight.data.mul_(1.01)
                elif change == "lr":
                    opt.param_groups[0]["lr"] *= 0.9
                else:
                    opt.param_groups[0]["betas"] = (0.8, 0.95)
                opt.step()
                opt.zero_grad()
            runs.append([p.detach().clone() for p in run.model.parameters()])
            stats = opt.stats()
    assert stats["speculation_num_redone"] + stats["speculation_num_undone"] > 0
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("why", ["l2", "beta1", "beta2", "moments", "muon"])
def test_what_cannot_be_rolled_back_has_an_exact_image(why):
    """L2 decay and zero betas forget what was before; bf16 moments round it away."""
    kwargs = {"swap": {"host_memory": "64MiB"}}
    if why == "l2":
        kwargs["cls"] = Adam
    elif why == "moments":
        kwargs["swap"] |= {"state_dtype": "bfloat16", "master": "separate"}
    elif why == "muon":
        kwargs |= {"cls": Muon, "make": lambda model: muon_param_groups(model, show=False)}

    def before(_step, run):
        for group in run.opt.param_groups:
            if why.startswith("beta"):
                group["betas"] = (0.0, 0.99) if why == "beta1" else (0.9, 0.0)

    plain, early = pair(**kwargs, max_grad_norm=1e6, train={"before": before})
    check_equal(early, plain)
    assert early.stats["speculation_num_kept"] > 0


def test_an_error_half_way_through_an_early_step_is_rolled_back(monkeypatch):
    """Chunks of 2^24 elements in RAM: the second one fails after the first was stepped in place."""
    original, calls = EarlyStepper._step_chunk, []

    def step_chunk(self, early, *args):
        calls.append(early.packed.key)
        done = original(self, early, *args)
        if len(calls) == 2:
            raise ArithmeticError("broken on purpose")
        return done

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (300, 200)]
    weights = [p.detach().clone() for p in params]
    swap = {"sub_group_numel": 256, "cpu_threads": 1}
    with AdamW(params, lr=0.1, betas=(0.9, 0.99), swap=swap, **ALGEBRAIC) as opt:
        monkeypatch.setattr(EarlyStepper, "_step_chunk", step_chunk)
        (params[0].sum() + params[1].sum()).backward()
        wait(opt)
        with pytest.raises(ArithmeticError, match="on purpose"):
            opt.step()
        for param, was in zip(params, weights, strict=True):
            assert torch.equal(param, was)
            state = opt.state_of(param)
            # m and v were 0: what is left of 0.1 and 0.01 is rounding.
            assert state["exp_avg"].abs().max() <= 3 * 2.0**-27
            assert state["exp_avg_sq"].abs().max() <= 3 * 2.0**-30
        opt.step()
        assert not torch.equal(params[0], weights[0])


def test_images_are_smaller():
    sizes = {}
    for dtype, master in FORMS:
        for undo in ("exact", "algebraic"):
            run = Run("always", dtype=dtype, undo=undo, swap={"master": master})
            sizes[dtype, master, undo] = run.opt._early._stepper._images.nbytes
            run.opt.close()
    for dtype, master in FORMS:
        exact, algebraic = (sizes[dtype, master, undo] for undo in ("exact", "algebraic"))
        assert algebraic <= 0.5 * exact, (dtype, master)


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match="neither 'exact' nor 'algebraic'"):
        AdamW([torch.nn.Parameter(torch.zeros(3))], undo="approximate")
