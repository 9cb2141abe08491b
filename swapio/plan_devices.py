# SPDX-License-Identifier: Apache-2.0
"""What is known of the devices under some paths: free space, and what `swapio tune` measured.

Rates are in a small JSON file in the user's cache folder. Invariant: nothing depends on it but
predictions, and the shares of a device that reports name; what the configuration says wins.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swapio.plan_time import Rates

_NAMES = ("read", "write", "mixed")


def cache_file() -> Path:
    """Return where rates are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swapio" / "devices.json"


def remember_rates(folder: str | os.PathLike[str], rates: dict[str, float]) -> None:
    """Keep the rates (bytes per second: read, write, mixed) of the device under a folder.

    Raises:
        OSError: The cache cannot be written.
    """
    known = _load()
    known[_key(Path(folder))] = {name: int(rates[name]) for name in _NAMES}
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(known, indent=2), encoding="utf-8")
    draft.replace(file)


def known_rates(paths: Sequence[str]) -> Rates | None:
    """Return the rates of the paths' devices together, or None if one was never measured."""
    known = _load()
    devices = {}
    for path in paths:
        folder = _existing(path)
        if folder is not None:
            devices[_key(folder)] = known.get(_key(folder))
    found = [entry for entry in devices.values() if entry]
    if not found or len(found) < len(devices):
        return None
    try:
        return Rates(**{name: sum(int(entry[name]) for entry in found) for name in _NAMES})
    except (KeyError, TypeError, ValueError):
        return None


def free_bytes(paths: Sequence[str]) -> int | None:
    """Return the free space of the paths together, each device once; None without paths."""
    devices = {}
    for path in paths:
        folder = _existing(path)
        if folder is not None:
            devices[folder.stat().st_dev] = shutil.disk_usage(folder).free
    return sum(devices.values()) if devices else None


def _existing(path: str) -> Path | None:
    """Return the folder, or the nearest above it that exists."""
    return next((p for p in (Path(path), *Path(path).parents) if p.is_dir()), None)


def _key(folder: Path) -> str:
    status, system = folder.stat(), os.statvfs(folder)
    # A device number may come to mean another drive; the file system's id and size tell.
    return (
        f"{os.major(status.st_dev)}:{os.minor(status.st_dev)} "
        f"{system.f_fsid:x} {system.f_blocks * system.f_frsize}"
    )


def _load() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return {}
    return found if isinstance(found, dict) else {}
