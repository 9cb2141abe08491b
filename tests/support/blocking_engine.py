# SPDX-License-Identifier: Apache-2.0
"""A double of the engine that transfers at once with buffered pread and pwrite.

The store's tests run on it as well as on the real engine: what fails on both is the store's.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from swapio._aio_buffers import as_raw_buffer
from swapio.aio import OP_READ, OP_WRITE, Request
from swapio.errors import AioError, StoreLockedError


class File:
    def __init__(self, path, fd):
        self.path = Path(path)
        self.fd = fd
        self.alignment_bytes = 512
        self.is_direct = False
        self.direct_reason = "blocking double"

    @property
    def size(self):
        return os.fstat(self.fd).st_size

    def allocate(self, nbytes):
        try:
            if nbytes:
                os.posix_fallocate(self.fd, 0, nbytes)
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise AioError(error.errno or 0, "allocate", self.path, length=nbytes) from error

    def truncate(self, nbytes):
        os.ftruncate(self.fd, nbytes)

    def lock(self):
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLockedError(f"{self.path} is locked") from None

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class IOFuture:
    wait_seconds = 0.0

    def __init__(self, value, error=None):
        self._value = value
        self._error = error

    def result(self, timeout=None):  # noqa: ARG002
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout=None):  # noqa: ARG002
        return self._error

    def done(self):
        return True


class BlockingEngine:
    kind = "blocking"
    closed = False

    def __init__(self):
        self.num_submits = 0
        self.fsynced = []

    def open(self, path, *, size=None, create=False, read_only=False, lock=False, direct=None):  # noqa: ARG002
        flags = os.O_RDONLY if read_only else os.O_RDWR
        flags |= os.O_CREAT if create else 0
        try:
            file = File(path, os.open(path, flags | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise AioError(error.errno or 0, "open", path) from error
        try:
            if lock:
                file.lock()
            if size is not None:
                file.truncate(size)
        except BaseException:
            file.close()
            raise
        return file

    def submit(self, requests: Sequence[Request], *, owner=None):  # noqa: ARG002
        self.num_submits += 1
        total = 0
        for request in requests:
            error = self._transfer(*request)
            if error is not None:
                return IOFuture(total, error)
            total += request[3]
        return IOFuture(total)

    def _transfer(self, op, file, address, nbytes, offset):
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        moved = 0
        name = "pwrite" if op == OP_WRITE else "pread"
        while moved < nbytes:
            try:
                if op == OP_WRITE:
                    count = os.pwrite(file.fd, memory[moved:], offset + moved)
                else:
                    count = os.preadv(file.fd, [memory[moved:]], offset + moved)
            except OSError as error:
                count, code = 0, error.errno or 0
            else:
                code = 0
            if not count:
                return AioError(
                    code, name, file.path, offset=offset, length=nbytes, transferred=moved
                )
            moved += count
        return None

    def pread(self, file, buffer, offset=0):
        return self.submit(
            [Request(OP_READ, file, *as_raw_buffer(buffer, writable=True)[:2], offset)]
        )

    def pwrite(self, file, buffer, offset=0):
        memory = as_raw_buffer(buffer, writable=False)
        return self.submit([Request(OP_WRITE, file, *memory[:2], offset)])

    def fsync(self, file, *, data_only=False):
        (os.fdatasync if data_only else os.fsync)(file.fd)
        self.fsynced.append(file.path)
        return IOFuture(0)

    def drain(self, timeout=None):  # noqa: ARG002
        return 0

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
