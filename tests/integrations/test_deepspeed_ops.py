# SPDX-License-Identifier: Apache-2.0
"""The modules that stand in for DeepSpeed's extensions, used as DeepSpeed uses them."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swapio.errors import AioError, ConfigError, CorruptionError, SwapioError
from swapio.integrations.deepspeed import async_io, cpu_adam, pinned
from swapio.integrations.deepspeed.async_io import aio_handle

LAYOUTS = {
    "whole": lambda tensor: tensor,
    "odd offset": lambda tensor: tensor[3:],
    "not contiguous": lambda tensor: tensor.view(-1, 2).t(),
}


@pytest.fixture
def handle() -> aio_handle:
    return aio_handle(
        block_size=1 << 20,
        queue_depth=8,
        single_submit=False,
        overlap_events=True,
        intra_op_parallelism=2,
    )


def test_the_settings_are_given_back(handle: aio_handle) -> None:
    assert handle.get_block_size() == 1 << 20
    assert handle.get_queue_depth() == 8
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 2
    assert handle.get_alignment() == 1024
    with pytest.raises(ConfigError, match="intra_op_parallelism is 0"):
        aio_handle(intra_op_parallelism=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_was_written_is_read(
    handle: aio_handle, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    whole = handle.new_cpu_locked_tensor(1_000_006, torch.empty(0, dtype=dtype))
    whole.copy_(torch.randint(0, 250, (1_000_006,)))
    data = LAYOUTS[layout](whole)
    name = str(tmp_path / "a.swp")
    assert handle.async_pwrite(data, name, 0) == 0
    assert handle.wait() == 1
    assert Path(name).stat().st_size == data.numel() * data.element_size()
    found = LAYOUTS[layout](torch.zeros_like(whole))
    assert handle.async_pread(found, name, 0) == 0
    assert handle.wait() == 1
    assert torch.equal(found, data)


def test_every_form_of_the_calls(handle: aio_handle, tmp_path: Path) -> None:
    data = torch.arange(5000, dtype=torch.float32)
    name, found = str(tmp_path / "a"), torch.empty(5000)
    assert handle.write(data, name, True) == 0
    assert handle.read(found, name, True) == 0
    assert torch.equal(found, data)
    assert handle.pwrite(data + 1, name, True, False) == 1
    assert handle.pread(found, name, False, **{"async": True}, file_offset=0) == 0
    assert handle.wait() == 1
    assert torch.equal(found, data + 1)
    assert handle.sync_pwrite(data[:1000], name, 4000) == 1
    assert handle.sync_pread(found, name) == 1
    assert torch.equal(found[1000:2000], data[:1000])
    with Path(name).open("r+b") as stream:
        assert handle.async_pwrite(data[:7], stream.fileno(), 20_000) == 0
        assert handle.wait() == 1
    assert async_io.aio_read(found[:7], name, validate=False) == 0
    assert torch.equal(found[:7], data[:7] + 1)
    assert async_io.aio_write(data, str(tmp_path / "b"), 1 << 20, 128, False, True, True) == 0
    assert async_io.deepspeed_memcpy(found, data) == 0
    assert torch.equal(found, data)
    with pytest.raises(ConfigError, match="dest has 5 elements, src 6"):
        async_io.deepspeed_memcpy(found[:5], data[:6])
    with pytest.raises(TypeError, match="no argument later"):
        handle.pread(found, name, later=True)


def test_nothing_to_wait_for(handle: aio_handle) -> None:
    assert handle.wait() == 0


def test_transfers_of_one_file_keep_their_order(handle: aio_handle, tmp_path: Path) -> None:
    name = str(tmp_path / "a")
    first, second = torch.full((1 << 20,), 1.0), torch.full((1 << 20,), 2.0)
    handle.sync_pwrite(first, name)
    before, after = torch.zeros(1 << 20), torch.zeros(1 << 20)
    handle.async_pread(before, name)
    handle.async_pwrite(second, name)
    handle.async_pread(after, name)
    assert handle.wait() == 3
    assert torch.equal(before, first)
    assert torch.equal(after, second)


def test_a_short_file_raises_and_the_handle_goes_on(handle: aio_handle, tmp_path: Path) -> None:
    """DeepSpeed's own handle prints a line, and kills the process in an assert or goes on."""
    name, data = str(tmp_path / "a"), torch.ones(4096)
    handle.sync_pwrite(data, name)
    other = torch.empty(4096)
    handle.async_pread(torch.empty(8192), name)
    handle.async_pread(other, name)
    with pytest.raises(AioError, match="wanted 32768 bytes, got 16384") as caught:
        handle.wait()
    assert name in str(caught.value)
    assert "1 of 2 transfers" in caught.value.__notes__[0]
    assert "restart from the last" in caught.value.__notes__[0]
    assert torch.equal(other, data)
    assert handle.wait() == 0
    assert handle.sync_pread(other, name) == 1


def test_a_missing_file_and_folder(handle: aio_handle, tmp_path: Path) -> None:
    with pytest.raises(AioError, match=r"open of .*gone failed: No such file"):
        handle.async_pread(torch.empty(4), str(tmp_path / "gone"))
    with pytest.raises(AioError, match="No such file"):
        handle.async_pwrite(torch.empty(4), str(tmp_path / "no" / "folder"))
    assert handle.wait() == 0


def test_a_full_disk_shows_before_a_byte_is_overwritten(tmp_path: Path) -> None:
    script = """
import resource, signal, sys, torch
from swapio.errors import AioError
from swapio.integrations.deepspeed.async_io import aio_handle
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
name = sys.argv[1] + "/a"
handle = aio_handle()
handle.sync_pwrite(torch.ones(1 << 18), name)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
try:
    handle.async_pwrite(torch.zeros(1 << 20), name)
except AioError as error:
    print(error)
found = torch.empty(1 << 18)
handle.sync_pread(found, name)
print("kept", bool((found == 1).all()))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "ulimit -f" in done.stdout
    assert str(tmp_path / "a") in done.stdout
    assert done.stdout.endswith("kept True\n")


def test_validate_finds_a_difference(
    handle: aio_handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = tmp_path / "a", torch.ones(100_000)
    handle.sync_pwrite(data, str(name))
    compare = async_io._compare

    def spoil_and_compare(transfer: async_io._Transfer) -> None:
        with name.open("r+b") as stream:
            stream.seek(77)
            stream.write(b"x")
        compare(transfer)

    monkeypatch.setattr(async_io, "_compare", spoil_and_compare)
    with pytest.raises(CorruptionError, match="at offset 0: 400000 bytes differ"):
        handle.read(torch.empty_like(data), str(name), True)


def test_locked_tensors_are_known_until_freed(handle: aio_handle) -> None:
    tensor = handle.new_cpu_locked_tensor(3_000_000, torch.empty(0, dtype=torch.bfloat16))
    assert tensor.shape == (3_000_000,)
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() % (2 << 20) == 0
    assert handle.is_pinned(tensor)
    assert handle.is_pinned(tensor[5:100])
    assert aio_handle(queue_depth=1).is_pinned(tensor[-1:])
    assert not handle.is_pinned(torch.empty(16))
    assert not handle.is_pinned(torch.empty(16, device="meta"))
    assert handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(tensor)
    tensor.fill_(1.0)  # the memory lives on with the tensor
    assert float(tensor.float().sum()) == 3e6
    assert handle.new_cpu_locked_tensor(0, tensor).numel() == 0


def test_the_pin_memory_extension() -> None:
    handle = pinned.pin_handle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    assert handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    assert not handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    other = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    assert handle.free_cpu_locked_tensor(other)


def test_dropped_buffers_survive_their_transfer(handle: aio_handle, tmp_path: Path) -> None:
    name = str(tmp_path / "a")
    for value in range(20):
        handle.async_pwrite(torch.full((1 << 18,), float(value)), name, value << 20)
        gc.collect()
        torch.full((1 << 18,), -1.0)
    assert handle.wait() == 20
    found = torch.empty(20, 1 << 18)
    handle.sync_pread(found, name)
    assert torch.equal(found, torch.arange(20.0).view(-1, 1).expand_as(found))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_update_is_torchs_and_rollback_undoes_it(decoupled: bool) -> None:
    torch.manual_seed(3)
    param, grads = torch.randn(1003), [torch.randn(1003) for _ in range(5)]
    theirs = torch.nn.Parameter(param.double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([theirs], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    moments = torch.zeros(1003), torch.zeros(1003)
    settings = (1e-2, 0.8, 0.95, 1e-6, 0.1, True)
    assert cpu_adam.create_adam(7, 1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled, True) == 0
    for step, grad in enumerate(grads, 1):
        before = param.clone()
        assert cpu_adam.adam_update(7, step, *settings, param, grad, *moments) == 0
        theirs.grad = grad.double()
        reference.step()
    torch.testing.assert_close(param, theirs.detach().float(), rtol=1e-6, atol=1e-6)
    if decoupled:
        assert cpu_adam.adam_rollback(7, 5, *settings, param, grads[-1], *moments) == 0
        torch.testing.assert_close(param, before, rtol=1e-6, atol=1e-6)
    else:
        with pytest.raises(ValueError, match="decay"):
            cpu_adam.adam_rollback(7, 5, *settings, param, grads[-1], *moments)
    assert cpu_adam.destroy_adam(7) == 0
    assert cpu_adam.destroy_adam(7) == 0
    with pytest.raises(ConfigError, match="optimizer_id is 7"):
        cpu_adam.adam_update(7, 6, *settings, param, grads[0], *moments)


def test_install_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapio.integrations import deepspeed as shim

    with pytest.raises(ConfigError, match=r"ops contains \['aio'\]"):
        shim.install(ops=["aio"])  # type: ignore[list-item]
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder.builder", None)
    with pytest.raises(SwapioError, match="pip install deepspeed=="):
        shim.install()
    assert not shim.is_installed()


def test_install_refuses_python_without_asserts() -> None:
    script = "import swapio.integrations.deepspeed as shim\nshim.install()"
    command = [sys.executable, "-O", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "Run without -O" in done.stderr
