# SPDX-License-Identifier: Apache-2.0
"""What stands in `p.grad` in stage 2, and backward passes that no no_sync() announces."""

from __future__ import annotations

import pytest
import torch

from support.zero_cases import discard, passes, read_gradients


def test_reading_a_reduced_gradient_raises(ranks) -> None:
    """torch's clip_grad_norm_ skips parameters without gradient: it returned 0, and clipped none.

    `p.grad` was None after backward in stage 2, and training went on unclipped.
    """
    for found in ranks.run(read_gradients, 2):
        assert "max_grad_norm" in found["clip"]
        assert "stage=1" in found["scaler"]
        assert found["during"] == [True, True]
        assert found["after"] == [True, True]
        assert found["closed"] == [True, True]


@pytest.mark.parametrize("accumulate", ["local", "shard"])
def test_every_pass_counts_with_and_without_no_sync(ranks, accumulate) -> None:
    """A parameter cut over buckets, of which one has gone when the next pass arrives.

    The pieces of the bucket that had gone missed the second gradient.
    """
    found = ranks.run(passes, 2, accumulate=accumulate)
    for params, wanted in found:
        for mine, one in zip(params, wanted, strict=True):
            assert torch.allclose(mine, one, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["module", "in place"])
def test_gradients_that_were_discarded_by_others_are_an_error(ranks, how) -> None:
    """The sums were in the shards already, and were stepped all the same."""
    for error, moved, after in ranks.run(discard, 2, how=how):
        assert "optimizer.zero_grad()" in error
        assert not moved
        assert after
