# SPDX-License-Identifier: Apache-2.0
"""CPU parameters that take the way of CUDA parameters, over streams that log."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from support.fake_cuda import FakeCuda
from swapio.optim import stream_open
from swapio.optim.layout import Bucket, MasterForm
from swapio.optim.registration import Registration

if TYPE_CHECKING:
    import pytest

CPU = torch.device("cpu")
_STREAM_CLASSES = ("DeviceCopier", "DeviceWeights", "KeptGradients")


def take_device_way(monkeypatch: pytest.MonkeyPatch, other: ModuleType, *classes: str) -> FakeCuda:
    """Have every parameter look as if it were on a device.

    Args:
        monkeypatch: Undoes it.
        other: The module besides stream_open that asks for the parameters' device.
        classes: Names of classes there that talk to CUDA.
    """
    cuda = FakeCuda()
    original = Registration._bucket

    def bucket(self: Registration, member: Any) -> Bucket:
        found = original(self, member)
        form = MasterForm.SPLIT if found.form is MasterForm.SPLIT else MasterForm.SEPARATE
        named = found._replace(device="fake", form=form)
        self._buckets.pop(found, None)
        return self._buckets.setdefault(named, named)

    monkeypatch.setattr(Registration, "_bucket", bucket)
    for module in (stream_open, other):
        monkeypatch.setattr(module, "device_of", lambda infos: CPU if infos else None)
    named = [(stream_open, name) for name in _STREAM_CLASSES] + [(other, c) for c in classes]
    for module, name in named:
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), cuda=cuda))
    return cuda
