# SPDX-License-Identifier: Apache-2.0
"""gradients="stream": copied and freed during backward, and the step is the same."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from swapio.errors import ConfigError, SwapioError, SwapStateError
from swapio.optim import Adam, AdamW, GradScaler, Muon, muon_param_groups

STREAMED = {"sub_group_numel": 1 << 19, "min_swap_bytes": 0, "host_memory": "64MiB"}


class Net(torch.nn.Module):
    """A tied embedding and head, a matrix used twice, an unused parameter, a permuted one."""

    def __init__(self, width=48, vocab=64):
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(vocab, width)
        self.twice = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, vocab, bias=False)
        self.out.weight = self.embed.weight
        self.unused = torch.nn.Parameter(torch.randn(5))
        self.turned = torch.nn.Parameter(torch.randn(width, 3).t().contiguous().t())

    def forward(self, tokens, use_reentrant=None):
        x = self.embed(tokens)
        for _ in range(2):
            if use_reentrant is None:
                x = torch.tanh(self.twice(x))
            else:
                x = checkpoint(lambda y: torch.tanh(self.twice(y)), x, use_reentrant=use_reentrant)
        return self.out(x).square().mean() + (x @ self.turned).square().mean()


def batch(step):
    return torch.randint(0, 64, (4, 6), generator=torch.Generator().manual_seed(step))


def train(make, *, steps=4, accumulation=1, dtype=torch.float32, use_reentrant=None, **kwargs):
    """Parameters and state after some steps, and the norms on the way."""
    model = Net().to(dtype)
    norms = []
    with make(model, **kwargs) as opt:
        for step in range(steps):
            for micro in range(accumulation):
                model(batch(step * 8 + micro), use_reentrant).backward()
            opt.step()
            norms.append(opt.grad_norm)
            opt.zero_grad()
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, param in model.named_parameters():
            for key, value in opt.state_of(param).items():
                found[f"{name}:{key}"] = value.clone()
    return found, norms


def adamw(model, **kwargs):
    return AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, **kwargs)


def muon(model, **kwargs):
    return Muon(muon_param_groups(model), lr=1e-2, **kwargs)


def check_same(left, right):
    assert left[0].keys() == right[0].keys()
    for name, value in left[0].items():
        assert torch.equal(value, right[0][name]), name
    assert left[1] == right[1]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("make", [adamw, muon])
def test_streamed_equals_kept(make, max_grad_norm, accumulation):
    kwargs = {"max_grad_norm": max_grad_norm, "accumulation": accumulation}
    check_same(train(make, **kwargs), train(make, gradients="stream", **kwargs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_low_precision_gradient_is_kept_as_it_is(dtype):
    kwargs = {"dtype": dtype, "max_grad_norm": 0.05}
    check_same(train(adamw, **kwargs), train(adamw, gradients="stream", **kwargs))


@pytest.mark.parametrize("stored", ["ram", "pipelined", "partitioned"])
@pytest.mark.parametrize("min_swap_bytes", [0, 1 << 10, 1 << 20])
def test_gradients_on_storage(tmp_path, stored, min_swap_bytes):
    """The four combinations: state and gradients each in RAM or on storage."""
    swap = {"swap_gradients": True, **STREAMED, "min_swap_bytes": min_swap_bytes}
    if stored != "ram":
        flags = {"pipeline_read": False, "pipeline_write": False} if stored == "partitioned" else {}
        swap |= {"path": tmp_path, **flags}
    for make in (adamw, muon):
        kwargs = {"max_grad_norm": 0.05, "accumulation": 2}
        found = train(make, swap=swap, gradients="stream", **kwargs)
        expected = train(make, **kwargs)
        assert found[0].keys() == expected[0].keys()
        # The norm is summed by fragments, which are cut at sub-groups.
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
        for name, value in expected[0].items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-6, atol=1e-9)


def test_gradients_on_storage_are_bit_equal_without_clipping(tmp_path):
    swap = {"path": tmp_path, "swap_gradients": True, **STREAMED}
    check_same(train(adamw, accumulation=2), train(
        adamw, swap=swap, gradients="stream", accumulation=2))  # fmt: skip


def test_large_fragments_go_to_storage_and_small_ones_do_not(tmp_path):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (1 << 19, 16)]
    swap = {"path": tmp_path, "swap_gradients": True, **STREAMED, "min_swap_bytes": 1 << 20}
    with AdamW(params, gradients="stream", swap=swap) as opt:
        (params[0].sum() + params[1].sum()).backward()
        fragments = opt._runtime.swapper._gradients._fragments
        kinds = {name: f.store_key for group in fragments.values() for name, f in group.items()}
        assert kinds == {"0": "0-adam-param-float32-00000/gradient/0/4", "1": ""}
        opt.step()
        assert [int(opt.state[p]["step"]) for p in params] == [1, 1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_that_delivers_a_gradient_in_parts(use_reentrant):
    kwargs = {"use_reentrant": use_reentrant, "max_grad_norm": 0.05}
    check_same(train(adamw, **kwargs), train(adamw, gradients="stream", **kwargs))


def test_bf16_gradients_are_added_in_fp32():
    param = torch.nn.Parameter(torch.zeros(700_001, dtype=torch.bfloat16))
    parts = [torch.randn(700_001, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    with AdamW([param], gradients="stream") as opt:
        for part in parts:
            (param * part.bfloat16()).sum().backward()
        gathered = opt._source.gather()
        assert gathered.dtype is torch.float32
        opt.step()
        got = opt.state_of(param)["exp_avg"]
    total = torch.zeros(700_001)
    for part in parts:
        total += part.bfloat16().float()
    expected = total * torch.tensor(1 - 0.9, dtype=torch.float64).float()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_accumulation_dtype_is_obeyed():
    param = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    with AdamW([param], gradients="stream", swap={"accumulation_dtype": "bfloat16"}) as opt:
        for value in (1.0, 2.0**-9):
            (param * value).sum().backward()
        assert opt._source.gather().dtype is torch.bfloat16
        opt.step()
        assert opt.state_of(param)["exp_avg"][0] == pytest.approx(0.1)


def test_p_grad_is_freed_and_reading_it_raises():
    model = Net()
    with adamw(model, gradients="stream") as opt:
        model(batch(0)).backward()
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            with pytest.raises(SwapStateError, match="max_grad_norm"):
                clip(model.parameters(), 1.0)
        assert model.embed.weight.grad.shape == model.embed.weight.shape
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(SwapStateError, match=r"swapio\.optim\.GradScaler"):
            scaler.step(opt)
        opt.step()
        assert all(p.grad is None for p in model.parameters())


def test_what_somebody_adds_to_a_streamed_gradient_is_stepped():
    """Such as noise: it is added as autograd adds, or refused, and never forgotten."""
    results = []
    for gradients in ("keep", "stream"):
        param = torch.nn.Parameter(torch.zeros(64))
        with AdamW([param], gradients=gradients) as opt:
            param.sum().backward()
            param.grad.add_(torch.full((64,), -3.0))
            if gradients == "stream":
                for refused in ({"alpha": 2}, {}):
                    with pytest.raises(SwapStateError, match="streams away"):
                        param.grad.add_(torch.ones(64), **refused)
                with pytest.raises(SwapStateError, match="streams away"):
                    param.grad.add_(1.0)
            opt.step()
            results.append(opt.state_of(param)["exp_avg"].clone())
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], torch.full((64,), -0.2))


def test_a_gradient_that_could_not_be_added_is_not_stepped(monkeypatch):
    """What arrived first must not be taken for the sum: the step raises until it is zeroed."""
    model = Net()
    with adamw(model, gradients="stream") as opt:
        memory = opt._source.stream._memory
        model(batch(0)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(memory, "place_sum", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                model(batch(1)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            with pytest.raises(SwapStateError, match="is not whole"):
                opt.step()
        assert all(map(torch.equal, before, model.parameters()))
        for set_to_none in (True, False):
            opt.zero_grad(set_to_none)
            model(batch(2)).backward()
            opt.step()
    other = Net()
    with adamw(other) as opt:
        for _ in range(2):
            opt.zero_grad()
            other(batch(2)).backward()
            opt.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_clip_grad_norm_of_the_optimizer_is_torchs():
    def foreign(model, _opt):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def own(model, opt):  # noqa: ARG001
        return opt.clip_grad_norm_(0.05)

    results = []
    for clip, kwargs in ((foreign, {}), (own, {"gradients": "stream"}), (own, {})):
        model = Net()
        with adamw(model, **kwargs) as opt:
            norms = []
            for step in range(3):
                model(batch(step)).backward()
                norms.append(float(clip(model, opt)))
                opt.step()
                opt.zero_grad()
            model(batch(9)).backward()
            opt.step()  # no limit is left over
            results.append((norms, [p.detach().clone() for p in model.parameters()]))
    for norms, params in results[1:]:
        assert norms == pytest.approx(results[0][0], rel=1e-6)
        for mine, reference in zip(params, results[0][1], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of_model", [True, False])
def test_zero_grad_drops_what_was_streamed(set_to_none, of_model):
    """Whoever zeroes gradients between two backward passes means those of the first."""
    results = []
    for gradients in ("keep", "stream"):
        model = Net()
        with adamw(model, gradients=gradients) as opt:
            model(batch(0)).backward()
            (model if of_model else opt).zero_grad(set_to_none)
            if set_to_none:
                opt.step()  # nothing to step
                assert int(opt.state[model.embed.weight]["step"]) == 0
            model(batch(1)).backward()
            opt.step()
            opt.zero_grad(set_to_none)
            model(batch(2)).backward()
            (model if of_model else opt).zero_grad(set_to_none)
            opt.step()
            results.append([p.detach().clone() for p in model.parameters()])
    for kept, streamed in zip(*results, strict=True):
        assert torch.equal(kept, streamed)


def test_gradients_that_no_backward_put_there_are_taken():
    param = torch.nn.Parameter(torch.zeros(100))
    with AdamW([param], gradients="stream") as opt:
        param.grad = torch.ones(100)
        opt.step()
        assert int(opt.state[param]["step"]) == 1


def test_nonfinite_gradients(tmp_path):
    for nonfinite in ("propagate", "skip", "raise"):
        for swap in (None, {"path": tmp_path / nonfinite, "swap_gradients": True, **STREAMED}):
            params = [torch.nn.Parameter(torch.zeros(100)) for _ in range(2)]
            named = [("a", params[0]), ("b", params[1])]
            with AdamW(named, gradients="stream", nonfinite=nonfinite, swap=swap) as opt:
                (params[0].sum() + (params[1] * float("inf")).sum()).backward()
                if nonfinite == "raise":
                    with pytest.raises(SwapioError, match="inf or nan in the gradient of b"):
                        opt.step()
                    opt.zero_grad()
                else:
                    opt.step()
                assert opt.step_skipped == (nonfinite == "skip")
                assert params[1].isnan().any() == (nonfinite == "propagate")
                assert int(opt.state[params[0]]["step"]) == int(nonfinite == "propagate")
                params[0].sum().backward()
                opt.step()
                assert int(opt.state[params[0]]["step"]) == 1 + (nonfinite == "propagate")


@pytest.mark.parametrize("early", [True, False])
def test_the_scaler_follows_torchs(early):
    """Same scales, same weights, with an overflow on the way and unscale_ or not."""
    results = []
    for streamed in (False, True):
        model = Net()
        cls = GradScaler if streamed else torch.amp.GradScaler
        scaler = cls("cpu", init_scale=2.0**10, growth_interval=2, backoff_factor=0.25)
        with adamw(model, gradients="stream" if streamed else "keep") as opt:
            scales = []
            for step in range(7):
                loss = model(batch(step)) * (float("inf") if step == 3 else 1.0)
                scaler.scale(loss).backward()
                if early:
                    scaler.unscale_(opt)
                    with pytest.raises(RuntimeError, match="already been called"):
                        scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                scales.append(scaler.get_scale())
            counts = [int(opt.state[p]["step"]) for p in model.parameters()]
            results.append((scales, counts, [p.detach().clone() for p in model.parameters()]))
    (scales, counts, kept), (own_scales, own_counts, streamed) = results
    assert scales == own_scales
    assert counts == own_counts
    for mine, reference in zip(streamed, kept, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


def test_the_scaler_divides_by_torchs_scale_whatever_is_between():
    """A loaded state, a scale that is set, an update after another optimizer: no count is stale."""
    param, other = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    sgd = torch.optim.SGD([other], lr=0.1)
    with AdamW([param], gradients="stream") as opt:
        for step in range(14):
            scaler.scale(param.sum() + other.sum()).backward()
            scaler.step(opt)
            if step in (4, 8):
                scaler.step(sgd)
            scaler.update(2.0**9 if step == 10 else None)
            if step == 1:
                scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 0})
            assert scaler.get_scale() == float(scaler._scale)
            scaler.scale(param.sum()).backward()
            assert opt.clip_grad_norm_(1e9) == 2.0 * scaler.get_scale()  # announced by step()
            opt.zero_grad()


def test_a_scaler_refuses_an_optimizer_that_would_step_with_inf():
    param = torch.nn.Parameter(torch.zeros(4))
    scaler = GradScaler("cpu")
    with AdamW([param], gradients="stream", nonfinite="propagate") as opt:
        scaler.scale(param.sum()).backward()
        with pytest.raises(ConfigError, match="nonfinite='propagate'"):
            scaler.step(opt)
        assert opt.clip_grad_norm_(1e9) == 2.0 * scaler.get_scale()  # nothing is divided


def test_the_scaler_serves_other_optimizers_as_torchs():
    param = torch.nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(param.detach(), torch.zeros(3))


def test_closing_leaves_a_model_for_any_optimizer():
    model = Net()
    opt = adamw(model, gradients="stream")
    model(batch(0)).backward()
    opt.close()
    assert all(p.grad is None for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.embed.weight.detach().clone()
    model(batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    other.step()
    assert not torch.equal(before, model.embed.weight)
    assert not [t for t in threading.enumerate() if t.name.startswith("swapio-early")]


def test_hooks_do_not_keep_an_optimizer_alive():
    model = Net()
    opt = adamw(model, gradients="stream")
    stream = weakref.ref(opt._source.stream)
    opt.close()
    del opt
    gc.collect()
    assert stream() is None


def test_a_dropped_optimizer_leaves_gradients_to_autograd():
    param = torch.nn.Parameter(torch.zeros(3))
    opt = AdamW([param], gradients="stream")
    param.sum().backward()
    del opt
    gc.collect()
    (param * 2).sum().backward()
    assert torch.equal(param.grad, torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a child there")
def test_a_forked_child_keeps_its_gradients():
    """The parent's memory is not there: touching it would end the child."""
    param = torch.nn.Parameter(torch.zeros(3))
    with AdamW([param], gradients="stream"):
        child = os.fork()
        if not child:
            code = 1
            try:
                param.sum().backward()
                code = 0 if type(param.grad) is torch.Tensor else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_parameters_added_later_are_streamed_too():
    model, more = Net(), torch.nn.Parameter(torch.ones(9))
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    with adamw(model, gradients="stream") as opt:
        opt.add_param_group({"params": [("more", more), ("frozen", frozen)]})
        (model(batch(0)) + more.sum()).backward()
        with pytest.raises(SwapStateError):
            more.grad.sum()
        opt.step()
        frozen.requires_grad_()
        frozen.sum().backward()
        opt.step()
        assert [int(opt.state[p]["step"]) for p in (more, frozen)] == [1, 1]


def test_settings_that_need_streaming_say_so():
    param = torch.nn.Parameter(torch.ones(4))
    for swap in ({"accumulation_dtype": "bfloat16"}, {"swap_gradients": True}):
        with pytest.raises(ConfigError, match="gradients='stream'"):
            AdamW([param], swap=swap)
    with pytest.raises(ConfigError, match="neither 'keep' nor 'stream'"):
        Adam([param], gradients="drop")
    with pytest.raises(ConfigError, match="max_norm"), AdamW([param]) as opt:
        opt.clip_grad_norm_(0.0)
    with pytest.raises(ConfigError, match="loss scale"), AdamW([param]) as opt:
        opt.set_loss_scale(float("inf"))


def test_host_memory_covers_streamed_gradients():
    param = torch.nn.Parameter(torch.zeros(1 << 20))
    with pytest.raises(ConfigError, match="host_memory"):
        AdamW([param], gradients="stream", swap={"host_memory": "9MiB"})
    AdamW([param], swap={"host_memory": "9MiB"}).close()
    AdamW([param], gradients="stream", swap={"host_memory": "13MiB"}).close()


def test_a_sparse_gradient_is_refused_in_backward():
    table = torch.nn.Embedding(8, 4, sparse=True)
    with (
        AdamW(table.parameters(), gradients="stream"),
        pytest.raises(ConfigError, match="sparse=False"),
    ):
        table(torch.tensor([1])).sum().backward()


def test_streamed_gradients_with_committed_steps(tmp_path):
    """What streams through storage is no part of a commit."""
    swap = {"path": tmp_path, "durability": "step", "swap_gradients": True, **STREAMED}
    model = Net()
    with adamw(model, gradients="stream", swap=swap) as opt:
        for step in range(3):
            model(batch(step)).backward()
            opt.step()
        opt.synchronize()
        expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    again = Net()
    with adamw(again, gradients="stream", swap=swap, resume=True) as opt:
        assert opt.recovered_step == 3
        for name, param in again.named_parameters():
            if name != "unused":
                assert torch.equal(param, expected[name])
        again(batch(3)).backward()
        opt.step()
        assert opt.recover() == 4
        again(batch(4)).backward()
        opt.step()
