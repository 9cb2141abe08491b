# SPDX-License-Identifier: Apache-2.0
"""`swapio info`: what this machine and a folder offer, what is used of it, and why.

Every fall-back is found the way the library finds it, by trying.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Section = dict[str, Any]
REGISTER_BYTES = 4 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "info",
        help="what this machine and a folder offer, and why something is not used",
        description="Shows the engine, direct I/O, limits, kernels and devices that swapio would "
        "use here, each with its reason.",
    )
    parser.add_argument("--path", metavar="DIR", default=".", help="folder to look at (default: .)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the sections; 0 unless the folder is missing."""
    from swapio.errors import ConfigError

    folder = Path(args.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--path {folder}: no such folder")
    logger = logging.getLogger("swapio")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what falls back is shown below, not logged
    try:
        sections = collect(folder)
    finally:
        logger.setLevel(level)
    if args.json:
        print(json.dumps(sections, indent=2))
        return 0
    for name, section in sections.items():
        print(name)
        for key, value in section.items():
            print(f"  {key:<22}{_text(value)}")
    return 0


def collect(folder: Path) -> dict[str, Section]:
    """Return all sections by name, as plain values fit for JSON."""
    parts: dict[str, Callable[[], Section]] = {
        "versions": _versions,
        "engine": _engine,
        "folder": lambda: _folder(folder),
        "memory": _memory,
        "kernels": _kernels,
        "gpu": _gpu,
    }
    return {name: part() for name, part in parts.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _versions() -> Section:
    import torch

    import swapio

    return {
        "swapio": swapio.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def _engine() -> Section:
    try:
        from swapio.aio import Engine, probe_io_uring
    except ImportError as error:
        return {"kind": "none", "why": f"the native engine cannot be loaded: {error}"}
    works, _ = probe_io_uring()
    with Engine() as engine:
        section: Section = {
            "kind": engine.kind,
            "why": engine.reason,
            "io_uring": works,
            "queue depth": engine.queue_depth,
            "block size": engine.block_size,
            "registered buffers": _registers_buffers(),
        }
        if engine.kind == "threads":
            section["threads"] = engine.num_threads
    return section


def _registers_buffers() -> str:
    from swapio.aio import Engine
    from swapio.buffers import BufferPool

    with Engine() as engine, BufferPool(REGISTER_BYTES, pin=False, name="info") as pool:
        if engine.kind != "io_uring":
            return "no (only io_uring has them)"
        address, nbytes = pool.regions[0]
        works = engine.register(address, nbytes)
        engine.unregister(address)
    if works:
        return f"yes ({nbytes >> 20} MiB tried)"
    return f"no ({nbytes >> 20} MiB tried: over the memory lock limit; raise ulimit -l)"


def _folder(folder: Path) -> Section:
    usage = shutil.disk_usage(folder)
    section: Section = {"path": str(folder.resolve())}
    try:
        from swapio.aio import Engine, filesystem_of
    except ImportError:
        return section
    section |= {"file system": filesystem_of(folder), "free bytes": usage.free}
    section["total bytes"] = usage.total
    if not os.access(folder, os.W_OK):
        return section | {"writable": False}
    with (
        Engine(direct="auto") as engine,
        tempfile.NamedTemporaryFile(dir=folder, prefix="swapio-info-") as scratch,
        engine.open(scratch.name, size=1 << 20) as file,
    ):
        engine.pwrite(file, bytearray(1 << 20)).result()
        section["writable"] = True
        section["direct I/O"] = file.is_direct
        section["direct I/O reason"] = file.direct_reason
        section["alignment bytes"] = file.alignment_bytes
    if section["file system"] in ("tmpfs", "ramfs"):
        section["warning"] = "this folder is RAM; state kept here saves none"
    return section


def _memory() -> Section:
    import resource

    from swapio.host_limits import memory_limits

    limits = memory_limits()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    text = huge.read_text(encoding="ascii") if huge.exists() else "[none]"
    return {
        "available bytes": limits.available,
        "limited by": limits.limited_by,
        "host_memory='auto'": limits.auto_host_memory,
        "memory lock limit": "unlimited" if soft == resource.RLIM_INFINITY else soft,
        "huge pages": text[text.index("[") + 1 : text.index("]")],
    }


def _kernels() -> Section:
    import torch

    section: Section = {
        "cpus": len(os.sched_getaffinity(0)),
        "torch threads": torch.get_num_threads(),
    }
    try:
        from swapio.optim import kernels
    except ImportError as error:
        return section | {"simd": "none", "why": f"the kernels cannot be loaded: {error}"}
    return section | {
        "simd": kernels.simd_level(),
        "simd levels here": list(kernels.simd_levels()),
        "simd override": os.environ.get("SWAPIO_SIMD", "none (SWAPIO_SIMD)"),
        "threads": kernels.num_threads(),
        "xxh3": "native" if kernels.has_xxh3 else "xxhash wheel (build with libxxhash-dev)",
    }


def _gpu() -> Section:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return {"available": False, "why": "no CUDA device" if built else "a CPU build of torch"}
    count = torch.cuda.device_count()
    return {"available": True, "devices": [torch.cuda.get_device_name(i) for i in range(count)]}
