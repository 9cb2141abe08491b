# SPDX-License-Identifier: Apache-2.0
"""Which parameter Muon steps and which AdamW."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from swapio.errors import ConfigError
from swapio.optim.muon_groups import ParamGroups, muon_param_groups


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width)
        self.experts = nn.Parameter(torch.zeros(3, 2 * width, width))


class Model(nn.Module):
    def __init__(self, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.pos_emb = nn.Parameter(torch.zeros(8, 16))
        self.conv = nn.Conv1d(4, 8, 3)
        self.layers = nn.ModuleList([Block(16), Block(16)])
        self.add_module(head, nn.Linear(16, 50, bias=False))
        if tied:
            self.get_submodule(head).weight = self.wte.weight


def routes(groups: ParamGroups) -> dict[str, str]:
    return {route.name: route.algorithm for route in groups.routes}


def muon_names(groups: ParamGroups) -> set[str]:
    return {name for name, algorithm in routes(groups).items() if algorithm == "muon"}


MATRICES = {
    "conv.weight",
    *(f"layers.{i}.{n}" for i in range(2) for n in ("q_proj.weight", "output.weight", "experts")),
}


def test_matrices_go_to_muon_and_the_rest_to_adamw(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    groups = muon_param_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-4})
    assert muon_names(groups) == MATRICES
    named = [(group, name, param) for group in groups for name, param in group["params"]]
    assert {name: param for _, name, param in named} == dict(model.named_parameters())
    for group, name, _ in named:
        assert group["use_muon"] is (name in MATRICES)
        assert group["lr"] == (0.02 if group["use_muon"] else 1e-4)
    views = {name: group["muon_view"] for group, name, _ in named if group["use_muon"]}
    assert views["conv.weight"] == "flat"
    assert views["layers.0.experts"] == "auto"
    text = capsys.readouterr().out
    assert text == groups.table() + "\n"
    line = next(line for line in text.splitlines() if line.startswith("layers.0.experts"))
    assert "3x32x16" in line
    assert "muon" in line
    assert "3 of 32x16" in line
    assert "output head" in text


def test_groups_make_a_torch_optimizer_with_names() -> None:
    model = Model()
    groups = muon_param_groups(model, show=False)
    optimizer = torch.optim.SGD(groups, lr=0.1)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_tied_head_is_an_embedding_and_appears_once() -> None:
    groups = muon_param_groups(Model(tied=True), show=False)
    assert routes(groups)["wte.weight"] == "adamw"
    assert "lm_head.weight" not in routes(groups)
    assert muon_names(groups) == MATRICES


def test_a_head_tied_to_an_embedding_that_comes_later_goes_to_adamw() -> None:
    model = nn.ModuleDict({"project": nn.Linear(16, 50, bias=False), "table": nn.Embedding(50, 16)})
    model["table"].weight = model["project"].weight
    assert routes(muon_param_groups(model, show=False)) == {"project.weight": "adamw"}


def test_the_head_is_found_without_a_telling_name() -> None:
    assert muon_names(muon_param_groups(Model(head="to_words"), show=False)) == MATRICES

    class WithAccessor(Model):
        def get_output_embeddings(self) -> nn.Module:
            return self.conv

    assert "conv.weight" not in muon_names(muon_param_groups(WithAccessor(), show=False))


def test_the_logical_shape_decides() -> None:
    """A flat placeholder of a matrix is a matrix, and a vector stays one."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(512))
    model.bias = nn.Parameter(torch.zeros(16))
    model.partitioned = nn.Parameter(torch.zeros(0))
    setattr(model.partitioned, "ds_shape", torch.Size((32, 16)))  # noqa: B010
    groups = muon_param_groups(model, logical_shapes={"weight": (32, 16)}, show=False)
    assert routes(groups) == {"weight": "muon", "bias": "adamw", "partitioned": "muon"}
    assert all(route.layout is None or route.layout.rows == 32 for route in groups.routes)


def test_heads_views_and_forced_routes() -> None:
    groups = muon_param_groups(
        Model(),
        num_heads={"*.q_proj.weight": 4},
        views={"*.experts": "flat"},
        force_muon=["lm_head.*"],
        force_adamw=["layers.1.*"],
        show=False,
    )
    layouts = {route.name: route.layout for route in groups.routes}
    q_proj, experts = layouts["layers.0.q_proj.weight"], layouts["layers.0.experts"]
    assert q_proj is not None
    assert q_proj.shape == (4, 4, 16)
    assert experts is not None
    assert experts.shape == (1, 3, 32 * 16)
    assert routes(groups)["lm_head.weight"] == "muon"
    assert not any(name.startswith("layers.1.") for name in muon_names(groups))
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["layers.0.q_proj.weight"]["num_heads"] == 4
    assert by_name["layers.0.output.weight"]["num_heads"] == 1


def test_frozen_parameters_are_shown_but_not_grouped(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    with caplog.at_level(logging.INFO, "swapio.optim"):
        groups = muon_param_groups(model, show=False)
    assert routes(groups)["layers.0.q_proj.weight"] == "frozen"
    assert not any(name.startswith("layers.0.") for g in groups for name, _ in g["params"])
    assert "needs no gradient" in caplog.text


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.q_proj\.weight: num_heads=5 must divide"):
        muon_param_groups(Model(), num_heads={"*.q_proj.weight": 5}, show=False)
    with pytest.raises(ConfigError, match=r"'\*\.q_porj\.weight' matches no parameter"):
        muon_param_groups(Model(), num_heads={"*.q_porj.weight": 4}, show=False)
