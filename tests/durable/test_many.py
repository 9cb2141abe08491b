# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of thousands of small parameters: neighbours are read together, whatever the form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swapio.checkpoint import read_manifest
from swapio.checkpoint.manifest import write_manifest
from swapio.checkpoint.reader import CheckpointReader
from swapio.errors import CorruptionError
from swapio.optim import AdamW

SWAP = {"min_swap_bytes": 0, "host_memory": "16MiB", "sub_group_numel": 1 << 18}
# Any kind of neighbour: small, scalar, transposed in memory, cut by the end of a sub-group.
SHAPES = [(7, 11), (), (300,), (13, 5), (1,), (2000,)] * 350


def make(path, dtype, **more):
    generator = torch.Generator().manual_seed(0)
    params = []
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator).to(dtype)
        if len(shape) == 2 and number % 12 == 0:
            value = value.t().contiguous().t()
        params.append((f"p{number}", torch.nn.Parameter(value)))
    for _, param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    swap = None if path is None else {"path": path, **SWAP, **more}
    return AdamW(params, lr=0.1, swap=swap), [param for _, param in params]


def assert_same_state(opt, params, other, others):
    for mine, theirs in zip(params, others, strict=True):
        assert torch.equal(mine, theirs)
        left, right = opt.state_of(mine), other.state_of(theirs)
        for name in left.keys() & right.keys():
            assert torch.equal(left[name], right[name]), name


@pytest.fixture
def num_reads(monkeypatch):
    counted = []
    inner = CheckpointReader.read_bytes

    def read_bytes(self, *args):
        counted.append(args[1])
        return inner(self, *args)

    monkeypatch.setattr(CheckpointReader, "read_bytes", read_bytes)
    return counted


@pytest.mark.parametrize(
    ("dtype", "source", "target"),
    [
        ("float32", {}, {}),
        ("float32", {}, {"sub_group_numel": 200_000}),
        ("float32", {}, {"master": "separate"}),
        ("bfloat16", {"master": "split"}, {"master": "split"}),
        ("bfloat16", {"master": "split"}, {"master": "separate"}),
        ("bfloat16", {"master": "separate"}, {"master": "split"}),
        ("bfloat16", {"master": "split"}, None),
    ],
)
def test_neighbours_are_read_together(tmp_path, num_reads, dtype, source, target):
    dtype = getattr(torch, dtype)
    opt, params = make(tmp_path / "a", dtype, **source)
    with opt:
        opt.step()
        opt.save(tmp_path / "c")
        other, others = make(None if target is None else tmp_path / "b", dtype, **(target or {}))
        with other:
            for param in others:
                param.data.zero_()
            other.load(tmp_path / "c")
            assert_same_state(opt, params, other, others)
            opt.step()
            other.step()
            assert_same_state(opt, params, other, others)
    assert 3 <= len(num_reads) < len(SHAPES) // 8


def test_another_order_in_memory_is_still_turned(tmp_path):
    opt, params = make(tmp_path / "a", torch.float32)
    with opt:
        opt.step()
        opt.save(tmp_path / "c")
        generator = torch.Generator().manual_seed(1)
        others = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
        named = [(f"p{number}", param) for number, param in enumerate(others)]
        with AdamW(named, lr=0.1, swap={"path": tmp_path / "b", **SWAP}) as other:
            other.load(tmp_path / "c")
            assert_same_state(opt, params, other, others)


def test_a_record_that_is_shorter_than_its_pack_is_refused(tmp_path):
    """Its last elements were taken from whatever the window held before."""
    opt, _ = make(tmp_path / "a", torch.float32)
    with opt:
        opt.step()
        opt.save(tmp_path / "c", "one")
        folder = tmp_path / "c" / "one"
        manifest = read_manifest(folder)
        pack = manifest.packs[0]
        record = pack.records["exp_avg"]
        (piece,) = record.pieces
        short = replace(
            record, nbytes=4096, pieces=(piece._replace(nbytes=4096),), hashes=record.hashes[:0]
        )
        packs = (replace(pack, records=pack.records | {"exp_avg": short}), *manifest.packs[1:])
        write_manifest(folder, replace(manifest, packs=packs))
        with pytest.raises(CorruptionError, match="has 4096 bytes"):
            opt.load(tmp_path / "c")
