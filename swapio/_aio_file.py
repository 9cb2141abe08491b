# SPDX-License-Identifier: Apache-2.0
"""An open file of an engine: its descriptors, alignment, size and lock.

Invariant: the native engine owns the descriptors from open to close, and closes them when the last
transfer of the file has completed; the lock lives exactly as long as the data descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from swapio._aio import ffi, lib
from swapio._aio_handle import Handle
from swapio._aio_probe import direct_alignment, filesystem_of, hint_for, log_once
from swapio.errors import AioError, ClosedError, StoreLockedError

if TYPE_CHECKING:
    from swapio.aio import Engine

DIRECT_REMEDY = (
    "direct='off' chooses buffered I/O silently; direct='required' or on_fallback='error' makes "
    "this an error"
)
_DIRECT_CODES = {
    "off": lib.SWAPIO_DIRECT_OFF,
    "auto": lib.SWAPIO_DIRECT_AUTO,
    "required": lib.SWAPIO_DIRECT_REQUIRED,
}


class File:
    """A file that an Engine transfers to and from. Made by Engine.open(). Thread safe.

    Attributes:
        path: As it was opened.
        fd: The descriptor that data goes through, and that the lock is on.
        alignment_bytes: Offsets, lengths and addresses that are multiples of it need no copy and
            no second descriptor.
        direct_reason: Why the file is direct or not.
        number: Of the file in the native engine.
        handle: The native engine's handle.
    """

    def __init__(
        self, engine: Engine, handle: Handle, path: str, fd: int, *, number: int,
        alignment_bytes: int, direct_reason: str,
    ) -> None:  # fmt: skip
        self.path = path
        self.fd = fd
        self.number = number
        self.alignment_bytes = alignment_bytes
        self.direct_reason = direct_reason
        self.handle = handle
        self.closed = False
        self._engine = engine  # an engine lives as long as one of its files is in use
        self._finalizer = weakref.finalize(self, _close_dropped, handle, number)
        self._finalizer.atexit = False

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache (now: "auto" may have fallen back)."""
        if self.closed or self.handle.closed:
            return False
        return lib.swapio_file_is_direct(self.handle.pointer, self.number) == 1

    @property
    def size(self) -> int:
        """Size in bytes, from the file system."""
        self._check_open()
        return os.fstat(self.fd).st_size

    def allocate(self, nbytes: int) -> None:
        """Give the file this size, with all its blocks allocated. Blocks; releases the GIL.

        Raises:
            AioError: The disk is full, or a limit is in the way.
        """
        self._check_open()
        try:
            if nbytes > 0:
                os.posix_fallocate(self.fd, 0, nbytes)
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise self._error(error, "allocate", nbytes) from error

    def truncate(self, nbytes: int) -> None:
        """Set the size in bytes; what is beyond the old end reads as zero.

        Do not cut under transfers that are in flight.
        """
        self._check_open()
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise self._error(error, "truncate", nbytes) from error

    def lock(self) -> None:
        """Take the exclusive lock (flock) without waiting.

        The lock is on the open file description that the engine writes through: after a SIGKILL
        the kernel holds it until the last write in flight has landed.

        Raises:
            StoreLockedError: Somebody else has it.
        """
        self._check_open()
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLockedError(
                f"{self.path} is locked by another run, or by the last writes of a killed one"
            ) from error
        except OSError as error:
            raise self._error(error, "lock", 0) from error

    def close(self) -> None:
        """Wait for the transfers of this file, and close it. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._finalizer.detach()
        if self.handle.closed:
            return
        self.handle.check_open()
        pointer, number = self.handle.pointer, self.number
        lib.swapio_file_close(pointer, number)
        self.handle.wait_until(lambda ms: lib.swapio_file_wait_closed(pointer, number, ms), None)
        self.handle.reap()

    def _check_open(self) -> None:
        self.handle.check_open()
        if self.closed:
            raise ClosedError(f"the file {self.path} is closed")

    def _error(self, error: OSError, op: str, nbytes: int) -> AioError:
        code = error.errno or 0
        return AioError(code, op, self.path, length=nbytes, hint=hint_for(code, op, self.path))

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
        return f"<swapio.File {self.path!r} {'closed' if self.closed else 'open'}>"

    def __reduce__(self) -> Any:
        raise ClosedError(f"the open file {self.path} cannot be pickled or copied")


def _close_dropped(handle: Handle, number: int) -> None:
    # The native close only marks the file; it returns at once.
    if handle.pid == os.getpid() and not handle.closed:
        lib.swapio_file_close(handle.pointer, number)


def open_file(
    engine: Engine, handle: Handle, path: str | os.PathLike[str], mode: str, *,
    create: bool, read_only: bool,
) -> File:  # fmt: skip
    """Open the descriptors and hand them to the native engine; see Engine.open."""
    name = os.fsdecode(path)
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
    buffered_fd = _open(name, flags | (os.O_CREAT if create else 0))
    fd, refusal = buffered_fd, "direct='off'"
    if mode != "off":
        try:
            fd, refusal = _open_direct(name, flags, buffered_fd)
        except BaseException:
            os.close(buffered_fd)
            raise
    alignment = direct_alignment(buffered_fd)
    if fd != buffered_fd and 0 in alignment:
        os.close(fd)
        fd, refusal = buffered_fd, "the file reports that it has no direct I/O"
    if fd == buffered_fd and mode != "off":
        _refused(name, mode, refusal, fd)
    is_direct = fd != buffered_fd
    offset_bytes, memory_bytes = alignment if is_direct else (1, 1)
    config = ffi.new(
        "swapio_file_config *",
        [fd, buffered_fd if is_direct else -1, _DIRECT_CODES[mode if is_direct else "off"],
         offset_bytes, memory_bytes, 0],
    )  # fmt: skip
    number = lib.swapio_file_open(handle.pointer, config)
    if number < 0:
        handle.check_open()
        raise AioError(-number, "open", name)
    return File(
        engine, handle, name, fd, number=number,
        alignment_bytes=max(offset_bytes, memory_bytes),
        direct_reason="direct I/O works" if is_direct else refusal,
    )  # fmt: skip


def _open(name: str, flags: int) -> int:
    try:
        return os.open(name, flags, 0o666)
    except OSError as error:
        code = error.errno or 0
        raise AioError(code, "open", name, hint=hint_for(code, "open", name)) from error


def _open_direct(name: str, flags: int, buffered_fd: int) -> tuple[int, str]:
    """Return the direct descriptor, or the buffered one with the reason of the refusal."""
    try:
        # By descriptor, so that a rename in between cannot give two different files.
        fd = os.open(f"/proc/self/fd/{buffered_fd}", flags | os.O_DIRECT)
    except FileNotFoundError:
        fd = os.open(name, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            code = error.errno or 0
            raise AioError(code, "open", name, hint=hint_for(code, "open", name)) from error
        code_name = errno.errorcode[error.errno]
        return buffered_fd, f"open with O_DIRECT was refused with {code_name}"
    return fd, ""


def _refused(name: str, mode: str, refusal: str, fd: int) -> None:
    kind = filesystem_of(name)
    if mode == "required":
        os.close(fd)
        raise AioError(
            errno.EINVAL, "open", name,
            hint=f"direct I/O is required, and {refusal} (file system {kind}); {DIRECT_REMEDY}",
        )  # fmt: skip
    log_once(
        "direct",
        f"direct I/O on {Path(name)}: {refusal} (file system {kind}); continuing with buffered "
        f"I/O, with the page cache kept small. {DIRECT_REMEDY}",
    )
