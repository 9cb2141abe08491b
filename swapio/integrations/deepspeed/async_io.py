# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepSpeed's async_io extension, on swapio's engine.

Facts about how DeepSpeed uses it, and what follows:

- Each tensor has its own file, opened anew for each transfer; the result of `wait()` is ignored or
  compared in an assert -> a failed transfer raises from `wait()`, with path, wanted and got.
- A file is created by its first write -> its blocks are allocated then, so that a full disk shows
  before a byte is overwritten, and later writes do not extend the file.
- Buffers may be views at any offset, on a device, or not contiguous -> the engine takes any
  address; for the other two a copy on the CPU is transferred, as DeepSpeed does.

Invariants: `wait()` returns when nothing is in flight any more, also when it raises; two transfers
of one path through one handle happen in the order they were asked for; nothing is done in asserts.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from swapio.aio import (
    BLOCK_SIZE,
    QUEUE_DEPTH,
    DirectMode,
    Engine,
    EngineKind,
    FallbackMode,
    File,
    IOFuture,
)
from swapio.align import PAGE_BYTES, round_up
from swapio.errors import ConfigError, CorruptionError, SwapioError
from swapio.integrations.deepspeed import pinned

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_DIRECT_ALIGNMENT = 512
_QUEUE_DEPTH_MAX = 4096
_COMPARE_BYTES = 8 << 20


class _Defaults(TypedDict):
    engine: EngineKind
    direct: DirectMode
    on_fallback: FallbackMode


defaults: _Defaults = {"engine": "auto", "direct": "auto", "on_fallback": "log"}
"""What DeepSpeed's configuration cannot say; set by `install()`, read when a handle is made."""


class _Transfer(NamedTuple):
    """One transfer in flight.

    Attributes:
        future: Of the engine.
        file: What it goes to or comes from.
        memory: The CPU tensor that is transferred.
        target: Where what was read is copied to, when `memory` is not it.
        offset: First byte in the file.
        validate: Compare the file with the memory afterwards.
        is_writable: Whether the file was opened for writing.
    """

    future: IOFuture
    file: File
    memory: torch.Tensor
    target: torch.Tensor | None
    offset: int
    validate: bool
    is_writable: bool


class aio_handle:
    """Reads and writes tensors. Thread safe; the constructor starts the engine.

    Args:
        block_size: Bytes of one request to the drive, rounded up to 4096.
        queue_depth: Requests in flight for each of intra_op_parallelism.
        single_submit: Kept for `get_single_submit`; the engine decides.
        overlap_events: Kept for `get_overlap_events`; the engine always overlaps.
        intra_op_parallelism: Multiplies queue_depth; sizes need not be divisible by it.

    Raises:
        ConfigError: A number is out of range.
        AioError: The engine that `install()` asked for does not work here.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if intra_op_parallelism < 1:
            raise ConfigError(f"intra_op_parallelism is {intra_op_parallelism}; want at least 1")
        self._settings = (block_size, queue_depth, single_submit, overlap_events)
        self._intra_op_parallelism = intra_op_parallelism
        self._engine = Engine(
            defaults["engine"],
            queue_depth=min(queue_depth * intra_op_parallelism, _QUEUE_DEPTH_MAX),
            block_size=round_up(block_size, PAGE_BYTES),
            direct=defaults["direct"],
            on_fallback=defaults["on_fallback"],
        )
        self._lock = threading.RLock()
        self._pending: list[_Transfer] = []

    def get_block_size(self) -> int:
        """Return block_size as given, in bytes."""
        return self._settings[0]

    def get_queue_depth(self) -> int:
        """Return queue_depth as given."""
        return self._settings[1]

    def get_single_submit(self) -> bool:
        """Return single_submit as given."""
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        """Return overlap_events as given."""
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        """Return intra_op_parallelism as given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Return the bytes that DeepSpeed rounds sizes up to; swapio accepts any size."""
        return self._intra_op_parallelism * _DIRECT_ALIGNMENT

    def read(
        self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        """Fill `buffer` from the file; blocks. Returns 0. See `pread`."""
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(
        self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        """Write `buffer` to the file; blocks. Returns 0. See `pwrite`."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    # `async` is DeepSpeed's name for the argument and a keyword of Python: given by position, or
    # in a dict.
    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
        **named: Any,
    ) -> int:
        """Start to fill `buffer` from the file at `file_offset`, in bytes.

        Args:
            buffer: A tensor of any dtype, device and layout. Do not use it before `wait()`.
            filename: The file, which must hold that many bytes.
            validate: Compare with the file once more when done.
            is_async: Return at once; else wait for all that is in flight.
            file_offset: First byte in the file.
            named: `async`, another name of is_async.

        Returns:
            0, or, not async, how many transfers have completed.

        Raises:
            AioError: The file cannot be opened; not async: the transfer failed or the file is
                shorter. Nothing is in flight then.
            CorruptionError: `validate` found a difference.
        """
        in_background = _async_of("pread", named, is_async)
        with self._lock:
            self._start_read(buffer, filename, validate, file_offset)
            return 0 if in_background else self.wait()

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
        **named: Any,
    ) -> int:
        """Start to write `buffer` to the file at `file_offset`; see `pread`.

        The file is created, and its blocks are allocated, where needed; that part blocks.

        Args:
            buffer: A tensor of any dtype, device and layout. Do not change it before `wait()`.
            filename: The file, or the descriptor of an open one.
            validate: Read back and compare when done.
            is_async: Return at once; else wait for all that is in flight.
            file_offset: First byte in the file.
            named: `async`, another name of is_async.

        Raises:
            AioError: The file cannot be opened, the disk is full, or the write failed.
            CorruptionError: `validate` found a difference.
        """
        in_background = _async_of("pwrite", named, is_async)
        with self._lock:
            self._start_write(buffer, filename, validate, file_offset)
            return 0 if in_background else self.wait()

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer`; blocks. Returns how many transfers have completed. See `pread`."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer`; blocks. Returns how many transfers have completed. See `pwrite`."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to fill `buffer`; returns 0 at once. See `pread`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start to write `buffer`; returns 0. `filename` may be a descriptor. See `pwrite`."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Wait for everything in flight; blocks with the GIL released.

        Returns:
            How many transfers have completed since the last call; 0 when there were none.

        Raises:
            AioError: A transfer failed; the message is that of the first, and says how many did.
                All are done then, and the handle can be used.
            CorruptionError: `validate` found a difference.
        """
        with self._lock:
            transfers, self._pending = self._pending, []
            failures: list[SwapioError] = []
            try:
                for transfer in transfers:
                    try:
                        _finish(transfer)
                    except SwapioError as error:
                        failures.append(error)
            finally:
                for file in {id(transfer.file): transfer.file for transfer in transfers}.values():
                    file.close()
        if failures:
            failures[0].add_note(_consequence(len(failures), len(transfers)))
            raise failures[0]
        return len(transfers)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised 1-D CPU tensor, in huge pages and registered with the engine.

        Args:
            num_elem: Elements.
            example_tensor: Gives the dtype.

        Raises:
            PoolExhaustedError: The memory cannot be mapped.
        """
        tensor = pinned.allocate(num_elem, example_tensor.dtype)
        if num_elem:
            self._engine.register(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Give a tensor's memory up; False when it is not one of new_cpu_locked_tensor's."""
        if not self._engine.closed:
            self._engine.unregister(tensor.data_ptr())
        return pinned.free(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether `buffer` is transferred without a copy: locked, or pinned by torch."""
        return pinned.is_pinned(buffer)

    def _start_read(self, buffer: torch.Tensor, filename: str, validate: bool, offset: int) -> None:
        target, memory = None, buffer
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            target, memory = buffer, torch.empty(buffer.shape, dtype=buffer.dtype)
        file, is_writable = self._file(filename, to_write=False)
        future = self._engine.pread(file, memory, offset)
        transfer = _Transfer(future, file, memory, target, offset, validate, is_writable)
        self._pending.append(transfer)

    def _start_write(
        self, buffer: torch.Tensor, filename: str | int, validate: bool, offset: int
    ) -> None:
        memory = buffer.detach().to("cpu").contiguous()
        file, _ = self._file(filename, to_write=True)
        end = offset + memory.numel() * memory.element_size()
        if isinstance(filename, str | os.PathLike) and file.size < end:
            file.allocate(end)
        future = self._engine.pwrite(file, memory, offset)
        self._pending.append(_Transfer(future, file, memory, None, offset, validate, True))

    def _file(self, filename: str | int, *, to_write: bool) -> tuple[File, bool]:
        """Return the file, shared with a transfer in flight so that the engine orders them."""
        path = f"/proc/self/fd/{filename}" if isinstance(filename, int) else os.fspath(filename)
        for transfer in reversed(self._pending):
            if transfer.file.path == path and (transfer.is_writable or not to_write):
                return transfer.file, transfer.is_writable
            if transfer.file.path == path:
                # A write after a read in flight: another open file would not be ordered.
                transfer.future.exception()
        return self._engine.open(path, create=to_write, read_only=not to_write), to_write


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int = BLOCK_SIZE,
    queue_depth: int = QUEUE_DEPTH,
    single_submit: bool = False,
    overlap_events: bool = False,
    validate: bool = False,
) -> int:
    """Fill `buffer` from the start of a file with an engine of its own; blocks. Returns 0.

    For the arguments see aio_handle.

    Raises:
        AioError: The file cannot be opened, or is shorter than the buffer.
        CorruptionError: `validate` found a difference.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    with handle._engine:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int = BLOCK_SIZE,
    queue_depth: int = QUEUE_DEPTH,
    single_submit: bool = False,
    overlap_events: bool = False,
    validate: bool = False,
) -> int:
    """Write `buffer` to the start of a file with an engine of its own; blocks. Returns 0.

    For the arguments see aio_handle.

    Raises:
        AioError: The file cannot be opened, the disk is full, or the write failed.
        CorruptionError: `validate` found a difference.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    with handle._engine:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` to `dest`, of the same number of elements; blocks. Returns 0.

    Raises:
        ConfigError: The numbers of elements differ.
    """
    if dest.numel() != src.numel():
        raise ConfigError(f"dest has {dest.numel()} elements, src {src.numel()}")
    dest.copy_(src.reshape(dest.shape))
    return 0


def _async_of(function: str, named: dict[str, Any], is_async: bool) -> bool:
    in_background = named.pop("async", is_async)
    if named:
        raise TypeError(f"{function}() has no argument {', '.join(sorted(named))}")
    return bool(in_background)


def _finish(transfer: _Transfer) -> None:
    transfer.future.result()
    if transfer.validate:
        _compare(transfer)
    if transfer.target is not None:
        transfer.target.copy_(transfer.memory)


def _compare(transfer: _Transfer) -> None:
    """Raise CorruptionError if the file does not hold what is in memory."""
    memory = transfer.memory.reshape(-1).view(torch.uint8).numpy()
    path = Path(transfer.file.path)
    with path.open("rb", buffering=0) as stream:
        stream.seek(transfer.offset)
        for start in range(0, memory.size, _COMPARE_BYTES):
            wanted = memory[start : start + _COMPARE_BYTES].tobytes()
            found = _read_whole(stream, len(wanted))
            if found != wanted:
                raise CorruptionError(
                    f"{path} at offset {transfer.offset + start}: {len(wanted)} bytes differ from "
                    f"memory, or only {len(found)} are there. Likely cause: the drive, or another "
                    "process that writes to the file"
                )


def _read_whole(stream: Any, nbytes: int) -> bytes:
    parts: list[bytes] = []
    while nbytes:
        part = stream.read(nbytes)
        if not part:
            break
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _consequence(num_failed: int, num_transfers: int) -> str:
    return (
        f"{num_failed} of {num_transfers} transfers of this wait() failed. DeepSpeed overwrites "
        "its swap files in place: what it holds of this step is no longer whole. Do not save a "
        "checkpoint from here; restart from the last one"
    )
