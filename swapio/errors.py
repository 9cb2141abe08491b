# SPDX-License-Identifier: Apache-2.0
"""The exceptions of swapio.

    SwapioError
    |-- ConfigError (ValueError)     a setting is wrong; nothing was touched
    |-- AioError (OSError)           a transfer failed: operation, path, offset, wanted, got
    |-- SwapStateError               a verb does not fit the state of its sub-group
    |-- CorruptionError              bytes on storage are not what was written
    |-- StoreLockedError             another run, or a dying one, owns the files
    |-- PoolExhaustedError           the memory budget has no room for a lease
    |-- CheckpointError              a save, load or recovery cannot be done
    `-- ClosedError                  the object was closed, or belongs to a parent process

Invariant: every message names the thing that failed, the values, and what to do about it.
"""

from __future__ import annotations

import os
from pathlib import Path


class SwapioError(Exception):
    """Base class of everything that swapio raises on purpose."""


class ConfigError(SwapioError, ValueError):
    """A setting, parameter or argument is invalid; raised before any work is done."""


class AioError(SwapioError, OSError):
    """A file operation failed, or transferred fewer bytes than it must.

    Attributes:
        errno: The positive error number, 0 for a transfer that ended early without one.
        filename: The path as it was opened.
        op: "open", "pread", "pwrite", "fsync", "allocate", ...
        offset: First byte of the operation in the file, in bytes.
        length: Bytes wanted.
        transferred: Bytes that were moved before the failure.
        hint: Likely cause and the knob to turn; empty when there is nothing to say.
    """

    def __init__(
        self,
        errno: int,
        op: str,
        path: str | os.PathLike[str],
        *,
        offset: int = 0,
        length: int = 0,
        transferred: int = 0,
        hint: str = "",
    ) -> None:
        reason = os.strerror(errno) if errno else "the transfer ended early"
        super().__init__(errno, reason, os.fspath(path))
        self.op = op
        self.offset = offset
        self.length = length
        self.transferred = transferred
        self.hint = hint

    def __str__(self) -> str:
        where = f" at offset {self.offset}: wanted {self.length} bytes, got {self.transferred}"
        text = f"{self.op} of {Path(self.filename)} failed"
        text += where if self.length else ""
        text += f": {self.strerror}" + (f" (errno {self.errno})" if self.errno else "")
        return text + (f". {self.hint}" if self.hint else "")


class SwapStateError(SwapioError, RuntimeError):
    """A verb was called that the sub-group's state does not allow."""


class CorruptionError(SwapioError):
    """Bytes read back differ from what was written: a checksum, a length or a field is wrong."""


class StoreLockedError(SwapioError):
    """The folder's files are in use by another run, or by the last writes of a killed one."""


class PoolExhaustedError(SwapioError, MemoryError):
    """A lease does not fit into what is left of the memory budget."""


class CheckpointError(SwapioError):
    """A checkpoint cannot be written, found, read or applied."""


class ClosedError(SwapioError, ValueError):
    """The object was closed, or it belongs to the parent of this forked process."""


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and what it says, for messages about an earlier failure."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
