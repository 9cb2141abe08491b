# SPDX-License-Identifier: Apache-2.0
"""Muon's surface: shapes, scales, skipped steps, clipping, groups, state dicts, errors."""

from __future__ import annotations

import io

import pytest
import torch
from oracles.muon import MuonReference, relative_error, torch_zeropower

from support.muon_training import MODES, SWAP, build, gradients, parameters, tight
from swapio.errors import ConfigError, SwapioError
from swapio.optim import AdamW, Muon, muon_param_groups

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products on a busy machine wait longer for a second thread than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


# -- groups ----------------------------------------------------------------------------------


def test_schedulers_move_each_group_from_its_own_lr():
    shapes = [(32, 24), (24,), (16,)]
    params = parameters(shapes)
    groups = [
        {"params": params[:1], "lr": 2e-2, "weight_decay": 0.01},
        {"params": params[1:2], "use_muon": False, "lr": 1e-5, "weight_decay": 0.0},
        {"params": params[2:], "algorithm": "adamw", "lr": 1e-4, "weight_decay": 0.1},
    ]
    start = [param.detach().clone() for param in params]
    reference = MuonReference(start[:1], lr=2e-2, weight_decay=0.01)
    others = [value.clone().requires_grad_() for value in start[1:]]
    adamw = torch.optim.AdamW(
        [
            {"params": others[:1], "lr": 1e-5, "weight_decay": 0.0},
            {"params": others[1:], "lr": 1e-4, "weight_decay": 0.1},
        ],
        foreach=False,
    )
    with Muon(groups) as opt:
        assert [group["use_muon"] for group in opt.param_groups] == [True, False, False]
        assert "betas" not in opt.param_groups[0]
        assert "momentum" not in opt.param_groups[1]
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        twin = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 / (1 + step))
        for at, row in enumerate(gradients(shapes, 3)):
            for param, grad in zip(params, row, strict=True):
                param.grad = grad.clone()
            for param, grad in zip(others, row[1:], strict=True):
                param.grad = grad.clone()
            reference.lr = 2e-2 / (1 + at)
            reference.step(row[:1])
            opt.step()
            adamw.step()
            scheduler.step()
            twin.step()
        assert [g["lr"] for g in opt.param_groups] == pytest.approx([5e-3, 2.5e-6, 2.5e-5])
    assert relative_error(params[0].detach() - start[0], reference.params[0] - start[0]) <= 1e-5
    for mine, other in zip(params[1:], others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("swapped", [False, True])
def test_groups_can_be_added_later(tmp_path, swapped):
    shapes = [(64, 64), (512, 600), (300,)]
    params, twins = parameters(shapes), parameters(shapes)
    rows = gradients(shapes, 4)
    swap = {"path": tmp_path, **SWAP} if swapped else None
    with Muon(params[:1], lr=0.02, swap=swap) as opt, Muon(twins[:1], lr=0.02) as twin:
        for at, row in enumerate(rows):
            if at == 2:
                for target, group in ((opt, params), (twin, twins)):
                    target.add_param_group({"params": [group[1]], "num_heads": 2})
                    target.add_param_group({"params": [group[2]], "use_muon": False})
                with pytest.raises(ConfigError, match="use_muon=False"):
                    opt.add_param_group({"params": parameters([(7,)])})
                assert len(opt.param_groups) == 3
            count = 1 if at < 2 else 3
            for some in (params, twins):
                for param, grad in zip(some[:count], row, strict=False):
                    param.grad = grad.clone()
            opt.step()
            twin.step()
        assert opt.stats()["num_newton_schulz"] == 4 + 2 * 2
        assert opt.plan.workspace_bytes == opt.workspace_bytes([])
    start = parameters(shapes)
    for index, heads in ((0, 1), (1, 2)):
        begin = start[index].detach()
        reference = MuonReference([begin], lr=0.02, num_heads=heads)
        for row in rows[2 * index :]:
            reference.step([row[index]])
        got = params[index].detach() - begin
        assert relative_error(got, reference.params[0] - begin) <= 1e-5
    for one, other in zip(params, twins, strict=True):
        assert torch.equal(one, other)


def test_describe_shows_each_route():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 48))
    with Muon(muon_param_groups(model, num_heads={"1.weight": 4}, show=False)) as opt:
        text = opt.describe()
        routes = {route.name: (route.algorithm, route.layout) for route in opt.routes()}
    assert routes["0.weight"] == ("adamw", None)
    assert routes["1.bias"] == ("adamw", None)
    assert routes["1.weight"][0] == "muon"
    assert routes["1.weight"][1].shape == (4, 12, 32)
    line = next(line for line in text.splitlines() if line.startswith("1.weight"))
    assert "muon" in line
    assert "4 of 12x32" in line


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"lr": -1.0}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"eps": -1.0}, "eps"),
        ({"ns_steps": 3, "ns_coefficients": [(1.0, 2.0, 3.0)] * 2}, "2 triples"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn"),
        ({"ns_dtype": torch.int8}, "ns_dtype"),
    ],
)
def test_settings_out_of_range(settings, word):
    with pytest.raises(ConfigError, match=word):
        Muon(parameters([(8, 8)]), **settings)


@pytest.mark.parametrize(
    ("group", "word"),
    [
        ({"use_muon": 1}, "use_muon"),
        ({"algorithm": "sgd"}, "algorithm"),
        ({"algorithm": "adamw", "use_muon": True}, "contradicts"),
        ({"num_heads": 3}, r"layers\.w: num_heads=3"),
        ({"muon_view": "rows"}, r"layers\.w: view"),
        ({"use_muon": False, "betas": (1.0, 0.9)}, "betas"),
    ],
)
def test_group_settings_out_of_range(group, word):
    with pytest.raises(ConfigError, match=word):
        Muon([{"params": [("layers.w", parameters([(8, 8)])[0])], **group}])


def test_vectors_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"layers\.bias.*muon_param_groups"):
        Muon([("layers.w", parameters([(8, 8)])[0]), ("layers.bias", parameters([(8,)])[0])])


def test_a_budget_below_the_largest_matrix_names_what_would_do(tmp_path):
    params = parameters([(1200, 1000)])
    settings = {"path": tmp_path, **SWAP, "durability": "step"}
    with pytest.raises(ConfigError, match="workspace") as error:
        Muon(params, swap={**settings, "host_memory": "2MiB"})
    need = int(str(error.value).split("least that does is ")[1].split(" bytes")[0])
    assert need > 2 * 4 * 1200 * 1000
    with pytest.raises(ConfigError, match="too small"):
        Muon(params, swap={**settings, "host_memory": need - 1})
    with Muon(params, swap={**settings, "host_memory": need}) as opt:
        params[0].grad = torch.randn(1200, 1000)
        opt.step()
        assert opt.stats()["host_bytes"] <= need
    with pytest.raises(SwapioError, match="closed"):
        opt.step()
