# SPDX-License-Identifier: Apache-2.0
"""torch's own tools around an optimizer: all schedulers, EMA, SWA, compiled models.

The oracle is the same loop with torch.optim.AdamW; and state on storage against state in RAM must
agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from swapio.optim import AdamW

MAKERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=True),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=True),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5, 2.0),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.StepLR(o, 1)], [2]
    ),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "SWALR": lambda o: SWALR(o, swa_lr=0.2, anneal_epochs=3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("swapio-*")), "close() leaves nothing behind"


def build() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 512, bias=False), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 600)
    )


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(8, 16, generator=generator) for _ in range(count)]


def swap_of(folder: Path) -> dict[str, object]:
    return {
        "path": str(folder),
        "host_memory": "24MiB",
        "min_swap_bytes": 0,
        "sub_group_numel": "128Ki",
    }


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def close(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_no_kind_of_scheduler_is_missing() -> None:
    kinds = {
        name
        for name in schedulers.__all__
        if isinstance(getattr(schedulers, name), type) and name != "LRScheduler"
    }
    assert kinds | {"SWALR"} == set(MAKERS)


@pytest.mark.parametrize("kind", MAKERS)
def test_schedulers_see_a_torch_optimizer(kind: str, folder: Path) -> None:
    ours, theirs = build(), build()
    with AdamW(ours.parameters(), lr=0.05, swap=swap_of(folder)) as mine:
        reference = torch.optim.AdamW(theirs.parameters(), lr=0.05)
        schedules = [MAKERS[kind](mine), MAKERS[kind](reference)]
        for number in range(5):
            for model, optimizer, schedule in zip(
                (ours, theirs), (mine, reference), schedules, strict=True
            ):
                # The same gradients for both: what a scheduler changes is all that may differ.
                generator = torch.Generator().manual_seed(number)
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=generator)
                optimizer.step()
                schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            for name in ("lr", "betas"):
                assert mine.param_groups[0][name] == reference.param_groups[0][name]
        state = schedules[0].state_dict()
        schedules[0].load_state_dict(state)
    close(ours, theirs)


def averaged_run(
    swap: dict[str, object] | None, *, use_torch: bool = False
) -> list[torch.nn.Module]:
    """Train with an EMA whose weights are swapped in for an evaluation in between, then SWA."""
    model = build()
    if use_torch:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = AdamW(model.parameters(), lr=0.01, swap=swap)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.005)
    data = batches(8)
    for number, inputs in enumerate(data):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        if number == 3:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(ema.module.state_dict())
            model.eval()
            model(inputs)
            model.train()
            model.load_state_dict(kept)
        if number > 4:
            swa.update_parameters(model)
            schedule.step()
    update_bn(data, swa)
    if not use_torch:
        optimizer.close()  # type: ignore[attr-defined]
    return [model, ema.module, swa.module]


def test_averaged_models(folder: Path) -> None:
    swapped = averaged_run(swap_of(folder))
    for mine, resident, theirs in zip(
        swapped, averaged_run(None), averaged_run(None, use_torch=True), strict=True
    ):
        assert same(mine, resident)
        close(mine, theirs)


def test_compiled_models(folder: Path) -> None:
    """The parameters of a compiled model are those of the model; the step is not compiled."""
    results = []
    for compiled in (False, True):
        model = build()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        with AdamW(called.parameters(), lr=0.01, swap=swap_of(folder)) as optimizer:
            for inputs in batches(4):
                called(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(model)
    close(*results)
    assert not same(results[0], build())


def test_scaled_and_accumulated_gradients(folder: Path) -> None:
    """GradScaler with two micro-batches for each step, one of them with inf in it."""
    models = []
    for swap in (None, swap_of(folder)):
        model = build()
        with AdamW(model.parameters(), lr=0.01, swap=swap) as optimizer:
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for number, inputs in enumerate(batches(8)):
                loss = model(inputs).square().mean() / 2
                scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
                if number % 2:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            assert scaler.get_scale() == 128.0
            first = next(iter(model.parameters()))
            assert int(optimizer.state[first]["step"]) == 3
        models.append(model)
    assert same(*models)
