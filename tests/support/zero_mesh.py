# SPDX-License-Identifier: Apache-2.0
"""What ranks run on meshes other than one row of ranks with Shard(0)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from support.zero_cases import raised, whole_state
from support.zero_training import RULES, Bank, make, rule_groups, train
from swapio.optim import AdamW


def run_hybrid(rank, _group, *, rule, shapes, settings, training, swap, save):
    """Train two copies of a model, each sharded over two ranks (HSDP), and save it."""
    names = ("copy", "shard")
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    model = Bank(make(shapes))
    fully_shard(model, mesh=mesh)
    params = list(model.params)
    swap = {**swap, "namespace": f"rank{rank}"}
    with RULES[rule](rule_groups(params, rule), nonfinite="skip", swap=swap, **settings) as opt:
        train(opt, params, rank, model=model, **training)
        state = whole_state(opt, params)
        opt.save(save).result()
        return {
            "norm": opt.grad_norm,
            "state": state,
            "params": [param.full_tensor().detach() for param in params],
            "local": [param.to_local().numel() for param in params],
            "stats": opt.stats(),
        }


def load_alone(_rank, _group, *, rule, shapes, settings, folder):
    """Load a checkpoint into one process; return parameters and state."""
    params = make(shapes, seed=9)
    with RULES[rule](rule_groups(params, rule), **settings) as opt:
        opt.load(folder)
        return [param.detach() for param in params], [opt.state_of(param) for param in params]


def refuse_placements(_rank, group):
    """What is said of parameters and gradients that are placed in other ways."""
    mesh = DeviceMesh.from_group(group, "cpu")
    found = {}
    for name, placement in {"columns": Shard(1), "copies": Replicate()}.items():
        param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [placement]))
        found[name] = raised(lambda param=param: AdamW([("weight", param)]))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    with AdamW([("weight", param)]) as opt:
        for name, placement, local in (
            ("partial", Partial(), torch.ones(4, 6)),
            ("replicated", Replicate(), torch.ones(4, 6)),
        ):
            param.grad = DTensor.from_local(local, mesh, [placement])
            found[name] = raised(opt.step)
        found["stepped"] = not torch.equal(param.full_tensor(), torch.ones(4, 6))
        param.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        opt.step()
        found["works"] = not torch.equal(param.full_tensor(), torch.ones(4, 6))
    return found
