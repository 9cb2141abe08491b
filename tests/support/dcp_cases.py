# SPDX-License-Identifier: Apache-2.0
"""What the ranks run to save and load FSDP2's parameters with DCP and with swapio's own files."""

from __future__ import annotations

import torch.distributed.checkpoint as dcp  # noqa: TID251
from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251
from torch.distributed.fsdp import fully_shard  # noqa: TID251

from support.zero_training import Bank, groups_of, make, train
from swapio.integrations.dcp import LoadPlanner
from swapio.optim import AdamW


def run(rank, group, *, shapes, dtype, folder, how):
    """Train and save everything, or load it in one way; return all state and weights, whole."""
    model = Bank(make(shapes, dtype))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    params = list(model.params)
    swap = {
        "path": str(folder / f"swap-{how}-{group.size()}"),
        "namespace": f"rank{rank}",
        "min_swap_bytes": 0,
        "host_memory": "24MiB",
        "cpu_threads": 1,
    }
    with AdamW(groups_of(params, muon=False), lr=0.02, swap=swap) as opt:
        if how == "save":
            train(opt, params, rank, model=model, steps=2)
            dcp.save({"optimizer": opt}, checkpoint_id=folder / "dcp", process_group=group)
            opt.save(folder / "own")
        elif how == "own":
            assert opt.load(folder / "own").step == 2
        else:
            planner = LoadPlanner(folder / "dcp") if how == "streamed" else None
            wanted = opt if planner is None else planner.streamed(opt)
            dcp.load(
                {"optimizer": wanted},
                checkpoint_id=folder / "dcp",
                planner=planner,
                process_group=group,
            )
        known = opt.state_dict()["state"]
        state = [
            {k: v.full_tensor().clone() if v.dim() else v for k, v in known[at].items()}
            for at in range(len(params))
        ]
        del known
        return state, [param.full_tensor().detach().clone() for param in params]
