#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The NVMe step beside its bound and beside DeepSpeed's pipelined swapper.

Each round runs, one after the other and in swapped order every second round: fio reading and
writing at once (the ceiling of the folder's device), the swapio step, and DeepSpeed's ZeRO-3 step
with `pipeline_read` and `pipeline_write` (left out when --peer-python has no DeepSpeed). Ratios are
taken within a round; the medians of the ratios are printed, with their range.

A swapio step is the wall time of --steps consecutive step() calls with gradients given, drained at
the end, divided by their number; durability and checksums are at their defaults, parameters bf16
with fp32 masters. DeepSpeed's is the median of its step() calls; its gradient traffic in backward
is not counted against it. The bound is the bytes that the step moved divided by fio's rate.

The last line of standard output is JSON. GB is 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DIM = 2048
FIO = [
    "fio", "--name=mix", "--rw=rw", "--rwmixread=50", "--direct=1", "--ioengine=io_uring",
    "--fixedbufs=1", "--registerfiles=1", "--bs=512k", "--iodepth=32", "--iomem_align=2m",
    "--thread=1", "--time_based=1", "--runtime=3", "--size=1G", "--fallocate=none",
    "--invalidate=0", "--output-format=json",
]  # fmt: skip


def resident_bytes() -> int:
    fields = ("RssAnon:", "RssShmem:")
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in status if line.startswith(fields))


def swapio_worker(folder: str, numel: int, host_memory: str, steps: int, extra: str) -> None:
    import torch

    from swapio.optim import AdamW

    layers = max(2, round(numel / DIM**2))
    params = [
        torch.nn.Parameter(torch.randn(DIM, DIM, dtype=torch.bfloat16)) for _ in range(layers)
    ]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-2
    before = resident_bytes()
    swap = {"path": folder, "host_memory": host_memory, "spare_slots": 0, **json.loads(extra)}
    optimizer = AdamW(params, lr=1e-4, swap=swap)
    for _ in range(2):
        optimizer.step()
    optimizer.synchronize()
    start, usage = optimizer.stats(), resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    optimizer.synchronize()
    seconds = time.perf_counter() - began
    end, used = optimizer.stats(), resource.getrusage(resource.RUSAGE_SELF)
    grown = resident_bytes() - before
    moved = {k: end[k] - start[k] for k in end if isinstance(end[k], int | float)}
    count = layers * DIM**2
    gigabytes = (moved["read_bytes"] + moved["write_bytes"]) / 1e9
    cpu = used.ru_utime - usage.ru_utime, used.ru_stime - usage.ru_stime
    result = {
        "ns_per_param": seconds / steps / count * 1e9,
        "gb_per_s": gigabytes / seconds,
        "read_bytes_per_param": moved["read_bytes"] / count / steps,
        "write_bytes_per_param": moved["write_bytes"] / count / steps,
        "stall_share": moved["stall_seconds"] / seconds,
        "compute_share": moved["compute_seconds"] / seconds,
        "hash_s_per_gb": moved["hash_seconds"] / gigabytes if gigabytes else 0.0,
        "user_s_per_gb": cpu[0] / gigabytes if gigabytes else 0.0,
        "system_s_per_gb": cpu[1] / gigabytes if gigabytes else 0.0,
        "host_bytes": grown,
    }
    optimizer.close()
    print("RESULT " + json.dumps(result), flush=True)


def deepspeed_worker(folder: str, numel: int, steps: int) -> None:
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    import torch

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
    )
    layers = max(2, round(numel / DIM**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(DIM, DIM, bias=False) for _ in range(layers)))
    swap = {
        "device": "nvme", "nvme_path": folder, "buffer_count": 16, "pin_memory": False,
        "pipeline_read": True, "pipeline_write": True, "fast_init": True,
    }  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 4 * DIM**2, "offload_optimizer": swap,
            "offload_param": {"device": "cpu"},
        },
        "aio": {
            "block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 2,
            "single_submit": False, "overlap_events": True,
        },
    }  # fmt: skip
    engine = deepspeed.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )[0]
    inputs = torch.randn(1, DIM, dtype=torch.bfloat16)
    seconds = []
    for _ in range(2 + steps):
        engine.backward(engine(inputs).float().square().mean())
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    value = statistics.median(seconds[2:]) / (layers * DIM**2) * 1e9
    print("RESULT " + json.dumps({"ns_per_param": value}), flush=True)


def run_worker(python: str, kind: str, folder: str, options: list[str]) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{kind}-") as scratch:
        command = [python, __file__, "--worker", kind, "--dir", scratch, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{kind} failed: {done.stderr[-600:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def fio_mixed(folder: str) -> float | None:
    """GB/s read and written at once, in total; None without fio."""
    if shutil.which("fio") is None:
        return None
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    with tempfile.TemporaryDirectory(dir=folder, prefix="fio-") as scratch:
        target = Path(scratch, "mix.0.0")
        block = os.urandom(1 << 20)
        with target.open("wb") as file:
            for _ in range(1024):
                file.write(block)
            os.fsync(file.fileno())
        done = subprocess.run(
            [*FIO, f"--directory={scratch}"],
            capture_output=True, text=True, check=True, env=environment,
        )  # fmt: skip
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9


def spread(values: list[float]) -> list[float]:
    return [round(min(values), 3), round(max(values), 3)]


def one_case(arguments: argparse.Namespace, numel: int, host_memory: str) -> dict[str, Any]:
    options = ["--numel", str(numel), "--host-memory", host_memory]
    options += ["--steps", str(arguments.steps), "--extra", arguments.extra]
    rounds: dict[str, list[Any]] = {"swapio": [], "deepspeed": [], "fio": []}
    for number in range(arguments.rounds):
        kinds = ["swapio", "deepspeed"] if number % 2 == 0 else ["deepspeed", "swapio"]
        rounds["fio"].append(fio_mixed(arguments.dir))
        for kind in kinds:
            python = sys.executable if kind == "swapio" else arguments.peer_python
            result = run_worker(python, kind, arguments.dir, options) if python else None
            rounds[kind].append(result)
            if result:
                print(f"{numel:.2g} {host_memory} {kind}: {result}", file=sys.stderr, flush=True)
    return summarize(rounds)


def summarize(rounds: dict[str, list[Any]]) -> dict[str, Any]:
    ours = rounds["swapio"]
    row: dict[str, Any] = {
        "ns_per_param": round(statistics.median(r["ns_per_param"] for r in ours), 2),
        "ns_range": spread([r["ns_per_param"] for r in ours]),
    }
    for name in ("read_bytes_per_param", "write_bytes_per_param", "stall_share"):
        row[name] = round(statistics.median(r[name] for r in ours), 3)
    row["host_gb"] = round(max(r["host_bytes"] for r in ours) / 1e9, 3)
    bounds = []
    for result, rate in zip(ours, rounds["fio"], strict=True):
        moved = result["read_bytes_per_param"] + result["write_bytes_per_param"]
        if rate:
            bounds.append(result["ns_per_param"] / (moved / rate))
    if bounds:
        row["of_bound"] = round(statistics.median(bounds), 3)
        row["of_bound_range"] = spread(bounds)
    pairs = [
        a["ns_per_param"] / b["ns_per_param"]
        for a, b in zip(ours, rounds["deepspeed"], strict=True)
        if a and b
    ]
    if pairs:
        row["deepspeed_ns"] = round(
            statistics.median(r["ns_per_param"] for r in rounds["deepspeed"] if r), 2
        )
        row["of_deepspeed"] = round(statistics.median(pairs), 3)
        row["of_deepspeed_range"] = spread(pairs)
    for name in ("user_s_per_gb", "system_s_per_gb", "hash_s_per_gb"):
        row[name] = round(statistics.median(r[name] for r in ours), 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--dir", default="build/bench", help="folder on the device")
    parser.add_argument("--cases", default="1e8:256MiB", help="comma-separated NUMEL:HOST_MEMORY")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peer-python", default="", help="a Python that has DeepSpeed")
    parser.add_argument("--extra", default="{}", help="more swap settings, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--numel", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--host-memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker == "swapio":
        swapio_worker(
            arguments.dir, int(arguments.numel), arguments.host_memory, arguments.steps,
            arguments.extra,
        )  # fmt: skip
        return
    if arguments.worker == "deepspeed":
        deepspeed_worker(arguments.dir, int(arguments.numel), arguments.steps)
        return
    Path(arguments.dir).mkdir(parents=True, exist_ok=True)
    rows = {}
    for case in arguments.cases.split(","):
        numel, _, host_memory = case.partition(":")
        rows[f"{float(numel):.0e} parameters, {host_memory}"] = one_case(
            arguments, int(float(numel)), host_memory
        )
    plain = {"rounds": arguments.rounds, "steps": arguments.steps}
    print(json.dumps({"bench": "step", **plain, "bf16_parameters": rows}))


if __name__ == "__main__":
    main()
