# SPDX-License-Identifier: Apache-2.0
"""Matrices that nobody thinks of: thin, single, empty, singular, huge, tiny, in odd memory."""

from __future__ import annotations

import threading

import pytest
import torch
from oracles.muon import MuonReference, relative_error

from support.muon_training import (
    MODES,
    SWAP,
    gradients,
    parameters,
    tight,
)
from swapio.errors import ConfigError
from swapio.optim import Muon

EDGES = [511, 512, 513, 576, 577, 623]  # around where products change, and their groups of rows


def updates(shapes, rows, swap=None, dtype=torch.float32, **kwargs):
    params = parameters(shapes, dtype)
    start = [param.detach().clone() for param in params]

    def make(setting):
        return Muon(params, **{"lr": 0.02, "weight_decay": 0.0, "swap": setting, **kwargs})

    with make(None) if swap is None else tight(make, {**SWAP, **swap}) as opt:
        for row in rows:
            for param, grad in zip(params, row, strict=True):
                param.grad = grad
            opt.step()
    return [param.detach() - begin for param, begin in zip(params, start, strict=True)]


def expected(shapes, rows, **kwargs):
    start = [param.detach() for param in parameters(shapes)]
    reference = MuonReference(start, **{"lr": 0.02, "weight_decay": 0.0, **kwargs})
    for row in rows:
        reference.step(row)
    return [want - begin for want, begin in zip(reference.params, start, strict=True)]


def test_thin_matrices():
    shapes = [(1, 1), (1, 7), (7, 1), (1, 4000), (4000, 1), (2, 3000), (3000, 2), (3, 1, 5)]
    rows = gradients(shapes, 3)
    for shape, got, want in zip(shapes, updates(shapes, rows), expected(shapes, rows), strict=True):
        assert relative_error(got, want) <= 1e-5, shape


@pytest.mark.parametrize("rows", EDGES)
def test_sizes_around_the_edges_of_products(rows):
    shapes = [(rows, 600), (530, rows)]
    grads = gradients(shapes, 1)
    for got, want in zip(updates(shapes, grads), expected(shapes, grads), strict=True):
        assert relative_error(got, want) <= 1e-5


@pytest.mark.parametrize("shape", [(0, 5, 3), (3, 0, 5), (3, 5, 0), (0, 0), (0, 4, 3, 3)])
def test_stacks_without_elements(tmp_path, shape):
    params = parameters([shape, (16, 8)])
    for swap in (None, {"path": tmp_path, **SWAP}):
        with Muon(params, swap=swap) as opt:
            for param in params:
                param.grad = torch.ones_like(param)
            opt.step()
            assert opt.stats()["num_newton_schulz"] == 1


@pytest.mark.parametrize("shape", [(40, 40), (64, 256), (520, 520), (520, 1100)])
def test_singular_matrices_are_finite_and_keep_their_range(shape):
    """Of rank one, with zero rows and columns, and with equal rows."""
    torch.manual_seed(0)
    one = torch.randn(shape[0], 1) @ torch.randn(1, shape[1])
    sparse = torch.randn(shape)
    sparse[::2], sparse[:, ::3] = 0, 0
    equal = torch.randn(1, shape[1]).expand(shape).clone()
    for grad, exact in ((one, False), (sparse, True), (equal, False)):
        (got,) = updates([shape], [[grad]])
        assert torch.isfinite(got).all()
        if exact:
            # Nothing can come of a row or column of zeros.
            assert not got[::2].any()
            assert not got[:, ::3].any()
        largest = float(torch.linalg.svdvals(got / 0.02)[0])
        assert 0.6 < largest < 1.25 * max(1.0, (shape[0] / shape[1]) ** 0.5)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_gradients_at_the_ends_of_fp32(scale):
    shapes = [(40, 56), (520, 530)]
    grads = gradients(shapes, 1)
    clamped = [[g.clamp(-2, 2) for g in row] for row in grads]
    small = [[g * scale for g in row] for row in clamped]
    for got, want in zip(
        updates(shapes, small, eps=0.0), updates(shapes, clamped, eps=0.0), strict=True
    ):
        # 1e-38 is subnormal after momentum: seven digits are not there to begin with.
        assert relative_error(got, want) <= (1e-5 if scale > 1e-36 else 1e-1)


def test_nan_spoils_its_own_matrix_only():
    params = parameters([(3, 20, 30), (16, 16)])
    start = [param.detach().clone() for param in params]
    with Muon(params, nonfinite="propagate") as opt:
        params[0].grad, params[1].grad = gradients([(3, 20, 30), (16, 16)], 1)[0]
        params[0].grad[1, 2, 3] = float("nan")
        opt.step()
    assert torch.isnan(params[0][1]).any()
    assert torch.isfinite(params[0][[0, 2]]).all()
    assert torch.isfinite(params[1]).all()
    assert not torch.equal(params[0][0], start[0][0])


@pytest.mark.parametrize("swap", [None, MODES["pipelined"]])
def test_gradients_in_another_memory_order(tmp_path, swap):
    shapes = [(40, 56), (520, 540), (3, 20, 30)]
    grads = gradients(shapes, 2)
    twisted = [[grad.mT.contiguous().mT for grad in row] for row in grads]
    settings = None if swap is None else {"path": tmp_path, **swap}
    for got, want in zip(updates(shapes, twisted, settings), updates(shapes, grads), strict=True):
        assert torch.equal(got, want)


def test_thousands_of_small_matrices(tmp_path):
    shapes = [(3, 5)] * 1500 + [(4, 4)] * 500
    grads = gradients(shapes, 1)
    got = updates(shapes, grads, {"path": tmp_path, "min_swap_bytes": 0})
    assert all(map(torch.equal, got, updates(shapes, grads)))
    for update, want in zip(got[::97], expected(shapes, grads)[::97], strict=True):
        # Next to weights of 1/8 an update of 0.02 has lost a digit; some are near singular.
        assert relative_error(update, want) <= 1e-4


def test_optimizers_in_several_threads_do_not_disturb_each_other():
    shapes = [(530, 560), (40, 56), (520, 1100)]
    grads = gradients(shapes, 2)
    want = updates(shapes, grads)
    results = [None] * 4

    def work(at):
        torch.set_num_threads(1)
        results[at] = updates(shapes, grads)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got in results:
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("value", [2.0, "2", None])
def test_settings_of_a_wrong_kind_are_named(value):
    with pytest.raises(ConfigError, match="num_heads"):
        Muon([{"params": parameters([(8, 8)]), "num_heads": value}])
    if value is not None:
        with pytest.raises(ConfigError, match="ns_steps"):
            Muon(parameters([(8, 8)]), ns_steps=value)
