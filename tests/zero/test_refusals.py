# SPDX-License-Identifier: Apache-2.0
"""What ZeRO refuses, by name, and that every rank hears of it."""

from __future__ import annotations

import pytest
import torch

from support.zero_cases import refuse
from swapio.errors import ConfigError
from swapio.optim import AdamW, ZeroOptimizer

CASES = [
    ({"stage": 3}, "fully_shard"),
    ({"accumulate": "both"}, "accumulate='both'"),
    ({"reduce_dtype": torch.int8}, "reduce_dtype"),
    ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ({"gradients": "stream"}, "for one process"),
    ({"lr": -1.0}, "lr=-1.0"),
    ({"wrap": "ddp", "stage": 2}, "DistributedDataParallel"),
    ({"differ": "shape"}, "differ from number 0 on"),
    ({"differ": "lr"}, "rank 1 of 2 failed: ConfigError: lr"),
]


@pytest.mark.parametrize(("settings", "message"), CASES)
def test_a_refusal_names_its_reason_on_every_rank(ranks, settings, message) -> None:
    found = ranks.run(refuse, 2, settings=settings)
    assert message in found[0]
    assert found[1] is not None


def test_ddp_averages_gradients_itself_in_stage_1(ranks) -> None:
    found = ranks.run(refuse, 2, settings={"wrap": "ddp", "stage": 1})
    assert found == [None, None]


def test_a_process_group_is_needed() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        ZeroOptimizer([torch.nn.Parameter(torch.ones(2))], AdamW, stage=1)


def test_only_optimizers_of_swapio_are_taken() -> None:
    with pytest.raises(ConfigError, match="not an optimizer of swapio"):
        ZeroOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.AdamW, stage=1)
