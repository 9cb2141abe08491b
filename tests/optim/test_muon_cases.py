# SPDX-License-Identifier: Apache-2.0
"""Muon's steps: shapes, dtypes, scales, clipping, skipped steps, state dicts."""

from __future__ import annotations

import io

import pytest
import torch
from oracles.muon import MuonReference, relative_error, torch_zeropower

from support.muon_training import (
    MODES,
    SWAP,
    build,
    gradients,
    parameters,
    tight,
)
from swapio.errors import ConfigError
from swapio.optim import AdamW, Muon, muon_param_groups

STEPS = 3


def run(params, grads, groups=None, scale=1.0, **kwargs):
    """Step `params` with rows of gradients; the updates."""
    start = [param.detach().clone() for param in params]
    with Muon(groups or params, **{"lr": 0.02, **kwargs}) as opt:
        for row in grads:
            for param, grad in zip(params, row, strict=True):
                param.grad = None if grad is None else grad * scale
            opt.step()
    return [param.detach() - begin for param, begin in zip(params, start, strict=True)]


# -- shapes ----------------------------------------------------------------------------------


def test_a_convolution_equals_its_flattened_linear_layer():
    grads = gradients([(8, 3, 3, 3)], STEPS)
    conv = run(parameters([(8, 3, 3, 3)]), grads)[0]
    flat = [torch.nn.Parameter(parameters([(8, 3, 3, 3)])[0].detach().reshape(8, 27))]
    linear = run(flat, [[grad.reshape(8, 27)] for (grad,) in grads])[0]
    assert torch.equal(conv.reshape(8, 27), linear)


@pytest.mark.parametrize("swap", [None, MODES["pipelined"]])
def test_heads_equal_stacked_matrices(tmp_path, swap):
    shape, heads = (2048, 160), 4
    whole, grads = parameters([shape]), gradients([shape], STEPS)
    settings = None if swap is None else {"path": tmp_path, **SWAP, **swap}
    by_head = run(whole, grads, [{"params": whole, "num_heads": heads}], swap=settings)[0]
    blocks = [torch.nn.Parameter(b) for b in parameters([shape])[0].detach().tensor_split(heads)]
    apart = run(blocks, [list(grad.tensor_split(heads)) for (grad,) in grads])
    assert relative_error(by_head, torch.cat(apart)) <= 1e-6
    assert relative_error(by_head, run(parameters([shape]), grads)[0]) > 1e-2


def test_experts_equal_separate_matrices():
    shape = (6, 40, 24)
    stacked = run(parameters([shape]), gradients([shape], STEPS))[0]
    experts = [torch.nn.Parameter(one) for one in parameters([shape])[0].detach()]
    apart = run(experts, [list(grad) for (grad,) in gradients([shape], STEPS)])
    assert relative_error(stacked, torch.stack(apart)) <= 1e-6


def test_many_matrices_are_worked_on_in_blocks_and_counted():
    shape = (700, 100, 80)
    (param,) = parameters([shape])
    reference = MuonReference([param.detach()], lr=0.02)
    (grads,) = gradients([shape], 1)
    with Muon([param], lr=0.02) as opt:
        param.grad = grads[0]
        start = param.detach().clone()
        opt.step()
        assert opt.stats()["num_newton_schulz"] == 700
        assert opt.workspace_bytes([]) < 4 * param.numel() * 4
    reference.step(grads)
    assert relative_error(param.detach() - start, reference.params[0] - start) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["auto", "separate", "none"])
def test_other_memory_orders_equal_contiguous_ones(dtype, form):
    """channels_last kernels, transposed matrices and transposed stacks step as what they mean."""
    shapes = [(24, 8, 3, 3), (40, 56), (3, 20, 30)]
    plain = parameters(shapes, dtype)
    twisted = [
        torch.nn.Parameter(plain[0].detach().to(memory_format=torch.channels_last)),
        torch.nn.Parameter(plain[1].detach().t().contiguous().t()),
        torch.nn.Parameter(plain[2].detach().mT.contiguous().mT),
    ]
    assert not any(param.is_contiguous() for param in twisted)
    grads = gradients(shapes, STEPS, dtype)
    swap = {"master": form}
    for got, want in zip(run(twisted, grads, swap=swap), run(plain, grads, swap=swap), strict=True):
        assert torch.equal(got, want)


# -- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16])
def test_dtypes_are_kept_and_the_update_is_right(dtype, grad_dtype, ns_dtype):
    params = parameters([(64, 48)], dtype)
    params[0].grad_dtype = grad_dtype
    start = params[0].detach().float().clone()
    reference = MuonReference([start], lr=0.02)
    with Muon(params, lr=0.02, ns_dtype=ns_dtype) as opt:
        for (grad,) in gradients([(64, 48)], STEPS, grad_dtype):
            params[0].grad = grad
            opt.step()
            reference.step([grad.float()])
        state = opt.state_of(params[0])
    assert params[0].dtype is dtype
    assert state["momentum_buffer"].dtype is torch.float32
    final = state.get("master", params[0].detach())
    bound = 1e-5 if ns_dtype is None else 5e-2
    assert relative_error(final - start, reference.params[0] - start) <= bound
    assert torch.equal(final.to(dtype), params[0])


def test_without_a_master_the_parameter_is_rounded_once():
    (param,) = parameters([(64, 48)], torch.bfloat16)
    reference = MuonReference([param.detach().float()], lr=0.02)
    (grads,) = gradients([(64, 48)], 1, torch.bfloat16)
    run([param], [grads], swap={"master": "none"})
    reference.step([grads[0].float()])
    ulp = 2.0**-7 * reference.params[0].abs().clamp(min=2.0**-126)
    assert ((param.detach().float() - reference.params[0]).abs() <= ulp).all()
    with pytest.raises(ConfigError, match="stochastic_rounding"):
        Muon([param], swap={"master": "none", "stochastic_rounding": True})


# -- torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("patched", [True, False])
def test_equals_torch(monkeypatch, adjust, patched):
    """With torch's own bf16 loop replaced by an fp32 one, and as it is."""
    if patched:
        module = torch.optim._muon
        monkeypatch.setattr(module, "_zeropower_via_newtonschulz", torch_zeropower)
    shapes = [(96, 160), (160, 96), (64, 64)]
    grads = gradients(shapes, 5)
    ours = run(parameters(shapes), grads, adjust_lr_fn=adjust, weight_decay=0.1)
    params = parameters(shapes)
    opt = torch.optim.Muon(params, lr=0.02, adjust_lr_fn=adjust, weight_decay=0.1)
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.clone()
        opt.step()
    for mine, param, start in zip(ours, params, parameters(shapes), strict=True):
        error = relative_error(mine, param.detach() - start.detach())
        assert error <= (1e-5 if patched else 5e-2)


@pytest.mark.parametrize("swapped", [False, True])
def test_state_dicts_pass_through_torch_save_and_both_ways_to_torch(tmp_path, swapped):
    shapes = [(512, 512), (64, 48)]
    grads = gradients(shapes, 4)

    def step(opt, params, rows):
        for row in rows:
            for param, grad in zip(params, row, strict=True):
                param.grad = grad.clone()
            opt.step()

    swap = {"path": tmp_path, **SWAP} if swapped else None
    first, second, theirs = (parameters(shapes) for _ in range(3))
    with Muon(first, lr=0.02, swap=swap) as opt:
        step(opt, first, grads[:2])
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        momentum = opt.state_of(first[0])["momentum_buffer"]
        step(opt, first, grads[2:])
    buffer.seek(0)
    saved = torch.load(buffer)
    with Muon(second, lr=0.5, swap=swap) as opt:
        step(opt, second, grads[:2])
        with torch.no_grad():
            for param, start in zip(second, parameters(shapes), strict=True):
                param.copy_(start)
        replay = Muon(start_again := parameters(shapes), lr=0.02)
        step(replay, start_again, grads[:2])
        with torch.no_grad():
            for param, value in zip(second, start_again, strict=True):
                param.copy_(value)
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["lr"] == 0.02
        step(opt, second, grads[2:])
        replay.close()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)

    reference = torch.optim.Muon(theirs, lr=0.5)
    reference.load_state_dict(saved)
    assert reference.param_groups[0]["lr"] == 0.02
    assert torch.equal(reference.state[theirs[0]]["momentum_buffer"], momentum)
    step(reference, theirs, grads[2:])
    with Muon(parameters(shapes), swap=swap) as back:
        back.load_state_dict(reference.state_dict())
        mine = back.state_of(back.param_groups[0]["params"][0])
        assert torch.equal(mine["momentum_buffer"], reference.state[theirs[0]]["momentum_buffer"])


def test_a_state_dict_that_was_routed_otherwise_is_refused():
    with Muon(parameters([(8, 8)])) as muon, AdamW(parameters([(8, 8)])) as adamw:
        saved = muon.state_dict()
        saved["param_groups"][0]["use_muon"] = False
        with pytest.raises(ValueError, match="param group 0 was stepped by adam"):
            muon.load_state_dict(saved)
        with pytest.raises(ValueError, match="exp_avg"):
            muon.load_state_dict(adamw.state_dict())


# -- scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eps", "scales"), [(1e-7, (1e-6, 1e-3, 1e3, 1e25)), (0.0, (1e-30, 1e-6, 1e25))]
)
def test_the_scale_of_the_gradient_does_not_matter(eps, scales):
    shapes = [(64, 64), (17, 33)]
    grads = gradients(shapes, STEPS)
    settings = {"eps": eps, "weight_decay": 0.0}
    want = run(parameters(shapes), grads, **settings)
    for scale in scales:
        got = run(parameters(shapes), grads, scale=scale, **settings)
        for one, other in zip(got, want, strict=True):
            # Three steps later the weights are 60 times their update: rounding of the sum.
            assert relative_error(one, other) <= 1e-5, scale


def test_a_zero_gradient_gives_no_update_and_no_nan():
    (param,) = parameters([(32, 32)])
    start = param.detach().clone()
    run([param], [[torch.zeros(32, 32)]], weight_decay=0.0)
    assert torch.equal(param.detach(), start)
    run([param], [[torch.zeros(32, 32)]], weight_decay=0.1, lr=0.02)
    assert torch.equal(param.detach(), start * (1 - 0.002))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_loss_scales_give_the_same_weights(max_grad_norm):
    """Scaled by torch's GradScaler, which unscales before the step."""
    results = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = torch.nn.Linear(48, 64)
        groups = muon_param_groups(model, show=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with Muon(groups, lr=0.02, max_grad_norm=max_grad_norm) as opt:
            for _ in range(STEPS):
                opt.zero_grad()
                loss = model(torch.randn(256, 48)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        results.append([param.detach().clone() for param in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_clipping_acts_on_all_groups_by_one_factor():
    shapes = [(64, 48), (48,)]
    grads = gradients(shapes, STEPS)
    finals = []
    for scale in (1.0, 1000.0):
        params = parameters(shapes)
        with build(params, None, num_muon=1, max_grad_norm=1.0) as opt:
            for row in grads:
                for param, grad in zip(params, row, strict=True):
                    param.grad = grad * scale
                opt.step()
            norm = opt.grad_norm
        finals.append(params)
    matrix, bias = finals[0]
    assert relative_error(finals[1][0].detach(), matrix.detach()) <= 1e-4
    assert norm == pytest.approx(1000 * torch.cat([g.flatten() for g in grads[-1]]).norm().item())
    reference = [p.detach().clone().requires_grad_() for p in parameters(shapes)]
    adamw = torch.optim.AdamW(reference[1:], lr=1e-3, weight_decay=0.01, foreach=False)
    for row in grads:
        for param, grad in zip(reference, row, strict=True):
            param.grad = grad * 1000
        torch.nn.utils.clip_grad_norm_(reference, 1.0)
        adamw.step()
    torch.testing.assert_close(finals[1][1], reference[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bias, reference[1], rtol=1e-4, atol=1e-6)


# -- steps that are not taken, parameters without gradient -------------------------------------


@pytest.mark.parametrize("mode", [None, "partitioned", "pipelined"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_leaves_everything(tmp_path, mode, bad):
    shapes = [(64, 64), (512, 512), (600,)]

    def train(rows):
        params = parameters(shapes)
        seen = []

        def make(swap):
            return build(params, swap, num_muon=2, nonfinite="skip")

        swap = None if mode is None else {"path": tmp_path, **SWAP, **MODES[mode]}
        with make(None) if swap is None else tight(make, swap) as opt:
            for row in rows:
                for param, grad in zip(params, row, strict=True):
                    param.grad = grad.clone()
                opt.step()
                states = [opt.state_of(param) for param in params]
                seen.append(([p.detach().clone() for p in params], states))
        return seen

    first, second, third = gradients(shapes, 3)
    second[0][3, 5] = bad
    with_skip, without = train([first, second, third]), train([first, third])
    for (params, states), (others, other_states) in (
        (with_skip[1], with_skip[0]),
        (with_skip[2], without[1]),
    ):
        assert all(map(torch.equal, params, others))
        for one, other in zip(states, other_states, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert [int(states[0]["step"]) for _, states in with_skip] == [1, 1, 2]


def test_parameters_without_gradient_are_left_alone(tmp_path):
    shapes = [(64, 64), (512, 512), (300, 900), (600,)]
    params = parameters(shapes)
    start = [param.detach().clone() for param in params]
    with build(params, {"path": tmp_path, **SWAP}, num_muon=3) as opt:
        for at, row in enumerate(gradients(shapes, 3)):
            for index, (param, grad) in enumerate(zip(params, row, strict=True)):
                param.grad = None if index == 2 or (index == 0 and at == 1) else grad
            opt.step()
        steps = [int(opt.state[param]["step"]) for param in params]
        assert steps == [2, 3, 0, 3]
        assert opt.stats()["num_newton_schulz"] == 5
        assert not opt.state[params[2]]["momentum_buffer"].any()
    assert torch.equal(params[2].detach(), start[2])
    reference = MuonReference(start[:1], lr=0.02)
    rows = gradients(shapes, 3)
    for row in (rows[0], rows[2]):
        reference.step(row[:1])
    assert relative_error(params[0].detach() - start[0], reference.params[0] - start[0]) <= 1e-5
