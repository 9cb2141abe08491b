# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run: what was moved, how fast, what was held; docs/stats.md explains each.

Invariant: all values are plain numbers; what is not known is 0.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swapio.plan_time import Rates, device_seconds

if TYPE_CHECKING:
    from swapio.runtime import SwapRuntime

_SECONDS_PER_DAY = 86400.0


def runtime_stats(runtime: SwapRuntime, began: float) -> dict[str, float]:
    """Return the numbers of an opened runtime.

    Args:
        runtime: The runtime.
        began: time.perf_counter() when it was opened.
    """
    numbers: dict[str, float] = dict(runtime.swapper.stats())
    plan = runtime.plan
    numbers["checksum_seconds"] = numbers.get("hash_seconds", 0.0)
    numbers["host_bytes"] = plan.host_memory - plan.spare_bytes
    numbers["resident_bytes"] = plan.resident_bytes
    numbers["staging_bytes"] = plan.staging_bytes
    numbers["cached_bytes"] = runtime.swapper.cached_bytes
    numbers["turn_wait_seconds"] = 0.0
    read_seconds = write_seconds = 0.0
    if runtime.engine is not None:
        engine = runtime.engine.stats()
        read_seconds, write_seconds = engine.read_seconds, engine.write_seconds
        numbers["turn_wait_seconds"] = getattr(runtime.engine, "turn_wait_seconds", 0.0)
    numbers["read_seconds"], numbers["write_seconds"] = read_seconds, write_seconds
    numbers["read_gb_per_second"] = rate(numbers.get("bytes_read", 0.0), read_seconds)
    written = sum(
        numbers.get(name, 0) for name in ("bytes_written", "bytes_copied", "bytes_tables")
    )
    numbers["write_gb_per_second"] = rate(written, write_seconds)
    numbers["total_written_bytes"] = written + numbers.get("bytes_allocated", 0)
    elapsed = max(1e-9, time.perf_counter() - began)
    # What makes the slot files is written once, and is no part of a day.
    numbers["written_bytes_per_day"] = written / elapsed * _SECONDS_PER_DAY
    numbers["predicted_step_seconds"] = plan.time.step or 0.0
    return numbers


def rate(nbytes: float, seconds: float) -> float:
    """Return GB/s (1e9 bytes a second); 0 when nothing took time."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def share_of_device(rates: Rates, read_bytes: float, write_bytes: float, seconds: float) -> float:
    """Return how much of the device's speed moving these bytes in `seconds` is; 0: not known.

    1 means that the drives could not have moved them faster, in turns or both at once.
    """
    best = device_seconds(rates, int(read_bytes), int(write_bytes))
    return best / seconds if best and seconds > 0 else 0.0
