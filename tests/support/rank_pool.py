# SPDX-License-Identifier: Apache-2.0
"""Processes with gloo between them, kept over many tests: importing torch takes seconds.

A case is a function `case(rank, group, **arguments)`; the pool runs it on the first `world_size`
of its processes, each with a process group of that size, and returns what each returned.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import multiprocessing
import os
import signal
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

# What ranks import by and by: torch's optimizers import torch._dynamo, which takes longest.
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "pytest",
    "swapio.integrations.dcp",
    "swapio.optim.zero.optimizer",
]


class CaseFailed(Exception):
    """A case raised; the message has the traceback of each rank that did."""


def _worker(rank, size, pipe, file):
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1)  # a rank that hangs says where
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    groups = {
        count: dist.new_group(list(range(count)), backend="gloo") for count in range(1, size + 1)
    }
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            break
        if request is None:
            break
        module, name, world_size, arguments = request
        try:
            case = getattr(importlib.import_module(module), name)
            pipe.send((None, case(rank, groups[world_size], **arguments)))
        except BaseException as error:
            pipe.send((f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None))
    with suppress(Exception):
        dist.destroy_process_group()


class RankPool:
    """So many processes."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(rank, size, theirs, folder / "rendezvous"), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(self, case, world_size, *, timeout=60, **arguments):
        """Run `case` (a function of a module) and return the results by rank."""
        answers = self.try_run(case, world_size, timeout=timeout, **arguments)
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
        if errors:
            raise CaseFailed("\n".join(errors))
        return [value for _, value in answers]

    def try_run(self, case, world_size, *, timeout=60, **arguments):
        """Return (error or None, result) by rank; a rank that died or hangs has such an error."""
        pipes = self._pipes[:world_size]
        for pipe in pipes:
            with suppress(BrokenPipeError):
                pipe.send((case.__module__, case.__name__, world_size, arguments))
        answers = []
        for pipe, process in zip(pipes, self.processes, strict=False):
            try:
                if pipe.poll(timeout):
                    answers.append(pipe.recv())
                    continue
                answers.append((f"no answer in {timeout} s", None))
                os.kill(process.pid, signal.SIGUSR1)
            except (EOFError, ConnectionError):
                answers.append(("the process died", None))
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
