# SPDX-License-Identifier: Apache-2.0
"""Facts about folders and file systems that the store must know, and limits it must raise.

Invariant: a fact that cannot be found out is logged and never stops a run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

from swapio.aio import filesystem_of
from swapio.errors import ConfigError

_logger = logging.getLogger("swapio.store")
_logged: set[tuple[str, str]] = set()

_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_NOCOW_FL = 0x00800000
_SPARE_DESCRIPTORS = 128

_REMARKS = {
    "tmpfs": "keeps its files in RAM: state stored there saves no memory",
    "ramfs": "keeps its files in RAM, without a limit: state stored there saves no memory",
    "nfs": "is a network file system: locks reach only as far as its server supports them",
    "nfs4": "is a network file system: locks reach only as far as its server supports them",
    "overlay": "is a container layer: mount a volume of the host instead for full speed",
}


def usable_folder(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder that can be written, creating it.

    Raises:
        ConfigError: If it is a file, cannot be created, or cannot be written; names it.
    """
    folder = Path(path).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} cannot be a folder: {error.filename} is a file") from error
    except OSError as error:
        raise ConfigError(f"cannot create the folder {folder}: {error.strerror}") from error
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise ConfigError(f"the folder {folder} is on a file system that is mounted read-only")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {folder} is not writable for this user")
    return folder


def note_filesystem(folder: Path) -> None:
    """Log once per folder what a user should know about its file system; tune btrfs."""
    name = filesystem_of(folder)
    if name in _REMARKS:
        _log_once(name, folder, _REMARKS[name])
    if name == "btrfs":
        _disable_copy_on_write(folder)


def _log_once(name: str, folder: Path, remark: str) -> None:
    if (name, str(folder)) not in _logged:
        _logged.add((name, str(folder)))
        _logger.warning("%s is on %s, which %s", folder, name, remark)


def _disable_copy_on_write(folder: Path) -> None:
    # New files inherit the attribute; without it each overwrite would go to a new place.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = struct.unpack("l", fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, bytes(8)))[0]
        fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, struct.pack("l", flags | _FS_NOCOW_FL))
    except OSError as error:
        remark = f"refused to turn copy-on-write off ({error.strerror}): writes will be slower"
        _log_once("btrfs", folder, remark)
    finally:
        os.close(descriptor)


def check_space(needs: Sequence[tuple[Path, int]]) -> None:
    """Check that each device has room for what its folders need together.

    Args:
        needs: `(folder, bytes)`; folders may share a device.

    Raises:
        ConfigError: If one has not; names need and free bytes.
    """
    totals: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in needs:
        device = folder.stat().st_dev
        first, total = totals.get(device, (folder, 0))
        totals[device] = (first, total + nbytes)
    for folder, total in totals.values():
        facts = os.statvfs(folder)
        free = facts.f_bavail * facts.f_frsize
        # ramfs reports no size at all.
        if facts.f_blocks and total > free:
            raise ConfigError(
                f"the state needs {total} bytes in {folder} and {free} bytes are free. Free some "
                "space, use another path, or lower spare_slots"
            )


def raise_descriptor_limit(num_files: int) -> None:
    """Raise the soft limit of open files as far as `num_files` more need it and may.

    Raises:
        ConfigError: If the hard limit is below the need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    need = used + num_files + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and used + num_files > hard:
        raise ConfigError(
            f"the state needs {num_files} open files and the limit is {hard}. Raise `ulimit -Hn`, "
            "or raise sub_group_numel"
        )
    wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
