# SPDX-License-Identifier: Apache-2.0
"""Puts the ways of gradients and weights together, and says what memory they take.

parameters on the CPU, gradients="keep"      nothing: the kernels read p.grad
parameters on the CPU, gradients="stream"    hooks; memory for gradients
parameters on a device, "keep"               gradients are copied down in step(); weights go up
parameters on a device, "stream"             gradients are copied down in hooks; weights go up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from swapio.align import PAGE_BYTES
from swapio.buffers import BufferPool
from swapio.config import SwapConfig
from swapio.errors import ConfigError
from swapio.optim.cuda_copies import DeviceCopier, norm_bytes
from swapio.optim.cuda_gradients import KeptGradients, kept_bytes
from swapio.optim.cuda_weights import DeviceWeights, ring_bytes
from swapio.optim.layout import Layout, PackedGroup, ParameterInfo
from swapio.optim.parameters import ParameterTable
from swapio.optim.stream import Copier, GradientStream, HostCopier
from swapio.optim.stream_fragments import SwappedFragments, resident_fragment_bytes
from swapio.optim.stream_memory import GradientMemory, streamed_bytes
from swapio.swapper import PartitionedSwapper


def accumulation_dtype(config: SwapConfig) -> torch.dtype:
    """The dtype in which gradients of one step are added."""
    return torch.bfloat16 if config.accumulation_dtype == "bfloat16" else torch.float32


def device_of(infos: Sequence[ParameterInfo]) -> torch.device | None:
    """The one device that is not the CPU, or None.

    Raises:
        ConfigError: There are several.
    """
    names = dict.fromkeys(info.bucket.device for info in infos if info.bucket.device != "cpu")
    if len(names) > 1:
        raise ConfigError(
            f"parameters lie on {', '.join(names)}; make one optimizer for each device"
        )
    return torch.device(next(iter(names))) if names else None


def stream_bytes(layout: Layout, config: SwapConfig, *, streamed: bool) -> int:
    """RAM for the gradients and weights that are on their way, of all parameters in a layout."""
    groups = on_device(layout)
    ring = ring_bytes(groups) + (norm_bytes(len(layout.infos)) if groups else 0)
    if not streamed:
        return ring + kept_bytes(groups)
    if not config.swap_gradients:
        return ring + streamed_bytes(layout.infos, accumulation_dtype(config))
    return ring + resident_fragment_bytes(
        list(layout.groups.values()),
        accumulation_dtype(config),
        config.min_swap_bytes,
        stored=bool(config.paths),
    )


def open_stream(
    layout: Layout,
    table: ParameterTable,
    config: SwapConfig,
    swapper: Callable[[], PartitionedSwapper],
    *,
    streamed: bool,
) -> GradientStream | None:
    """Take care of gradients from now on; None if they can stay in `p.grad` until the step.

    Args:
        layout: The optimizer's sub-groups.
        table: Its parameters.
        config: Its settings.
        swapper: Gives its swapper, which recovery replaces.
        streamed: Take them in hooks during backward.
    """
    device = device_of(layout.infos)
    if device is None and not streamed:
        return None

    def open_pool(nbytes: int) -> BufferPool:
        return page_locked(config, nbytes, "gradients", pin=device is not None)

    memory = GradientMemory(accumulation_dtype(config), open_pool)
    fragments = None
    if streamed and config.swap_gradients:
        fragments = SwappedFragments(layout, swapper, accumulation_dtype(config), open_pool)
    copier: Copier = HostCopier()
    if device is not None:
        copier = DeviceCopier(device, open_pool)
    kept = None
    if device is not None and not streamed:
        kept = KeptGradients(device, open_pool(max(PAGE_BYTES, kept_bytes(on_device(layout)))))
    stream = GradientStream(table, memory, copier, fragments, kept=kept)
    try:
        stream.attach()
    except BaseException:
        stream.close()
        raise
    return stream


def open_weights(layout: Layout, config: SwapConfig) -> DeviceWeights | None:
    """The way of new weights to parameters on a device; None if there are none."""
    device = device_of(layout.infos)
    if device is None:
        return None
    groups = on_device(layout)
    pool = page_locked(config, max(PAGE_BYTES, ring_bytes(groups)), "weights", pin=True)
    return DeviceWeights(device, layout.infos, pool)


def grow_ways(
    layout: Layout,
    config: SwapConfig,
    stream: GradientStream | None,
    weights: DeviceWeights | None,
) -> None:
    """Make room on the ways for parameters that were added to a layout; no step is under way."""
    groups = on_device(layout)
    if weights is not None and weights.nbytes < (nbytes := ring_bytes(groups)):
        weights.grow(page_locked(config, nbytes, "weights", pin=True))
    if stream is None:
        return
    if stream.kept is not None and stream.kept.nbytes < (nbytes := kept_bytes(groups)):
        stream.kept.grow(page_locked(config, nbytes, "gradients", pin=True))
    stream.attach()


def page_locked(config: SwapConfig, nbytes: int, name: str, *, pin: bool) -> BufferPool:
    """A pool of so many bytes, page-locked if `pin` and pin_memory allow it."""
    pin = pin and bool(config.pin_memory)
    return BufferPool(nbytes, huge_pages=config.huge_pages, pin=pin, name=name)


def is_on_device(packed: PackedGroup) -> bool:
    """Whether a sub-group's parameters are not on the CPU."""
    return packed.bucket.device != "cpu"


def on_device(layout: Layout) -> list[PackedGroup]:
    """The sub-groups whose parameters are not on the CPU."""
    return [packed for packed in layout.groups.values() if is_on_device(packed)]
