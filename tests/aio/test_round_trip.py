# SPDX-License-Identifier: Apache-2.0
"""What was written is what is read: any size, offset, address and dtype, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swapio.aio import OP_READ, OP_WRITE, Engine, EngineKind, File, Request
from swapio.errors import ConfigError

MakeFile = Callable[..., File]
PAGE = 4096
UGLY_SIZES = (1, 511, 512, 513, 4095, 4096, 4097, 2**20 - 2, 2**20 + 2, 28_824_000)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def aligned_zeros(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + PAGE, dtype=np.uint8)
    start = -memory.__array_interface__["data"][0] % PAGE
    return memory[start : start + nbytes]


@pytest.mark.parametrize("nbytes", UGLY_SIZES)
def test_sizes(engine: Engine, make_file: MakeFile, tmp_path: Path, nbytes: int) -> None:
    """DeepSpeed#1070 and kin: files were shorter than their buffers, and nobody noticed."""
    source = random_bytes(nbytes)
    with make_file() as file:
        assert engine.pwrite(file, source).result() == nbytes
    with engine.open(tmp_path / "data") as file:
        assert file.size == nbytes
        target = np.full(nbytes, 0xAB, dtype=np.uint8)
        assert engine.pread(file, target).result() == nbytes
    assert np.array_equal(source, target)
    assert (tmp_path / "data").read_bytes() == source.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_dtypes(engine: Engine, make_file: MakeFile, dtype: torch.dtype) -> None:
    source = torch.randn(100_003).mul_(100).to(dtype)
    target = torch.full_like(source, 7)
    with make_file() as file:
        engine.pwrite(file, source).result()
        engine.pread(file, target).result()
    assert torch.equal(source, target)


@pytest.mark.parametrize("start", [0, 3, 8, 256])
def test_unaligned_memory_and_its_neighbours(
    engine: Engine, make_file: MakeFile, start: int
) -> None:
    """DeepSpeed#1086: swap-in into an unaligned half-precision view."""
    nbytes = 300_000
    source = torch.arange(nbytes // 2, dtype=torch.int32).to(torch.bfloat16)
    base = torch.full((nbytes // 2 + 1024,), 171, dtype=torch.uint8).repeat(2).view(torch.bfloat16)
    target = base[start : start + nbytes // 2]
    with make_file() as file:
        engine.pwrite(file, source).result()
        engine.pread(file, target).result()
    assert torch.equal(target, source)
    guards = torch.cat((base[:start], base[start + nbytes // 2 :])).view(torch.uint8)
    assert bool((guards == 171).all())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_requests_against_a_bytearray(
    engine: Engine, tmp_path: Path, data: st.DataObject
) -> None:
    """Overlapping reads and writes, submitted without waiting, act as if done one by one."""
    (tmp_path / "model").unlink(missing_ok=True)
    file_bytes = 40 * PAGE
    model = bytearray(file_bytes)
    expected: list[tuple[np.ndarray, bytes]] = []
    near_page = st.builds(
        lambda page, shift: max(0, page * PAGE + shift), st.integers(0, 39), st.integers(-2, 2)
    )
    offsets = st.one_of(near_page, st.integers(0, file_bytes - 1))
    lengths = st.one_of(near_page, st.integers(0, 5 * PAGE))
    with engine.open(tmp_path / "model", create=True, size=file_bytes) as file:
        for _ in range(data.draw(st.integers(1, 25))):
            offset = min(data.draw(offsets), file_bytes - 1)
            nbytes = min(data.draw(lengths), file_bytes - offset)
            shift = data.draw(st.sampled_from((0, 1, 8, 512)))
            memory = aligned_zeros(nbytes + shift)[shift:]
            if data.draw(st.booleans()):
                memory[:] = data.draw(st.integers(0, 255))
                model[offset : offset + nbytes] = memory.tobytes()
                engine.pwrite(file, memory, offset)
            else:
                expected.append((memory, bytes(model[offset : offset + nbytes])))
                engine.pread(file, memory, offset)
        engine.drain()
        for memory, wanted in expected:
            assert memory.tobytes() == wanted
    assert (tmp_path / "model").read_bytes() == model


def test_batch_under_one_future(engine: Engine, make_file: MakeFile) -> None:
    source = aligned_zeros(64 * PAGE)
    source[:] = random_bytes(source.nbytes)
    target = aligned_zeros(64 * PAGE)
    with make_file() as first, make_file("other") as second:
        pieces = [(first, 0, 16), (second, 16, 30), (first, 46, 18)]

        def requests(op: int, memory: np.ndarray) -> list[Request]:
            address = memory.__array_interface__["data"][0]
            return [
                Request(op, file, address + start * PAGE, count * PAGE, start * PAGE)
                for file, start, count in pieces
            ]

        assert engine.submit(requests(OP_WRITE, source), owner=source).result() == source.nbytes
        assert engine.submit(requests(OP_READ, target), owner=target).result() == source.nbytes
    assert np.array_equal(source, target)


def test_kinds_of_buffers(engine: Engine, make_file: MakeFile) -> None:
    with make_file() as file:
        for buffer in (b"bytes", bytearray(b"array"), memoryview(b"views"), np.arange(3)):
            engine.pwrite(file, buffer).result()
        target = bytearray(5)
        engine.pwrite(file, b"fresh").result()
        assert engine.pread(file, target).result() == 5
        assert target == b"fresh"
        assert engine.pread(file, torch.empty(0)).result() == 0


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(8, 8).t()[1:],
        torch.zeros(4, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        np.zeros((8, 8))[:, ::2],
        np.broadcast_to(np.zeros(1), 5),
        np.array([object()]),
        b"read-only",
        "text",
        3.14,
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_buffers_that_cannot_be_read_into(
    engine: Engine, make_file: MakeFile, buffer: object
) -> None:
    with make_file() as file, pytest.raises(ConfigError):
        engine.pread(file, buffer)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [2**31 + PAGE + 4, 2**32 + 8])
def test_transfers_above_the_limit_of_one_call(
    kind: EngineKind, tmp_path: Path, nbytes: int
) -> None:
    """libwolv#45 and kin: one read or write moves at most 0x7ffff000 bytes.

    The arithmetic alone is tested with a fake kernel, in csrc/aio/tests/core_test.cpp.
    """
    memory = np.arange(nbytes // 4, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(memory)
    with Engine(kind, block_size=1 << 30) as engine:
        with engine.open(tmp_path / "big", create=True) as file:
            assert engine.pwrite(file, memory).result() == nbytes
        with engine.open(tmp_path / "big", read_only=True) as file:
            assert engine.pread(file, target).result() == nbytes
    (tmp_path / "big").unlink()
    assert np.array_equal(memory, target)
