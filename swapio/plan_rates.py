# SPDX-License-Identifier: Apache-2.0
"""Which speeds a plan is made with: given, remembered, or measured in milliseconds."""

from __future__ import annotations

import dataclasses

from swapio.checksum import measure_hash_rate
from swapio.config import SwapConfig
from swapio.plan_devices import known_rates
from swapio.plan_time import Rates


def rates_of(config: SwapConfig) -> Rates:
    """Return what the configuration says of the drives, else what `swapio tune` found here."""
    rates = Rates(
        read=config.read_bandwidth, write=config.write_bandwidth, mixed=config.mixed_bandwidth
    )
    if rates.read is None and rates.write is None and config.paths:
        rates = known_rates(config.paths) or rates
    if rates.read is None or not config.checksum:
        return rates
    return dataclasses.replace(rates, checksum=measure_hash_rate())
