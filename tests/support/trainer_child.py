# SPDX-License-Identifier: Apache-2.0
"""A training process that tells what it did, and can be killed at any time.

    trainer_child.py JSON

The JSON: `swap` (settings), `dtype`, `sizes`, `steps` (train up to this step), `resume`, `load`
(checkpoint folder), `save_every`, `save` (folder), `keep_last`, `dump` (file for the final state).
With `muon` matrices are stepped by Muon, the rest by AdamW. With `ranks`, `rank`, `meet` (a file)
and `cut` (how parameters are cut: see shards.py) it is one of several processes, and dumps to
`<dump>.<rank>`. `fail_save`: {rank, step, phase} lets that save fail there; with `keep_going` a
failed save is told, not raised. `own_folder`: each rank saves into a folder of its own.
Gradients are a function of the step, so that a run can be continued anywhere. Each finished step
is told on standard output.
"""

from __future__ import annotations

import errno
import importlib
import json
import sys

import torch

from swapio.checkpoint import folders
from swapio.errors import SwapioError
from swapio.optim import AdamW, Muon


def make_params(sizes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size in map(tuple, sizes)
    ]


def gradients_of(shapes, dtypes, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        gradient = torch.randn(shape, generator=generator).to(dtype)
        yield gradient if (index + step) % 5 != 4 else None


def set_gradients(params, step):
    shapes, dtypes = [param.shape for param in params], [param.dtype for param in params]
    for param, gradient in zip(params, gradients_of(shapes, dtypes, step), strict=True):
        param.grad = gradient


def rate(step):
    return 1e-2 / (1 + step)


def everything(opt, params):
    return {
        "params": [param.detach().clone() for param in params],
        "state": [
            {name: value.clone() for name, value in opt.state_of(param).items()} for param in params
        ],
        "lr": opt.param_groups[0]["lr"],
    }


def nothing(step):
    del step


def train(opt, params, first, last, after=nothing, *, set_gradients=set_gradients, payload=""):
    for step in range(first, last + 1):
        opt.param_groups[0]["lr"] = rate(step)
        opt.param_groups[0]["tag"] = {"step": step}
        opt.commit_payload = f"after {step}{payload}".encode()
        set_gradients(params, step)
        opt.step()
        after(step)


def tell(*words):
    print(*words, flush=True)


def build(job):
    """Optimizer, parameters, how they get gradients, and the end of each payload."""
    dtype = getattr(torch, job.get("dtype", "float32"))
    params = make_params(job["sizes"], dtype)
    options = {"lr": 1.0, "swap": job["swap"], "resume": job.get("resume", False)}
    if job.get("muon"):
        matrices = [(f"p{i}", p) for i, p in enumerate(params) if p.dim() == 2]
        others = [(f"p{i}", p) for i, p in enumerate(params) if p.dim() != 2]
        groups = [{"params": matrices}, {"params": others, "use_muon": False, "lr": 1e-3}]
        return Muon(groups, **options), params, set_gradients, "", None
    if "ranks" not in job:
        named = [(f"p{i}", param) for i, param in enumerate(params)]
        return AdamW(named, **options), params, set_gradients, "", None
    from support import shards

    agreement = shards.join(job)
    parts = [
        shards.part_of(job.get("cut", "flat"), tuple(p.shape), job["rank"], job["ranks"])
        for p in params
    ]
    shapes = [param.shape for param in params]
    params = [
        torch.nn.Parameter(shards.cut(param.detach(), *part).clone())
        for param, part in zip(params, parts, strict=True)
    ]

    def set_parts(local, step):
        whole = gradients_of(shapes, [dtype] * len(shapes), step)
        for param, part, gradient in zip(local, parts, whole, strict=True):
            param.grad = None if gradient is None else shards.cut(gradient, *part)

    places = [place for place, _ in parts]
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    by_name = {f"p{i}": place for i, place in enumerate(places)}
    opt = shards.ShardedAdamW(named, by_name, agreement, **options)
    return opt, params, set_parts, f" on {job['rank']}", places


# What a save calls in each phase.
PHASES = {
    "hold": ("swapio.filestore", "FileStore", "hold"),
    "write": ("swapio.checkpoint.datafile", "DataFile", "append"),
    "copy": ("swapio.checkpoint.datafile", "DataFile", "sync"),
    "publish": ("swapio.checkpoint.save", None, "write_manifest"),
}


def fail(*_, **__):
    raise OSError(errno.ENOSPC, "no space left", "a disk")


def save(opt, job, done):
    folder = job["save"]
    if job.get("own_folder"):
        folder = f"{job['swap']['path']}-{job['rank']}/{folder}"
        folders._SEEN_AFTER_SECONDS = 0.3
    wanted = job.get("fail_save", {})
    owner = None
    if (wanted.get("rank"), wanted.get("step")) == (job.get("rank", 0), done):
        module, kind, name = PHASES[wanted["phase"]]
        owner = importlib.import_module(module)
        owner = owner if kind is None else getattr(owner, kind)
        inner = getattr(owner, name)
        setattr(owner, name, fail)
    tell("saving", done)
    try:
        opt.save(folder, f"step-{done}", keep_last=job.get("keep_last"))
    except SwapioError as error:
        if not job.get("keep_going"):
            raise
        tell("failed", done, error)
    else:
        tell("saved", done)
    finally:
        if owner is not None:
            setattr(owner, name, inner)


def replicas(job):
    """Save replicated parameters with DCP, load them in two ways, and step once more."""
    import torch.distributed.checkpoint as dcp  # noqa: TID251

    from support import shards
    from swapio.integrations.dcp import LoadPlanner

    shards.join(job)
    folder = job["replicas"]

    def make(where):
        params = make_params(job["sizes"], getattr(torch, job["dtype"]))
        swap = {**job["swap"], "path": f"{job['swap']['path']}-{where}-{job['rank']}"}
        return AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1.0, swap=swap), params

    opt, params = make("saved")
    train(opt, params, 1, job["steps"])
    state = {"optimizer": opt, "model": dict(enumerate(params))}
    dcp.async_save(state, checkpoint_id=folder).result()
    del state
    opt.close()
    for how in ("plain", "streamed"):
        opt, params = make(how)
        planner = LoadPlanner(folder) if how == "streamed" else None
        wanted = opt if planner is None else planner.streamed(opt)
        state = {"optimizer": wanted, "model": dict(enumerate(params))}
        dcp.load(state, checkpoint_id=folder, planner=planner)
        del state
        train(opt, params, job["steps"] + 1, job["steps"] + 1)
        torch.save(everything(opt, params), f"{job['dump']}.{job['rank']}.{how}")
        opt.close()
    tell("done")


def main(job):
    if "replicas" in job:
        replicas(job)
        return
    opt, params, gradients, payload, places = build(job)
    step = opt.recovered_step or 0
    if step:
        expected = f"after {step}{payload}".encode()
        if opt.commit_payload != expected or opt.param_groups[0]["tag"] != {"step": step}:
            raise SystemExit(f"payload {opt.commit_payload!r}, tag {opt.param_groups[0]['tag']}")
    if job.get("load"):
        found = opt.load(job["load"])
        step = found.step
        tell("loaded", found.bytes_read)
    tell("ready", step)

    def after(done):
        if job.get("save_every") and done % job["save_every"] == 0:
            save(opt, job, done)
        tell("step", done)

    train(opt, params, step + 1, job["steps"], after, set_gradients=gradients, payload=payload)
    if job.get("dump"):
        dump = everything(opt, params)
        if places is None:
            torch.save(dump, job["dump"])
        else:
            torch.save({**dump, "places": places}, f"{job['dump']}.{job['rank']}")
    opt.close()
    tell("done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
