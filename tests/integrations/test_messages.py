# SPDX-License-Identifier: Apache-2.0
"""What users read when something fails: the thing by name, wanted and got, and what to change.

One table of mistakes and accidents that were reported of this kind of software, as an outsider
provokes them through public names. Each row says which words the message must hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import swapio
from swapio import errors
from swapio.optim import AdamW, kernels

ROW = Callable[[Path], object]


def parameters(numel: int = 600_000) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(numel)) for _ in range(2)]


def swapped(folder: Path, **settings: object) -> AdamW:
    swap = {"path": str(folder), "host_memory": "24MiB", "sub_group_numel": "512Ki"}
    return AdamW(parameters(), lr=1e-3, swap=swap | settings)


def read_a_short_file(folder: Path) -> object:
    (folder / "short.bin").write_bytes(bytes(5000))
    with swapio.Engine() as engine, engine.open(folder / "short.bin") as file:
        return engine.pread(file, torch.empty(8192, dtype=torch.uint8)).result()


def open_without_the_folder(folder: Path) -> object:
    with swapio.Engine() as engine:
        return engine.open(folder / "none" / "file.bin", create=True)


def transfer_what_is_not_contiguous(folder: Path) -> object:
    with swapio.Engine() as engine, engine.open(folder / "a.bin", create=True) as file:
        return engine.pwrite(file, torch.empty(8, 8).t())


def run_in_one_folder_twice(folder: Path) -> object:
    script = """
import sys, torch
from swapio.optim import AdamW
params = [torch.nn.Parameter(torch.randn(600_000))]
swap = {"path": sys.argv[1], "host_memory": "24MiB", "namespace": "same", "lock_timeout": 0.2}
AdamW(params, swap=swap | {"sub_group_numel": "256Ki"})
"""
    with swapped(folder, namespace="same"):
        command = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    last = done.stderr.strip().splitlines()[-1]
    kind, _, message = last.partition(": ")
    raise getattr(errors, kind.rpartition(".")[2])(message)


def spoil_a_block(folder: Path) -> object:
    with swapped(folder) as optimizer:
        optimizer.save(folder / "saved", "one").result()
        optimizer.close()
    for file in (folder / "saved" / "one").rglob("*.bin"):
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 3)
            stream.write(os.urandom(4096))
    with swapped(folder / "other") as optimizer:
        return optimizer.load(folder / "saved")


def load_what_is_not_there(folder: Path) -> object:
    with swapped(folder) as optimizer:
        return optimizer.load(folder / "nothing")


def set_state_of_a_wrong_shape(folder: Path) -> object:
    with swapped(folder) as optimizer:
        param = optimizer.param_groups[0]["params"][1]
        return optimizer.set_state(param, "exp_avg", torch.zeros(7))


def set_state_of_no_such_name(folder: Path) -> object:
    with swapped(folder) as optimizer:
        return optimizer.set_state(optimizer.param_groups[0]["params"][0], "exp_average", 0.0)


def step_when_closed(folder: Path) -> object:
    optimizer = swapped(folder)
    optimizer.close()
    return optimizer.step()


def load_other_groups(folder: Path) -> object:
    other = torch.optim.AdamW(parameters()[:1])
    with swapped(folder) as optimizer:
        return optimizer.load_state_dict(other.state_dict())


def step_with_dtypes_without_a_kernel(_: Path) -> object:
    tensors = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    return kernels.adam_step(*tensors, step=1)


def config(**settings: object) -> ROW:
    return lambda _: swapio.SwapConfig(**settings)


def config_of(**data: object) -> ROW:
    return lambda _: swapio.SwapConfig.from_dict(data)


def with_settings(**settings: object) -> ROW:
    return lambda folder: swapped(folder, **settings)


TABLE: list[tuple[ROW, type[Exception], tuple[str, ...]]] = [
    (
        read_a_short_file,
        swapio.AioError,
        ("pread", "{folder}/short.bin", "wanted 8192", "got 5000"),
    ),
    (open_without_the_folder, swapio.AioError, ("open", "{folder}/none/file.bin", "create=True")),
    (transfer_what_is_not_contiguous, swapio.ConfigError, ("(8, 8)", "contiguous()")),
    (run_in_one_folder_twice, swapio.StoreLockedError, ("{folder}", "lock_timeout")),
    (spoil_a_block, swapio.CorruptionError, ("{folder}/saved/one", "block", "checksum")),
    (load_what_is_not_there, swapio.CheckpointError, ("{folder}/nothing",)),
    (set_state_of_a_wrong_shape, ValueError, ("exp_avg", "(600000,)", "(7,)")),
    (set_state_of_no_such_name, swapio.ConfigError, ("'exp_average'", "exp_avg")),
    (step_when_closed, swapio.ClosedError, ("optimizer is closed",)),
    (load_other_groups, ValueError, ("[1]", "[2]")),
    (step_with_dtypes_without_a_kernel, TypeError, ("param=torch.float64", "there are:", "fp32")),
    (with_settings(host_memory="1MiB"), swapio.ConfigError, ("host_memory", "MiB")),
    (with_settings(path="/proc/none"), Exception, ("/proc/none",)),
    (with_settings(swap_gradients=True), swapio.ConfigError, ("swap_gradients=True", "False")),
    (config(queue_depth=0), swapio.ConfigError, ("queue_depth", "0", "at least 1")),
    (config(host_memory="8 GiBs"), swapio.ConfigError, ("host_memory", "'8 GiBs'", "'8GiB'")),
    (config(engine="uring"), swapio.ConfigError, ("engine", "'uring'", "'io_uring'")),
    (config(durability="steps"), swapio.ConfigError, ("durability", "'steps'", "'step'")),
    (config_of(host_memroy="1GiB"), swapio.ConfigError, ("'host_memroy'", "'host_memory'")),
    (config_of(aio={"use_gds": True}), swapio.ConfigError, ("aio.use_gds",)),
    (config_of(aio={"blok_size": 1}), swapio.ConfigError, ("'blok_size'", "'block_size'")),
    (
        config_of(offload_optimizer={"device": "nvme"}),
        swapio.ConfigError,
        ("offload_optimizer.device", "nvme_path"),
    ),
    (lambda _: swapio.BufferPool(0), swapio.ConfigError, ("pool", "positive", "0 bytes")),
    (lambda _: AdamW(parameters(), lr=-1.0), ValueError, ("lr", "-1.0")),
    (lambda _: AdamW(parameters(), betas=(0.9, 1.0)), ValueError, ("beta", "1.0")),
    (lambda _: AdamW(parameters(), amsgrad=True), Exception, ("amsgrad",)),
    (lambda _: AdamW(parameters(), swap=7), swapio.ConfigError, ("swap is 7", "folder", "dict")),
    (
        lambda _: AdamW(parameters(), nonfinite="ignore"),
        swapio.ConfigError,
        ("nonfinite='ignore'", "'skip'"),
    ),
    (
        lambda _: AdamW(parameters(), max_grad_norm=0.0),
        swapio.ConfigError,
        ("max_grad_norm=0.0", "positive"),
    ),
]


def name_of(row: object) -> str:
    return getattr(row, "__name__", "").strip("<>") if callable(row) else ""


@pytest.mark.parametrize(("provoke", "kind", "words"), TABLE, ids=name_of)
def test_messages_say_what_and_what_to_do(
    tmp_path: Path, provoke: ROW, kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        provoke(tmp_path)
    message = str(caught.value)
    for word in words:
        assert word.format(folder=tmp_path) in message, message
    assert not isinstance(caught.value, AttributeError | KeyError | AssertionError)
