# SPDX-License-Identifier: Apache-2.0
"""Random models: Muon with state anywhere equals the pure functions, bit by bit."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.muon_training import MODES, gradients, parameters, tight
from support.pure_muon import PureMuon
from swapio.optim import Muon

SIDES = st.sampled_from([1, 2, 7, 16, 33, 64, 96])
SHAPES = st.lists(
    st.one_of(st.tuples(SIDES, SIDES), st.tuples(st.integers(1, 3), SIDES, SIDES)),
    min_size=1,
    max_size=5,
)


def check(shapes, dtype, form, mode, resident, sub_group_numel, folder):
    params = parameters(shapes, dtype)
    reference = PureMuon([param.detach() for param in params], lr=0.02)
    swap = {
        "path": folder,
        "master": form,
        "resident": resident,
        "sub_group_numel": sub_group_numel,
        "min_swap_bytes": 0,
        **MODES[mode],
    }
    with tight(lambda setting: Muon(params, lr=0.02, swap=setting), swap) as opt:
        for at, row in enumerate(gradients(shapes, 3, dtype)):
            present = [None if (at + index) % 4 == 3 else g for index, g in enumerate(row)]
            for param, grad in zip(params, present, strict=True):
                param.grad = grad
            opt.step()
            reference.step([None if grad is None else grad.float() for grad in present])
        for param, want, buffer in zip(params, reference.params, reference.buffers, strict=True):
            state = opt.state_of(param)
            assert torch.equal(state["momentum_buffer"], buffer)
            assert torch.equal(state.get("master", param.detach()), want)
            assert torch.equal(param.detach(), want.to(dtype))


DRAWN = given(
    shapes=SHAPES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    form=st.sampled_from(["auto", "separate"]),
    mode=st.sampled_from(sorted(MODES)),
    resident=st.sampled_from([(), ("momentum_buffer",), ("master",)]),
    sub_group_numel=st.sampled_from([1, 4096, 1 << 18]),
)


def test_state_anywhere_equals_the_pure_functions():
    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    @DRAWN
    def run(**drawn):
        with tempfile.TemporaryDirectory() as folder:
            check(folder=folder, **drawn)

    run()


@pytest.mark.slow
def test_state_anywhere_equals_the_pure_functions_at_length():
    @settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
    @DRAWN
    def run(**drawn):
        with tempfile.TemporaryDirectory() as folder:
            check(folder=folder, **drawn)

    run()
