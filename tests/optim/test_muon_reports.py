# SPDX-License-Identifier: Apache-2.0
"""Muon against bugs that others had, one test for each report; the number is the report's."""

from __future__ import annotations

import pytest
import torch
from oracles.muon import MuonReference, relative_error
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: TID251

from support.muon_training import (
    MODES,
    SWAP,
    gradients,
    parameters,
    tight,
)
from swapio.optim import Adam, AdamW, Muon, muon_param_groups


def test_accumulated_micro_batches_are_one_muon_step():
    """DeepSpeed#8443: Newton-Schulz ran, and momentum advanced, once per micro-batch."""
    torch.manual_seed(0)
    data = torch.randn(3, 8, 32)
    finals = []
    for size in (8, 2):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))
        start = [param.detach().clone() for param in model.parameters()]
        with Muon(model.parameters(), lr=0.02) as opt:
            for batch in data:
                opt.zero_grad()
                for part in batch.split(size):
                    (model(part).square().sum() / 8).backward()
                opt.step()
            assert opt.stats()["num_newton_schulz"] == 2 * 3
        finals.append([p.detach() - s for p, s in zip(model.parameters(), start, strict=True)])
    for whole, parts in zip(*finals, strict=True):
        assert relative_error(parts, whole) <= 1e-3  # gradients of rank 8: noise is amplified


def test_an_overflow_does_not_stay_in_the_momentum():
    """DeepSpeed#8432: the first overflow of a loss scale made every later step overflow."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1)
    with Muon([weight], lr=0.02) as opt:
        scales, steps = [], []
        for _ in range(20):
            opt.zero_grad()
            inputs = torch.randn(64, 64).half()
            scaler.scale((inputs @ weight.half()).float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
            steps.append(int(opt.state[weight]["step"]))
        momentum = opt.state[weight]["momentum_buffer"]
    assert steps[0] == 0 < steps[-1] < 20
    assert max(scales[-5:]) > 1.0
    assert torch.isfinite(momentum).all()
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("mode", ["partitioned", "pipelined"])
@pytest.mark.parametrize("resident", [(), ("momentum_buffer",)])
def test_offloaded_fragments_of_all_sizes(tmp_path, mode, resident):
    """DeepSpeed#8463: flattened pieces lost their shape, small ones were lost on the way."""
    shapes = [(600, 600), (64, 64), (17, 33), (9,)]
    params = parameters(shapes)
    start = [param.detach().clone() for param in params]
    reference = MuonReference(start[:3], lr=0.02)
    swap = {
        "path": tmp_path,
        **SWAP,
        **MODES[mode],
        "resident": resident,
        "durability": "step",
    }

    def make(setting):
        groups = [{"params": params[:3]}, {"params": params[3:], "use_muon": False, "lr": 1e-3}]
        return Muon(groups, lr=0.02, swap=setting)

    with tight(make, swap) as opt:
        for row in gradients(shapes, 3):
            for param, grad in zip(params, row, strict=True):
                param.grad = grad.clone()
            opt.step()
            reference.step(row[:3])
        assert opt.stats()["write_bytes"] > 3 * 4 * 600 * 600
    for param, want, begin in zip(params, reference.params, start, strict=False):
        assert relative_error(param.detach() - begin, want - begin) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_calls_itself_muon_is_muon(dtype):
    """DeepSpeed#8441, #8438, #8526: matrices were stepped by SGD or AdamW in silence."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 32), torch.nn.Tanh()
    ).to(dtype)
    start = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    with Muon(muon_param_groups(model, show=False), lr=0.02, weight_decay=0.0) as opt:
        for _ in range(3):
            before = opt.stats()["num_newton_schulz"]
            opt.zero_grad()
            model(torch.randn(64, 32).to(dtype)).float().square().mean().backward()
            opt.step()
            assert opt.stats()["num_newton_schulz"] - before == 2
        routes = {route.name: route.algorithm for route in opt.routes()}
        lines = {line.split()[0]: line for line in opt.describe().splitlines() if line.strip()}
    assert routes == {"0.weight": "muon", "0.bias": "adamw", "2.weight": "muon", "2.bias": "adamw"}
    assert all(f" {route} " in lines[name] for name, route in routes.items())
    for name in ("0.weight", "2.weight"):
        update = dict(model.named_parameters())[name].detach().float() - start[name]
        values = torch.linalg.svdvals(update)
        # SGD's update has a few large singular values; Muon's are alike.
        assert values.max() < 6 * values.median()


def test_loaded_momentum_keeps_its_dtype():
    """pytorch#43706, DeepSpeed#7746: state was cast to the parameter's dtype, or step crashed."""
    shapes = [(64, 48)]
    (first,), (second,) = (parameters(shapes, torch.bfloat16) for _ in range(2))
    rows = gradients(shapes, 2, torch.bfloat16)
    with Muon([first], lr=0.02) as opt, Muon([second], lr=0.02) as other:
        first.grad = rows[0][0]
        opt.step()
        other.load_state_dict(opt.state_dict())
        state = other.state_of(second)
        assert state["momentum_buffer"].dtype is state["master"].dtype is torch.float32
        for name, value in opt.state_of(first).items():
            assert torch.equal(state[name], value)
        for param, which in ((first, opt), (second, other)):
            param.grad = rows[1][0]
            which.step()
    assert torch.equal(first, second)


def test_heads_are_orthogonalised_alone():
    """Moonlight#27, Megatron#5961: heads of 64x32 cut in four are four matrices of 16x32."""
    whole = parameters([(64, 32)])[0]
    blocks = [torch.nn.Parameter(block.clone()) for block in whole.detach().split(16)]
    start = whole.detach().clone()
    with Muon([{"params": [whole], "num_heads": 4}]) as one, Muon(blocks) as other:
        for (grad,) in gradients([(64, 32)], 3):
            whole.grad = grad
            for block, part in zip(blocks, grad.split(16), strict=True):
                block.grad = part.contiguous()
            one.step()
            other.step()
        assert one.stats()["num_newton_schulz"] == other.stats()["num_newton_schulz"] == 12
    joined = torch.cat([block.detach() for block in blocks])
    assert relative_error(whole.detach() - start, joined - start) <= 1e-6


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("mode", ["partitioned", "pipelined", "read", "write"])
def test_where_state_lives_is_no_matter_of_the_rule(tmp_path, kind, mode):
    """PaddleFormers#4787, miles#2739: offloading hooked into one rule and missed another."""
    shapes = [(512, 512), (300, 900), (512, 520), (33,)]

    def train(swap):
        params = parameters(shapes)

        def make(setting):
            if kind != "muon":
                return {"adam": Adam, "adamw": AdamW}[kind](params, lr=1e-2, swap=setting)
            groups = [{"params": params[:3]}, {"params": params[3:], "use_muon": False}]
            return Muon(groups, lr=1e-2, swap=setting)

        with make(None) if swap is None else tight(make, swap) as opt:
            for row in gradients(shapes, 2):
                for param, grad in zip(params, row, strict=True):
                    param.grad = grad
                opt.step()
        return params

    swapped = train({"path": tmp_path, **SWAP, **MODES[mode]})
    assert all(map(torch.equal, train(None), swapped))


def test_the_step_moves_what_was_planned(tmp_path):
    """Momentum resident and a split master: two bytes read and two written per parameter."""
    shapes = [(512, 512)] * 8
    params = parameters(shapes, torch.bfloat16)
    swap = {"path": tmp_path, **SWAP, "resident": ("momentum_buffer",), "min_swap_bytes": 0}
    with tight(lambda setting: Muon(params, swap=setting), swap) as opt:
        rows = gradients(shapes, 3, torch.bfloat16)
        numbers = []
        for row in rows:
            for param, grad in zip(params, row, strict=True):
                param.grad = grad
            opt.step()
            opt.synchronize()
            numbers.append(opt.stats())
        plan = opt.plan
    moved = [numbers[2][name] - numbers[1][name] for name in ("read_bytes", "write_bytes")]
    assert moved == [plan.read_bytes, plan.write_bytes]
    numel = 8 * 512 * 512
    kept = plan.kept_bytes
    assert moved[0] + kept == moved[1] + kept == 2 * numel


@pytest.mark.parametrize("with_gradients", [False, True])
def test_asking_for_state_takes_no_step(with_gradients):
    """pytorch#164929, #125708: the helper stepped with zero gradients, which decayed weights."""
    net = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 8))
    net[1].bias.requires_grad_(False)
    start = [param.detach().clone() for param in net.parameters()]
    with Muon(muon_param_groups(net, show=False), lr=0.02) as opt:
        if with_gradients:
            net(torch.randn(4, 24)).sum().backward()
        found = get_optimizer_state_dict(net, opt)
        assert all(map(torch.equal, net.parameters(), start))
        assert not found["state"]["0.weight"]["momentum_buffer"].any()
        assert "1.bias" not in found["state"]
        assert opt.stats()["num_newton_schulz"] == 0


def test_group_settings_are_restored_with_the_state(tmp_path):
    """prime-rl#3561: tensors came back, the groups stayed as the constructor made them."""
    rows = gradients([(24, 16), (16,)], 3)

    def make(**settings):
        params = parameters([(24, 16), (16,)])
        groups = [
            {"params": params[:1], **settings},
            {"params": params[1:], "use_muon": False, "tag": "none"},
        ]
        return params, Muon(groups)

    def step(params, opt, row):
        for param, grad in zip(params, row, strict=True):
            param.grad = grad
        opt.step()

    settings = {"lr": 0.125, "momentum": 0.9, "tag": {"tag": "x"}, "ns_steps": 4}
    for how in ("load", "load_state_dict"):
        params, opt = make(**settings)
        others, other = make(lr=0.75, momentum=0.1, tag=None, ns_steps=5)
        with opt, other:
            for row in rows[:2]:
                step(params, opt, row)
            if how == "load":
                opt.save(tmp_path, "two").result()
                other.load(tmp_path)
            else:
                with torch.no_grad():
                    for mine, theirs in zip(others, params, strict=True):
                        mine.copy_(theirs)
                other.load_state_dict(opt.state_dict())
            group = other.param_groups[0]
            assert {name: group[name] for name in settings} == settings
            assert int(other.state[others[0]]["step"]) == 2
            step(params, opt, rows[2])
            step(others, other, rows[2])
            assert all(map(torch.equal, params, others))
