# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3: parameters that FSDP2 (`fully_shard`) has sharded, stepped where they lie.

FSDP2 gathers parameters for forward and backward and reduces gradients; what is left for the
optimizer is this rank's rows of each. With HSDP every copy of the model steps by itself.

Invariant: only Shard(0) over one dimension of the mesh, Replicate over the others; anything else
is refused by name. A parameter that is no DTensor is the same on every rank and is stepped on all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from swapio.checkpoint.placement import Placement, box_placement, whole
from swapio.errors import ConfigError
from swapio.optim.gradients import GRADIENT_DTYPES, Gradients
from swapio.optim.layout import ParameterInfo, check_parameter, memory_order
from swapio.optim.parameters import ParameterTable
from swapio.optim.zero.comm import Comm
from swapio.optim.zero.dtensors import (
    MeshShard,
    as_dtensor,
    is_dtensor,
    local_of,
    mesh_key,
    mesh_shard,
    require_placed_alike,
)
from swapio.optim.zero.flat import SharedRanks


class MeshRanks(SharedRanks):
    """The ranks of a device mesh.

    Args:
        comm: The collectives of all its ranks.
        mesh: How the parameters lie on it.
    """

    def __init__(self, comm: Comm, key: tuple[object, int], mesh: MeshShard) -> None:
        super().__init__(comm)
        self.mesh = mesh
        self.shards = comm if mesh.num_copies == 1 else Comm(mesh.group)
        self.gather = self._gather
        self._key = key
        self._index = mesh.peers.index(comm.rank)

    def outer(self, info: ParameterInfo, value: torch.Tensor) -> torch.Tensor | None:
        """Return a DTensor for a DTensor parameter."""
        return as_dtensor(value, info.listed)

    def largest_numel(self, listed: torch.Tensor) -> int | None:
        """The elements of the first shard, which is the longest."""
        return max(last - first for first, last in self.bounds(listed))

    def bounds(self, listed: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """First and last element of each shard."""
        if not is_dtensor(listed):
            return ((0, listed.numel()),)
        length, count = listed.shape[0], len(self.mesh.peers)
        rows = -(-length // count)
        width = listed.numel() // max(1, length)
        return tuple(
            (min(at * rows, length) * width, min((at + 1) * rows, length) * width)
            for at in range(count)
        )

    def local(self, name: str, listed: torch.Tensor) -> tuple[torch.Tensor, Placement | None]:
        """Return this rank's rows of a parameter, and where they belong."""
        if not is_dtensor(listed):
            place = whole(listed.shape, memory_order(listed))
            return listed, place._replace(is_saved=self.comm.rank == 0)
        if mesh_key(name, listed) != self._key:
            raise ConfigError(
                f"parameter {name} lies on another mesh, or is sharded over another dimension of "
                "it, than the others; make one optimizer for each"
            )
        if not listed.is_contiguous():
            raise ConfigError(f"parameter {name} is a DTensor of strides {listed.stride()}")
        local = local_of(listed)
        check_parameter(name, local)
        return local, self._place(listed, local)

    def _place(self, listed: torch.Tensor, local: torch.Tensor) -> Placement:
        shape = tuple(listed.shape)
        if not shape:
            raise ConfigError("a DTensor without dimensions cannot be sharded over rows")
        rows = -(-shape[0] // len(self.mesh.peers))
        first = min(self._index * rows, shape[0])
        sizes = (min(rows, shape[0] - first), *shape[1:])
        if math.prod(sizes) != local.numel():
            raise ConfigError(
                f"a DTensor of {shape} has {tuple(local.shape)} on shard {self._index} of "
                f"{len(self.mesh.peers)}; expected {sizes}"
            )
        starts = (first, *(0 for _ in shape[1:]))
        return box_placement(shape, starts, sizes, is_saved=self.mesh.copy == 0)

    # -- gradients ---------------------------------------------------------------------------

    def _gather(self, table: ParameterTable) -> Gradients:
        """The local parts of all `p.grad`."""
        for info in table.infos:
            local = local_of(info.listed)
            if info.part is not None and local.data_ptr() != info.param.data_ptr():
                # FSDP2 makes new local tensors when a model is loaded or moved.
                info.param.data = local
        parameters = table.refresh()
        count = len(table.infos)
        result = Gradients(parameters, np.zeros(count, np.uint64), np.zeros(count, bool))
        for info in table.infos:
            grad = info.listed.grad
            if grad is None:
                continue
            require_placed_alike(info.name, grad, info.listed)
            local = local_of(grad).resolve_neg()  # the negative bit is not in memory
            if local.dtype not in GRADIENT_DTYPES or local.shape != info.param.shape:
                raise ConfigError(
                    f"the gradient of {info.name} is {local.dtype} of {tuple(local.shape)} on this "
                    f"rank, the parameter {info.param.dtype} of {tuple(info.param.shape)}. "
                    "Nothing was stepped"
                )
            if local.device.type != "cpu":
                local = local.cpu()
            if local.stride() != info.param.stride() and local.numel():
                copy = torch.empty_strided(local.shape, info.param.stride(), dtype=local.dtype)
                local = copy.copy_(local)
            result.keep.append(local)
            result.present[info.index] = True
            result.address[info.index] = local.data_ptr()
            result.dtype = result.dtype or local.dtype
            if local.dtype is not result.dtype:
                result.dtypes[info.index] = local.dtype
        self._infos = table.infos
        return result

    def counted(self, gradients: Gradients) -> Gradients:
        """Parameters that every rank has whole count on the first one only."""
        if self._index == 0:
            return gradients
        sharded = np.array([is_dtensor(info.listed) for info in self._infos], bool)
        return dataclasses.replace(gradients, present=gradients.present & sharded)

    def total(self, value: float) -> float:
        """Return the sum over the shards of this rank's copy of the model."""
        values = self.comm.exchange(value)
        return float(sum(values[list(self.mesh.peers)].tolist()))

    def close(self) -> None:
        """Give up the connections, of the copy's own group too."""
        if self.shards is not None:
            self.shards.close()
        super().close()


def mesh_ranks(params: Sequence[torch.Tensor], name_of: Callable[[int], str]) -> MeshRanks:
    """Return the ranks of the mesh that the DTensors among `params` lie on. Collective."""
    at, sample = next((at, param) for at, param in enumerate(params) if is_dtensor(param))
    key = mesh_key(name_of(at), sample)
    mesh = mesh_shard(*key)
    comm = Comm(mesh.group) if mesh.num_copies == 1 else Comm(ranks=mesh.ranks)
    return MeshRanks(comm, key, mesh)
