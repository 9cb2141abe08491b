# SPDX-License-Identifier: Apache-2.0
"""From what users hold (tensors, arrays, leases, bytes) to an address, a size and an owner.

Invariant: the owner keeps the memory at the address for as long as it is referenced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from swapio._aio import ffi
from swapio.errors import ConfigError


class RawBuffer(NamedTuple):
    """Memory by address.

    Attributes:
        address: First byte.
        nbytes: Size in bytes.
        owner: Kept referenced until the transfer has completed.
    """

    address: int
    nbytes: int
    owner: object


def as_raw_buffer(buffer: Any, *, writable: bool) -> RawBuffer:
    """Return the memory of a tensor, array, lease, bytes-like object or RawBuffer.

    Args:
        buffer: A contiguous CPU tensor of any dtype, a C-contiguous numpy array, anything with the
            buffer protocol, or an object with integer `address` and `nbytes` (a Lease).
        writable: Whether the engine will write to it, as pread does.

    Raises:
        ConfigError: The memory cannot be used; the message says why.
    """
    if isinstance(buffer, RawBuffer):
        return buffer
    if hasattr(buffer, "data_ptr"):
        return _of_tensor(buffer)
    if hasattr(buffer, "__array_interface__"):
        return _of_array(buffer, writable=writable)
    if hasattr(buffer, "address") and hasattr(buffer, "nbytes"):
        return RawBuffer(buffer.address, buffer.nbytes, buffer)
    return _of_bytes_like(buffer, writable=writable)


def _of_tensor(tensor: Any) -> RawBuffer:
    if tensor.device.type != "cpu":
        raise ConfigError(f"a tensor on {tensor.device} cannot be transferred: move it to the CPU")
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} that is not contiguous cannot be "
            "transferred: pass tensor.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            "a tensor whose conjugate or negative bit is set cannot be transferred, as its memory "
            "holds other values: pass tensor.resolve_conj().resolve_neg()"
        )
    return RawBuffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def _of_array(array: Any, *, writable: bool) -> RawBuffer:
    address, read_only = array.__array_interface__["data"]
    if not array.flags.c_contiguous:
        raise ConfigError(f"an array with strides {array.strides} cannot be transferred: copy it")
    if writable and read_only:
        raise ConfigError("cannot read into a read-only array")
    if array.dtype.hasobject:
        raise ConfigError("an array of Python objects cannot be transferred")
    return RawBuffer(address, array.nbytes, array)


def _of_bytes_like(buffer: Any, *, writable: bool) -> RawBuffer:
    try:
        view = ffi.from_buffer("char[]", buffer, require_writable=writable)
    except (TypeError, BufferError, ValueError) as error:
        kind = "writable " if writable else ""
        raise ConfigError(
            f"{type(buffer).__name__} is no contiguous {kind}memory: {error}"
        ) from error
    # The cdata keeps the export, so a bytearray cannot be resized under the transfer.
    return RawBuffer(int(ffi.cast("uintptr_t", view)), len(view), view)
