# SPDX-License-Identifier: Apache-2.0
"""How the DTensors that fully_shard makes lie on their mesh, and the parts of one rank.

Invariant: a parameter whose parts are not whole rows over one dimension of the mesh is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from swapio.errors import ConfigError


class MeshShard(NamedTuple):
    """How the DTensors of one optimizer lie on their mesh.

    Attributes:
        group: The ranks that have shards of one copy.
        num_copies: Copies of each parameter; above 1 with HSDP.
        copy: Which of them this rank has a part of.
        peers: Positions of the ranks of `group` among all ranks of the mesh.
        ranks: All ranks of the mesh, as the default process group counts them.
    """

    group: dist.ProcessGroup
    num_copies: int
    copy: int
    peers: tuple[int, ...]
    ranks: tuple[int, ...]


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor."""
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of this rank, without autograd; the tensor itself if it is no DTensor."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def as_dtensor(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A DTensor of this rank's part, placed as `like`; the part itself if `like` is none."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def mesh_key(name: str, tensor: torch.Tensor) -> tuple[Any, int]:
    """The mesh of a DTensor, and the dimension of the mesh over which its rows are sharded.

    Raises:
        ConfigError: It is placed otherwise; names it.
    """
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    shards = [at for at, placement in enumerate(placements) if isinstance(placement, Shard)]
    plain = all(
        (type(placement) is Shard and placement.dim == 0) or isinstance(placement, Replicate)
        for placement in placements
    )
    if len(shards) != 1 or not plain or not isinstance(tensor, DTensor):
        raise ConfigError(
            f"parameter {name} is a DTensor placed {tuple(placements)}; swapio steps those that "
            "fully_shard makes: Shard(0) over one dimension of the mesh, Replicate() over others"
        )
    return tensor.device_mesh, shards[0]


def require_placed_alike(name: str, grad: torch.Tensor, param: torch.Tensor) -> None:
    """Raise ConfigError unless a gradient lies on its parameter's mesh as the parameter does."""
    if not isinstance(param, DTensor):
        return
    found = grad.placements if isinstance(grad, DTensor) else None
    if found != param.placements:
        raise ConfigError(
            f"the gradient of {name} is placed {found}, the parameter {param.placements}: it must "
            "be reduced and sharded before step(). Nothing was stepped"
        )


def mesh_shard(mesh: Any, dim: int) -> MeshShard:
    """Describe the ranks of a mesh whose dimension `dim` shards."""
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    group = mesh.get_group(dim)
    peers = tuple(ranks.index(rank) for rank in dist.get_process_group_ranks(group))
    coordinate = [at for axis, at in enumerate(mesh.get_coordinate()) if axis != dim]
    sizes = [size for axis, size in enumerate(mesh.mesh.shape) if axis != dim]
    copy = 0
    for at, size in zip(coordinate, sizes, strict=True):
        copy = copy * size + at
    return MeshShard(group, len(ranks) // len(peers), copy, peers, ranks)
