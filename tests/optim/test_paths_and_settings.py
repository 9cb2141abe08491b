# SPDX-License-Identifier: Apache-2.0
"""Several paths, and the settings that decide how memory and threads are used."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from swapio import path_rates
from swapio.aio import Engine
from swapio.errors import ConfigError
from swapio.filestore import FileStore
from swapio.optim import AdamW, kernels
from swapio.store import RecordLayout

NUMEL = 5 << 20


def train(swap, steps=3, *, close=True):
    param = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL))
    opt = AdamW([param], swap=swap)
    for _ in range(steps):
        param.grad = torch.sin(param.detach())
        opt.step()
    opt.synchronize()
    if close:
        opt.close()
    return param.detach().clone(), opt


def folders(tmp_path, count=3):
    return [str(tmp_path / f"drive{index}") for index in range(count)]


def slot_bytes(paths):
    return [sum(f.stat().st_size for f in Path(p).rglob("slots/*.bin")) for p in paths]


def test_three_paths_are_as_good_as_one(tmp_path):
    one, _ = train({"path": tmp_path / "one", "host_memory": "12MiB"})
    three, opt = train({"path": folders(tmp_path), "host_memory": "12MiB"}, close=False)
    sizes = slot_bytes(folders(tmp_path))
    opt.close()
    assert torch.equal(one, three)
    assert max(sizes) - min(sizes) <= 4 << 20


def test_extents_follow_the_weights(tmp_path):
    swap = {"path": folders(tmp_path), "host_memory": "12MiB", "path_weights": (1, 2, 5)}
    _, opt = train(swap, close=False)
    sizes = slot_bytes(folders(tmp_path))
    opt.close()
    assert [size / sum(sizes) for size in sizes] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.04)


def test_unknown_weights_are_measured(tmp_path, monkeypatch, caplog):
    devices = dict(zip(folders(tmp_path), (1, 2, 2), strict=True))
    monkeypatch.setattr(path_rates, "device_of", lambda path: devices[str(path)])
    monkeypatch.setattr(path_rates, "FILE_BYTES", 8 << 20)
    caplog.set_level(logging.INFO, logger="swapio.store")
    with Engine() as engine:
        weights = path_rates.measure_weights(tuple(devices), engine)
        assert engine.stats().num_files == 0
    assert weights[1] == weights[2] > 0
    assert weights[0] > 0
    assert "in proportion" in caplog.text
    assert [list(Path(folder).iterdir()) for folder in list(devices)[:2]] == [[], []]
    assert not Path(list(devices)[2]).exists()


def test_paths_on_one_device_need_no_measurement(tmp_path):
    with Engine() as engine:
        assert path_rates.measure_weights(folders(tmp_path), engine) == (1.0, 1.0, 1.0)
        assert engine.stats().num_writes == 0


def test_committed_state_keeps_its_pattern(tmp_path):
    def store(weights):
        return FileStore(folders(tmp_path, 2), engine, durability="step", weights=weights)

    with Engine() as engine:
        with store([1, 3]) as first:
            pattern = first._folders.pattern
            first.add("a", [RecordLayout("x", 8 << 20)])
            first.allocate()
            buffer = torch.ones(2 << 20)
            transaction = first.begin_write("a", 1)
            from swapio.store import Piece

            transaction.write([Piece("x", 0, 8 << 20, buffer.data_ptr())]).result()
            transaction.seal().result()
            first.commit(1).result()
        with store(lambda: pytest.fail("measured")) as second:
            assert second._folders.pattern == pattern
            second.add("a", [RecordLayout("x", 8 << 20)])
            assert second.recover().step == 1


@pytest.mark.parametrize(
    ("setting", "reason"),
    [({"accumulation_dtype": "bfloat16"}, "streamed"), ({"swap_gradients": True}, "on storage")],
)
def test_settings_about_gradients_that_stay_in_p_grad_are_refused(setting, reason):
    with pytest.raises(ConfigError, match=reason):
        AdamW([torch.nn.Parameter(torch.zeros(4))], swap=setting)


def test_kernel_threads_are_bound_to_the_cores_given():
    core = min(os.sched_getaffinity(0))
    try:
        swap = {"cpu_threads": 1, "cpu_affinity": (core,)}
        with AdamW([torch.nn.Parameter(torch.zeros(4))], swap=swap):
            assert kernels.num_threads() == 1
            assert kernels.thread_cores() == [core]
    finally:
        kernels.set_threads(2)


def test_pages_and_pinning_reach_the_pool(tmp_path, monkeypatch):
    seen = []
    import swapio.runtime

    class Pool(swapio.runtime.BufferPool):
        def __init__(self, nbytes, **options):
            seen.append(options)
            super().__init__(nbytes, **options)

    monkeypatch.setattr(swapio.runtime, "BufferPool", Pool)
    param = torch.nn.Parameter(torch.zeros(4))
    AdamW([param], swap={"path": tmp_path, "huge_pages": "off", "pin_memory": False}).close()
    assert seen[0]["huge_pages"] == "off"
    assert seen[0]["pin"] is False
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="pin_memory=True"):
            AdamW([param], swap={"path": tmp_path, "pin_memory": True, "on_fallback": "error"})
        AdamW([param], swap={"path": tmp_path, "pin_memory": True}).close()
