# SPDX-License-Identifier: Apache-2.0
"""Memory that transfers run on: pools of 2 MiB-aligned huge pages, and leases of pieces of them.

Facts about the memory -> consequence:
- Pages of 4 KiB cost a third to a half of the bandwidth -> 2 MiB alignment and MADV_HUGEPAGE.
- A huge page over the end of a slab would be resident as a whole -> slabs end at the exact page.
- A forked child would share pages that the kernel is writing into -> MADV_DONTFORK.
- torch's pinned allocator rounds up to powers of two -> slabs are page-locked in place instead.

Invariants: leases never overlap; the sum of leased and free bytes is the size of the pool; the
mapping lives as long as any lease, tensor or memoryview over it; after an interrupt memory is not
lent again while a transfer may still run on it.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from swapio.align import HUGE_PAGE_BYTES, PAGE_BYTES, round_up
from swapio.errors import (
    ClosedError,
    ConfigError,
    PoolExhaustedError,
    SwapioError,
    SwapStateError,
)

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger("swapio.buffers")
_logged: set[str] = set()

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _log_once(topic: str, message: str, *values: object) -> None:
    if topic not in _logged:
        _logged.add(topic)
        _logger.warning(message, *values)


class _Slab:
    """One anonymous mapping; unmapped when the last object that refers to it is gone."""

    def __init__(self, nbytes: int, name: str) -> None:
        self.nbytes = round_up(nbytes, PAGE_BYTES)
        reserved = self.nbytes + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _libc.mmap(None, reserved, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if start is None or start == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise PoolExhaustedError(
                f"cannot reserve {nbytes} bytes for {name}: {reason}. Likely cause: host_memory "
                "is above what this process may map (RLIMIT_AS, cgroup, overcommit); lower "
                "host_memory or raise the limit"
            )
        self.address = round_up(start, HUGE_PAGE_BYTES)
        head = self.address - start
        if head:
            _libc.munmap(start, head)
        if head < HUGE_PAGE_BYTES:
            _libc.munmap(self.address + self.nbytes, HUGE_PAGE_BYTES - head)
        # Not at interpreter exit: a transfer may still be running there, and the kernel unmaps.
        weakref.finalize(self, _unmap, self.address, self.nbytes).atexit = False

    def advise(self, advice: int) -> str:
        """Apply `madvise`; return the reason when the kernel refuses, else an empty string."""
        if _libc.madvise(self.address, self.nbytes, advice):
            return os.strerror(ctypes.get_errno())
        return ""

    def view(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return an object with the buffer protocol that keeps the mapping alive."""
        array = (ctypes.c_char * nbytes).from_address(self.address + offset)
        array.slab = self  # type: ignore[attr-defined]
        return array


def _unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


class Lease:
    """A piece of a pool, borrowed until `release`; a context manager.

    Tensors and views taken from it keep the mapping alive, but after `release` their bytes
    belong to the next lease.

    Attributes:
        address: First byte, aligned as asked.
        nbytes: Size as asked, in bytes.
    """

    def __init__(self, pool: BufferPool, offset: int, nbytes: int, reserved_bytes: int) -> None:
        self._pool: BufferPool | None = pool
        self._slab = pool._require_slab()
        self._offset = offset
        self._reserved_bytes = reserved_bytes
        self.address = self._slab.address + offset
        self.nbytes = nbytes

    @property
    def memory(self) -> memoryview:
        """The bytes of the lease, writable."""
        self._check()
        return memoryview(self._slab.view(self._offset, self.nbytes)).cast("B")

    def tensor(
        self, dtype: torch.dtype, shape: int | Sequence[int], byte_offset: int = 0
    ) -> torch.Tensor:
        """Return a CPU tensor over the lease's memory; nothing is copied or cleared.

        Args:
            dtype: Any torch dtype.
            shape: Logical shape; an int is a 1-D length.
            byte_offset: First byte in the lease, a multiple of the dtype's size.

        Raises:
            ConfigError: If the tensor does not fit in the lease or would be unaligned.
        """
        self._check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        numel = 1
        for size in sizes:
            numel *= size
        nbytes = numel * dtype.itemsize
        if byte_offset < 0 or byte_offset + nbytes > self.nbytes:
            raise ConfigError(
                f"a tensor of {nbytes} bytes at byte {byte_offset} does not fit in a lease of "
                f"{self.nbytes} bytes"
            )
        if (self.address + byte_offset) % dtype.itemsize:
            raise ConfigError(f"byte offset {byte_offset} is not aligned for {dtype}")
        import torch

        if not numel:
            return torch.empty(sizes, dtype=dtype)
        memory = self._slab.view(self._offset + byte_offset, nbytes)
        return torch.frombuffer(memory, dtype=dtype, count=numel).view(sizes)

    def release(self) -> None:
        """Give the memory back to the pool; never blocks. A second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._give_back(self._offset, self._reserved_bytes)

    def release_after(self, error: BaseException | None) -> None:
        """Release at the end of a block that `error` has left (None: nothing has).

        An error of this library is raised when the block's transfers are over. Anything else, such
        as a KeyboardInterrupt, may leave one in flight: then the pool gets the memory back when
        the last reference to this lease is gone, and the owner of a transfer is one.
        """
        if error is None or isinstance(error, SwapioError):
            self.release()
            return
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._give_back_after(self, self._offset, self._reserved_bytes)

    def _check(self) -> None:
        if self._pool is None:
            raise SwapStateError("the lease was released: take its tensors before that")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.release_after(error)


class BufferPool:
    """Memory of an exact size, reserved once and lent in pieces (first fit, holes coalesce).

    All methods may be called from any thread and none blocks. The pool's pages become resident
    when they are first touched, except with `pin`, which makes them resident at once.

    Args:
        nbytes: Size in bytes; the mapping is this size rounded up to 4 KiB.
        huge_pages: "auto" asks for transparent huge pages and goes on without them; "off" does
            not ask.
        pin: Page-lock the memory for CUDA. None does so where torch sees a GPU.
        name: Used in messages.

    Raises:
        ConfigError: If `nbytes` is not positive.
        PoolExhaustedError: If the memory cannot be mapped.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: Literal["auto", "off"] = "auto",
        pin: bool | None = None,
        name: str = "pool",
    ) -> None:
        if nbytes <= 0:
            raise ConfigError(f"{name}: a buffer pool needs a positive size, not {nbytes} bytes")
        self.name = name
        self._slab: _Slab | None = _Slab(nbytes, name)
        self.nbytes = self._slab.nbytes
        self.is_pinned = False
        self._lock = threading.Lock()
        self._holes = [(0, self.nbytes)]  # (offset, length), ascending, never adjacent
        self._num_leases = 0
        # A finalizer may run inside the lock: it only appends here.
        self._returned: deque[tuple[int, int]] = deque()
        self._advise(huge_pages)
        if pin or (pin is None and _has_gpu()):
            self._pin()

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are not leased, in however many holes."""
        with self._lock:
            self._take_returned()
            return sum(length for _, length in self._holes)

    @property
    def num_leases(self) -> int:
        """Leases that were not released yet."""
        return self._num_leases

    @property
    def regions(self) -> list[tuple[int, int]]:
        """The `(address, nbytes)` of each mapping, for registration with an engine."""
        slab = self._require_slab()
        return [(slab.address, slab.nbytes)]

    def lease(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Lease:
        """Borrow `nbytes` bytes; what is in them is undefined.

        Args:
            nbytes: Size in bytes; the pool gives up this rounded up to 4 KiB.
            alignment: Of the address; a power of two.

        Raises:
            PoolExhaustedError: If no hole is large enough; nothing was taken.
            ConfigError: If an argument is out of range.
        """
        if nbytes <= 0 or alignment <= 0 or alignment & (alignment - 1):
            raise ConfigError(
                f"{self.name}: cannot lease {nbytes} bytes aligned to {alignment}: the size must "
                "be positive and the alignment a power of two"
            )
        wanted = round_up(nbytes, PAGE_BYTES)
        with self._lock:
            base = self._require_slab().address
            self._take_returned()
            for index, (start, length) in enumerate(self._holes):
                offset = round_up(base + start, alignment) - base
                if offset + wanted <= start + length:
                    self._take(index, offset, wanted)
                    return Lease(self, offset, nbytes, wanted)
            free = sum(length for _, length in self._holes)
            largest = max((length for _, length in self._holes), default=0)
        raise PoolExhaustedError(
            f"{self.name}: no room for a lease of {nbytes} bytes: {free} of {self.nbytes} bytes "
            f"are free, the largest hole has {largest}. Raise host_memory, or lower chunk_numel "
            "or sub_group_numel"
        )

    def close(self, *, force: bool = False) -> None:
        """Give the memory up; it is unmapped when the last tensor over it is gone.

        Raises:
            SwapStateError: If leases are out and `force` is false; the pool stays open.
        """
        with self._lock:
            if self._slab is None:
                return
            if self._num_leases and not force:
                raise SwapStateError(
                    f"{self.name}: {self._num_leases} leases are still out; release them first"
                )
            self._slab = None
            self._holes = []

    def _take(self, index: int, offset: int, wanted: int) -> None:
        start, length = self._holes[index]
        rest = [(start, offset - start), (offset + wanted, start + length - offset - wanted)]
        self._holes[index : index + 1] = [hole for hole in rest if hole[1]]
        self._num_leases += 1

    def _give_back(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._num_leases -= 1
            self._add_hole(offset, nbytes)

    def _give_back_after(self, lease: Lease, offset: int, nbytes: int) -> None:
        with self._lock:
            self._num_leases -= 1
        weakref.finalize(lease, self._returned.append, (offset, nbytes)).atexit = False

    def _take_returned(self) -> None:
        while self._returned:
            self._add_hole(*self._returned.popleft())

    def _add_hole(self, offset: int, nbytes: int) -> None:
        if self._slab is None:
            return
        index = bisect.bisect(self._holes, (offset, 0))
        end = offset + nbytes
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == offset:
            index -= 1
            offset = self._holes.pop(index)[0]
        self._holes.insert(index, (offset, end - offset))

    def _require_slab(self) -> _Slab:
        if self._slab is None:
            raise ClosedError(f"{self.name} was closed")
        return self._slab

    def _advise(self, huge_pages: str) -> None:
        slab = self._require_slab()
        if reason := slab.advise(mmap.MADV_DONTFORK):
            _log_once("fork", "%s: forked children share its pages: %s", self.name, reason)
        if huge_pages == "off":
            return
        if reason := slab.advise(mmap.MADV_HUGEPAGE):
            _log_once(
                "huge",
                "%s: no huge pages, transfers will be slower: %s. Check "
                "/sys/kernel/mm/transparent_hugepage/enabled",
                self.name,
                reason,
            )

    def _pin(self) -> None:
        slab = self._require_slab()
        try:
            code = int(_cuda_runtime().cudaHostRegister(slab.address, slab.nbytes, 0))
            reason = f"cudaHostRegister returned {code}" if code else ""
        except (RuntimeError, AssertionError, AttributeError) as error:
            reason = str(error)
        if reason:
            _log_once("pin", "%s: not page-locked, copies to the GPU are slower: %s. Raise "
                      "`ulimit -l` or lower host_memory", self.name, reason)  # fmt: skip
            return
        self.is_pinned = True
        # Runs before the slab's own finalizer: finalizers of one object run newest first.
        weakref.finalize(slab, _unpin, slab.address).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close(force=kind is not None)


def _unpin(address: int) -> None:
    _cuda_runtime().cudaHostUnregister(address)


def _has_gpu() -> bool:
    # Importing torch takes seconds; who has not imported it has no tensor on a GPU.
    loaded = sys.modules.get("torch")
    return loaded is not None and bool(loaded.cuda.is_available())


def _cuda_runtime() -> Any:
    import torch

    return torch.cuda.cudart()
