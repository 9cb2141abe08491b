# SPDX-License-Identifier: Apache-2.0
"""What torch code expects of an optimizer: schedulers, scalers, hooks, closures, groups, state."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (  # noqa: TID251
    get_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from support.training import (
    assert_same,
    make_parameters,
    set_gradients,
    snapshot,
    swap_of,
    train,
)
from swapio.errors import ConfigError
from swapio.optim import Adam, AdamW

N = 1_100_000  # 8.8 MB of state


@pytest.fixture(params=["ram", pytest.param("partitioned", marks=pytest.mark.slow), "pipelined"])
def mode(request):
    return request.param


def pair(tmp_path, mode, sizes=(N, 7), **kwargs):
    """One of ours and one of torch's over equal parameters."""
    ours, theirs = make_parameters(sizes), make_parameters(sizes)
    return (
        ours,
        AdamW(ours, swap=swap_of(mode, tmp_path), **kwargs),
        theirs,
        torch.optim.AdamW(theirs, foreach=False, **kwargs),
    )


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def test_is_a_torch_optimizer(tmp_path, mode):
    params = make_parameters([N])
    with AdamW(params, lr=0.1, swap=swap_of(mode, tmp_path)) as opt:
        assert isinstance(opt, torch.optim.Optimizer)
        assert opt.defaults["lr"] == 0.1
        assert repr(opt).startswith("AdamW (")
        assert "lr: 0.1" in repr(opt)
        params[0].grad = torch.ones(N)
        opt.zero_grad(set_to_none=False)
        assert params[0].grad.eq(0).all()
        opt.zero_grad()
        assert params[0].grad is None
        before = params[0].detach().clone()
        opt.step()
        assert torch.equal(params[0], before)


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=10, cycle_momentum=True
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("mode", ["ram", "pipelined"])
def test_schedulers(tmp_path, mode, scheduler):
    """pytorch/ao#959, #1209: a wrapper that is no Optimizer makes the schedulers raise."""
    ours, opt, theirs, reference = pair(tmp_path, mode, lr=0.05)
    mine, other = SCHEDULERS[scheduler](opt), SCHEDULERS[scheduler](reference)
    for step in range(1, 6):
        for params, optimizer, schedule in ((ours, opt, mine), (theirs, reference, other)):
            set_gradients(params, step)
            optimizer.step()
            schedule.step(*([1.0] if scheduler == "plateau" else []))
        assert opt.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert opt.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    assert_close(ours, theirs)
    opt.close()


def test_groups_keep_their_own_hyperparameters(tmp_path, mode):
    """DeepSpeed#7713, #8440: a scheduler made all groups one, or groups were flattened away."""
    settings = [
        {"lr": 2e-2, "weight_decay": 0.01},
        {"lr": 1e-5, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-3, "tag": "x"},
    ]
    ours, theirs = make_parameters([N, 5, N]), make_parameters([N, 5, N])
    opt = AdamW(
        [{"params": [p], **s} for p, s in zip(ours, settings, strict=True)],
        swap=swap_of(mode, tmp_path),
    )
    reference = torch.optim.AdamW(
        [{"params": [p], **s} for p, s in zip(theirs, settings, strict=True)], foreach=False
    )
    schedules = [lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)) for o in (opt, reference)]
    for step in range(1, 4):
        for params, optimizer, schedule in zip(
            (ours, theirs), (opt, reference), schedules, strict=True
        ):
            set_gradients(params, step)
            optimizer.step()
            schedule.step()
    assert len(opt.param_groups) == 3
    assert opt.param_groups[2]["tag"] == "x"
    for group, setting in zip(opt.param_groups, settings, strict=True):
        assert group["lr"] == pytest.approx(setting["lr"] / 4)
    assert_close(ours, theirs)
    opt.close()


def test_hyperparameters_are_read_at_each_step(tmp_path, mode):
    ours, opt, theirs, reference = pair(tmp_path, mode, lr=torch.tensor(0.05))
    for step in range(1, 4):
        for params, optimizer in ((ours, opt), (theirs, reference)):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            optimizer.param_groups[0]["betas"] = (0.5 + step / 10, 0.9)
            optimizer.param_groups[0]["lr"].fill_(0.01 * step)
            set_gradients(params, step)
            optimizer.step()
    assert_close(ours, theirs)
    opt.close()


@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("eps", [1e-4, 1e-8])
def test_eps_decay_and_direction_are_those_of_torch(cls, maximize, eps):
    """torchani#261, pytorch#22628: eps and weight decay belong elsewhere in other libraries."""
    for scale, decay in ((1e-7, 0.0), (1.0, 0.1)):
        ours, theirs = make_parameters([1000]), make_parameters([1000])
        kwargs = {"lr": 1e-2, "eps": eps, "weight_decay": decay, "maximize": maximize}
        opt = cls(ours, **kwargs)
        reference = getattr(torch.optim, cls.__name__)(theirs, foreach=False, **kwargs)
        for step in range(1, 6):
            set_gradients(ours, step, scale)
            set_gradients(theirs, step, scale)
            opt.step()
            reference.step()
            if step == 1:
                torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-8)
        assert_close(ours, theirs)


def test_amsgrad_is_refused():
    with pytest.raises(ConfigError, match="amsgrad"):
        AdamW(make_parameters([3]), amsgrad=True)


def test_closures_run_once_with_gradients_enabled(tmp_path, mode):
    ours, opt, theirs, reference = pair(tmp_path, mode, lr=0.1)
    calls = []

    def closure_of(params, optimizer):
        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum((param**2).sum() for param in params)
            loss.backward()
            return loss

        return closure

    for _ in range(2):
        mine = opt.step(closure_of(ours, opt))
        other = reference.step(closure_of(theirs, reference))
        torch.testing.assert_close(mine, other)
    assert calls == [True] * 4
    assert_close(ours, theirs)
    opt.close()


def test_a_closure_that_raises_leaves_everything_alone(tmp_path, mode):
    params = make_parameters([N])
    with AdamW(params, swap=swap_of(mode, tmp_path)) as opt:
        train(opt, params, 1)
        before = snapshot(opt, params)

        def closure():
            raise RuntimeError("of the user")

        with pytest.raises(RuntimeError, match="of the user"):
            opt.step(closure)
        assert_same(before, snapshot(opt, params))
        train(opt, params, 1, first=2)


def test_step_hooks_run_before_and_after(tmp_path, mode):
    params = make_parameters([N])
    with AdamW(params, swap=swap_of(mode, tmp_path)) as opt:
        seen = []
        start = params[0].detach().clone()
        opt.register_step_pre_hook(
            lambda *_: seen.append(("pre", bool(torch.equal(params[0], start))))
        )
        opt.register_step_post_hook(
            lambda *_: seen.append(("post", bool(torch.equal(params[0], start))))
        )
        train(opt, params, 1)
        assert seen == [("pre", True), ("post", False)]


def test_grad_scaler_unscales_and_skips(tmp_path, mode):
    ours, opt, theirs, reference = pair(tmp_path, mode, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(1, 5):
        for params, optimizer, scaler in zip(
            (ours, theirs), (opt, reference), scalers, strict=True
        ):
            loss = sum((param * step).square().mean() for param in params)
            scaler.scale(loss).backward()
            if step == 3:
                params[0].grad[17] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert [int(opt.state[p]["step"]) for p in ours] == [3, 3]
    assert_close(ours, theirs)
    opt.close()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_changes_nothing(tmp_path, mode, bad):
    """DeepSpeed#8432: the first overflow of a run put nan in the momentum for good."""
    params, twins = make_parameters([N, 7]), make_parameters([N, 7])
    opt = AdamW(params, lr=0.1, max_grad_norm=1.0, swap=swap_of(mode, tmp_path / "a"))
    twin = AdamW(twins, lr=0.1, max_grad_norm=1.0, swap=swap_of(mode, tmp_path / "b"))
    train(opt, params, 1)
    before = snapshot(opt, params)
    set_gradients(params, 2)
    params[1].grad[3] = bad
    opt.step()
    assert opt.step_skipped
    assert not torch.isfinite(torch.tensor(opt.grad_norm))
    assert_same(before, snapshot(opt, params))
    train(opt, params, 1, first=3)
    assert not opt.step_skipped
    train(twin, twins, 1)
    train(twin, twins, 1, first=3)
    assert_same(snapshot(opt, params), snapshot(twin, twins))
    opt.close()
    twin.close()


@pytest.mark.parametrize("mode", ["ram", "pipelined"])
def test_clipping_in_the_step_is_that_of_torch(tmp_path, mode):
    ours, opt, theirs, reference = pair(tmp_path, mode, lr=0.1)
    opt.max_grad_norm = 0.5
    for step in range(1, 4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        norm = sum(float(p.grad.double().square().sum()) for p in theirs) ** 0.5
        for param in theirs:
            param.grad.mul_(0.5 / (norm + 1e-6))
        opt.step()
        reference.step()
        assert opt.grad_norm == pytest.approx(norm, rel=1e-12)
    assert_close(ours, theirs)
    opt.close()


def test_state_reads_through_and_can_be_assigned(tmp_path, mode):
    """DeepSpeed#7046: state of a swapped optimizer can be read and set (rows a to c of the API)."""
    params = make_parameters([(1200, 900), 7])
    with AdamW(params, lr=0.1, swap=swap_of(mode, tmp_path)) as opt:
        train(opt, params, 2)
        entry = opt.state[params[0]]
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
        assert entry["exp_avg"].shape == (1200, 900)
        assert entry["exp_avg"].abs().sum() > 0
        assert params[0] in opt.state
        assert len(opt.state) == 2
        value = torch.randn(1200, 900)
        opt.set_state(params[0], "exp_avg", value)
        assert torch.equal(opt.state[params[0]]["exp_avg"], value)
        opt.state[params[1]]["step"] = 40
        assert int(opt.state_of(params[1])["step"]) == 40
        other = make_parameters([(1200, 900), 7])
        twin = AdamW(other, lr=0.1)
        for mine, its in zip(params, other, strict=True):
            its.data.copy_(mine.data)
            twin.state[its] = {name: opt.state[mine][name] for name in opt.state[mine]}
        train(opt, params, 1, first=3)
        train(twin, other, 1, first=3)
        assert_same(snapshot(opt, params), snapshot(twin, other))
        with pytest.raises(ValueError, match=r"exp_avg.*\(1200, 900\).*\(3,\)"):
            opt.set_state(params[0], "exp_avg", torch.zeros(3))
        with pytest.raises(ConfigError, match=r"'momentum'.*exp_avg"):
            opt.set_state(params[0], "momentum", value)
        with pytest.raises(KeyError, match="not one of"):
            opt.state_of(torch.nn.Parameter(torch.zeros(3)))
        assert opt.state.get(torch.nn.Parameter(torch.zeros(3))) is None


def test_state_is_there_before_the_first_step(tmp_path, mode):
    """pytorch#164929: DCP's helper steps an optimizer that has no state yet."""
    model = torch.nn.Sequential(torch.nn.Linear(1100, 1100), torch.nn.Linear(1100, 2))
    model[0].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    trained = []
    for net, ask in ((model, True), (twin, False)):
        opt = AdamW(net.parameters(), lr=0.1, swap=swap_of(mode, tmp_path / str(ask)))
        if ask:
            start = [p.detach().clone() for p in net.parameters()]
            found = get_optimizer_state_dict(net, opt)
            assert "0.weight" in found["state"]
            assert found["state"]["0.weight"]["exp_avg"].shape == (1100, 1100)
            assert all(torch.equal(a, b) for a, b in zip(start, net.parameters(), strict=True))
        for step in range(3):
            net(torch.full((4, 1100), 0.1 * step + 0.1)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            if ask and step == 1:
                get_optimizer_state_dict(net, opt)
        trained.append([p.detach().clone() for p in net.parameters()])
        opt.close()
    for a, b in zip(*trained, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()


def test_state_dict_is_torchs_and_goes_both_ways(tmp_path, mode):
    """bitsandbytes#782, #1381: state under other names, or a step of the wrong type."""
    ours, opt, theirs, reference = pair(tmp_path, mode, lr=0.1)
    train(opt, ours, 2)
    stream = io.BytesIO()
    torch.save(opt.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert set(loaded["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    for mine, its in zip(ours, theirs, strict=True):
        its.data.copy_(mine.data)
    reference.load_state_dict(loaded)
    train(opt, ours, 1, first=3)
    train(reference, theirs, 1, first=3)
    assert_close(ours, theirs)
    for mine, its in zip(ours, theirs, strict=True):
        mine.data.copy_(its.data)
    opt.load_state_dict(reference.state_dict())
    train(opt, ours, 1, first=4)
    train(reference, theirs, 1, first=4)
    assert_close(ours, theirs)
    opt.close()


def test_copies_are_refused_with_the_way_out(tmp_path, mode):
    with AdamW(make_parameters([5]), swap=swap_of(mode, tmp_path)) as opt:
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match=r"save.*state_dict"):
                attempt(opt)


def test_step_counts_are_cpu_values(tmp_path, mode):
    params = make_parameters([N])
    with AdamW(params, swap=swap_of(mode, tmp_path)) as opt:
        train(opt, params, 2)
        step = opt.state[params[0]]["step"]
        assert step.device.type == "cpu"
        assert step.dtype is torch.float32
        assert step.item() == 2


@pytest.mark.parametrize("sizes", [[3, 5], [N], [N, 7]])
def test_nothing_to_step_is_no_error(tmp_path, mode, sizes):
    """DeepSpeed#7712: waiting with nothing submitted failed an assert."""
    params = make_parameters(sizes)
    with AdamW(params, swap=swap_of(mode, tmp_path, min_swap_bytes=1 << 20)) as opt:
        opt.synchronize()
        for _ in range(3):
            opt.step()
        params[0].grad = torch.ones_like(params[0])
        for _ in range(3):
            opt.step()
        assert int(opt.state[params[0]]["step"]) == 3
        opt.synchronize()


MASTERS = [("param", 8, 8), ("separate", 12, 12), ("split", 10, 10)]


@pytest.mark.parametrize(("master", "read", "written"), MASTERS)
def test_bytes_of_a_step(tmp_path, master, read, written):
    """Megatron-LM#63: nobody counted what a step moves."""
    numel = 8_000_000
    dtype = torch.float32 if master == "param" else torch.bfloat16
    params = make_parameters([numel], dtype)
    swap = swap_of("pipelined", tmp_path, master=master, host_memory="16MiB")
    with AdamW(params, swap=swap) as opt:
        train(opt, params, 1)
        opt.synchronize()
        before = opt.stats()
        train(opt, params, 2, first=2)
        opt.synchronize()
        after = opt.stats()
        for name, width in (("read_bytes", read), ("write_bytes", written)):
            moved = (after[name] - before[name]) / 2
            assert 0.7 * width * numel < moved <= 1.02 * width * numel, name
