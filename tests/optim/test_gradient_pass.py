# SPDX-License-Identifier: Apache-2.0
"""The pass over parameters and gradients: what it takes as it is, and what it must look at closely.

Each case runs with and without DLPack's exchange table, and means the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swapio import _kernels
from swapio.errors import ConfigError
from swapio.optim import AdamW
from swapio.optim import parameters as parameters_module
from swapio.optim.gradients import collect

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


@pytest.fixture(params=["native", "python"], autouse=True)
def way(request, monkeypatch):
    """Look through DLPack's table, or property by property."""
    if request.param == "python":
        monkeypatch.setattr(parameters_module, "_new_layouts", lambda: None)
    elif EXCHANGE is None:
        pytest.skip("this torch has no DLPack exchange table")
    return request.param


def optimizer(*params):
    return AdamW([torch.nn.Parameter(param) for param in params], lr=0.1)


def params_of(opt):
    return opt.param_groups[0]["params"]


def shapes():
    return [
        torch.randn(7),
        torch.randn(3, 5),
        torch.randn(5, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 4),
        torch.randn(1, 6),
    ]


def test_gradients_laid_out_as_their_parameters_are_used_in_place():
    opt = optimizer(*shapes())
    params = params_of(opt)
    for param in params:
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape))
    found = collect(opt._table)
    assert found.complete
    assert found.dtype is torch.float32
    assert not found.keep
    for param, address, grad in zip(params, found.parameters, found.address, strict=True):
        if param.numel():
            assert (address, grad) == (param.data_ptr(), param.grad.data_ptr())


def test_missing_gradients_have_no_address():
    opt = optimizer(*shapes())
    for param in params_of(opt)[::2]:
        param.grad = torch.ones_like(param)
    found = collect(opt._table)
    assert found.present.tolist() == [True, False] * 3 + [True]
    assert not found.complete
    assert not found.address[1::2].any()
    for param in params_of(opt):
        param.grad = None
    found = collect(opt._table)
    assert found.dtype is None
    assert not found.present.any()


def test_a_gradient_in_another_order_is_copied():
    opt = optimizer(torch.randn(4, 6), torch.randn(3))
    first, second = params_of(opt)
    first.grad = torch.randn(6, 4).t()
    second.grad = torch.randn(3)
    found = collect(opt._table)
    (copy,) = found.keep
    assert torch.equal(copy, first.grad)
    assert copy.is_contiguous()
    assert found.address.tolist() == [copy.data_ptr(), second.grad.data_ptr()]


def test_strides_of_a_dimension_of_one_do_not_matter():
    opt = optimizer(torch.randn(1, 6))
    (param,) = params_of(opt)
    memory = torch.randn(600)
    param.grad = memory.as_strided((1, 6), (77, 1))
    before = param.detach().clone()
    opt.step()
    expected = optimizer(before)
    params_of(expected)[0].grad = memory[:6].view(1, 6)
    expected.step()
    assert torch.equal(param, params_of(expected)[0])


def test_dtypes_may_be_mixed():
    opt = optimizer(torch.randn(5), torch.randn(6).bfloat16(), torch.randn(7))
    for param in params_of(opt):
        param.grad = torch.ones_like(param)
    found = collect(opt._table)
    assert found.dtype is torch.float32
    assert found.dtypes == {1: torch.bfloat16}


class Marked(torch.Tensor):
    """A subclass as users have them."""


def test_a_gradient_of_a_subclass_is_looked_at_closely():
    opt = optimizer(torch.randn(5))
    (param,) = params_of(opt)
    param.grad = torch.ones(5).as_subclass(Marked)
    assert collect(opt._table).address.tolist() == [param.grad.data_ptr()]


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (lambda _: torch.ones(4, 4).to_sparse(), "sparse"),
        (lambda p: torch.ones_like(p, dtype=torch.float64), "float64"),
    ],
)
def test_unsuitable_gradients_are_named(grad, message):
    param = torch.nn.Parameter(torch.randn(4, 4))
    opt = AdamW([("w", param)])
    param.grad_dtype = None
    param.grad = grad(param)
    with pytest.raises(ConfigError, match=rf"gradient of w .*{message}"):
        opt.step()


def test_replaced_memory_is_followed_and_a_replaced_kind_is_refused():
    opt = optimizer(torch.randn(4, 6), torch.randn(8))
    first, second = params_of(opt)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    first.data = first.data.clone()
    assert collect(opt._table).parameters.tolist() == [first.data_ptr(), second.data_ptr()]
    good = first.data
    for other in (torch.randn(6, 4).t(), torch.randn(4, 6).double(), torch.randn(6, 4)):
        first.data = other
        with pytest.raises(ConfigError, match=r"param\.0 no longer fits"):
            collect(opt._table)
    first.data = good
    assert collect(opt._table).complete


def test_parameters_that_come_later_are_seen():
    opt = optimizer(torch.randn(5))
    opt.add_param_group({"params": [torch.nn.Parameter(torch.randn(3, 3))]})
    params = [param for group in opt.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.ones_like(param)
    assert collect(opt._table).address.tolist() == [p.grad.data_ptr() for p in params]


@pytest.mark.skipif(EXCHANGE is None, reason="this torch has no DLPack exchange table")
def test_layouts_refuse_what_is_not_theirs(way):
    if way == "python":
        return
    with pytest.raises(ValueError, match="PyCapsule"):
        _kernels.TensorLayouts(_capsule_of_another_name(), (torch.Tensor,))
    layouts = _kernels.TensorLayouts(EXCHANGE, (torch.Tensor,))
    assert layouts.extend([torch.ones(3)])
    assert not layouts.extend([torch.ones(3), torch.nn.Parameter(torch.ones(3))])
    assert not layouts.extend([3])  # type: ignore[list-item]
    assert len(layouts) == 1
    with pytest.raises(ValueError, match="as long as"):
        layouts.addresses([], np.empty(1, np.uint64))
    with pytest.raises(TypeError):
        layouts.addresses([torch.ones(3)], np.empty(1, np.int64))
    out = np.empty(1, np.uint64)
    assert layouts.addresses([torch.ones(4)], out) == 0
    assert layouts.addresses([torch.ones(3)], out) == -1


def _capsule_of_another_name():
    import datetime

    return datetime.datetime_CAPI


def conjugate_loss(param):
    """A loss whose gradient autograd leaves as a view with the negative bit."""
    z = torch.complex(torch.tensor(2.0), param).conj()
    return z.real + 3 * z.imag


@pytest.mark.parametrize("gradients", ["keep", "stream"])
def test_a_negated_view_is_read_as_what_it_means(gradients):
    """The gradient of a scalar behind a conjugate was once taken with the wrong sign."""
    mine, theirs = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    opt = AdamW([mine], lr=0.1, gradients=gradients)
    reference = torch.optim.AdamW([theirs], lr=0.1)
    for _ in range(3):
        for param, optimizer_ in ((mine, opt), (theirs, reference)):
            optimizer_.zero_grad()
            conjugate_loss(param).backward()
            if param is theirs:
                assert param.grad.is_neg(), "the test needs a gradient with the negative bit"
            optimizer_.step()
    torch.testing.assert_close(mine, theirs)


def test_one_element_of_a_conjugate_is_read_as_what_it_means():
    opt = optimizer(torch.randn(1), torch.randn(3))
    first, second = params_of(opt)
    first.grad = torch.tensor([1 + 2j]).conj().imag
    second.grad = torch.ones(3)
    found = collect(opt._table)
    (copy,) = found.keep
    assert copy.tolist() == [-2.0]
    assert found.address.tolist() == [copy.data_ptr(), second.grad.data_ptr()]


def test_a_parameter_with_the_negative_bit_is_refused():
    with pytest.raises(ConfigError, match="negative bit"):
        optimizer(torch.tensor([1 + 2j]).conj().imag)


@pytest.mark.parametrize("what", ["parameter", "gradient"])
def test_freed_memory_is_refused_before_anything_is_stepped(what):
    opt = optimizer(torch.randn(5), torch.randn(6))
    first, second = params_of(opt)
    first.grad, second.grad = torch.randn(5), torch.randn(6)
    before = first.detach().clone()
    freed = second.data if what == "parameter" else second.grad
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=f"{what} .*has no memory"):
        opt.step()
    assert torch.equal(first, before)


def test_addresses_go_to_a_contiguous_array_only(way):
    if way == "python":
        pytest.skip("the native pass")
    opt = optimizer(torch.randn(5), torch.randn(6))
    backwards = np.zeros(2, np.uint64)[::-1]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        opt._table._layouts.addresses(params_of(opt), backwards)
    assert not backwards.any()
