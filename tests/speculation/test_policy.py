# SPDX-License-Identifier: Apache-2.0
"""When early steps are worth it, without a clock."""

from __future__ import annotations

import pytest

from swapio.optim.speculation_policy import Policy


def simulate(policy, steps, *, seconds, wasted=lambda _step: False):
    """Total time of iterations that take seconds(is_on, step), and when it was on."""
    total, history = 0.0, []
    for step in range(steps):
        is_on = policy.is_on
        took = seconds(is_on, step)
        policy.end_step(took, wasted=is_on and wasted(step))
        total += took
        history.append(is_on)
    return total, history


def test_always_is_always():
    _, history = simulate(Policy("always"), 50, seconds=lambda _on, _step: 1.0)
    assert all(history)


@pytest.mark.parametrize("slowdown", [1.0, 1.02, 1.5])
def test_where_nothing_is_hidden_it_costs_at_most_two_percent(slowdown):
    total, history = simulate(
        Policy("adaptive"), 2000, seconds=lambda on, _step: slowdown if on else 1.0
    )
    assert total <= 1.02 * 2000
    assert sum(history) < 40


def test_where_it_helps_it_is_used():
    total, history = simulate(Policy("adaptive"), 1000, seconds=lambda on, _step: 0.7 if on else 1)
    assert total <= 1.02 * 700
    assert history[-1]


def test_one_slow_iteration_does_not_decide():
    def seconds(on, step):
        return (0.7 if on else 1.0) + (5.0 if step in (4, 1) else 0.0)

    _, history = simulate(Policy("adaptive"), 100, seconds=seconds)
    assert history[-1]


def test_clipping_in_every_step_turns_it_off_within_five():
    policy = Policy("adaptive")
    simulate(policy, 20, seconds=lambda on, _step: 0.7 if on else 1.0)
    assert policy.is_on
    total, history = simulate(
        policy, 2000, seconds=lambda on, _step: 1.3 if on else 1.0, wasted=lambda _step: True
    )
    assert not any(history[5:10])
    assert total <= 1.02 * 2000
    assert policy.reason


def test_clipping_that_ends_lets_it_come_back():
    policy = Policy("adaptive")
    simulate(policy, 20, seconds=lambda on, _step: 0.7 if on else 1.0)
    simulate(policy, 6, seconds=lambda _on, _step: 1.0, wasted=lambda _step: True)
    _, history = simulate(policy, 100, seconds=lambda on, _step: 0.7 if on else 1.0)
    assert history[-1]


def test_a_rare_clip_changes_nothing():
    policy = Policy("adaptive")
    simulate(policy, 20, seconds=lambda on, _step: 0.7 if on else 1.0)
    _, history = simulate(
        policy, 60, seconds=lambda _on, _step: 0.7, wasted=lambda step: step % 7 == 0
    )
    assert all(history)
