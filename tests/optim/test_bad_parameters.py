# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients of every odd kind: they work, or one error names them."""

from __future__ import annotations

import pytest
import torch

from support.training import (
    assert_same,
    make_parameters,
    set_gradients,
    snapshot,
    swap_of,
    train,
)
from swapio.errors import ConfigError, SwapioError
from swapio.optim import AdamW

N = 1_100_000


@pytest.fixture(params=["ram", pytest.param("partitioned", marks=pytest.mark.slow), "pipelined"])
def mode(request):
    return request.param


def named(param, **kwargs):
    return AdamW([("layer.weight", param)], **kwargs)


def refused(param, match, error=ConfigError):
    with pytest.raises(error, match=match) as info:
        named(param)
    assert "layer.weight" in str(info.value)


def test_dtypes_without_a_kernel_are_refused():
    refused(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), "float64.*Supported")
    refused(torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)), "complex64")


def test_meta_and_sparse_parameters_are_refused():
    refused(torch.nn.Parameter(torch.zeros(3, device="meta")), "meta device")
    refused(torch.nn.Parameter(torch.eye(3).to_sparse()), "sparse")


def test_gaps_in_memory_are_refused():
    refused(torch.zeros(10, 10)[:, :5].requires_grad_(), "not a leaf|gaps")
    base = torch.zeros(10, 10)
    refused(torch.nn.Parameter(base[:, :5]), r"gaps.*\(10, 1\)")
    refused(torch.nn.Parameter(torch.zeros(1).expand(5)), "gaps or overlaps")


def test_results_of_other_tensors_are_refused():
    refused(torch.zeros(3, requires_grad=True) * 2, "not a leaf")


def test_a_parameter_is_listed_once():
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="same tensor as number 0"):
        AdamW([param, param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": [param]}, {"params": [param]}])


def test_parameters_that_share_memory_are_refused():
    base = torch.zeros(100)
    one, other = torch.nn.Parameter(base[:60]), torch.nn.Parameter(base[50:])
    with pytest.raises(ConfigError, match=r"a and b share memory"):
        AdamW([("a", one), ("b", other)])
    AdamW([("a", torch.nn.Parameter(base[:50])), ("b", other)]).close()


@pytest.mark.parametrize("values", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}])
def test_hyperparameters_out_of_range_are_named(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        AdamW([torch.nn.Parameter(torch.zeros(3))], **values)
    with pytest.raises(ConfigError, match="lr=nan"):
        AdamW([torch.nn.Parameter(torch.zeros(3))], lr=float("nan"))


def test_zero_size_and_only_frozen_parameters_work(tmp_path, mode):
    empty, some = torch.nn.Parameter(torch.zeros(0, 5)), torch.nn.Parameter(torch.ones(N))
    for number, params in enumerate(([empty], [empty, some], [some.detach()])):
        with AdamW(params, swap=swap_of(mode, tmp_path / str(number))) as opt:
            for param in params:
                param.grad = torch.ones_like(param) if param.requires_grad else None
            opt.step()
            opt.state_dict()
            if number < 2:
                assert opt.state[empty]["exp_avg"].shape == (0, 5)


def test_frozen_parameters_have_no_state_until_they_are_unfrozen(tmp_path, mode):
    """pytorch/ao#959: frozen entries crashed the constructor. Here they cost nothing either."""
    params, twins = make_parameters([N, N, 5]), make_parameters([N, N, 5])
    params[1].requires_grad_(False)
    swap = swap_of(mode, tmp_path, host_memory="24MiB") if mode != "ram" else None
    opt, reference = AdamW(params, lr=0.1, swap=swap), torch.optim.AdamW(twins, lr=0.1)
    assert params[1] not in opt.state
    for step in range(1, 5):
        if step == 3:
            params[1].requires_grad_()
        for mine, its in zip(params, twins, strict=True):
            set_gradients([mine], step)
            set_gradients([its], step)
            if not mine.requires_grad:
                mine.grad = its.grad = None
        opt.step()
        reference.step()
        assert (params[1] in opt.state) == (step >= 3)
    assert [int(opt.state[p]["step"]) for p in params] == [4, 2, 4]
    for mine, its in zip(params, twins, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-7)
    opt.close()


@pytest.mark.parametrize("mode", ["ram", "pipelined"])
def test_frozen_parameters_of_any_dtype_are_accepted(tmp_path, mode):
    quantised = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    meta = torch.nn.Parameter(torch.zeros(4, device="meta"), requires_grad=False)
    some = make_parameters([N])
    with AdamW([quantised, meta, *some], swap=swap_of(mode, tmp_path)) as opt:
        train(opt, some, 1)
        meta.requires_grad_()
        before = snapshot(opt, some)
        set_gradients(some, 2)
        with pytest.raises(ConfigError, match=r"param\.1 .*meta"):
            opt.step()
        assert_same(before, snapshot(opt, some))


def test_permuted_parameters_are_stepped_in_place(tmp_path, mode):
    matrix = torch.nn.Parameter(torch.randn(1000, 600).t())
    image = torch.nn.Parameter(torch.randn(40, 30, 20, 22).to(memory_format=torch.channels_last))
    params = [matrix, image]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    opt = AdamW(params, lr=0.1, swap=swap_of(mode, tmp_path))
    reference = torch.optim.AdamW(twins, lr=0.1, foreach=False)
    for step in range(1, 4):
        set_gradients(params, step)
        set_gradients(twins, step)
        opt.step()
        reference.step()
    for mine, its in zip(params, twins, strict=True):
        assert mine.stride() != torch.empty(mine.shape).stride()
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(
            opt.state[mine]["exp_avg"], reference.state[its]["exp_avg"], rtol=1e-6, atol=1e-7
        )
    value = torch.randn(600, 1000)
    opt.set_state(matrix, "exp_avg", value)
    assert torch.equal(opt.state[matrix]["exp_avg"], value)
    opt.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_another_dtype_are_read_as_what_they_are(tmp_path, mode, dtype):
    """DeepSpeed's SuperOffload: bf16 gradients of fp32 parameters were read as fp32 bytes."""
    params, twins = make_parameters([N, 7]), make_parameters([N, 7])
    opt, twin = AdamW(params, swap=swap_of(mode, tmp_path)), AdamW(twins)
    for step in range(1, 3):
        for mine, its in zip(params, twins, strict=True):
            set_gradients([its], step)
            low = its.grad.to(dtype) if mine is params[0] else its.grad
            mine.grad_dtype = None
            mine.grad = low
            its.grad = low.float()
        opt.step()
        twin.step()
    assert_same(snapshot(opt, params), snapshot(twin, twins))
    opt.close()


def test_gradients_of_another_layout_are_copied(tmp_path, mode):
    params, twins = make_parameters([(1000, 1100)]), make_parameters([(1000, 1100)])
    opt, twin = AdamW(params, swap=swap_of(mode, tmp_path)), AdamW(twins)
    value = torch.randn(1100, 1000)
    for grad in (value.t(), torch.full((1, 1), 0.5).expand(1000, 1100), torch.ones(1000, 2200)):
        grad = grad[:, ::2] if grad.shape[1] == 2200 else grad
        params[0].grad = grad
        twins[0].grad = grad.contiguous()
        opt.step()
        twin.step()
    assert_same(snapshot(opt, params), snapshot(twin, twins))
    opt.close()


def break_gradient(kind, param):
    if kind == "sparse":
        param.grad = torch.ones(param.shape).to_sparse()
    elif kind == "shape":
        param.grad.data = torch.ones(3)
    else:
        param.grad_dtype = None
        param.grad = torch.ones(param.shape, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["sparse", "shape", "float64"])
def test_unsuitable_gradients_are_named_and_nothing_is_stepped(tmp_path, mode, kind):
    params = make_parameters([N, (600, 5)])
    names = ["first", "embedding.weight"]
    with AdamW(list(zip(names, params, strict=True)), swap=swap_of(mode, tmp_path)) as opt:
        train(opt, params, 1)
        before = snapshot(opt, params)
        set_gradients(params, 2)
        break_gradient(kind, params[1])
        with pytest.raises(ConfigError, match=rf"embedding\.weight .*{kind}.*Nothing was stepped"):
            opt.step()
        assert_same(before, snapshot(opt, params))
        params[1].grad = None
        train(opt, params, 1, first=2)
        assert int(opt.state[params[1]]["step"]) == 2


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])
def test_nonfinite_gradients_do_what_was_asked(nonfinite):
    params = make_parameters([50, 60])
    opt = AdamW([("a", params[0]), ("b", params[1])], nonfinite=nonfinite)
    before = params[1].detach().clone()
    set_gradients(params, 1)
    params[1].grad[7] = float("nan")
    if nonfinite == "raise":
        with pytest.raises(SwapioError, match="gradient of b"):
            opt.step()
    else:
        opt.step()
    assert params[1].isnan().any() == (nonfinite == "propagate")
    assert torch.equal(params[1], before) == (nonfinite != "propagate")
    with pytest.raises(ConfigError, match="nonfinite='ignore'"):
        AdamW(params, nonfinite="ignore")


def test_a_parameter_may_get_other_memory_of_the_same_kind(tmp_path, mode):
    params, twins = make_parameters([N, 9]), make_parameters([N, 9])
    opt, twin = AdamW(params, swap=swap_of(mode, tmp_path)), AdamW(twins)
    for step in range(1, 4):
        train(opt, params, 1, first=step)
        train(twin, twins, 1, first=step)
        for param in params:
            param.data = param.data.clone()
    assert_same(snapshot(opt, params), snapshot(twin, twins))
    opt.close()


REPLACEMENTS = {
    "dtype": lambda data: data.bfloat16(),
    "half the elements": lambda data: data[: len(data) // 2],
    "shape": lambda data: data.view(-1),
    "strides": lambda data: data.t().contiguous().t(),
    "gaps": lambda data: data.repeat(1, 2)[:, ::2],
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_a_parameter_replaced_by_another_kind_is_named(tmp_path, mode, kind):
    param = torch.nn.Parameter(torch.randn(1100, 1000))
    with named(param, swap=swap_of(mode, tmp_path)) as opt:
        train(opt, [param], 1)
        good, state = param.data, opt.state_of(param)
        copy = good.clone()
        param.grad = None
        param.data = REPLACEMENTS[kind](good)
        for grad in (torch.ones_like(param), torch.ones(param.shape, dtype=param.dtype)):
            param.grad = grad
            with pytest.raises(ConfigError, match=r"layer\.weight no longer fits.*Nothing was"):
                opt.step()
            param.grad = None
        assert torch.equal(good, copy)
        param.data = good
        for name, value in state.items():
            assert torch.equal(opt.state[param][name], value)
        train(opt, [param], 1, first=2)


def test_a_model_that_was_halved_after_construction_is_named(tmp_path, mode):
    model = torch.nn.Linear(1100, 1100).bfloat16()
    swap = swap_of(mode, tmp_path)
    if swap is not None:
        swap["host_memory"] = "17MiB"
    with AdamW(model.named_parameters(), swap=swap) as opt:
        model.half()
        model(torch.ones(2, 1100, dtype=torch.float16)).sum().backward()
        with pytest.raises(ConfigError, match=r"weight no longer fits.*bfloat16.*float16"):
            opt.step()


def test_groups_may_be_added_at_any_time(tmp_path, mode):
    ours, theirs = make_parameters([N, N, 6]), make_parameters([N, N, 6])
    opt = AdamW(ours[:1], lr=0.1, swap=swap_of(mode, tmp_path))
    reference = torch.optim.AdamW(theirs[:1], lr=0.1, foreach=False)
    for step in range(1, 5):
        if step in (2, 3):
            for optimizer, params in ((opt, ours), (reference, theirs)):
                optimizer.add_param_group({"params": [params[step - 1]], "lr": 0.01 * step})
        for params in (ours, theirs):
            set_gradients(params, step)
        opt.step()
        reference.step()
    assert [int(opt.state[p]["step"]) for p in ours] == [4, 3, 2]
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-7)
    opt.close()


def test_a_group_that_cannot_be_added_changes_nothing(tmp_path, mode):
    params = make_parameters([N])
    with AdamW(params, swap=swap_of(mode, tmp_path)) as opt:
        train(opt, params, 1)
        for bad in (
            {"params": [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]},
            {"params": make_parameters([3]), "lr": -1.0},
            {"params": [params[0]]},
        ):
            with pytest.raises(ValueError, match=r"float64|lr|more than one"):
                opt.add_param_group(bad)
        assert len(opt.param_groups) == 1
        more = make_parameters([5])
        opt.add_param_group({"params": more})
        train(opt, [*params, *more], 1, first=2)
        assert int(opt.state[more[0]]["step"]) == 1


def test_a_group_too_large_for_the_memory_left_is_refused(tmp_path):
    params = make_parameters([N])
    swap = swap_of("pipelined", tmp_path, resident=["exp_avg"], host_memory="12MiB")
    with AdamW(params, swap=swap) as opt:
        train(opt, params, 1)
        big = make_parameters([4 * N])
        with pytest.raises(ConfigError, match=r"host_memory=12582912.* bytes"):
            opt.add_param_group({"params": big})
        train(opt, params, 2, first=2)
        assert int(opt.state[params[0]]["step"]) == 3
        small = make_parameters([5])
        opt.add_param_group({"params": small})
        train(opt, [*params, *small], 1, first=4)


def test_groups_may_be_replaced_and_taken_out():
    params, twins = make_parameters([50, 60]), make_parameters([50, 60])
    opt = AdamW([{"params": [p]} for p in params], lr=0.1)
    reference = torch.optim.AdamW([{"params": [p]} for p in twins], lr=0.1, foreach=False)
    for optimizer in (opt, reference):
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    train(opt, params, 1)
    train(reference, twins, 1)
    for optimizer in (opt, reference):
        del optimizer.param_groups[1]
    train(opt, params, 1, first=2)
    train(reference, twins, 1, first=2)
    for mine, its in zip(params, twins, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-7)
    opt.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ConfigError, match="add_param_group"):
        opt.step()
