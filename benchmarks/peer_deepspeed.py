# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's side of the paired benchmarks, run by a Python that has it (see paired.Peer).

    peer_deepspeed.py adam NUMEL THREADS      "step": one DeepSpeedCPUAdam step on fp32
    peer_deepspeed.py aio FOLDER NBYTES       "read", "write", "mixed": aio_handle over whole files

The `aio` mode first tries the settings below and keeps the best of each pattern. Results are lines
that begin with RESULT; DeepSpeed prints other lines. Imports nothing of swapio.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# block_size in KiB, queue_depth, intra_op_parallelism, single_submit
AIO_SETTINGS = (
    (1024, 16, 1, False), (1024, 32, 1, False), (1024, 16, 2, False), (1024, 32, 2, True),
    (512, 32, 1, False), (512, 16, 2, False), (8192, 32, 1, False),
)  # fmt: skip


def say(**values: Any) -> None:
    print("RESULT " + json.dumps(values), flush=True)


def timed(call: Callable[[], int]) -> dict[str, float]:
    """Return seconds, CPU seconds of this process, and the bytes that `call` says it moved."""
    usage, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    nbytes = call()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "nbytes": nbytes}


def adam(numel: int, threads: int) -> dict[str, Callable[[], int]]:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    param = torch.nn.Parameter(torch.randn(numel).mul_(0.1))
    param.grad = torch.randn(numel).mul_(0.01)
    optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=1e-2)

    def step() -> int:
        optimizer.step()
        return 28 * numel

    step()  # makes the moments
    say(threads=torch.get_num_threads())
    return {"step": step}


def aio(folder: str, nbytes: int) -> dict[str, Callable[[], int]]:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    library = AsyncIOBuilder().load(verbose=False)
    owner = library.aio_handle(1 << 20, 16, False, True, 1)
    empty = torch.empty(0, dtype=torch.uint8)
    tensors = [owner.new_cpu_locked_tensor(nbytes, empty) for _ in range(2)]
    source, target = str(Path(folder, "a")), str(Path(folder, "b"))

    def runner(pattern: str, setting: tuple[int, int, int, bool]) -> Callable[[], int]:
        block, depth, parallel, single = setting
        handles = [library.aio_handle(block << 10, depth, single, True, parallel) for _ in range(2)]
        sides = {"read": (0,), "write": (1,), "mixed": (0, 1)}[pattern]

        def run() -> int:
            for side in sides:
                if side == 0:
                    handles[0].async_pread(tensors[0], source, 0)
                else:
                    handles[1].async_pwrite(tensors[1], target, 0)
            for side in sides:
                handles[side].wait()
            return nbytes * len(sides)

        return run

    best, facts = {}, {}
    for pattern in ("read", "write", "mixed"):
        runs = {setting: runner(pattern, setting) for setting in AIO_SETTINGS}
        cost = {s: min(timed(run)["seconds"] for _ in range(2)) for s, run in runs.items()}
        setting = min(cost, key=lambda s: cost[s])
        best[pattern], facts[pattern] = runs[setting], setting
    say(settings=facts)
    return best


def main() -> None:
    kind, *arguments = sys.argv[1:]
    if kind == "adam":
        commands = adam(int(arguments[0]), int(arguments[1]))
    else:
        commands = aio(arguments[0], int(arguments[1]))
    for line in sys.stdin:
        say(**timed(commands[line.strip()]))


if __name__ == "__main__":
    main()
