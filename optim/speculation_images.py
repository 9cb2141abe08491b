# SPDX-License-Identifier: Apache-2.0
"""Memory of early steps: where results wait until it is known whether they count.

An early step of a sub-group in RAM reads the state and writes the new one to an image. Keeping it
is an exchange: the image becomes the state, and what was the state is the memory of the next image.
So undoing is forgetting, bit for bit, and nothing is ever copied.

Invariants: an image holds one sub-group's records, laid out as the swapper lays them out; new
weights of parameters on the host lie beside it, those of a device's parameters are on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from swapio.align import PAGE_BYTES, round_up
from swapio.buffers import BufferPool, Lease
from swapio.errors import PoolExhaustedError
from swapio.optim.layout import MasterForm, PackedGroup
from swapio.subgroup import Placement, RecordBuffer

_ALIGNMENT = 64


class Image:
    """What an early step wrote.

    Attributes:
        state: The new state; None where it was written in place.
        weights: The new weights of parameters on the host, by position in the sub-group; beyond
            `low_offset` the lower halves of split masters whose moments were written in place.
    """

    __slots__ = ("state", "weights")

    def __init__(self, state: RecordBuffer | None, weights: Lease | None) -> None:
        self.state = state
        self.weights = weights


class Images:
    """A pool of memory for images. Safe from several threads; nothing blocks.

    Args:
        pool: Its memory; owned.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        # State that an image has replaced: memory of the swapper's pool, used from now on here.
        self._exchanged: dict[tuple[Placement, ...], list[RecordBuffer]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.nbytes

    def take(self, like: RecordBuffer | None, weight_bytes: int) -> Image | None:
        """Memory for a sub-group's image, or None if there is none left.

        Args:
            like: The buffer of the state; None for an early step in place.
            weight_bytes: Bytes of new weights on the host.
        """
        with self._lock:
            try:
                weights = self._pool.lease(weight_bytes) if weight_bytes else None
            except PoolExhaustedError:
                return None
            state = None if like is None else self._state(like)
            if like is not None and state is None:
                if weights is not None:
                    weights.release()
                return None
            return Image(state, weights)

    def _state(self, like: RecordBuffer) -> RecordBuffer | None:
        layout = tuple(like.placements.values())
        waiting = self._exchanged.get(layout)
        if waiting:
            return waiting.pop()
        try:
            return RecordBuffer(self._pool.lease(like.lease.nbytes), layout)
        except PoolExhaustedError:
            return None

    def give_back(self, image: Image, replaced: RecordBuffer | None = None) -> None:
        """The image is not needed any more; `replaced` is the state that its own replaced."""
        with self._lock:
            if image.weights is not None:
                image.weights.release()
            buffer = image.state if replaced is None else replaced
            if buffer is not None:
                layout = tuple(buffer.placements.values())
                self._exchanged.setdefault(layout, []).append(buffer)
        image.state = image.weights = None

    def forget(self) -> None:
        """Release all buffers that wait for the next image, the swapper's former ones too."""
        with self._lock:
            for waiting in self._exchanged.values():
                for buffer in waiting:
                    buffer.lease.release()
            self._exchanged.clear()

    def close(self) -> None:
        """Give everything back. Buffers that the swapper still has keep their mapping."""
        self.forget()
        self._pool.close(force=True)


def weight_bytes(packed: PackedGroup, *, in_place: bool) -> int:
    """Bytes of what an image holds beside the state: weights of parameters on the host.

    Args:
        packed: The sub-group.
        in_place: Its state is stepped in place: new lower halves of split masters lie here too.
    """
    if packed.bucket.device != "cpu":
        return 0
    nbytes = packed.numel * packed.bucket.dtype.itemsize
    return low_offset(packed) + nbytes if in_place and is_split(packed) else nbytes


def low_offset(packed: PackedGroup) -> int:
    """Where lower halves begin, in bytes after the first weight of an image."""
    return round_up(packed.numel * packed.bucket.dtype.itemsize, _ALIGNMENT)


def is_split(packed: PackedGroup) -> bool:
    """Whether the parameters are the upper halves of their masters."""
    return packed.bucket.form is MasterForm.SPLIT


def image_bytes(packed: PackedGroup, state_bytes: int, *, in_place: bool) -> int:
    """Bytes of one image; `state_bytes` of them for the state, unless that is stepped in place."""
    weights = round_up(weight_bytes(packed, in_place=in_place), PAGE_BYTES)
    return weights if in_place else state_bytes + weights


class DeviceImages:
    """New weights on a device, waiting there until they may be the parameters.

    Memory: as much as the parameters that can be stepped early, reserved at construction; what is
    added to the optimizer later has none.

    Args:
        groups: The sub-groups on the device.
        device: The device.
    """

    def __init__(self, groups: Sequence[PackedGroup], device: torch.device) -> None:
        self._weights = {
            packed.key: torch.empty(packed.numel, dtype=packed.bucket.dtype, device=device)
            for packed in groups
        }

    def of(self, packed: PackedGroup) -> torch.Tensor:
        """The waiting weights of a sub-group, by position in it."""
        return self._weights[packed.key]

    def __contains__(self, packed: PackedGroup) -> bool:
        """Whether there is memory for a sub-group."""
        return packed.key in self._weights
