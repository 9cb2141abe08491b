# SPDX-License-Identifier: Apache-2.0
"""BufferPool and Lease: sizes, alignment, reuse, lifetime, limits."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swapio.align import HUGE_PAGE_BYTES, PAGE_BYTES
from swapio.buffers import BufferPool
from swapio.errors import ClosedError, ConfigError, PoolExhaustedError, SwapStateError

MIB = 1 << 20


def test_alignment_and_exact_size():
    with BufferPool(3 * MIB + 1) as pool:
        [(address, nbytes)] = pool.regions
        assert address % HUGE_PAGE_BYTES == 0
        assert nbytes == pool.nbytes == 3 * MIB + PAGE_BYTES
        with pool.lease(100, alignment=1 << 20) as lease:
            assert lease.address % (1 << 20) == 0
            assert len(lease.memory) == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_tensor_over_a_lease(dtype):
    with BufferPool(MIB) as pool, pool.lease(1000) as lease:
        tensor = lease.tensor(dtype, (5, 7), byte_offset=64)
        assert tensor.data_ptr() == lease.address + 64
        tensor.copy_(torch.arange(35).view(5, 7))
        assert lease.tensor(dtype, 35, 64).tolist() == list(range(35))
        assert lease.tensor(dtype, (0, 3)).numel() == 0
        with pytest.raises(ConfigError, match="does not fit"):
            lease.tensor(dtype, 1001)
        if dtype.itemsize > 1:
            with pytest.raises(ConfigError, match="not aligned"):
                lease.tensor(dtype, 1, 1)


def test_tensors_keep_the_mapping_alive():
    pool = BufferPool(MIB)
    lease = pool.lease(4096)
    tensor = lease.tensor(torch.int32, 1024)
    tensor.fill_(7)
    lease.release()
    pool.close()
    del pool, lease
    gc.collect()
    assert tensor.sum() == 7 * 1024


def test_exhaustion_names_the_numbers():
    with BufferPool(4 * PAGE_BYTES, name="staging") as pool:
        leases = [pool.lease(PAGE_BYTES) for _ in range(4)]
        leases[1].release()
        leases[3].release()
        with pytest.raises(PoolExhaustedError) as raised:
            pool.lease(PAGE_BYTES + 1)
        for text in ("staging", "4097 bytes", "8192 of 16384", "largest hole has 4096", "host_mem"):
            assert text in str(raised.value)
        leases[2].release()
        assert pool.lease(3 * PAGE_BYTES).nbytes == 3 * PAGE_BYTES
        with pytest.raises(SwapStateError, match="2 leases"):
            pool.close()
        pool.close(force=True)


def test_a_released_lease_and_a_closed_pool_are_refused():
    pool = BufferPool(MIB)
    lease = pool.lease(10)
    lease.release()
    lease.release()
    with pytest.raises(SwapStateError):
        lease.tensor(torch.uint8, 1)
    pool.close()
    with pytest.raises(ClosedError):
        pool.lease(10)


def test_after_an_interrupt_memory_comes_back_with_the_last_reference():
    pool = BufferPool(4 * PAGE_BYTES)
    owners = []

    def use():
        with pool.lease(PAGE_BYTES) as lease:
            owners.append(lease)  # as a transfer in flight has it
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    gc.collect()
    assert pool.num_free_bytes == 3 * PAGE_BYTES
    other = pool.lease(3 * PAGE_BYTES)
    with pytest.raises(PoolExhaustedError):
        pool.lease(1)
    owners.clear()
    gc.collect()
    assert pool.num_free_bytes == PAGE_BYTES
    pool.lease(PAGE_BYTES).release()
    other.release()
    assert pool.lease(4 * PAGE_BYTES).nbytes == 4 * PAGE_BYTES


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_empty_pool(nbytes):
    with pytest.raises(ConfigError):
        BufferPool(nbytes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE_BYTES), st.integers(0, 99))))
def test_leases_never_overlap_and_holes_coalesce(actions):
    with BufferPool(64 * PAGE_BYTES) as pool:
        leases = []
        for is_lease, nbytes, choice in actions:
            if is_lease:
                try:
                    leases.append(pool.lease(nbytes))
                except PoolExhaustedError:
                    continue
            elif leases:
                leases.pop(choice % len(leases)).release()
            spans = sorted((lease.address, lease.address + lease.nbytes) for lease in leases)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        for lease in leases:
            lease.release()
        assert pool.num_free_bytes == pool.nbytes
        pool.lease(pool.nbytes).release()


def test_many_threads():
    with BufferPool(64 * PAGE_BYTES) as pool:

        def work(value):
            for _ in range(300):
                with pool.lease(PAGE_BYTES * (1 + value % 3)) as lease:
                    tensor = lease.tensor(torch.uint8, lease.nbytes)
                    tensor.fill_(value)
                    assert bool((tensor == value).all())

        threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.num_free_bytes == pool.nbytes


def test_resident_memory_is_what_was_asked_for():
    # Others round up to powers of two: 2.25 MiB buffers took 4 MiB each.
    size = 9 * MIB // 4
    process = psutil.Process()
    before = process.memory_info().rss
    pools = [BufferPool(size, pin=False) for _ in range(64)]
    for pool in pools:
        pool.lease(size).tensor(torch.uint8, size).fill_(1)
    growth = process.memory_info().rss - before
    for pool in pools:
        pool.close(force=True)
    assert growth <= 1.1 * 64 * size


LIMITED = """
import resource, sys
from swapio.buffers import BufferPool
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (80 << 20),) * 2)
try:
    BufferPool(int(sys.argv[1]) << 20, pin=False, name="staging")
except MemoryError as error:
    print(type(error).__name__, error)
else:
    print("fits")
"""


@pytest.mark.parametrize(("mebibytes", "text"), [(70, "fits"), (100, "host_memory")])
def test_address_space_limit(mebibytes, text):
    command = [sys.executable, "-c", LIMITED, str(mebibytes)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert text in result.stdout
