# SPDX-License-Identifier: Apache-2.0
"""Parameters that take the way of CUDA parameters on a machine without GPU."""

from __future__ import annotations

import pytest
import torch

from support.fake_device import take_device_way
from swapio.optim import speculation_owner

CPU = torch.device("cpu")


@pytest.fixture
def on_fake_device(monkeypatch):
    """CPU parameters take the way of CUDA parameters, over streams that log."""
    cuda = take_device_way(monkeypatch, speculation_owner)
    cuda.undo = monkeypatch.undo
    return cuda
