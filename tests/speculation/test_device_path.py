# SPDX-License-Identifier: Apache-2.0
"""The way to a device and back, without one: queues, rings, addresses, and whole steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.early import wait
from support.fake_cuda import FakeCuda
from swapio.buffers import BufferPool
from swapio.errors import ConfigError, PoolExhaustedError, SwapStateError
from swapio.optim import AdamW
from swapio.optim.cuda_copies import PIECE_BYTES, CopyQueue, DeviceCopier, pieces
from swapio.optim.cuda_weights import Run, WeightRing, runs, virtual_addresses
from swapio.optim.layout import MasterForm, UnitTable
from swapio.partition import Fragment

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [0, 1, 1000, 4096, 4097, 12_289])
def test_pieces_cover_a_copy_once(numel):
    found = list(pieces(numel, 2, 8192))
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(numel))
    assert all((part.stop - part.start) * 2 <= 8192 for part in found)
    if found:
        sizes = [part.stop - part.start for part in found]
        assert max(sizes) - min(sizes) < len(sizes)


def test_each_piece_waits_for_the_one_before_on_the_other_stream():
    cuda = FakeCuda()
    queue = CopyQueue(CPU, cuda)
    numel = 3 * PIECE_BYTES // 4
    source, target = torch.arange(numel, dtype=torch.float32), torch.zeros(numel)
    cuda.log.clear()
    last = queue.copy(source, target)
    queue.copy(source[:5], target[:5])
    assert torch.equal(source, target)
    ran = [entry[1] for entry in cuda.log if entry[0] == "run"]
    assert ran == [1, 2, 1, 2]
    recorded = [entry[2] for entry in cuda.log if entry[0] == "record"]
    waited = [entry[2] for entry in cuda.log if entry[0] == "wait"]
    assert waited == recorded[:3]
    assert last.number == recorded[2]


def test_a_copier_waits_for_the_gradient_and_knows_its_square_sum():
    cuda = FakeCuda()
    copier = DeviceCopier(CPU, lambda nbytes: BufferPool(nbytes, pin=False), cuda)
    copier.reserve(4)
    source = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    target = torch.zeros(2, dtype=torch.bfloat16)
    cuda.log.clear()
    copier.fetch(1, source, target)
    ready = cuda.log[0]
    assert ready[:2] == ("record", cuda.current.number)
    waits = [entry for entry in cuda.log if entry[0] == "wait" and entry[2] == ready[2]]
    assert len(waits) == 3  # both copy streams, and the one for the sums
    chosen = np.array([1])
    assert np.isnan(copier.square_sums(chosen)[0])
    copier.settle([1])
    assert copier.square_sums(chosen)[0] == 25.0
    copier.reserve(5000)  # what is known of the others is kept
    assert copier.square_sums(chosen)[0] == 25.0
    copier.forget(1)
    assert np.isnan(copier.square_sums(chosen)[0])
    assert torch.equal(source, target)


def test_a_ring_waits_for_the_oldest_copy_only_when_it_is_full():
    cuda = FakeCuda()
    ring = WeightRing(BufferPool(3 * 4096, pin=False))
    events = [cuda.Event() for _ in range(3)]
    for event in events:
        ring.give_back(ring.take(4096), event)
    assert not any(event.was_waited for event in events)
    ring.give_back(ring.take(4096), None)
    assert [event.was_waited for event in events] == [True, False, False]
    with pytest.raises(PoolExhaustedError):
        ring.take(5 * 4096)
    ring.close()


def test_units_that_follow_each_other_are_one_run():
    fragments = [
        Fragment(0, 100, 0, 300_000),
        Fragment(1, 0, 300_000, 10),
        Fragment(2, 0, 300_010, 9),
    ]
    units = UnitTable(fragments, [4, 5, 6])
    everything = runs(units, np.arange(len(units.param)))
    assert everything == [Run(4, 100, 0, 300_000), Run(5, 0, 300_000, 10), Run(6, 0, 300_010, 9)]
    rows = np.flatnonzero(units.param != 5)
    assert [run.index for run in runs(units, rows)] == [4, 6]
    address = virtual_addresses(everything, 4096, 0, 2)
    assert int(address[0] + np.uint64(200)) == 4096  # element 100 lies at the front
    assert int(address[1]) == 4096 + 600_000


def train(*, steps=3, sizes=(5, 300_000, 700_001), dtype=torch.bfloat16, missing=(), **kwargs):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
    with AdamW(params, lr=1e-2, **kwargs) as opt:
        for step in range(steps):
            loss = 0
            for at, param in enumerate(params):
                if (step, at) not in missing:
                    factor = torch.randn(param.shape, generator=generator).to(dtype)
                    loss = loss + (param * factor).sum()
            loss.backward()
            wait(opt)
            opt.step()
            opt.zero_grad()
        assert opt._early is None or opt.stats()["speculation_num_kept"] > 0
        state = [opt.state_of(param) for param in params]
    return [p.detach().clone() for p in params], state


@pytest.mark.parametrize("gradients", ["keep", "stream", "early"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [False, True])
def test_the_way_over_a_device_changes_no_bit(request, tmp_path, gradients, dtype, stored):
    small = {"sub_group_numel": 1 << 19, "min_swap_bytes": 0, "host_memory": "48MiB"}
    kwargs = {"dtype": dtype, "max_grad_norm": 1e4, "missing": {(1, 0), (2, 2)}}
    if dtype is torch.float32:
        kwargs["max_grad_norm"] = None  # the norms differ in the last bits
    swaps = [{"master": "separate"}, {"master": "separate"}]
    if stored:
        swaps = [{**swap, "path": tmp_path / str(i), **small} for i, swap in enumerate(swaps)]
    expected = train(swap=swaps[0], **kwargs)
    cuda = request.getfixturevalue("on_fake_device")
    how = {"speculate": "always"} if gradients == "early" else {"gradients": gradients}
    found = train(swap=swaps[1], **how, **kwargs)
    assert any(entry[0] == "run" for entry in cuda.log)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0 if dtype is torch.float32 else 1e-2, atol=0)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("on_fake_device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clipped", [False, True])
def test_early_steps_in_place_are_rescaled_for_a_device(dtype, clipped):
    """undo="algebraic": the rescaled weights are sent up to where the first ones waited."""
    found = []
    for how in ({"gradients": "stream"}, {"speculate": "always", "undo": "algebraic"}):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (70_000, 9)
        ]
        swap = {"master": "separate", "sub_group_numel": 1 << 15}
        with AdamW(params, lr=1e-2, max_grad_norm=1e9, swap=swap, **how) as opt:
            for _ in range(4):
                for param in params:
                    factor = torch.randn(param.shape, generator=generator).to(dtype)
                    (param * factor).sum().backward()
                wait(opt)
                if clipped:
                    opt.clip_grad_norm_(float(opt.clip_grad_norm_(1e9)) / 3)
                opt.step()
            stats = opt.stats()
            found.append([p.detach().clone() for p in params])
            found[-1] += [value for p in params for value in opt.state_of(p).values()]
    assert stats["speculation_num_kept"] == stats["speculation_num_early"] > 4
    assert (stats["speculation_num_rescaled"] > 4) == clipped
    for mine, theirs in zip(*found, strict=True):
        if clipped:
            rtol = 2.0**-7 if mine.dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-7)
        else:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_split_masters_are_joined_with_what_comes_down(on_fake_device, tmp_path, durability):
    """Bit for bit as on the CPU; and what somebody else does to the parameter is noticed."""
    small = {"sub_group_numel": 1 << 19, "min_swap_bytes": 0, "host_memory": "48MiB"}
    found = []
    for number in range(2):
        swap = {"path": tmp_path / str(number), "durability": durability, **small}
        if number:
            on_fake_device.undo()
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(700_001, generator=generator).bfloat16())
        with AdamW([param], lr=1e-2, gradients="stream", swap=swap) as opt:
            assert opt._layout.infos[0].form is MasterForm.SPLIT
            for step in range(3):
                if step == 2:
                    param.data[5] = 3.0
                    with pytest.warns(UserWarning, match="changed outside"):
                        one_step(opt, param, generator)
                else:
                    one_step(opt, param, generator)
            state = opt.state_of(param)
            opt.set_state(param, "master", state["master"] + 1)
            kept = opt.state_dict()
            opt.load_state_dict(kept)
            one_step(opt, param, generator)
            opt.save(tmp_path / f"save{number}").result()
            opt.load(tmp_path / f"save{number}")
            if durability == "step":
                opt.synchronize()
                opt.recover()
            found.append([param.detach().clone(), *opt.state_of(param).values()])
            del kept
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("how", [{}, {"gradients": "stream"}, {"speculate": "always"}])
def test_parameters_added_later_have_a_way_too(on_fake_device, how):
    """More of them than the norms had room for, and a sub-group larger than the staging was."""
    results = []
    for number in range(2):
        if number:
            on_fake_device.undo()
        generator = torch.Generator().manual_seed(0)
        first = torch.nn.Parameter(torch.randn(500, generator=generator).bfloat16())
        sizes = [400_000, *range(1, 1200)]
        more = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in sizes]
        with AdamW(
            [first], lr=1e-2, swap={"master": "separate"}, **(how if not number else {})
        ) as opt:
            for step in range(4):
                if step == 1:
                    opt.add_param_group({"params": more})
                factors = [torch.randn(p.shape, generator=generator).bfloat16() for p in more]
                loss = (first * first.detach()).sum()
                if step:
                    loss = loss + sum((p * f).sum() for p, f in zip(more, factors, strict=True))
                loss.backward()
                wait(opt)
                opt.step()
                opt.zero_grad()
            results.append([p.detach().clone() for p in [first, *more]])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_device_that_is_new_to_an_optimizer_is_refused(request):
    first, more = (torch.nn.Parameter(torch.zeros(50, dtype=torch.bfloat16)) for _ in range(2))
    with AdamW([first], swap={"master": "separate"}) as opt:
        request.getfixturevalue("on_fake_device")
        with pytest.raises(ConfigError, match="make one optimizer for each device"):
            opt.add_param_group({"params": [more]})
        first.sum().backward()
        opt.step()


def one_step(opt, param, generator):
    (param * torch.randn(param.shape, generator=generator).bfloat16()).sum().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("speculate", [False, "always"])
def test_a_write_to_a_parameter_on_a_device_is_noticed(on_fake_device, speculate):
    """load_state_dict of the model, an EMA swap: the master follows, as on the host."""
    results = []
    for number in range(2):
        if number:
            on_fake_device.undo()
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(5000, generator=generator).bfloat16())
        swap = {"master": "separate"}
        mode = False if number else speculate
        with AdamW([param], gradients="stream", speculate=mode, lr=1e-2, swap=swap) as opt:
            one_step(opt, param, generator)
            opt.state_of(param)
            one_step(opt, param, generator)
            with torch.no_grad():
                param.copy_(torch.ones(5000))
            with pytest.warns(UserWarning, match="changed outside"):
                one_step(opt, param, generator)
            opt.load_state_dict(opt.state_dict())
            opt.set_state(param, "master", torch.full((5000,), 1.001))
            one_step(opt, param, generator)
            results.append([param.detach().clone(), *opt.state_of(param).values()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_write_may_be_an_error(on_fake_device):  # noqa: ARG001
    param = torch.nn.Parameter(torch.zeros(50, dtype=torch.bfloat16))
    swap = {"master": "separate", "on_param_change": "error"}
    with AdamW([param], swap=swap) as opt:
        generator = torch.Generator().manual_seed(0)
        one_step(opt, param, generator)
        one_step(opt, param, generator)
        with torch.no_grad():
            param.add_(1)
        with pytest.raises(SwapStateError, match="somebody else"):
            one_step(opt, param, generator)


def test_kept_gradients_stay(on_fake_device):  # noqa: ARG001
    param = torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    with AdamW([param], swap={"master": "separate"}) as opt:
        param.sum().backward()
        torch.nn.utils.clip_grad_norm_([param], 0.5)
        kept = param.grad.clone()
        norm = opt.clip_grad_norm_(10.0)
        assert float(norm) == pytest.approx(0.5, rel=1e-2)
        opt.step()
        assert torch.equal(param.grad, kept)


def test_the_device_waits_for_the_weights_and_they_for_it(on_fake_device):
    cuda = on_fake_device
    param = torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    with AdamW([param], swap={"master": "separate"}) as opt:
        param.sum().backward()
        cuda.log.clear()
        opt.step()
        main = cuda.current.number
        assert cuda.log[-1][:2] == ("wait", main)
        copied = [entry for entry in cuda.log if entry[0] == "record" and entry[1] != main]
        assert cuda.log[-1][2] == copied[-1][2]
        assert not [entry for entry in cuda.log if entry[0] == "synchronize"]
