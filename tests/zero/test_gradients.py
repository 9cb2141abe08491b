# SPDX-License-Identifier: Apache-2.0
"""What stands in `p.grad` in stage 2, and backward passes that no no_sync() announces."""

from __future__ import annotations

import pytest
import torch

from support.zero_cases import average_in, discard, passes, read_gradients, scale_losses
from support.zero_training import alone, gradient


def test_reading_a_reduced_gradient_raises(ranks) -> None:
    """torch's clip_grad_norm_ skips parameters without gradient: it returned 0, and clipped none.

    `p.grad` was None after backward in stage 2, and training went on unclipped.
    """
    for found in ranks.run(read_gradients, 2):
        assert "max_grad_norm" in found["clip"]
        assert "swapio.optim.GradScaler" in found["scaler"]
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_scaler_trains_as_without_one(ranks, stage) -> None:
    """Scales are powers of two: the updates are those without scaling, to the bit.

    One rank overflows in the third step: all skip it, and lower the scale. FSDP2 reduces each
    micro-batch, so that its sums are formed in another order.
    """
    micros = 1 if stage == 3 else 2
    training = {"steps": 4, "micros": micros, "clip_on": (2, 4), "overflow": {(3, 1, 1)}}
    common = {
        "shapes": [(17, 33), (300, 40), (33,)],
        "settings": {"lr": 0.02, "weight_decay": 0.1},
        "training": training,
    }
    wanted, _, _ = alone("adamw", world_size=2, **common)
    for params, scales in ranks.run(scale_losses, 2, stage=stage, **common):
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0]
        for mine, theirs in zip(params, wanted, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_averaged_in_the_stated_dtype(ranks, stage, dtype) -> None:
    """Stage 2 adds up in fp32, in the order of the ranks; gloo's all-reduce in the dtype itself."""
    shapes = [(17, 33), (300, 40), (3,)]
    for found in ranks.run(average_in, 3, stage=stage, dtype=dtype, shapes=shapes):
        for index, mine in enumerate(found):
            sent = [gradient(shapes[index], 1, 0, rank, index).to(dtype) for rank in range(3)]
            exact = torch.stack([gradient(shapes[index], 1, 0, r, index) for r in range(3)]).mean(0)
            assert not torch.allclose(mine, exact, rtol=0, atol=1e-6), "nothing was rounded"
            wanted = torch.stack(sent).float().sum(0) / 3
            slack = (
                1e-6 if stage == 2 else 3 * torch.finfo(dtype).eps * torch.stack(sent).abs().max()
            )
            assert torch.allclose(mine, wanted, rtol=0, atol=float(slack))
