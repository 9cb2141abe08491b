# SPDX-License-Identifier: Apache-2.0
"""Run a command with io_uring denied: `deny_io_uring.py {EPERM,ENOSYS,...} COMMAND...`.

A seccomp filter refuses the three io_uring system calls with the errno given, as containers do.
It needs no privileges and is inherited by every process the command starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
FIRST_CALL, LAST_CALL = 425, 427  # io_uring_setup, _enter, _register: the same on all machines
LOAD_WORD, JUMP_GE, JUMP_GT, RETURN = 0x20, 0x35, 0x25, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def deny(number: int) -> None:
    """Make io_uring's system calls fail with errno `number` in this process and its children."""
    instructions = (
        (LOAD_WORD, 0, 0, 0),  # the system call's number
        (JUMP_GE, 0, 2, FIRST_CALL),
        (JUMP_GT, 1, 0, LAST_CALL),
        (RETURN, 0, 0, REFUSE | number),
        (RETURN, 0, 0, ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(instructions), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot install the seccomp filter: {os.strerror(number)}")


def main() -> None:
    """Install the filter and become the command."""
    if len(sys.argv) < 3 or not hasattr(errno, sys.argv[1]):
        raise SystemExit(__doc__)
    deny(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
