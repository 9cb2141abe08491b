# SPDX-License-Identifier: Apache-2.0
"""How much memory and how many CPUs this process may use. Pure; standard library only.

Facts: a container sees the whole machine in /proc/meminfo; its limit is in its cgroup, and in each
cgroup above it. What a cgroup "uses" includes page cache that the kernel gives back on demand
(inactive_file). Ranks that torchrun starts on one host share all of it (LOCAL_WORLD_SIZE).

Consequence: the memory left is the least of MemAvailable and, over the cgroup's ancestors, limit
minus usage plus inactive_file; a share of it belongs to each local rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swapio.align import HUGE_PAGE_BYTES, round_down
from swapio.errors import ConfigError

AUTO_SHARE = 0.5
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimits:
    """What is left of the host's memory for this process and its neighbours, in bytes.

    Attributes:
        available: The least of what the machine and the cgroups have left.
        machine_available: MemAvailable of the machine.
        cgroup_available: What the tightest cgroup has left, None when there is no limit.
        local_ranks: Processes of this job on this host.
        limited_by: The file that gave the least.
    """

    available: int
    machine_available: int
    cgroup_available: int | None
    local_ranks: int
    limited_by: str

    @property
    def auto_host_memory(self) -> int:
        """What host_memory="auto" is: a share of what is left, of one rank, in whole pages."""
        return round_down(int(self.available * AUTO_SHARE) // self.local_ranks, HUGE_PAGE_BYTES)


def memory_limits(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> MemoryLimits:
    """Read the limits.

    Args:
        root: Where /proc and /sys are found; for tests.
        environment: LOCAL_WORLD_SIZE is read from it; os.environ when None.

    Raises:
        ConfigError: /proc/meminfo cannot be read; host_memory must then be given.
    """
    meminfo = root / "proc/meminfo"
    machine = _keyed(meminfo).get("MemAvailable:")
    if machine is None:
        raise ConfigError(
            f"host_memory='auto' needs MemAvailable in {meminfo}, which cannot be read; "
            "give host_memory in bytes"
        )
    machine *= 1024
    least, where = machine, str(meminfo)
    tightest: int | None = None
    for folder in _cgroup_folders(root, "memory"):
        left = _cgroup_left(folder)
        if left is not None and (tightest is None or left < tightest):
            tightest = left
            if left < least:
                least, where = left, str(folder)
    return MemoryLimits(least, machine, tightest, local_ranks(environment), where)


def auto_host_memory() -> int:
    """Return what host_memory="auto" means now, in bytes."""
    return memory_limits().auto_host_memory


def local_ranks(environment: Mapping[str, str] | None = None) -> int:
    """Return how many processes of this job run on this host; 1 unless the launcher says."""
    text = (os.environ if environment is None else environment).get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.strip().isdigit() else 1


def rank_name(environment: Mapping[str, str] | None = None) -> str:
    """Return "rank3" in a run of several ranks (RANK, WORLD_SIZE), else an empty string."""
    found = os.environ if environment is None else environment
    rank, size = found.get("RANK", ""), found.get("WORLD_SIZE", "")
    return f"rank{rank}" if rank.isdigit() and size.isdigit() and int(size) > 1 else ""


def auto_cpu_threads(
    affinity: Sequence[int] | None = None,
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
) -> int:
    """Return the kernel threads of this rank: usable CPUs divided by the local ranks.

    Args:
        affinity: CPUs that were chosen for this rank; they are not divided again.
        root: Where /sys is found; for tests.
        environment: LOCAL_WORLD_SIZE is read from it; os.environ when None.
    """
    if affinity is not None:
        return len(affinity)
    usable = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            usable = min(usable, quota)
    return max(1, int(usable) // local_ranks(environment))


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's cgroup and of each one above it, for v2 and v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may be the host's, which is not below the mount there; the
        # walk up then still ends at the mount, which is the container's own cgroup.
        folder = mount / path.strip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == mount:
                break
            folder = folder.parent


def _cgroup_left(folder: Path) -> int | None:
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(folder / limit_name)
        if limit is not None and limit < _UNLIMITED:
            used = _number(folder / usage_name) or 0
            cache = _keyed(folder / "memory.stat").get(cache_key, 0)
            return max(0, limit - max(0, used - cache))
    return None


def _cpu_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    v1_quota, v1_period = (_number(folder / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return v1_quota / v1_period if v1_quota and v1_period and v1_quota > 0 else None


def _number(path: Path) -> int | None:
    """Return the number a file holds; None when it is missing or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _keyed(path: Path) -> dict[str, int]:
    """Return the numbers of a file of "key number" lines."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
