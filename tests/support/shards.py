# SPDX-License-Identifier: Apache-2.0
"""An AdamW that keeps a part of each parameter on each rank, as ZeRO does, without any training.

Elementwise updates of parts are those of the whole, bit for bit: what a rank has must equal the
same elements of one process's run.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist  # noqa: TID251

from swapio.checkpoint.placement import PlacedRun, Placement, box_placement
from swapio.optim import AdamW


class Gloo:
    """The agreement of the ranks of the default process group."""

    def __init__(self, group=None):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group = group
        self._other = None

    def share(self, value):
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    def gather(self, value):
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def background(self):
        return self._other

    @classmethod
    def pair(cls):
        """An agreement that has another one for background threads; collective."""
        agreement = cls(dist.new_group(backend="gloo"))
        agreement._other = cls(dist.new_group(backend="gloo"))
        return agreement


def join(job):
    """Become a rank of the job's process group."""
    dist.init_process_group(
        "gloo", init_method=f"file://{job['meet']}", rank=job["rank"], world_size=job["ranks"]
    )
    return Gloo.pair()


def flat_part(shape, rank, ranks):
    """A range of the elements; the last ranks may have none."""
    numel = math.prod(shape)
    share = -(-numel // ranks)
    start, stop = min(numel, rank * share), min(numel, (rank + 1) * share)
    runs = (PlacedRun(start, 0, stop - start),) if stop > start else ()
    return Placement(tuple(shape), tuple(range(len(shape))), runs), (stop - start,)


def box_part(shape, rank, ranks, dim):
    """Part of a dimension, as DTensor's Shard(dim)."""
    share = -(-shape[dim] // ranks)
    start = min(shape[dim], rank * share)
    sizes, starts = list(shape), [0] * len(shape)
    sizes[dim], starts[dim] = min(share, shape[dim] - start), start
    return box_placement(shape, starts, sizes), tuple(sizes)


def part_of(kind, shape, rank, ranks):
    """Placement and local shape of a parameter on a rank."""
    if kind == "flat" or 0 in shape:
        return flat_part(shape, rank, ranks)
    return box_part(shape, rank, ranks, min(len(shape), 2) - 1 if kind == "columns" else 0)


def cut(value, place, shape):
    """The local tensor of a whole one."""
    flat = value.reshape(-1)
    runs = [flat[run.offset : run.offset + run.numel] for run in place.runs]
    return (torch.cat(runs) if runs else flat[:0]).reshape(shape)


class ShardedAdamW(AdamW):
    """AdamW of `(name, part)` parameters."""

    def __init__(self, named, places, agreement, **options):
        self._places = places
        self._agreement = agreement
        super().__init__(named, **options)

    def placement_of(self, name, param):  # noqa: ARG002
        return self._places[name]


def assemble(dumps, shapes, key=None):
    """Put parts together: whole tensors, of the parameters, or of the state `key`."""
    wholes = []
    for index, shape in enumerate(shapes):
        whole = None
        for dump in dumps:
            place = dump["places"][index]
            local = dump["params"][index] if key is None else dump["state"][index][key]
            if local.dim() == 0:
                whole = local
                continue
            if whole is None:
                whole = torch.full((math.prod(shape),), math.nan, dtype=local.dtype)
            for run in place.runs:
                part = local.reshape(-1)[run.local : run.local + run.numel]
                whole[run.offset : run.offset + run.numel] = part
        wholes.append(whole if whole.dim() == 0 else whole.view(shape))
    return wholes


def assert_parts_same(dumps, shapes, expected):
    """What the ranks dumped is one result of `everything`, bit for bit."""
    for dump in dumps:
        assert dump["lr"] == expected["lr"]
    for index, (a, b) in enumerate(zip(assemble(dumps, shapes), expected["params"], strict=True)):
        assert torch.equal(a, b), f"parameter {index}"
    for key in expected["state"][0]:
        for index, whole in enumerate(assemble(dumps, shapes, key)):
            assert torch.equal(whole, expected["state"][index][key]), f"{key} of {index}"
