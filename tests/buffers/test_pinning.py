# SPDX-License-Identifier: Apache-2.0
"""Page-locking of pools: asked for, chosen by itself where there is a GPU, refused."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from swapio import buffers
from swapio.buffers import BufferPool

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _log_again(monkeypatch):
    monkeypatch.setattr(buffers, "_logged", set())


class Runtime:
    """A double of torch.cuda.cudart()."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


def test_a_pool_is_registered_in_place_and_unregistered_before_it_is_unmapped(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(buffers, "_cuda_runtime", lambda: runtime)
    pool = BufferPool(MIB, pin=True)
    [(address, nbytes)] = pool.regions
    assert pool.is_pinned
    assert runtime.calls == [("register", address, nbytes, 0)]
    pool.close()
    gc.collect()
    assert runtime.calls[1:] == [("unregister", address)]


def test_a_refusal_is_logged_once_with_its_remedy(monkeypatch, caplog):
    monkeypatch.setattr(buffers, "_cuda_runtime", lambda: Runtime(code=2))
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        with BufferPool(MIB, pin=True) as pool:
            assert not pool.is_pinned
    assert caplog.text.count("not page-locked") == 1
    assert "cudaHostRegister returned 2" in caplog.text
    assert "ulimit -l" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_pinning_without_a_gpu_is_a_fall_back(caplog):
    caplog.set_level(logging.WARNING)
    with BufferPool(MIB) as pool:
        assert not pool.is_pinned
    with BufferPool(MIB, pin=True) as pool, pool.lease(MIB) as lease:
        assert not pool.is_pinned
        lease.tensor(torch.uint8, MIB).fill_(1)
    assert caplog.text.count("not page-locked") == 1


def test_huge_pages_that_are_refused_are_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(buffers._Slab, "advise", lambda *_: "Invalid argument")
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with BufferPool(MIB, pin=False):
            pass
    assert caplog.text.count("no huge pages") == 1
    assert caplog.text.count("forked children share") == 1


@pytest.mark.cuda
def test_transfers_to_and_from_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    with BufferPool(64 * MIB) as pool, pool.lease(64 * MIB) as lease:
        assert pool.is_pinned
        tensor = lease.tensor(torch.float32, 16 * MIB)
        assert tensor.is_pinned()
        tensor.copy_(torch.arange(16 * MIB))
        there = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        tensor.zero_()
        tensor.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(tensor, torch.arange(16 * MIB, dtype=torch.float32))
