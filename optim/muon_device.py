# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a device, for matrices whose momentum and master are in RAM or on storage.

    host     g, m -> u | u ......... X -> master -> weights        momentum and master, elementwise
    device             | u -> X                                    whole matrices

Per parameter two bytes of u go up and two bytes of X come down, in the dtype of the products; with
the gradient going down and the weights going up that makes eight over the bus (ten with a split
master, whose upper half is read back), and momentum and master never cross it. While the device
works on one block, the host advances the momentum of the next and applies the update of the one
before: each of the two blocks under way has its own stream, page-locked memory and buffers on the
device.

Invariants:
- nothing waits for the device but `finish`, which waits for its own block;
- the host touches a block's page-locked memory only before `start` and after `finish`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from swapio.optim.muon_update import (
    NO_TIES,
    NUM_STAGED,
    MatrixBlock,
    MatrixStep,
    Scratch,
    Ties,
    staged_dtype,
)
from swapio.optim.newton_schulz import newton_schulz_workspace_bytes


class _UnderWay(NamedTuple):
    """A block that is with the device, and where its new ties go."""

    block: MatrixBlock
    ties: list[Ties]


class _Place:
    """Where one block at a time is orthogonalised."""

    def __init__(self, device: torch.device, staged: torch.Tensor, cuda: Any) -> None:
        self._cuda = cuda
        self._staged = staged
        self._stream = cuda.Stream(device=device)
        self._done = cuda.Event()
        self._device = device
        self._update = torch.empty(0, dtype=staged.dtype, device=device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._under_way: _UnderWay | None = None

    @property
    def is_free(self) -> bool:
        """Whether no block is under way."""
        return self._under_way is None

    def start(self, block: MatrixBlock, buffer: torch.Tensor, ties: list[Ties]) -> None:
        """Advance the momentum; queue the way up, Newton-Schulz and the way back."""
        numel = block.last - block.first
        staged = self._staged[:numel]
        block.advance(staged, buffer)
        group, shape = block.step.group, block.matrices(staged).shape
        nbytes = newton_schulz_workspace_bytes(
            shape,
            group["ns_coefficients"],
            group["ns_steps"],
            dtype=staged.dtype,
            device_type=self._device.type,
        )
        with self._cuda.stream(self._stream):
            # Made on the stream that uses them, and kept: they are as large as the largest block.
            if self._update.numel() < numel:
                self._update = self._update.new_empty(numel)
            if self._workspace.numel() < nbytes:
                self._workspace = self._workspace.new_empty(nbytes)
            there = self._update[:numel]
            there.copy_(staged, non_blocking=True)
            block.orthogonalise(there, self._workspace, staged.dtype)
            staged.copy_(there, non_blocking=True)
        self._done.record(self._stream)
        self._under_way = _UnderWay(block, ties)

    def finish(self, buffer: torch.Tensor) -> None:
        """Wait for the block, if there is one, and apply its update."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        self._done.synchronize()
        block, ties = under_way
        ties += block.apply(self._staged[: block.last - block.first], buffer)

    def abandon(self) -> None:
        """Wait for what is under way, and forget it."""
        self._stream.synchronize()
        self._under_way = None


class DeviceMatrices:
    """Steps the matrices of one device.

    Args:
        device: The CUDA device.
        scratch: Reserved memory of the host, with `staged` page-locked.
        ns_dtype: Dtype of the products, or None.
        cuda: The module with `Stream`, `Event` and `stream`; torch.cuda.
    """

    def __init__(
        self,
        device: torch.device,
        scratch: Scratch,
        ns_dtype: torch.dtype | None,
        cuda: Any = torch.cuda,
    ) -> None:
        self._scratch = scratch
        self._ns_dtype = ns_dtype
        staged = scratch.staged.view(staged_dtype(ns_dtype))
        each = staged.numel() // NUM_STAGED
        self._places = [
            _Place(device, staged[at * each : (at + 1) * each], cuda) for at in range(NUM_STAGED)
        ]

    def step(self, steps: Iterable[MatrixStep]) -> list[Ties]:
        """Take one step of each parameter; return the new ties of a split master, for each.

        Blocks until the last update is applied.
        """
        found: list[list[Ties]] = []
        buffer = self._scratch.master
        places = itertools.cycle(self._places)
        try:
            for one in steps:
                found.append([NO_TIES])
                for block in one.blocks(self._ns_dtype):
                    place = next(places)
                    place.finish(buffer)
                    place.start(block, buffer, found[-1])
            for place in itertools.islice(places, NUM_STAGED):
                place.finish(buffer)
        except BaseException:
            self.close()
            raise
        return [np.concatenate(ties) for ties in found]

    def close(self) -> None:
        """Wait for what the device still does; its memory is freed with this object."""
        for place in self._places:
            place.abandon()
