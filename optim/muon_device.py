# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a device, for matrices whose momentum and master are in RAM or on storage.

    host     g, m -> u | u ......... X -> master -> weights        momentum and master, elementwise
    device             | u -> X                                    whole matrices

Per parameter two bytes of u go up and two bytes of X come down, in the dtype of the products; with
the gradient going down and the weights going up that makes eight over the bus, and momentum and
master never cross it. While the device works on one block, the host advances the momentum of the
next and applies the update of the one before: each of the two blocks under way has its own stream,
page-locked memory and buffers on the device.

Invariants:
- nothing waits for the device but `finish`, which waits for its own block;
- the host touches a block's page-locked memory only before `start` and after `finish`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from swapio.optim.muon_update import NUM_STAGED, MatrixBlock, MatrixStep, Scratch, staged_dtype
from swapio.optim.newton_schulz import newton_schulz_workspace_bytes


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
        self.block: MatrixBlock | None = None

    def start(self, block: MatrixBlock, buffer: torch.Tensor) -> None:
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
        self.block = block

    def finish(self) -> tuple[MatrixBlock, torch.Tensor] | None:
        """Wait for the block, if there is one; the block and its orthogonalised update."""
        block, self.block = self.block, None
        if block is None:
            return None
        self._done.synchronize()
        return block, self._staged[: block.last - block.first]

    def abandon(self) -> None:
        """Wait for what is under way, and forget it."""
        self._stream.synchronize()
        self.block = None


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

    def step(self, steps: Iterable[MatrixStep]) -> None:
        """Take one step of each parameter; their master is a record of its own.

        Blocks until the last update is applied.
        """
        turn = 0
        try:
            for one in steps:
                for block in one.blocks(self._ns_dtype):
                    place = self._places[turn % NUM_STAGED]
                    self._apply(place)
                    place.start(block, self._scratch.master)
                    turn += 1
            for at in range(NUM_STAGED):
                self._apply(self._places[(turn + at) % NUM_STAGED])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for what the device still does; its memory is freed with this object."""
        for place in self._places:
            place.abandon()

    def _apply(self, place: _Place) -> None:
        found = place.finish()
        if found is not None:
            block, update = found
            block.apply(update, self._scratch.master)
