# SPDX-License-Identifier: Apache-2.0
"""A training process that tells what it did, and can be killed at any time.

    trainer_child.py JSON

The JSON: `swap` (settings), `dtype`, `sizes`, `steps` (train up to this step), `resume`, `load`
(checkpoint folder), `save_every`, `save` (folder), `keep_last`, `dump` (file for the final state).
Gradients are a function of the step, so that a run can be continued anywhere. Each finished step
is told on standard output.
"""

from __future__ import annotations

import json
import sys

import torch

from swapio.optim import AdamW


def make_params(sizes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size in map(tuple, sizes)
    ]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for index, param in enumerate(params):
        has_gradient = (index + step) % 5 != 4
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = gradient if has_gradient else None


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


def train(opt, params, first, last, after=nothing):
    for step in range(first, last + 1):
        opt.param_groups[0]["lr"] = rate(step)
        opt.param_groups[0]["tag"] = {"step": step}
        opt.commit_payload = f"after {step}".encode()
        set_gradients(params, step)
        opt.step()
        after(step)


def tell(*words):
    print(*words, flush=True)


def main(job):
    dtype = getattr(torch, job.get("dtype", "float32"))
    params = make_params(job["sizes"], dtype)
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    opt = AdamW(named, lr=1.0, swap=job["swap"], resume=job.get("resume", False))
    step = opt.recovered_step or 0
    if step:
        expected = f"after {step}".encode()
        if opt.commit_payload != expected or opt.param_groups[0]["tag"] != {"step": step}:
            raise SystemExit(f"payload {opt.commit_payload!r}, tag {opt.param_groups[0]['tag']}")
    if job.get("load"):
        step = opt.load(job["load"]).step
    tell("ready", step)

    def after(done):
        if job.get("save_every") and done % job["save_every"] == 0:
            tell("saving", done)
            opt.save(job["save"], f"step-{done}", keep_last=job.get("keep_last"))
            tell("saved", done)
        tell("step", done)

    train(opt, params, step + 1, job["steps"], after)
    if job.get("dump"):
        torch.save(everything(opt, params), job["dump"])
    opt.close()
    tell("done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
