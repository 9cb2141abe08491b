# SPDX-License-Identifier: Apache-2.0
"""Async file I/O for tensors: Engine, File, IOFuture. The only importer of the native engine.

Facts about O_DIRECT, and what follows:

- It needs aligned offsets, lengths and addresses; what it needs differs by file (statx tells). The
  engine cuts a request into an aligned middle that goes directly (through a bounce buffer when the
  memory is unaligned) and unaligned ends that go through a second, buffered descriptor.
- Some file systems refuse it at open, some at the first transfer. With direct="auto" the file is
  buffered then, and behind each 32 MiB the page cache is written out and dropped.
- A transfer may be short at any time. The rest is asked for again; a read that ends at the end of
  the file before it is whole is an error, never stale bytes.
- tmpfs accepts O_DIRECT with any alignment: a test there proves nothing.

Invariants: every completion is checked; overlapping pages of one file are ordered by submission;
memory stays referenced until its completion; nothing here blocks but result(), exception(), drain()
and close().
"""

from __future__ import annotations

import errno
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from swapio._aio import ffi, lib
from swapio._aio_buffers import RawBuffer, as_raw_buffer
from swapio._aio_file import DIRECT_REMEDY, File, open_file
from swapio._aio_handle import Handle, IOFuture, sweep_orphans
from swapio._aio_probe import (
    filesystem_of,
    log_once,
    memlock_text,
    probe_io_uring,
    uring_errno,
    uring_refusal,
)
from swapio.errors import AioError, ClosedError, ConfigError

__all__ = [
    "OP_FDATASYNC",
    "OP_FSYNC",
    "OP_READ",
    "OP_WRITE",
    "Engine",
    "EngineStats",
    "File",
    "IOFuture",
    "RawBuffer",
    "Request",
    "filesystem_of",
    "probe_io_uring",
]

OP_READ: Final = 0
OP_WRITE: Final = 1
OP_FSYNC: Final = 2
OP_FDATASYNC: Final = 3

EngineKind = Literal["auto", "io_uring", "threads"]
RunningKind = Literal["io_uring", "threads"]
DirectMode = Literal["auto", "required", "off"]
FallbackMode = Literal["log", "error"]

# More than 16 MiB in flight slowed reads on the disks that were measured; 512 KiB x 32 and
# 1 MiB x 16 were best on both.
QUEUE_DEPTH: Final = 32
BLOCK_SIZE: Final = 512 << 10
_NUM_THREADS: Final = 8
_QUEUE_DEPTH_MAX: Final = 4096
_BLOCK_SIZE_MAX: Final = 1 << 30

_pack_request = struct.Struct("=iiQQQ").pack


class Request(NamedTuple):
    """One transfer of a batch.

    Attributes:
        op: OP_READ, OP_WRITE, OP_FSYNC or OP_FDATASYNC.
        file: An open file of the engine that it is submitted to.
        address: First byte in memory.
        nbytes: Bytes to transfer, of any size.
        offset: First byte in the file.
    """

    op: int
    file: File
    address: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine was created.

    Attributes:
        bytes_read: Bytes read.
        bytes_written: Bytes written.
        num_reads: Read transfers of at most one block.
        num_writes: Write transfers of at most one block.
        read_seconds: Time with at least one read transfer in flight.
        write_seconds: Time with at least one write transfer in flight.
        num_in_flight: Submissions that have not completed.
        num_files: Open files.
        num_registered_files: Files in the ring's table.
        num_registered_buffers: Entries in the ring's table of fixed buffers.
    """

    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    read_seconds: float
    write_seconds: float
    num_in_flight: int
    num_files: int
    num_registered_files: int
    num_registered_buffers: int


class Engine:
    """Moves bytes between memory and files without blocking the caller. Thread safe.

    Args:
        kind: "io_uring", "threads", or "auto" (io_uring where it works, else threads).
        queue_depth: Most transfers in flight at once (io_uring).
        block_size: Size of one transfer in bytes, a multiple of 4096; larger requests are cut.
        direct: What files do unless open() says otherwise. "auto": direct I/O, buffered where it is
            refused. "required": an error where it is refused. "off": buffered.
        on_fallback: "log" warns once per kind of fall-back; "error" raises instead.
        num_threads: Threads of the "threads" engine: the most transfers in flight there.

    Raises:
        ConfigError: A setting is invalid.
        AioError: io_uring was asked for, or on_fallback is "error", and it does not work here.
    """

    def __init__(
        self,
        kind: EngineKind = "auto",
        *,
        queue_depth: int = QUEUE_DEPTH,
        block_size: int = BLOCK_SIZE,
        direct: DirectMode = "auto",
        on_fallback: FallbackMode = "log",
        num_threads: int = _NUM_THREADS,
    ) -> None:
        _check_choice("kind", kind, ("auto", "io_uring", "threads"))
        _check_choice("direct", direct, ("auto", "required", "off"))
        _check_choice("on_fallback", on_fallback, ("log", "error"))
        _check_range("queue_depth", queue_depth, 1, _QUEUE_DEPTH_MAX)
        _check_range("num_threads", num_threads, 1, _QUEUE_DEPTH_MAX)
        _check_range("block_size", block_size, 4096, _BLOCK_SIZE_MAX)
        if block_size % 4096:
            raise ConfigError(f"block_size must be a multiple of 4096, not {block_size}")
        self.queue_depth = queue_depth
        self.block_size = block_size
        self.direct = direct
        self.on_fallback = on_fallback
        self.num_threads = num_threads
        sweep_orphans()
        pointer, self.kind, self.reason = self._create(kind)
        self._handle = Handle(pointer, direct_remedy=DIRECT_REMEDY)
        self._finalizer = weakref.finalize(self, self._handle.orphan)
        self._finalizer.atexit = False

    def _create(self, kind: EngineKind) -> tuple[Any, RunningKind, str]:
        if kind == "threads":
            return self._create_native(lib.SWAPIO_KIND_THREADS), "threads", "asked for"
        works, reason = probe_io_uring()
        code = 0 if works else uring_errno()
        if works:
            try:
                return self._create_native(lib.SWAPIO_KIND_URING), "io_uring", reason
            except AioError as error:
                code, reason = error.errno or 0, uring_refusal(error.errno or 0)
        remedy = "engine='threads' (Engine(kind='threads')) chooses the thread pool silently"
        if kind == "io_uring" or self.on_fallback == "error":
            raise AioError(code or errno.ENOSYS, "setup", "io_uring", hint=f"{reason}; {remedy}")
        log_once(
            "io_uring",
            f"{reason}. Using a pool of {self.num_threads} threads; results are the same, at more "
            f"CPU time. {remedy}; on_fallback='error' makes this an error",
        )
        return self._create_native(lib.SWAPIO_KIND_THREADS), "threads", reason

    def _create_native(self, kind: int) -> Any:
        config = ffi.new(
            "swapio_engine_config *",
            [kind, self.queue_depth, self.block_size, self.num_threads, 0],
        )
        error = ffi.new("int *")
        pointer = lib.swapio_engine_create(config, error)
        if pointer == ffi.NULL:
            name = "io_uring" if kind == lib.SWAPIO_KIND_URING else "thread pool"
            raise AioError(-error[0], "setup", name)
        return pointer

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        size: int | None = None,
        create: bool = False,
        read_only: bool = False,
        lock: bool = False,
        direct: DirectMode | None = None,
    ) -> File:
        """Open a file for transfers of this engine. Blocks for the system calls only.

        Args:
            path: The file.
            size: Give the file this size in bytes (it is extended with a hole, or cut).
            create: Create the file when it does not exist.
            read_only: Open without permission to write.
            lock: Take the file's exclusive lock (flock) on the descriptor the engine writes to.
            direct: Overrides the engine's `direct` for this file.

        Raises:
            AioError: A system call failed, or direct I/O is required and refused.
            StoreLockedError: Another process, or another open file, holds the lock.
            ClosedError: The engine is closed, or this is a forked child.
        """
        self._handle.check_open()
        mode = self.direct if direct is None else direct
        _check_choice("direct", mode, ("auto", "required", "off"))
        if mode == "auto" and self.on_fallback == "error":
            mode = "required"
        file = open_file(self, self._handle, path, mode, create=create, read_only=read_only)
        try:
            if lock:
                file.lock()
            if size is not None and size != file.size:
                file.truncate(size)
        except BaseException:
            file.close()
            raise
        return file

    def pread(self, file: File, buffer: Any, offset: int = 0) -> IOFuture:
        """Start to fill `buffer` from the file at `offset`; returns at once.

        Args:
            file: An open file of this engine.
            buffer: A contiguous CPU tensor of any dtype, numpy array, writable bytes-like object,
                Lease or RawBuffer. The engine keeps it alive; do not use it before completion.
            offset: First byte in the file.
        """
        memory = as_raw_buffer(buffer, writable=True)
        request = Request(OP_READ, file, memory.address, memory.nbytes, offset)
        return self.submit((request,), owner=memory.owner)

    def pwrite(self, file: File, buffer: Any, offset: int = 0) -> IOFuture:
        """Start to write `buffer` to the file at `offset`; returns at once. See pread."""
        memory = as_raw_buffer(buffer, writable=False)
        request = Request(OP_WRITE, file, memory.address, memory.nbytes, offset)
        return self.submit((request,), owner=memory.owner)

    def fsync(self, file: File, *, data_only: bool = False) -> IOFuture:
        """Start to make durable what was written before; it waits for earlier writes by itself."""
        op = OP_FDATASYNC if data_only else OP_FSYNC
        return self.submit((Request(op, file, 0, 0, 0),))

    def submit(self, requests: Sequence[Request], *, owner: object = None) -> IOFuture:
        """Queue a batch under one future, in one native call; returns at once.

        Args:
            requests: Transfers; overlapping pages of one file are done in this order.
            owner: Kept referenced until the batch has completed; it must keep the memory valid.

        Raises:
            ClosedError: The engine or a file is closed, or this is a forked child.
            ConfigError: A request is malformed.
        """
        handle = self._handle
        handle.check_open()
        requests = tuple(requests)
        try:
            packed = b"".join(
                [
                    _pack_request(op, file.number, address, nbytes, offset)
                    for op, file, address, nbytes, offset in requests
                ]
            )
        except (struct.error, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"a request is malformed: {error}") from error
        for op, file, _, _, _ in requests:
            if file.handle is not handle:
                raise ConfigError(f"the file {file.path} belongs to another engine")
            if not OP_READ <= op <= OP_FDATASYNC:
                raise ConfigError(f"a request has the unknown op {op}")
        future = IOFuture(handle, requests, owner)
        handle.submit(future, packed, len(requests))
        return future

    def drain(self, timeout: float | None = None) -> int:
        """Wait until nothing is in flight.

        Returns:
            How many submissions were waited for; 0 when there were none.

        Raises:
            AioError: The first failure that no result() or exception() has shown yet.
            TimeoutError: Something is still in flight.
        """
        return self._handle.drain(timeout)

    def register(self, address: int, nbytes: int) -> bool:
        """Make memory a fixed buffer of the ring: cheaper transfers from and to it.

        Returns:
            Whether it is registered. The thread engine has no such thing; a refusal (memory lock
            limit) is logged once, and transfers work without.

        Raises:
            AioError: The kernel refuses and on_fallback is "error".
        """
        self._handle.check_open()
        if self.kind != "io_uring":
            return False
        code = -lib.swapio_engine_register(self._handle.pointer, address, nbytes)
        if code <= 0:
            return True
        reason = (
            f"registering {nbytes} bytes as fixed io_uring buffers was refused with "
            f"{errno.errorcode.get(code, code)} (memory lock limit: {memlock_text()})"
        )
        remedy = (
            f"raise 'ulimit -l' to {nbytes // 1024 + 1024} KiB or more for a little less CPU time"
        )
        if self.on_fallback == "error":
            raise AioError(code, "register", "memory", hint=f"{reason}; {remedy}")
        log_once(
            "register",
            f"{reason}; continuing with unregistered buffers. {remedy}; on_fallback='error' "
            "makes this an error",
        )
        return False

    def unregister(self, address: int) -> None:
        """Undo register(address, ...); does nothing when it was not registered."""
        self._handle.check_open()
        lib.swapio_engine_unregister(self._handle.pointer, address)

    def stats(self) -> EngineStats:
        """Return the totals; cheap, never blocks."""
        self._handle.check_open()
        self._handle.reap()
        raw = ffi.new("swapio_stats *")
        lib.swapio_engine_stats(self._handle.pointer, raw)
        return EngineStats(
            bytes_read=raw.bytes_read,
            bytes_written=raw.bytes_written,
            num_reads=raw.num_reads,
            num_writes=raw.num_writes,
            read_seconds=raw.read_nanoseconds / 1e9,
            write_seconds=raw.write_nanoseconds / 1e9,
            num_in_flight=raw.num_batches_in_flight,
            num_files=raw.num_files,
            num_registered_files=raw.num_registered_files,
            num_registered_buffers=raw.num_registered_buffers,
        )

    @property
    def closed(self) -> bool:
        """Whether close() has ended the engine."""
        return self._handle.closed

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is in flight, close the files and end the threads. Idempotent.

        Raises:
            TimeoutError: Transfers are still in flight; the engine and its buffers live on.
            ClosedError: In a forked child.
        """
        if self._handle.closed:
            return
        self._handle.check_open()
        if not self._handle.stop(timeout):
            raise TimeoutError(f"transfers are still in flight after {timeout} s")
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        handle: Handle | None = getattr(self, "_handle", None)  # None: __init__ has raised
        state = "closed" if handle is None or handle.closed else "open"
        return f"<swapio.Engine {state}, {self.queue_depth} x {self.block_size} bytes>"

    def __reduce__(self) -> Any:
        raise ClosedError("an Engine cannot be pickled or copied; create one in each process")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
