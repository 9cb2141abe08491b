# SPDX-License-Identifier: Apache-2.0
"""What ZeRO plans and shows of itself: collectives, memory, and buckets during backward."""

from __future__ import annotations

import pytest

from support.zero_figures import count_collectives, trace_backward

SHAPES = [(17, 33), (300, 40), (40, 300), (1, 3), (33,), (3,)]


@pytest.mark.parametrize(("rule", "stage"), [("adamw", 1), ("adamw", 2), ("muon", 2)])
def test_collectives_of_a_step_are_those_of_the_plan(ranks, rule, stage) -> None:
    """Small exchanges are in no plan: there are as many in every step, and on every rank."""
    found = ranks.run(count_collectives, 3, rule=rule, stage=stage, shapes=SHAPES)
    planned, described, steps = found[0]
    reduce = "all_reduce" if stage == 1 else "reduce_scatter"
    assert planned.keys() == {"all_gather", reduce, *(["all_to_all"] if rule == "muon" else [])}
    assert min(planned.values()) >= 2
    assert f"collectives of a step: {planned}" in described
    for rank in found:
        assert rank[0] == planned
        assert rank[2] == steps
    small = {"exchange": steps[0]["exchange"]}
    assert all(step == planned | small | {"gather": 0} for step in steps)


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_travel_while_backward_goes_on(ranks, tmp_path, stage) -> None:
    """In the trace all buckets but the first layer's begin before the last gradient is there."""
    for num_buckets, spans in ranks.run(trace_backward, 2, stage=stage, folder=tmp_path):
        arrivals = [span for span in spans if span[0] == "backward"]
        buckets = [span for span in spans if span[0] == "reduce"]
        assert num_buckets == 6
        assert len(arrivals) == 2
        assert len(buckets) == 2 * num_buckets
        for _, begin, end in arrivals:
            during = [span for span in buckets if begin < span[1] < end]
            assert len(during) == num_buckets - 1
