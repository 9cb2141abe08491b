#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The NVMe step beside its bound and beside DeepSpeed's pipelined swapper.

Each round runs, one after the other and in swapped order every second round: fio (read, write, and
both at once: the ceilings of the folder's device), the swapio step, and DeepSpeed's ZeRO-3 step
with `pipeline_read` and `pipeline_write` (left out when --peer-python has no DeepSpeed). Ratios are
taken within a round; the medians of the ratios are printed, with their range.

A swapio step is the wall time of --steps consecutive step() calls with gradients given, drained at
the end, divided by their number; durability and checksums are at their defaults, parameters bf16
with fp32 masters. DeepSpeed's is the median of its step() calls; its gradient traffic in backward
is not counted against it. The bound is the bytes that the step moved divided by fio's best rate for
that mix: both at once, or one direction after the other where that is faster.

CPU times are those of the process's threads less the kernels: what the kernels' own threads used,
and what the calling thread used inside update kernels and checksums. fio's are of the same mix.

With --compute S a pause of S seconds, a forward and backward on another device, lies before every
step. Then `exposed_ms` is the time by which an iteration is longer than the same with all state in
RAM, `exposed_of_bound` compares it to what cannot be hidden (the bytes of all swapped records less
the buffers, each direction at fio's rate for it alone), and `exposed_of_io` to all I/O of the step.

With --variant JSON each round also runs with those settings; `of_variant` is the step's time over
theirs ('{"checksum": false}': what checksums cost).

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIM = 2048
SHIFT = 8191  # no two layers have a block in common
FIO = [
    "fio", "--direct=1", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--bs=512k",
    "--iodepth=32", "--iomem_align=2m", "--thread=1", "--time_based=1", "--runtime=3", "--size=1G",
    "--fallocate=none", "--invalidate=0", "--output-format=json",
]  # fmt: skip
FIO_MODES = {"read": ["--rw=read"], "write": ["--rw=write"], "mixed": ["--rw=rw"]}


def resident_bytes() -> int:
    fields = ("RssAnon:", "RssShmem:")
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in status if line.startswith(fields))


class CpuClock:
    """CPU seconds of this process by what they were used for."""

    def __init__(self) -> None:
        self.update = 0.0
        self.checksums = 0.0

    def watch(self) -> None:
        """Wrap the native calls, to see what the calling thread uses inside them."""
        from swapio import checksum
        from swapio.optim import kernels

        checksum._hash_blocks = self._timed(checksum._hash_blocks, "checksums")
        checksum._hash_spans = self._timed(checksum._hash_spans, "update")
        kernels.adam_step_spans = self._timed(kernels.adam_step_spans, "update")
        kernels.copy_spans = self._timed(kernels.copy_spans, "update")

    def _timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self, kind, getattr(self, kind) + time.thread_time() - began)

        return timed

    def now(self) -> dict[str, float]:
        """Return seconds so far: all, system, and inside kernels, by kind."""
        kernel_threads = engine_threads = 0.0
        for task in Path("/proc/self/task").iterdir():
            name = (task / "comm").read_text(encoding="ascii").strip()
            used = int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
            kernel_threads += used if name == "swapio-kernel" else 0.0
            engine_threads += used if name.startswith(("swapio-uring", "swapio-io")) else 0.0
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "total": time.process_time() - kernel_threads - self.update - self.checksums,
            "engine": engine_threads,
            "system": usage.ru_stime,
            "checksums": self.checksums,
            "kernels": kernel_threads + self.update + self.checksums,
        }


def make_parameters(numel: int) -> list[Any]:
    import torch

    layers = max(2, round(numel / DIM**2))
    noise = torch.randn(DIM**2 + SHIFT * layers)  # drawn once: numbers take longer than steps

    def layer(number: int, scale: float) -> torch.Tensor:
        return (noise[SHIFT * number :][: DIM**2].view(DIM, DIM) * scale).bfloat16()

    params = [torch.nn.Parameter(layer(number, 0.02)) for number in range(layers)]
    for number, param in enumerate(params):
        param.grad = layer(layers - 1 - number, 1e-2)
    return params


def load_torch_optimizers() -> None:
    """Have torch load what its first optimizer needs: some 70 MB that are not swapio's."""
    import torch

    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.SGD([param]).step()


def take_steps(optimizer: Any, steps: int, compute: float) -> tuple[float, float]:
    """Return (seconds, seconds inside step()) of an iteration, drained at the end.

    A last pause, which is not counted, gives the writes of the last step the time that those of
    the others have.
    """
    inside = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        time.sleep(compute)
        before = time.perf_counter()
        optimizer.step()
        inside += time.perf_counter() - before
    time.sleep(compute)
    optimizer.synchronize()
    return (time.perf_counter() - began - compute) / steps, inside / steps


def swapio_worker(arguments: argparse.Namespace) -> None:
    from swapio.optim import AdamW

    params = make_parameters(int(arguments.numel))
    steps, count = arguments.steps, len(params) * DIM**2
    clock = CpuClock()
    clock.watch()
    load_torch_optimizers()
    before = resident_bytes()
    swap = {"path": arguments.dir, "host_memory": arguments.host_memory, "spare_slots": 0}
    optimizer = AdamW(params, lr=1e-4, swap=swap | json.loads(arguments.extra))
    for _ in range(2):
        time.sleep(arguments.compute)
        optimizer.step()
    optimizer.synchronize()
    start, cpu = optimizer.stats(), clock.now()
    seconds, inside = take_steps(optimizer, steps, arguments.compute)
    end, used = optimizer.stats(), clock.now()
    grown = resident_bytes() - before
    moved = {k: end[k] - start[k] for k in end if isinstance(end[k], int | float)}
    gigabytes = (moved["read_bytes"] + moved["write_bytes"]) / 1e9
    spent = {name: used[name] - cpu[name] for name in cpu}
    plan = optimizer.plan
    result = {
        "ns_per_param": seconds / count * 1e9,
        "numel": count if moved["read_bytes"] + moved["write_bytes"] else 0,
        "step_seconds": inside,
        "gb_per_s": gigabytes / steps / seconds,
        "read_bytes_per_param": moved["read_bytes"] / count / steps,
        "write_bytes_per_param": moved["write_bytes"] / count / steps,
        "stall_share": moved["stall_seconds"] / seconds / steps,
        "compute_share": moved["compute_seconds"] / seconds / steps,
        "host_bytes": grown,
        "resident_share": plan.resident_bytes / (10 * count),
        "buffer_bytes": plan.staging_bytes,
        "streamed_bytes": 10 * count - plan.resident_bytes,
    }
    if gigabytes:
        result |= {
            "user_s_per_gb": (spent["total"] - spent["system"]) / gigabytes,
            "cpu_s_per_gb": spent["total"] / gigabytes,
            "engine_s_per_gb": spent["engine"] / gigabytes,
            "checksum_s_per_gb": moved["hash_seconds"] / gigabytes,
            "kernels_cpu_s_per_gb": spent["kernels"] / gigabytes,
        }
    optimizer.close()
    if arguments.compute:
        with AdamW(params, lr=1e-4) as resident:
            take_steps(resident, 1, 0.0)
            seconds_in_ram, _ = take_steps(resident, steps, arguments.compute)
        result["exposed_seconds"] = seconds - seconds_in_ram
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
            "block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2,
            "single_submit": True, "overlap_events": True,
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


def fio(folder: str) -> dict[str, float] | None:
    """GB/s of each mode and CPU seconds per GB of the mix; None without fio."""
    if shutil.which("fio") is None:
        return None
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="fio-") as scratch:
        block = os.urandom(1 << 20)
        with Path(scratch, "job.0.0").open("wb") as file:
            for _ in range(1024):
                file.write(block)
            os.fsync(file.fileno())
        for mode, options in FIO_MODES.items():
            done = subprocess.run(
                [*FIO, "--name=job", *options, f"--directory={scratch}"],
                capture_output=True, text=True, check=True, env=environment,
            )  # fmt: skip
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            found[mode] = (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9
            if mode == "mixed":
                moved = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9
                cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
                found["cpu_s_per_gb"] = cpu / moved
    print(f"fio: {found}", file=sys.stderr, flush=True)
    return found


def bound_ns(result: dict[str, Any], rates: dict[str, float]) -> float:
    """Return the least time per parameter in which the device moves the bytes of a step."""
    read, write = result["read_bytes_per_param"], result["write_bytes_per_param"]
    turns = read / rates["read"] + write / rates["write"]
    both = min(read, write)
    rest = (read - both) / rates["read"] + (write - both) / rates["write"]
    return float(min(turns, 2 * both / rates["mixed"] + rest))


def exposed_bound(result: dict[str, Any], rates: dict[str, float]) -> float:
    """Return the seconds of I/O that no forward and backward can hide."""
    beyond = max(0, result["streamed_bytes"] - result["buffer_bytes"]) / 1e9
    return float(beyond / rates["read"] + beyond / rates["write"])


def spread(values: list[float]) -> list[float]:
    return [round(min(values), 3), round(max(values), 3)]


def one_case(arguments: argparse.Namespace, numel: int, host_memory: str) -> dict[str, Any]:
    options = ["--numel", str(numel), "--host-memory", host_memory]
    options += ["--steps", str(arguments.steps), "--extra", arguments.extra]
    options += ["--compute", str(arguments.compute)]
    variant = [*options, "--extra", arguments.variant]
    rounds: dict[str, list[Any]] = {"swapio": [], "variant": [], "deepspeed": [], "fio": []}
    for number in range(arguments.rounds):
        kinds = ["swapio", "variant", "deepspeed"][:: 1 if number % 2 == 0 else -1]
        rounds["fio"].append(fio(arguments.dir))
        for kind in kinds:
            python = arguments.peer_python if kind == "deepspeed" else sys.executable
            python = "" if kind == "variant" and not arguments.variant else python
            chosen = variant if kind == "variant" else options
            result = run_worker(python, kind, arguments.dir, chosen) if python else None
            rounds[kind].append(result)
            if result:
                print(f"{numel:.2g} {host_memory} {kind}: {result}", file=sys.stderr, flush=True)
    return summarize(rounds)


def median_and_range(row: dict[str, Any], name: str, values: list[float], digits: int = 3) -> None:
    if values:
        row[name] = round(statistics.median(values), digits)
        row[f"{name}_range"] = spread(values)


def summarize(rounds: dict[str, list[Any]]) -> dict[str, Any]:
    ours = [result for result in rounds["swapio"] if result]
    row: dict[str, Any] = {}
    median_and_range(row, "ns_per_param", [r["ns_per_param"] for r in ours], 2)
    pairs = list(zip(rounds["swapio"], rounds["fio"], strict=True))
    both = [(result, rates) for result, rates in pairs if result and rates]
    median_and_range(
        row,
        "of_bound",
        [result["ns_per_param"] / bound_ns(result, rates) for result, rates in both],
    )
    peers = [
        (a["ns_per_param"], b["ns_per_param"])
        for a, b in zip(rounds["swapio"], rounds["deepspeed"], strict=True)
        if a and b
    ]
    if peers:
        row["deepspeed_ns"] = round(statistics.median(b for _, b in peers), 2)
        median_and_range(row, "of_deepspeed", [a / b for a, b in peers])
    variants = [
        a["ns_per_param"] / b["ns_per_param"]
        for a, b in zip(rounds["swapio"], rounds["variant"], strict=True)
        if a and b
    ]
    median_and_range(row, "of_variant", variants)
    if ours and "exposed_seconds" in ours[0]:
        row["exposed_ms"] = round(1e3 * statistics.median(r["exposed_seconds"] for r in ours), 1)
        ratios = [r["exposed_seconds"] / bound for r, f in both if (bound := exposed_bound(r, f))]
        median_and_range(row, "exposed_of_bound", ratios)
        moving = [(r, bound_ns(r, f) * r["numel"] / 1e9) for r, f in both if r["numel"]]
        shares = [r["exposed_seconds"] / seconds for r, seconds in moving]
        median_and_range(row, "exposed_of_io", shares)
    for name in ("read_bytes_per_param", "write_bytes_per_param", "stall_share", "compute_share"):
        row[name] = round(statistics.median(r[name] for r in ours), 3)
    row["host_gb"] = round(max(r["host_bytes"] for r in ours) / 1e9, 3)
    for name in ("user", "cpu", "engine", "checksum"):
        values = [r[f"{name}_s_per_gb"] for r in ours if f"{name}_s_per_gb" in r]
        if values:
            row[f"{name}_s_per_gb"] = round(statistics.median(values), 4)
    if both:
        row["fio_gb_per_s"] = round(statistics.median(rates["mixed"] for _, rates in both), 2)
        row["fio_cpu_s_per_gb"] = round(statistics.median(r["cpu_s_per_gb"] for _, r in both), 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--dir", default="build/bench", help="folder on the device")
    parser.add_argument("--cases", default="1e8:256MiB", help="comma-separated NUMEL:HOST_MEMORY")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--peer-python", default="", help="a Python that has DeepSpeed")
    parser.add_argument("--extra", default="{}", help="more swap settings, as JSON")
    parser.add_argument("--variant", default="", help="settings of a second run, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--numel", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--host-memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker in ("swapio", "variant"):
        swapio_worker(arguments)
        return
    if arguments.worker == "deepspeed":
        deepspeed_worker(arguments.dir, int(arguments.numel), arguments.steps)
        return
    Path(arguments.dir).mkdir(parents=True, exist_ok=True)
    rows = {}
    for case in arguments.cases.split(","):
        numel, _, host_memory = case.partition(":")
        name = f"{float(numel):.0e} parameters, {host_memory}"
        rows[name] = one_case(arguments, int(float(numel)), host_memory)
        print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    plain: dict[str, Any] = {"rounds": arguments.rounds, "steps": arguments.steps}
    if arguments.compute:
        plain["compute_seconds"] = arguments.compute
    for name in ("extra", "variant"):
        if json.loads(getattr(arguments, name) or "{}"):
            plain[name] = getattr(arguments, name)
    print(json.dumps({"bench": "step", **plain, "bf16_parameters": rows}))


if __name__ == "__main__":
    main()
