# SPDX-License-Identifier: Apache-2.0
""" "auto" respects the machine, the cgroup and its ancestors (v1 and v2), and the local ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swapio.errors import ConfigError
from swapio.host_limits import auto_cpu_threads, local_ranks, memory_limits, rank_name

GIB = 1 << 30


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


MACHINE: dict[str, object] = {
    "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {16 * GIB // 1024} kB"
}


def test_without_cgroup_limits_the_machine_decides(tmp_path: Path) -> None:
    limits = memory_limits(tree(tmp_path, MACHINE), {})
    assert (limits.available, limits.cgroup_available) == (16 * GIB, None)
    assert limits.auto_host_memory == 8 * GIB


def test_v2_the_tightest_ancestor_decides_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/memory.max": 4 * GIB,
            "sys/fs/cgroup/pod/memory.current": 3 * GIB,
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}",
        },
    )
    limits = memory_limits(root, {"LOCAL_WORLD_SIZE": "2"})
    assert limits.cgroup_available == 2 * GIB
    assert limits.limited_by.endswith("/pod")
    assert limits.auto_host_memory == GIB // 2


def test_v1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/x\n0::/",
            # In the container only the mount itself exists, not the host's path below it.
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
        },
    )
    assert memory_limits(root, {}).available == GIB


def test_v1_without_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "5:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        },
    )
    assert memory_limits(root, {}).cgroup_available is None


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
        },
    )
    assert memory_limits(root, {}).auto_host_memory == 0


def test_no_meminfo_asks_for_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give host_memory in bytes"):
        memory_limits(tmp_path, {})


@pytest.mark.parametrize(
    ("text", "ranks"), [(None, 1), ("", 1), ("4", 4), ("0", 1), ("x", 1), ("-2", 1)]
)
def test_local_ranks(text: str, ranks: int) -> None:
    assert local_ranks({} if text is None else {"LOCAL_WORLD_SIZE": text}) == ranks


def test_cpu_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert auto_cpu_threads(None, tmp_path, {}) == 16
    assert auto_cpu_threads(None, tmp_path, {"LOCAL_WORLD_SIZE": "3"}) == 5
    assert auto_cpu_threads(None, tmp_path, {"LOCAL_WORLD_SIZE": "99"}) == 1
    assert auto_cpu_threads((0, 1), tmp_path, {"LOCAL_WORLD_SIZE": "3"}) == 2
    tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"})
    assert auto_cpu_threads(None, tmp_path, {}) == 2


def test_cpu_quota_of_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    folder = "sys/fs/cgroup/cpu/"
    files: dict[str, object] = {
        "proc/self/cgroup": "4:cpu,cpuacct:/a",
        folder + "cpu.cfs_period_us": 100000,
    }
    tree(tmp_path, files | {folder + "cpu.cfs_quota_us": -1})
    assert auto_cpu_threads(None, tmp_path, {}) == 16
    tree(tmp_path, {folder + "cpu.cfs_quota_us": 400000})
    assert auto_cpu_threads(None, tmp_path, {}) == 4


def test_ranks_have_names() -> None:
    assert rank_name({"RANK": "3", "WORLD_SIZE": "4"}) == "rank3"
    for alone in ({}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "x"}):
        assert rank_name(alone) == ""
