# SPDX-License-Identifier: Apache-2.0
"""ratio below 1: some state stays on its device, and nothing else tells.

Without a GPU parameters of the fake device are stepped by torch's functions on the CPU: those must
give the kernels' bits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.early import Run, check_equal, wait
from swapio.errors import ConfigError
from swapio.optim import Adam, AdamW, Muon, kernels, muon_param_groups
from swapio.optim.device_state import AdamNumbers, adam_update
from swapio.subgroup import SubGroupState

SIZES = (70_000, 33, (90, 70), 50_000)


def make(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]


def two_groups(params):
    first = {"params": params[:2], "weight_decay": 0.1}
    return [first, {"params": params[2:], "weight_decay": 0.02, "lr": 3e-3, "betas": (0.8, 0.95)}]


def go_back(params, step, missing=()):
    for at, param in enumerate(params):
        if (step, at) in missing:
            continue
        generator = torch.Generator().manual_seed(100 * step + at)
        factor = torch.randn(param.shape, generator=generator).to(param.dtype)
        (param * factor).sum().backward()


def train(opt, params, steps, *, first=0, missing=(), before=None):
    for step in range(first, first + steps):
        go_back(params, step, missing)
        wait(opt)
        if before is not None:
            before(step, opt, params)
        opt.step()
        opt.zero_grad()


def found_in(opt, params):
    found = [p.detach().clone() for p in params]
    for param in params:
        found += [value.clone() for _, value in sorted(opt.state_of(param).items())]
    return found


def kept_numel(opt):
    groups = opt._layout.groups.values()
    return sum(packed.numel for packed in groups if packed.bucket.is_kept)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("speculate", [False, "always"])
def test_on_the_cpu_the_rest_stays_in_ram(tmp_path, ratio, speculate):
    results = []
    for share in (1.0, ratio):
        params = make()
        swap = {
            "path": tmp_path / str(share),
            "min_swap_bytes": 0,
            "host_memory": "64MiB",
            "sub_group_numel": 1 << 14,
        }
        opt = AdamW(two_groups(params), lr=1e-2, ratio=share, swap=swap, speculate=speculate)
        with opt:
            train(opt, params, 4)
            total, kept = sum(p.numel() for p in params), kept_numel(opt)
            assert (1 - share) * total <= kept <= (1 - share) * total + max(SIZES[:1]) * (share < 1)
            for key, packed in opt._layout.groups.items():
                if packed.bucket.is_kept:
                    assert opt.swapper.state(key) is SubGroupState.RESIDENT
            results.append(found_in(opt, params))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_fake_device")
@pytest.mark.parametrize("ratio", [0.0, 0.4])
@pytest.mark.parametrize("how", [{}, {"gradients": "stream"}, {"speculate": "always"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("limit", [None, 50.0])
def test_on_a_device_torch_steps_it_to_the_same_bits(ratio, how, dtype, limit):
    results = []
    for share in (1.0, ratio):
        params = make(dtype)
        swap = {"sub_group_numel": 1 << 14, "master": "separate"}
        kwargs = {"max_grad_norm": limit, "swap": swap, **how}
        with AdamW(two_groups(params), lr=1e-2, ratio=share, **kwargs) as opt:
            train(opt, params, 4, missing={(1, 0), (2, 3)})
            assert (kept_numel(opt) > 0) == (share < 1)
            results.append(found_in(opt, params))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_fake_device")
@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("more", [{"maximize": True}, {"state_dtype": "bfloat16"}, {}])
def test_every_rule_of_adam(cls, more):
    """L2 decay, ascent, moments that are kept in bf16."""
    state = {"state_dtype": more["state_dtype"]} if "state_dtype" in more else {}
    results = []
    for share in (1.0, 0.0):
        params = make(torch.bfloat16)
        arguments = {"maximize": True} if "maximize" in more else {}
        swap = {"master": "separate", **state}
        groups = two_groups(params)
        with cls(groups, lr=1e-2, eps=1e-6, ratio=share, swap=swap, **arguments) as opt:
            train(opt, params, 5)
            results.append(found_in(opt, params))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_fake_device")
def test_who_looks_or_changes_finds_what_the_device_has():
    def before(step, opt, params):
        param = params[0]
        if step == 1:
            opt.set_state(param, "exp_avg", opt.state_of(param)["exp_avg"] * 2)
        elif step == 2:
            opt.load_state_dict(opt.state_dict())
        elif step == 3:
            opt.param_groups[0]["lr"] = 0.5

    results = []
    for share in (1.0, 0.0):
        params = make(torch.bfloat16)
        with AdamW(two_groups(params), ratio=share, swap={"master": "separate"}) as opt:
            train(opt, params, 5, before=before)
            results.append(found_in(opt, params))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_fake_device")
def test_a_parameter_that_somebody_changes_is_resynced():
    results = []
    for share in (1.0, 0.0):
        params = make(torch.bfloat16)
        with AdamW(params, ratio=share, swap={"master": "separate"}) as opt:
            train(opt, params, 2)
            with torch.no_grad():
                params[2].mul_(0.5)
            with pytest.warns(UserWarning, match="changed outside"):
                train(opt, params, 1, first=2)
            train(opt, params, 1, first=3)
            results.append(found_in(opt, params))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_fake_device")
@pytest.mark.parametrize("stored", [False, True])
def test_a_checkpoint_does_not_depend_on_the_ratio(tmp_path, stored):
    results = []
    for number, (first, second) in enumerate([(1.0, 1.0), (0.0, 1.0), (1.0, 0.3), (0.5, 0.0)]):
        swap = {"master": "separate", "sub_group_numel": 1 << 14}
        if stored:
            swap |= {"path": tmp_path / f"{number}", "min_swap_bytes": 0, "host_memory": "64MiB"}
        params = make(torch.bfloat16)
        with AdamW(params, ratio=first, swap=swap) as opt:
            train(opt, params, 2)
            opt.save(tmp_path / f"save{number}").result()
        params = make(torch.bfloat16)
        with AdamW(params, ratio=second, swap=swap) as opt:
            opt.load(tmp_path / f"save{number}")
            train(opt, params, 2, first=2)
            results.append(found_in(opt, params))
    for one in results[1:]:
        assert all(map(torch.equal, one, results[0]))


@pytest.mark.usefixtures("on_fake_device")
def test_every_step_is_committed(tmp_path):
    """Durability "step": what the device has is in each commit."""
    results = []
    for share in (1.0, 0.5):
        params = make(torch.bfloat16)
        swap = {
            "path": tmp_path / str(share),
            "master": "separate",
            "durability": "step",
            "min_swap_bytes": 0,
            "host_memory": "64MiB",
        }
        with AdamW(params, ratio=share, swap=swap) as opt:
            train(opt, params, 3)
            opt.synchronize()
            for param in params:
                param.data.zero_()
            assert opt.recover() == 3
            train(opt, params, 1, first=3)
            results.append(found_in(opt, params))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_fake_device")
def test_a_skipped_step_changes_nothing():
    params = make(torch.bfloat16)
    with AdamW(params, ratio=0.5, max_grad_norm=1.0, swap={"master": "separate"}) as opt:
        train(opt, params, 2)
        before = found_in(opt, params)
        go_back(params, 2)
        params[3].grad[0] = float("inf")
        opt.step()
        assert opt.step_skipped
        assert all(map(torch.equal, found_in(opt, params), before))


def test_early_steps_go_on_beside_it():
    """The model of the early steps' tests, whose gradients come in parts."""
    plain = Run(False, max_grad_norm=1e6).train()
    check_equal(Run("always", max_grad_norm=1e6, ratio=0.5).train(), plain)


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("flags", [{}, {"decoupled": False}, {"maximize": True}])
def test_torchs_functions_have_the_kernels_bits(step, flags):
    """Extreme values too: subnormals, zeros, infinities; elements with nan are left out."""
    generator = np.random.default_rng(0)
    odd = np.array([0.0, -0.0, 1e-45, 1e-40, 1e-30, 1e-10, 1.0, 3e18, 1e30, -1e-42], np.float32)
    columns = [generator.permutation(np.resize(odd, 4000)) for _ in range(4)]
    columns[3] = np.abs(columns[3])
    p, g, m, v = (torch.from_numpy(c.astype(np.float32)) for c in columns)
    mine = [t.clone() for t in (p, g, m, v)]
    words = {"lr": 0.03, "eps": 1e-7, "weight_decay": 0.1}
    betas = {"beta1": 0.9, "beta2": 0.995}
    given = {"betas": tuple(betas.values()), "grad_scale": 0.3, "step": step}
    kernels.adam_step(p, g, m, v, **given, **words, **flags)
    hyper = np.zeros(1, kernels.HYPER_DTYPE)[0]
    for name, value in (words | betas).items():
        hyper[name] = value
    hyper["step"] = step
    hyper["flags"] = kernels.BIAS_CORRECTION
    hyper["flags"] |= kernels.DECOUPLED if flags.get("decoupled", True) else 0
    hyper["flags"] |= kernels.MAXIMIZE if flags.get("maximize") else 0
    adam_update(*mine, AdamNumbers.of(hyper, 0.3))
    for left, right in ((p, mine[0]), (m, mine[2]), (v, mine[3])):
        bits, others = left.view(torch.int32), right.view(torch.int32)
        either_nan = left.isnan() & right.isnan()
        assert torch.equal(bits[~either_nan], others[~either_nan])
    assert not p.isnan().all()


def test_muon_keeps_its_matrices_where_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    with Muon(muon_param_groups(model, show=False), ratio=0.0) as opt:
        buckets = [packed.bucket for packed in opt._layout.groups.values()]
        assert {bucket.rule for bucket in buckets if bucket.is_kept} == {"adam"}


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_another_share_is_refused(ratio):
    with pytest.raises(ConfigError, match="share from 0 to 1"):
        AdamW(make(), ratio=ratio)


@pytest.mark.usefixtures("on_fake_device")
def test_gradients_on_storage_are_refused_for_it(tmp_path):
    swap = {"path": tmp_path, "swap_gradients": True, "master": "separate"}
    with pytest.raises(ConfigError, match="leave it at 1"):
        AdamW(make(torch.bfloat16), ratio=0.5, gradients="stream", swap=swap)
