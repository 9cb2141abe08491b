# SPDX-License-Identifier: Apache-2.0
"""Run DeepSpeed's NVMe offload on swapio's engine and CPU kernels, without changing DeepSpeed.

    import swapio.integrations.deepspeed

    swapio.integrations.deepspeed.install()
    engine, *_ = deepspeed.initialize(...)      # ZeRO-3, offload_optimizer.device = "nvme"

`install()` puts modules with the interface of DeepSpeed's `async_io`, `pin_memory` and `cpu_adam`
extensions where DeepSpeed keeps the extensions that it has loaded. Nothing is compiled: neither
libaio nor a compiler is needed. What changes: a transfer that fails raises AioError where DeepSpeed
would go on with wrong weights, files may have any size, and a lost or short file is an error.

What does not change: DeepSpeed's files are overwritten in place and not checksummed, gradients are
swapped too (16 bytes read and 16 written per parameter), and a killed run cannot be resumed from
them. For those, use `swapio.optim.AdamW` with a DeepSpeed-free loop.

Invariant: `uninstall()` leaves DeepSpeed as `install()` found it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any, Literal

from swapio.aio import DirectMode, EngineKind, FallbackMode
from swapio.errors import ConfigError, SwapioError
from swapio.integrations.deepspeed import async_io, cpu_adam, pinned

__all__ = ["install", "is_installed", "uninstall"]

TESTED_RELEASE = "0.19.8"

OpName = Literal["async_io", "cpu_adam"]

# DeepSpeed caches its pin_memory extension here, beside OpBuilder._loaded_ops.
_PIN_MEMORY_CACHE = "_deepspeed_pin_memory_op_module"
_ABSENT = object()
_replaced: dict[str, object] = {}


def install(
    *,
    ops: Collection[OpName] = ("async_io", "cpu_adam"),
    engine: EngineKind = "auto",
    direct: DirectMode = "auto",
    on_fallback: FallbackMode = "log",
) -> None:
    """Make DeepSpeed use swapio's engine and kernels. Call it before `deepspeed.initialize`.

    Blocks for the import of DeepSpeed; starts no thread. A second call changes the settings of
    handles that are made from then on.

    Args:
        ops: Which extensions to replace. "async_io" brings "pin_memory" with it.
        engine: "io_uring", "threads", or "auto"; see swapio.Engine.
        direct: Whether files are opened with O_DIRECT; see swapio.Engine.
        on_fallback: "error" refuses to go on without io_uring, O_DIRECT or registered buffers.

    Raises:
        ConfigError: An unknown name in `ops`, or Python runs with -O: DeepSpeed calls its I/O
            functions inside assert statements, so that no byte would be read or written.
        SwapioError: DeepSpeed is not installed, or keeps its extensions in an unknown way.
    """
    unknown = sorted(set(ops) - {"async_io", "cpu_adam"})
    if unknown:
        raise ConfigError(f"ops contains {unknown}; want 'async_io', 'cpu_adam' or both")
    if sys.flags.optimize and "async_io" in ops:
        raise ConfigError(
            "Python runs with -O (PYTHONOPTIMIZE), which removes assert statements, and DeepSpeed "
            "calls its swap functions inside them: no state would be read or written. Run without "
            "-O, or use swapio.optim, which does not depend on asserts"
        )
    loaded = _loaded_ops()
    async_io.defaults["engine"] = engine
    async_io.defaults["direct"] = direct
    async_io.defaults["on_fallback"] = on_fallback
    if "async_io" in ops:
        _put(loaded, "async_io", _facade("async_io", async_io))
        pin_memory = _facade("pin_memory", pinned)
        _put(loaded, "pin_memory", pin_memory)
        _put(vars(sys), _PIN_MEMORY_CACHE, pin_memory)
    if "cpu_adam" in ops:
        _put(loaded, "cpu_adam", _facade("cpu_adam", cpu_adam))


def uninstall() -> None:
    """Give DeepSpeed its own extensions back; handles and optimizers that exist keep swapio's."""
    if not _replaced:
        return
    loaded = _loaded_ops()
    for name, before in _replaced.items():
        table = vars(sys) if name == _PIN_MEMORY_CACHE else loaded
        if before is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = before
    _replaced.clear()


def is_installed() -> bool:
    """Return whether `install()` is in effect; cheap, imports nothing."""
    return bool(_replaced)


def _put(table: dict[str, Any], name: str, module: ModuleType) -> None:
    _replaced.setdefault(name, table.get(name, _ABSENT))
    table[name] = module


def _facade(name: str, source: ModuleType) -> ModuleType:
    """Return a module with the public names of `source` and without a file.

    DeepSpeed opens the file of its pin_memory extension with ctypes, which fails on Python source.
    """
    module = ModuleType(f"swapio_{name}", source.__doc__)
    names = vars(source)["__all__"]
    vars(module).update({public: getattr(source, public) for public in names})
    vars(module)["__getattr__"] = _missing(name)
    return module


def _missing(op: str) -> Any:
    def missing(name: str) -> Any:
        raise AttributeError(
            f"swapio's {op} has no {name!r}: it replaces the functions that ZeRO's offload uses. "
            f"To keep DeepSpeed's own extension, leave {op!r} out of install(ops=...)"
        )

    return missing


def _loaded_ops() -> dict[str, Any]:
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    except ImportError as error:
        raise SwapioError(
            f"DeepSpeed cannot be imported: {error}. pip install deepspeed=={TESTED_RELEASE}"
        ) from error
    loaded: object = getattr(builder, "_loaded_ops", None)
    if not isinstance(loaded, dict):
        raise SwapioError(
            "this DeepSpeed does not keep its extensions in OpBuilder._loaded_ops; "
            f"swapio was tested with {TESTED_RELEASE}"
        )
    return loaded
