# SPDX-License-Identifier: Apache-2.0
"""swapio keeps optimizer state on NVMe, with exact numerics, inside a memory budget.

Optimizers are in `swapio.optim`. The names here are loaded when they are first used: importing this
package starts no thread, opens no file, and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swapio.aio import Engine, File, IOFuture
    from swapio.buffers import BufferPool, Lease
    from swapio.config import SwapConfig
    from swapio.errors import (
        AioError,
        CheckpointError,
        ClosedError,
        ConfigError,
        CorruptionError,
        PoolExhaustedError,
        StoreLockedError,
        SwapioError,
        SwapStateError,
    )
    from swapio.filestore import FileStore
    from swapio.pipeline import PipelinedSwapper
    from swapio.residency import is_resident, tag_resident, untag_resident
    from swapio.runtime import GroupRequest, SwapRuntime
    from swapio.store import SwapStore
    from swapio.subgroup import RecordSpec, SubGroupState
    from swapio.swapper import PartitionedSwapper

__version__ = "0.1.0"

__all__ = [
    "AioError",
    "BufferPool",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "Engine",
    "File",
    "FileStore",
    "GroupRequest",
    "IOFuture",
    "Lease",
    "PartitionedSwapper",
    "PipelinedSwapper",
    "PoolExhaustedError",
    "RecordSpec",
    "StoreLockedError",
    "SubGroupState",
    "SwapConfig",
    "SwapRuntime",
    "SwapStateError",
    "SwapStore",
    "SwapioError",
    "is_resident",
    "tag_resident",
    "untag_resident",
]

_MODULES = {
    "aio": ("Engine", "File", "IOFuture"),
    "buffers": ("BufferPool", "Lease"),
    "config": ("SwapConfig",),
    "filestore": ("FileStore",),
    "pipeline": ("PipelinedSwapper",),
    "residency": ("is_resident", "tag_resident", "untag_resident"),
    "runtime": ("GroupRequest", "SwapRuntime"),
    "store": ("SwapStore",),
    "subgroup": ("RecordSpec", "SubGroupState"),
    "swapper": ("PartitionedSwapper",),
}
# All other names are exceptions.
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'swapio' has no attribute {name!r}")
    module = importlib.import_module(f"swapio.{_MODULE_OF.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
