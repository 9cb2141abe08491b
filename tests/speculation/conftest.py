# SPDX-License-Identifier: Apache-2.0
"""Parameters that take the way of CUDA parameters on a machine without GPU."""

from __future__ import annotations

import functools

import pytest
import torch

from support.fake_cuda import FakeCuda
from swapio.optim import speculation_owner, stream_open
from swapio.optim.layout import Bucket, MasterForm
from swapio.optim.registration import Registration

CPU = torch.device("cpu")


@pytest.fixture
def on_fake_device(monkeypatch):
    """CPU parameters take the way of CUDA parameters, over streams that log."""
    cuda = FakeCuda()
    original = Registration._bucket

    def bucket(self, member) -> Bucket:
        found = original(self, member)
        named = found._replace(
            device="fake",
            form=MasterForm.SPLIT if found.form is MasterForm.SPLIT else MasterForm.SEPARATE,
        )
        self._buckets.pop(found, None)
        return self._buckets.setdefault(named, named)

    monkeypatch.setattr(Registration, "_bucket", bucket)
    for module in (stream_open, speculation_owner):
        monkeypatch.setattr(module, "device_of", lambda infos: CPU if infos else None)
    for name in ("DeviceCopier", "DeviceWeights", "KeptGradients"):
        cls = functools.partial(getattr(stream_open, name), cuda=cuda)
        monkeypatch.setattr(stream_open, name, cls)
    cuda.undo = monkeypatch.undo
    return cuda
