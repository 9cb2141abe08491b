# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's "locked" CPU tensors, and its pin_memory extension, as huge-page buffers.

Invariants: memory lives as long as a tensor over it, also after it was freed by name; one registry
for the process, so that a handle knows the buffers of another.
"""

from __future__ import annotations

import threading

import torch

from swapio.buffers import BufferPool

__all__ = ["pin_handle"]

_lock = threading.Lock()
_pools: dict[int, BufferPool] = {}


def allocate(numel: int, dtype: torch.dtype, *, pin: bool | None = None) -> torch.Tensor:
    """Return an uninitialised 1-D tensor in 2 MiB-aligned memory of its own.

    Args:
        numel: Elements.
        dtype: Any torch dtype.
        pin: Page-lock it for CUDA; None does so where torch sees a GPU.

    Raises:
        PoolExhaustedError: The memory cannot be mapped.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    nbytes = numel * dtype.itemsize
    pool = BufferPool(nbytes, pin=pin, name=f"DeepSpeed's buffer of {numel} elements")
    tensor = pool.lease(nbytes).tensor(dtype, numel)
    with _lock:
        _pools[tensor.data_ptr()] = pool
    return tensor


def free(address: int) -> bool:
    """Forget the buffer that starts at `address`; False when there is none.

    The memory goes back to the system with the last tensor over it.
    """
    with _lock:
        return _pools.pop(address, None) is not None


def is_managed(tensor: torch.Tensor) -> bool:
    """Return whether all of the tensor lies in one buffer of `allocate`."""
    if tensor.device.type != "cpu":
        return False
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    with _lock:
        return any(base <= start and end <= base + pool.nbytes for base, pool in _pools.items())


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether transfers need no copy: pinned by torch, or one of `allocate`'s."""
    return is_managed(tensor) or tensor.is_pinned()


class pin_handle:
    """The interface of DeepSpeed's pin_memory extension. Thread safe; nothing blocks."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised 1-D CPU tensor of `num_elem` elements of the example's dtype.

        DeepSpeed registers it with the device runtime itself.

        Raises:
            PoolExhaustedError: The memory cannot be mapped.
        """
        return allocate(num_elem, example_tensor.dtype, pin=False)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Give a tensor's memory up; False when it is not one of new_cpu_locked_tensor's."""
        return free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Give memory up by its first address; False when there is none there."""
        return free(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether transfers to and from `buffer` need no copy."""
        return is_pinned(buffer)
