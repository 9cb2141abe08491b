# SPDX-License-Identifier: Apache-2.0
"""A transfer completes whole or raises: full disks, limits, short files, closed and wrong files."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from support.script import run_script
from support.storage import small_disk
from swapio import _aio_file
from swapio._aio_probe import DirectAlignment
from swapio.aio import OP_READ, OP_WRITE, DirectMode, Engine, EngineKind, File, RawBuffer, Request
from swapio.errors import AioError, ClosedError, ConfigError, StoreLockedError

MakeFile = Callable[..., File]
MIB = 1 << 20


@pytest.mark.parametrize("cut", [1, 4096])
@pytest.mark.parametrize("nbytes", [5000, 4096, 3 * MIB, 3 * MIB + 17])
def test_file_shorter_than_recorded(
    engine: Engine, make_file: MakeFile, nbytes: int, cut: int
) -> None:
    """qdrant#8466 and kin: the end of the file is not a spurious short read."""
    with make_file() as file:
        engine.pwrite(file, np.ones(nbytes, dtype=np.uint8)).result()
        file.truncate(nbytes - cut)
        with pytest.raises(AioError, match=r"ended early.*shorter than the caller") as caught:
            engine.pread(file, np.zeros(nbytes, dtype=np.uint8)).result()
    error = caught.value
    assert (error.errno, error.op, error.filename) == (0, "pread", file.path)
    assert (error.offset, error.length, error.transferred) == (0, nbytes, nbytes - cut)


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("full"), 64 * MIB) as mount:
        yield mount


@pytest.mark.root
def test_full_disk(engine: Engine, full_disk: Path) -> None:
    """DeepSpeed#1070: a full disk showed up when the file was read, as an aborted process."""
    with (
        engine.open(full_disk / "good", create=True) as good,
        engine.open(full_disk / "bad", create=True) as bad,
    ):
        engine.pwrite(good, b"still here").result()
        engine.fsync(good).result()
        with pytest.raises(AioError, match=r"bytes are free\); free space") as caught:
            engine.pwrite(bad, np.ones(100 * MIB, dtype=np.uint8)).result()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == bad.path
        with pytest.raises(AioError) as refused:
            bad.allocate(100 * MIB)
        assert refused.value.errno == errno.ENOSPC
        back = bytearray(10)
        engine.pread(good, back).result()
        assert back == b"still here"
    (full_disk / "bad").unlink()


FSIZE = """
import resource, sys
import numpy as np
from swapio.aio import Engine
from swapio.errors import AioError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with Engine(sys.argv[2], direct=sys.argv[3]) as engine:
    file = engine.open(sys.argv[1], create=True)
    engine.pwrite(file, b"before").result()
    try:
        engine.pwrite(file, np.ones(3 << 20, dtype=np.uint8), 4096).result()
    except AioError as error:
        print(error.errno, error.transferred, error)
    back = bytearray(6)
    engine.pread(file, back).result()
    print(back.decode())
"""


def test_file_size_limit(kind: EngineKind, direct: DirectMode, tmp_path: Path) -> None:
    done = run_script(FSIZE, tmp_path / "data", kind, direct)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{errno.EFBIG} {MIB - 4096} ")
    assert "RLIMIT_FSIZE) is 1048576 bytes" in done.stdout
    assert done.stdout.endswith("before\n")


def test_one_failure_of_a_batch(engine: Engine, make_file: MakeFile) -> None:
    """liburing#733: completions of a failed batch must not be credited to the next one."""
    memory = np.zeros(8 * MIB, dtype=np.uint8)
    address = memory.__array_interface__["data"][0]
    with make_file() as file, make_file("short") as short:
        content = np.repeat(np.arange(8, dtype=np.uint8), MIB)
        engine.pwrite(file, content).result()
        requests = [
            Request(OP_READ, short if i == 3 else file, address + i * MIB, MIB, i * MIB)
            for i in range(8)
        ]
        with pytest.raises(AioError) as caught:
            engine.submit(requests, owner=memory).result()
        assert caught.value.filename == short.path
        requests[3] = Request(OP_READ, file, address + 3 * MIB, MIB, 3 * MIB)
        assert engine.submit(requests, owner=memory).result() == 8 * MIB
    assert np.array_equal(memory, content)


def test_direct_io_refused_at_first_use(
    kind: EngineKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """fuse-overlayfs#168: O_DIRECT is accepted at open and refused by the first transfer.

    The engine is told that any address will do, and the kernel answers EINVAL.
    """
    monkeypatch.setattr(_aio_file, "direct_alignment", lambda _: DirectAlignment(4096, 1))
    source = np.random.default_rng(1).integers(0, 256, 5 * MIB + 1, dtype=np.uint8)[1:]
    with Engine(kind) as engine, engine.open(tmp_path / "data", create=True) as file:
        assert file.is_direct
        engine.pwrite(file, source).result()
        assert not file.is_direct
        target = np.zeros_like(source)
        engine.pread(file, target).result()
        assert np.array_equal(source, target)
        with engine.open(tmp_path / "strict", create=True, direct="required") as strict:
            with pytest.raises(AioError, match="refuses direct I/O") as caught:
                engine.pwrite(strict, source).result()
            assert caught.value.errno == errno.EINVAL
    assert [record.message for record in caplog.records] == [
        f"direct I/O on {file.path} was accepted at open and refused at its first use (EINVAL); "
        "continuing with buffered I/O. direct='off' chooses buffered I/O silently; "
        "direct='required' or on_fallback='error' makes this an error"
    ]


@pytest.mark.parametrize(
    ("path", "code"),
    [("missing", errno.ENOENT), ("missing/data", errno.ENOENT), (".", errno.EISDIR),
     ("plain/data", errno.ENOTDIR)],
)  # fmt: skip
def test_paths_that_cannot_be_opened(engine: Engine, tmp_path: Path, path: str, code: int) -> None:
    (tmp_path / "plain").touch()
    with pytest.raises(AioError) as caught:
        engine.open(tmp_path / path)
    assert (caught.value.errno, caught.value.op) == (code, "open")
    assert caught.value.hint


def test_writing_to_a_read_only_file(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 8192)
    with engine.open(tmp_path / "data", read_only=True) as file:
        with pytest.raises(AioError, match="read_only=True") as caught:
            engine.pwrite(file, b"y" * 8192).result()
        assert caught.value.errno == errno.EBADF
        assert engine.pread(file, bytearray(8192)).result() == 8192


def test_malformed_requests(engine: Engine, make_file: MakeFile, kind: EngineKind) -> None:
    with make_file() as file:
        for request in (
            Request(OP_READ, file, -1, 5, 0),
            Request(OP_READ, file, 4096, -5, 0),
            Request(OP_READ, file, 4096, 5, -1),
            Request(cast(Any, "read"), file, 4096, 5, 0),
            Request(OP_READ, cast(Any, None), 4096, 5, 0),
        ):
            with pytest.raises(ConfigError):
                engine.submit([request])
        for request in (Request(9, file, 4096, 5, 0), Request(OP_READ, file, 0, 5, 0)):
            with pytest.raises((AioError, ConfigError)):
                engine.submit([request])
        with Engine(kind) as other, pytest.raises(ConfigError, match="another engine"):
            other.pread(file, bytearray(1))
        with pytest.raises(AioError):
            engine.pread(file, RawBuffer(4096, 1 << 62, None), 1 << 62)
    assert engine.drain() == 0


def test_closed_files_and_engines(engine: Engine, make_file: MakeFile) -> None:
    file = make_file()
    file.close()
    file.close()
    with pytest.raises(ClosedError, match="data is closed"):
        engine.pread(file, bytearray(1))
    with pytest.raises(ClosedError):
        file.truncate(0)
    other = make_file("other")
    future = engine.pwrite(other, b"z")
    engine.close()
    engine.close()
    assert future.result() == 1
    other.close()
    for call in (engine.drain, engine.stats, lambda: engine.pread(other, bytearray(1))):
        with pytest.raises(ClosedError):
            call()


def test_lock_excludes_others_until_close(make_file: MakeFile) -> None:
    first = make_file(lock=True)
    with pytest.raises(StoreLockedError, match="data is locked"):
        make_file(lock=True)
    first.close()
    make_file(lock=True).close()


def test_errors_that_nobody_asked_for_are_raised_by_drain(
    engine: Engine, make_file: MakeFile
) -> None:
    with make_file() as file:
        engine.pread(file, bytearray(10))
        seen = engine.pread(file, bytearray(20))
        with pytest.raises(AioError):
            seen.result()
        with pytest.raises(AioError) as caught:
            engine.drain()
        assert caught.value.length == 10
        assert engine.drain() == 0


def test_waiting_with_a_limit(engine: Engine, make_file: MakeFile) -> None:
    with make_file() as file:
        future = engine.pwrite(file, np.ones(64 * MIB, dtype=np.uint8))
        with pytest.raises(TimeoutError):
            future.result(timeout=0)
        assert future.result(timeout=math.inf) == 64 * MIB
        assert future.done()
        assert future.exception() is None
        assert future.wait_seconds > 0


@pytest.mark.parametrize(
    "options",
    [{"kind": "libaio"}, {"queue_depth": 0}, {"block_size": 1000}, {"block_size": 2 << 30},
     {"num_threads": True}, {"direct": True}, {"on_fallback": "ignore"}],
)  # fmt: skip
def test_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Engine(**options)


def test_fsync_reports_success_and_takes_no_memory(engine: Engine, make_file: MakeFile) -> None:
    with make_file() as file:
        writes = [engine.pwrite(file, bytes([i]) * 5000, i * 5000) for i in range(20)]
        assert engine.fsync(file, data_only=True).result() == 0
        assert all(write.done() for write in writes)


def test_many_threads_share_an_engine(engine: Engine, make_file: MakeFile) -> None:
    errors: list[BaseException] = []

    def work(index: int, file: File) -> None:
        try:
            for round_number in range(20):
                source = np.full(100_001, index * 20 + round_number, dtype=np.uint8)
                target = np.zeros_like(source)
                engine.pwrite(file, source, index * 100_001)
                engine.pread(file, target, index * 100_001).result()
                assert np.array_equal(source, target)
        except BaseException as error:
            errors.append(error)

    with make_file() as file:
        threads = [threading.Thread(target=work, args=(i, file)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_descriptors_are_given_back(engine: Engine, make_file: MakeFile) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    make_file().close()
    before = num_open()
    for _ in range(30):
        with make_file() as file:
            engine.submit([Request(OP_WRITE, file, 0, 0, 0)]).result()
    assert num_open() == before
