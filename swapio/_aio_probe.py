# SPDX-License-Identifier: Apache-2.0
"""What this machine and this file allow: io_uring, direct I/O, and one log line when not.

Invariants: everything is found out by trying, never by version numbers; each kind of fall-back is
logged once per process, with its reason and the switch that changes it.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import resource
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from swapio._aio import ffi, lib

logger = logging.getLogger("swapio.aio")

_logged_kinds: set[str] = set()
_logged_lock = threading.Lock()


def log_once(kind: str, message: str) -> None:
    """Log a fall-back of this kind as a warning, the first time in this process only."""
    with _logged_lock:
        if kind in _logged_kinds:
            return
        _logged_kinds.add(kind)
    logger.warning("%s", message)


@functools.cache
def probe_io_uring() -> tuple[bool, str]:
    """Try to create a ring, once per process; blocks for well under a millisecond.

    Returns:
        Whether io_uring works here, and the reason: what was found or what refused it.
    """
    if not lib.swapio_uring_is_built():
        return False, (
            "this build of swapio has no io_uring: install liburing (Debian: liburing-dev >= 2.3) "
            "and install swapio again"
        )
    code = -lib.swapio_uring_probe()
    if code == 0:
        return True, "io_uring works"
    return False, uring_refusal(code)


def uring_errno() -> int:
    """Return the errno that io_uring_setup gives here, 0 when it works."""
    return -lib.swapio_uring_probe()


def uring_refusal(code: int) -> str:
    """Explain why io_uring_setup failed, with the likely causes and what to do."""
    name = errno.errorcode.get(code, str(code))
    causes = {
        errno.EPERM: "likely cause: a seccomp filter (container runtime: allow io_uring_setup, "
        "io_uring_enter and io_uring_register) or the sysctl kernel.io_uring_disabled (set it to "
        "0)",
        errno.EACCES: "likely cause: a security policy (SELinux, AppArmor, seccomp) denies it",
        errno.ENOSYS: "likely cause: a seccomp filter that hides it (container runtime), or a "
        "kernel older than 5.1",
        errno.ENOMEM: "likely cause: the memory lock limit (ulimit -l, now "
        f"{memlock_text()}), which all rings of this user count against",
        errno.EMFILE: "likely cause: too many open files (ulimit -n)",
    }
    cause = causes.get(code, "the kernel gives no further reason")
    return f"io_uring_setup was refused with {name}; {cause}"


def memlock_text() -> str:
    """Return the soft memory lock limit in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


class DirectAlignment(NamedTuple):
    """Alignment that direct I/O needs on one file; zero when the file refuses it."""

    offset_bytes: int
    memory_bytes: int


def direct_alignment(fd: int) -> DirectAlignment:
    """Ask the file (statx) for its direct I/O alignment; 4096 where the kernel does not tell."""
    offset = ffi.new("uint32_t *")
    memory = ffi.new("uint32_t *")
    lib.swapio_direct_alignment(fd, offset, memory)
    return DirectAlignment(offset[0], memory[0])


def filesystem_of(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that holds `path` ("ext4"), or "unknown"."""
    resolved = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return kind
    for line in lines.splitlines():
        fields = line.split()
        mount = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[fields.index("-") + 1]
    return kind


def hint_for(code: int, op: str, path: str) -> str:
    """Say what the user can do about an errno of a file operation; empty for nothing to say."""
    if code in (errno.ENOSPC, errno.EDQUOT):
        return _space_hint(path)
    if code == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        return f"The file size limit (ulimit -f, RLIMIT_FSIZE) is {limit}; raise it"
    if code == errno.EINVAL:
        return (
            f"Likely cause: the file system ({filesystem_of(path)}) refuses direct I/O or this "
            "alignment; direct='off' uses buffered I/O, direct='auto' with on_fallback='log' "
            "falls back to it"
        )
    hints = {
        0: "The file is shorter than the caller expects: it was truncated, or never written whole",
        errno.EMFILE: "Too many open files: raise the limit (ulimit -n)",
        errno.ENFILE: "Too many open files on this machine (sysctl fs.file-max)",
        errno.EBADF: "Likely cause: the file was opened with read_only=True",
        errno.EIO: "The device reports a failure; see the kernel log (dmesg)",
        errno.ENOENT: "The file or its folder does not exist; create=True makes the file",
        errno.EISDIR: "The path is a folder; name a file in it",
        errno.ENOTDIR: "A part of the path is a file, not a folder",
        errno.EACCES: "No permission; check the owner and mode of the file and its folder",
        errno.EROFS: "The file system is mounted read-only; choose another folder",
        errno.ENOMEM: "The machine is out of memory for this transfer",
    }
    return hints.get(code, "") if code or op == "pread" else ""


def _space_hint(path: str) -> str:
    folder = Path(path).resolve().parent
    try:
        free = f"{shutil.disk_usage(folder).free} bytes are free"
    except OSError:
        free = "its free space is unknown"
    return f"The file system of {folder} is full or over quota ({free}); free space or move path="
