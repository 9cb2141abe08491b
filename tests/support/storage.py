# SPDX-License-Identifier: Apache-2.0
"""Real file systems with a property that a test needs: full, 4K sectors only, no direct I/O."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def need_root(*tools: str) -> None:
    """Skip the test unless it runs as root and the tools are installed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not possible here: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def _mounted(*arguments: str, at: Path) -> Iterator[Path]:
    at.mkdir()
    _run("mount", *arguments, str(at))
    try:
        yield at
    finally:
        subprocess.run(("umount", "--lazy", str(at)), check=False)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount an ext4 file system of this size."""
    need_root("mkfs.ext4", "mount", "losetup")
    image = folder / "disk.img"
    image.touch()
    os.truncate(image, nbytes)
    _run("mkfs.ext4", "-qF", str(image))
    with _mounted("-o", "loop", str(image), at=folder / "disk") as mount:
        yield mount


@contextmanager
def disk_with_4k_sectors(folder: Path, nbytes: int = 64 << 20) -> Iterator[Path]:
    """Mount an ext4 file system on a device that only takes direct I/O in units of 4096 bytes."""
    need_root("mkfs.ext4", "mount", "losetup")
    image = folder / "sectors.img"
    image.touch()
    os.truncate(image, nbytes)
    device = _run("losetup", "--sector-size", "4096", "-f", "--show", str(image))
    try:
        _run("mkfs.ext4", "-qF", device)
        with _mounted(device, at=folder / "sectors") as mount:
            yield mount
    finally:
        subprocess.run(("losetup", "--detach", device), check=False)


@contextmanager
def without_direct_io(folder: Path) -> Iterator[Path]:
    """Mount a ramfs: it refuses O_DIRECT at open."""
    need_root("mount")
    with _mounted("-t", "ramfs", "ramfs", at=folder / "ramfs") as mount:
        yield mount
