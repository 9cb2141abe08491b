# SPDX-License-Identifier: Apache-2.0
"""Muon's param groups, settings, routes and budget."""

from __future__ import annotations

import pytest
import torch
from oracles.muon import MuonReference, relative_error

from support.muon_training import SWAP, gradients, parameters
from swapio.errors import ConfigError, SwapioError
from swapio.optim import Muon, muon_param_groups
from swapio.optim.muon_update import spread


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


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"use_muon": False, "betas": (0.9, 0.999)}, r"param\.0 was routed to muon"),
        ({"num_heads": 4}, "num_heads"),
        ({"ns_steps": 5}, "scratch memory"),
        ({"momentum": 1.5}, "momentum"),
    ],
)
def test_changes_that_do_not_fit_the_layout_change_nothing(change, word):
    (param,) = parameters([(32, 128)])
    with Muon([param], ns_steps=2) as opt:
        (param.grad,) = gradients([(32, 128)], 1)[0]
        opt.step()
        start, saved = param.detach().clone(), dict(opt.param_groups[0])
        opt.param_groups[0].update(change)
        with pytest.raises(ConfigError, match=word):
            opt.step()
        assert torch.equal(param.detach(), start)
        opt.param_groups[0].update(saved)
        opt.param_groups[0]["ns_coefficients"] = [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5)]
        opt.step()
        assert not torch.equal(param.detach(), start)
        assert int(opt.state[param]["step"]) == 2


def test_a_frozen_matrix_is_stepped_once_it_thaws():
    first, second = parameters([(16, 16), (900, 40)])
    second.requires_grad_(False)
    with Muon([first, second]) as opt:
        first.grad = torch.randn(16, 16)
        opt.step()
        second.requires_grad_(True)
        start = second.detach().clone()
        second.grad = gradients([(900, 40)], 1)[0][0]
        opt.step()
        assert opt.stats()["num_newton_schulz"] == 3
    reference = MuonReference([start])
    reference.step(gradients([(900, 40)], 1)[0])
    assert relative_error(second.detach() - start, reference.params[0] - start) <= 1e-5


def test_sub_groups_of_adamw_lie_evenly_between_those_of_muon():
    costs = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    assert spread(["x", "y"], costs) == ["a", "b", "x", "c", "y", "d"]
    assert spread([], costs) == list(costs)
    assert spread(["x", "y"], {}) == ["x", "y"]


def test_the_sweep_alternates_and_visits_each_sub_group_once(monkeypatch):
    params = parameters([(64, 64)] * 4 + [(4096,)] * 2)
    groups = [{"params": params[:4]}, {"params": params[4:], "use_muon": False}]
    with Muon(groups, swap={"sub_group_numel": 4096}) as opt:
        orders = []
        monkeypatch.setattr(opt._runtime.swapper, "set_order", orders.append)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            opt.step()
    kinds = ["muon" if "muon" in key else "adam" for key in orders[0]]
    assert kinds == ["muon", "adam", "muon", "muon", "adam", "muon"]
    assert len(set(orders[0])) == 6
    assert orders[1] == orders[0][::-1]


def test_a_matrix_without_elements_is_no_obstacle():
    params = parameters([(0, 5), (16, 8)])
    with Muon(params) as opt:
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        assert opt.stats()["num_newton_schulz"] == 1
        assert opt.state[params[0]]["momentum_buffer"].shape == (0, 5)
        assert "param.0" in opt.describe()


def test_momentum_is_fp32_whatever_the_moments_are():
    params = parameters([(16, 8), (8,)], torch.bfloat16)
    groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
    with Muon(groups, swap={"state_dtype": "bfloat16"}) as opt:
        assert opt.state[params[0]]["momentum_buffer"].dtype is torch.float32
        assert opt.state[params[1]]["exp_avg"].dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="momentum is always fp32"):
        Muon(params[:1], swap={"state_dtype": "bfloat16"})


def test_a_parameter_moved_to_another_group_by_hand_is_not_stepped():
    params = parameters([(16, 8), (8, 8), (8,)])
    groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
    with Muon(groups) as opt:
        opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop())
        for param in params:
            param.grad = torch.ones_like(param)
        start = [param.detach().clone() for param in params]
        with pytest.raises(ConfigError, match=r"param\.1 was routed to muon"):
            opt.step()
        assert all(map(torch.equal, start, params))
