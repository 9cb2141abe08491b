# SPDX-License-Identifier: Apache-2.0
"""What this machine does not allow is found by trying, logged once, and can be made an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.script import denied, memlock, run_script
from support.storage import disk_with_4k_sectors, without_direct_io
from swapio._aio import lib
from swapio.aio import Engine, EngineKind, filesystem_of, probe_io_uring
from swapio.errors import AioError

MIB = 1 << 20
needs_build = pytest.mark.skipif(
    not lib.swapio_uring_is_built(), reason="this build has the thread engine only"
)

ROUND_TRIPS = """
import sys
import numpy as np
from swapio.aio import Engine
from swapio.errors import AioError
source = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
for _ in range(50):
    with Engine() as engine, engine.open(sys.argv[1], create=True) as file:
        kind, reason = engine.kind, engine.reason
        engine.pwrite(file, source).result()
        target = np.zeros_like(source)
        engine.pread(file, target).result()
        if not np.array_equal(source, target):
            sys.exit("the bytes differ")
print(kind, "|", reason)
for options in ({"kind": "io_uring"}, {"on_fallback": "error"}):
    try:
        Engine(**options)
    except AioError as error:
        print(error)
"""


@needs_build
@pytest.mark.parametrize(
    ("name", "cause"),
    [("EPERM", "kernel.io_uring_disabled"), ("ENOSYS", "seccomp"), ("EACCES", "SELinux")],
)
def test_io_uring_denied(tmp_path: Path, name: str, cause: str) -> None:
    """liburing#1078 and kin: containers deny io_uring, and programs ended at start."""
    done = run_script(ROUND_TRIPS, tmp_path / "data", prefix=denied(name))
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for text in (f"refused with {name}", cause, "engine='threads'", "on_fallback='error'"):
        assert text in done.stderr
    first, *errors = done.stdout.strip().splitlines()
    assert first.startswith("threads |")
    assert len(errors) == 2
    for line in errors:
        assert f"(errno {getattr(errno, name)})" in line
        assert cause in line


REGISTER = """
import sys
import numpy as np
from swapio.aio import Engine
from swapio.errors import AioError
nbytes = 64 << 20
memory = np.zeros(nbytes + 4096, dtype=np.uint8)
memory = memory[-memory.__array_interface__["data"][0] % 4096:][:nbytes]
for _ in range(3):
    with Engine("io_uring") as engine, engine.open(sys.argv[1], create=True) as file:
        print(engine.register(memory.__array_interface__["data"][0], nbytes))
        memory[:] = 5
        engine.pwrite(file, memory).result()
        memory[:] = 0
        engine.pread(file, memory).result()
        print(bool((memory == 5).all()))
try:
    Engine("io_uring", on_fallback="error").register(memory.__array_interface__["data"][0], nbytes)
except AioError as error:
    print(error.errno)
"""


@pytest.mark.skipif(not probe_io_uring()[0], reason="io_uring does not work here")
@pytest.mark.parametrize("limit", [64 << 10, 8 << 20])
def test_memory_lock_limit(tmp_path: Path, limit: int) -> None:
    """liburing#365 and kin: registration is optional; no `ulimit -l unlimited` is needed."""
    done = run_script(REGISTER, tmp_path / "data", prefix=memlock(limit))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"] * 3 + [str(errno.ENOMEM)]
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    for text in ("67108864 bytes", "ENOMEM", f"limit: {limit} bytes", "ulimit -l"):
        assert text in lines[0]


@pytest.mark.skipif(not probe_io_uring()[0], reason="io_uring does not work here")
def test_registered_memory_is_used(tmp_path: Path) -> None:
    memory = np.zeros(2 * MIB, dtype=np.uint8)
    address = memory.__array_interface__["data"][0]
    with Engine("io_uring") as engine, engine.open(tmp_path / "data", create=True) as file:
        if not engine.register(address, memory.nbytes):
            pytest.skip("registration is refused here")
        assert engine.register(address, memory.nbytes)  # again: it replaces the first
        assert engine.stats().num_registered_buffers == 1
        memory[:] = 9
        engine.pwrite(file, memory).result()
        memory[:] = 0
        engine.pread(file, memory).result()
        assert bool((memory == 9).all())
        engine.unregister(address)
        engine.unregister(address)
        assert engine.register(address, 0)
        assert engine.stats().num_registered_buffers == 0


@pytest.fixture(scope="module")
def ramfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with without_direct_io(tmp_path_factory.mktemp("ramfs")) as mount:
        yield mount


@pytest.mark.root
def test_direct_io_refused_at_open(
    kind: EngineKind, ramfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """kvikio#126 and kin: refused by the file system of this folder, not by the machine."""
    source = np.random.default_rng(2).integers(0, 256, 3 * MIB + 5, dtype=np.uint8)
    with Engine(kind) as engine:
        for name in ("one", "two"):
            with engine.open(ramfs / name, create=True) as file:
                assert not file.is_direct
                assert "refused with EINVAL" in file.direct_reason
                engine.pwrite(file, source).result()
                target = np.zeros_like(source)
                engine.pread(file, target).result()
                assert np.array_equal(source, target)
        with pytest.raises(AioError, match="file system ramfs") as caught:
            engine.open(ramfs / "one", direct="required")
        assert caught.value.filename == str(ramfs / "one")
    with Engine(kind, on_fallback="error") as engine, pytest.raises(AioError, match="ramfs"):
        engine.open(ramfs / "one")
    assert len(caplog.records) == 1
    assert "file system ramfs" in caplog.records[0].message
    assert "direct='off'" in caplog.records[0].message


@pytest.fixture(scope="module")
def sectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with disk_with_4k_sectors(tmp_path_factory.mktemp("sectors")) as mount:
        yield mount


@pytest.mark.root
@pytest.mark.parametrize("nbytes", [1, 512, 2048, 4096, 5000, MIB + 512, 3 * MIB + 904])
def test_device_that_only_takes_4k(
    kind: EngineKind, sectors: Path, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    with Engine(kind) as engine, engine.open(sectors / f"{kind}-{nbytes}", create=True) as file:
        assert file.is_direct
        assert file.alignment_bytes == 4096
        for offset in (0, 512, 4096):
            engine.pwrite(file, source, offset).result()
            target = np.zeros_like(source)
            engine.pread(file, target, offset).result()
            assert np.array_equal(source, target)
        assert file.is_direct
        file.truncate(nbytes - 1)
        with pytest.raises(AioError):
            engine.pread(file, target).result()
    assert not caplog.records


def resident_bytes(path: Path) -> int:
    """Count the bytes of a file in the page cache (mincore)."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    pages = (ctypes.c_ubyte * (size // 4096))()
    code = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    assert code == 0
    return 4096 * int((np.frombuffer(bytes(pages), dtype=np.uint8) & 1).sum())


def cached_bytes_max(kind: EngineKind, path: Path, nbytes: int) -> int:
    memory = np.ones(64 * MIB, dtype=np.uint8)
    cached = 0
    with Engine(kind, direct="off") as engine, engine.open(path, create=True, size=nbytes) as file:
        for step in (engine.pwrite, engine.pread):
            for offset in range(0, nbytes, memory.nbytes):
                step(file, memory, offset).result()
                cached = max(cached, resident_bytes(path))
    return cached


def test_buffered_files_keep_the_page_cache_small(kind: EngineKind, tmp_path: Path) -> None:
    """zenfs#147 and kin: the fall-back filled the page cache until the container was killed."""
    assert cached_bytes_max(kind, tmp_path / "data", 512 * MIB) < 256 * MIB


@pytest.mark.slow
def test_buffered_files_keep_the_page_cache_small_for_long(
    kind: EngineKind, tmp_path: Path
) -> None:
    assert cached_bytes_max(kind, tmp_path / "data", 4096 * MIB) < 256 * MIB


def test_filesystem_of(tmp_path: Path) -> None:
    assert filesystem_of("/proc/self/mountinfo") == "proc"
    assert filesystem_of(tmp_path / "not" / "there") == filesystem_of(tmp_path) != "unknown"
