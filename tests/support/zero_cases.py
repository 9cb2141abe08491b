# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the ZeRO tests run; see RankPool."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from support.training import swap_of
from support.zero_training import (
    RULES,
    Bank,
    groups_of,
    loss_of,
    make,
    rank_gradients,
    rule_groups,
    train,
)
from swapio.errors import ConfigError, SwapioError
from swapio.optim import AdamW, GradScaler, Muon, ZeroOptimizer
from swapio.optim.zero.comm import Comm


def tight(build, mode, folder, **more):
    """Build with the least host_memory that does, so that state is really swapped."""
    if mode == "ram":
        return build(None)
    more["sub_group_numel"] = 1 << 14
    try:
        return build(swap_of(mode, folder, host_memory=1 << 20, **more))
    except ConfigError as error:
        least = int(re.search(r"least that does is (\d+) bytes", str(error))[1])
    return build(swap_of(mode, folder, host_memory=least, **more))


def run_stage(
    rank,
    group,
    *,
    stage,
    rule,
    shapes,
    mode,
    folder,
    training,
    settings,
    zero=None,
    resident=(),
    dtype=torch.float32,
):
    """Train in any stage; return the parameters, state, counts and figures of this rank."""
    model = Bank(make(shapes, dtype))
    if stage == 3:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    params = list(model.params)
    options = {"stage": stage, "process_group": group, "bucket_bytes": 1 << 17, **(zero or {})}

    def build(swap):
        groups = [{**g} for g in rule_groups(params, rule)]
        if stage < 3:
            return ZeroOptimizer(groups, RULES[rule], **options, swap=swap, **settings)
        if swap is not None:
            swap["namespace"] = f"rank{rank}"
        return RULES[rule](groups, nonfinite="skip", swap=swap, **settings)

    with tight(build, mode, folder, resident=resident) as opt:
        train(opt, params, rank, model=model, **training)
        return {
            "skipped": opt.step_skipped,
            "norm": opt.grad_norm,
            "stats": opt.stats(),
            "planned": {} if stage == 3 else opt._ranks.planned_collectives(),
            "local": [sizes_of(opt.state_of(param)) for param in params],
            "state": whole_state(opt, params),
            "params": [(p.full_tensor() if stage == 3 else p).detach() for p in params],
        }


def sizes_of(state):
    """Elements of this rank's part of a parameter."""
    return next(value for value in state.values() if value.dim()).numel()


def whole_state(opt, params):
    """All state; with FSDP2 by way of state_dict, which a load must take back unchanged."""
    if isinstance(opt, ZeroOptimizer):
        return [opt.full_state_of(param) for param in params]
    known = opt.state_dict()
    order = [id(param) for group in opt.param_groups for param in group["params"]]
    entries = [known["state"][order.index(id(param))] for param in params]
    whole = [{k: v.full_tensor() if v.dim() else v for k, v in e.items()} for e in entries]
    opt.load_state_dict(known)
    for param, entry in zip(params, entries, strict=True):
        for name, value in opt.state_of(param).items():
            assert not value.dim() or torch.equal(value, entry[name].to_local()), name
    return whole


def break_one(rank, group, *, name, culprit, delay=0.0):
    """Fail (or be late) in one collective of a given name on one rank; return what was raised."""
    comm = Comm(group)

    def before(what):
        if what == name and rank == culprit:
            if not delay:
                raise OSError(5, "injected")
            time.sleep(delay)

    comm.before = before
    error = None
    try:
        rows = torch.arange(float(4 * comm.world_size))
        for _ in range(3):
            comm.exchange(1.0)
            comm.gather("x" * rank)
            comm.all_reduce(torch.ones(4)).wait()
            comm.reduce_scatter(torch.empty(4), rows, torch.empty_like(rows)).wait()
            comm.all_gather(torch.empty_like(rows), torch.ones(4)).wait()
            sizes = [1] * comm.world_size
            comm.all_to_all(torch.empty(len(sizes)), torch.ones(len(sizes)), sizes, sizes).wait()
            comm.broadcast(torch.ones(3)).wait()
    except SwapioError as failure:
        error = str(failure)
    comm.close()
    return error


def leave_early(rank, group):
    """Close the communication on rank 0 while the others wait; return what they raised."""
    comm = Comm(group)
    comm.exchange()
    error = None if rank == 0 else raised(comm.exchange)
    comm.close()
    return error


def fail_between_steps(rank, group):
    """Fail rank 0 where nobody hears of it, then step; return what each rank raised."""
    params = make([(40, 30)])
    with ZeroOptimizer(params, AdamW, stage=2, process_group=group) as opt:
        train(opt, params, rank, steps=1)
        if rank == 0:
            opt._runtime.swapper.fail(OSError(5, "injected"))
        error = raised(lambda: train(opt, params, rank, steps=1, first=2))
        torch.distributed.barrier(group)  # the failed rank lives on, and keeps its buckets
    return error


def save_or_load(_rank, group, *, stage, shapes, folder, swap, steps, load, save, muon=False):
    """Load a checkpoint if there is one to load, train, save; return parameters and state."""
    params = make(shapes, seed=5 if load else 0)
    settings = {"lr": 0.02, "stage": stage, "process_group": group, "bucket_bytes": 1 << 17}
    kind = Muon if muon else AdamW
    with ZeroOptimizer(groups_of(params, muon=muon), kind, **settings, swap=swap) as opt:
        first = 1 + (opt.load(folder).step if load else 0)
        loaded = [opt.full_state_of(param) for param in params]
        for param, entry in zip(params, loaded, strict=True):
            entry["param"] = param.detach().clone()
        train(opt, params, 0, steps=steps, first=first)
        if save:
            opt.save(folder, keep_last=1).result()
        state = [{**opt.full_state_of(p), "param": p.detach().clone()} for p in params]
    return [param.detach() for param in params], state, loaded


def committed_steps(_rank, group, *, stage, shapes, swap, steps, resume, muon=False):
    """Take some steps that are committed, from where the last run ended with `resume`."""
    params = make(shapes, seed=5 if resume else 0)
    settings = {"lr": 0.02, "stage": stage, "process_group": group, "bucket_bytes": 1 << 17}
    kind, groups = (Muon if muon else AdamW), groups_of(params, muon=muon)
    with ZeroOptimizer(groups, kind, **settings, swap=swap, resume=resume) as opt:
        begun = [param.detach().clone() for param in params]
        train(opt, params, 0, steps=steps, first=1 + (opt.recovered_step or 0))
        state = [opt.full_state_of(param) for param in params]
    return [param.detach() for param in params], state, begun


def refuse(rank, group, *, settings):
    """Make and step an optimizer with unsuitable settings; return what was raised, or None."""
    settings = {"stage": 1, **settings}
    wrap, differ = settings.pop("wrap", None), settings.pop("differ", None)
    model = torch.nn.Linear(3 + rank if differ == "shape" else 3, 2)
    if differ == "lr" and rank == 1:
        settings["lr"] = -1.0
    wrapped = (
        torch.nn.parallel.DistributedDataParallel(model, process_group=group) if wrap else None
    )
    try:
        with ZeroOptimizer(model.parameters(), AdamW, process_group=group, **settings) as opt:
            before = [param.detach().clone() for param in model.parameters()]
            (wrapped or model)(torch.full((4, 3), float(rank))).sum().backward()
            opt.step()
            if wrapped is not None and torch.equal(before[0], model.weight):
                return "nothing was stepped"
            if any(name in opt.stats() for name in ("num_all_reduce", "num_reduce_scatter")):
                return "gradients were averaged twice" if wrapped is not None else None
            opt.zero_grad()
            with pytest.raises(ConfigError, match="save"):
                opt.state_dict()
    except SwapioError as error:
        return str(error)
    return None


def raised(call):
    """What a call of swapio raises, as text."""
    with pytest.raises(SwapioError) as caught:
        call()
    return str(caught.value)


def read_gradients(rank, group):
    """What others find in p.grad after a backward pass of stage 2, after step() and close()."""
    params = make([(40, 30), (7,)])
    clip = torch.nn.utils.clip_grad_norm_
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with ZeroOptimizer(params, AdamW, stage=2, process_group=group) as opt:
        loss_of(params, rank_gradients(params, 1, 0, rank)).backward()
        found = {
            "clip": raised(lambda: clip(params, 1.0)),
            "scaler": raised(lambda: scaler.unscale_(opt)),
            "during": [p.grad is not None and p.grad.shape == p.shape for p in params],
        }
        opt.step()
        found["after"] = [p.grad is None for p in params]
        loss_of(params, rank_gradients(params, 2, 0, rank)).backward()
    return {**found, "closed": [p.grad is None for p in params]}


def passes(rank, group, *, accumulate):
    """Two passes outside no_sync(), the first without some parameters; SGD's sums as oracle."""
    params = make([(6, 5), (300, 70), (9,)])
    options = {"accumulate": accumulate, "bucket_bytes": 1 << 15, "process_group": group}
    with ZeroOptimizer(params, AdamW, stage=2, **options) as opt:
        cut = [len(numbers) for numbers in opt._ranks.reducer._buckets_of]
        assert cut[1] > 1, "no parameter is cut"
        sums = [torch.zeros_like(param) for param in params]
        for micro, unused in enumerate(({(1, rank, 0)}, set())):
            loss_of(params, rank_gradients(params, 1, micro, rank, unused=unused)).backward()
        for theirs in range(2):
            for micro, unused in enumerate(({(1, theirs, 0)}, set())):
                grads = rank_gradients(params, 1, micro, theirs, unused=unused)
                for total, grad in zip(sums, grads, strict=True):
                    total += 0 if grad is None else grad / 2
        opt.step()
        moments = [opt.full_state_of(param)["exp_avg"] for param in params]
    return moments, [0.1 * total for total in sums]


def discard(rank, group, *, how):
    """Drop gradients behind the optimizer's back, step, then do it rightly."""
    model = Bank(make([(40, 30), (7,)]))
    params = list(model.params)
    before = [param.detach().clone() for param in params]
    with ZeroOptimizer(params, AdamW, stage=2, process_group=group) as opt:
        model(rank_gradients(params, 1, 0, rank)).backward()
        opt.synchronize()
        opt._ranks.begin_step()
        model.zero_grad(set_to_none=how == "module")
        error = raised(opt.step)
        moved = not all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        opt.zero_grad()
        model(rank_gradients(params, 1, 0, rank)).backward()
        opt.step()
        return error, moved, not torch.equal(params[0], before[0])


def export_rows(_rank, group, *, folder):
    """Export a model of one row; return what was raised."""
    model = Bank(make([(1, 300)]))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with AdamW(model.parameters()) as opt:
        return raised(lambda: opt.export_safetensors(folder / "export"))


def scale_losses(rank, group, *, stage, shapes, settings, training):
    """Train with a loss scaler; return parameters, and the scale after each step."""
    params, model = make(shapes), None
    kind = GradScaler if stage == 2 else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
    if stage == 3:
        model = Bank(params)
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        params = list(model.params)
        opt = AdamW(params, nonfinite="skip", **settings)
    else:
        options = {"process_group": group, "bucket_bytes": 1 << 15}
        opt = ZeroOptimizer(params, AdamW, stage=stage, **options, **settings)
    scales = []
    with opt:
        for step in range(1, training["steps"] + 1):
            now = {**training, "first": step, "steps": 1}
            train(opt, params, rank, model=model, scaler=scaler, **now)
            scales.append(scaler.get_scale())
    whole = [param.full_tensor() if stage == 3 else param for param in params]
    return [param.detach() for param in whole], scales


def average_in(rank, group, *, stage, dtype, shapes):
    """Average one pass's gradients in a dtype; return what the first moments are made of."""
    params = make(shapes)
    options = {"reduce_dtype": dtype, "process_group": group, "bucket_bytes": 1 << 15}
    with ZeroOptimizer(params, AdamW, stage=stage, betas=(0.5, 0.9), **options) as opt:
        train(opt, params, rank, steps=1)
        return [2 * opt.full_state_of(param)["exp_avg"] for param in params]
