# SPDX-License-Identifier: Apache-2.0
"""The kernels' threads: same bits however the work is cut, fork, exit, budget, binding, the GIL."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from swapio import _kernels
from swapio.optim import kernels

NUMEL = 200_003
TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = kernels.num_threads()
    yield
    kernels.set_threads(threads)


def tasks() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


def state(seed: int = 0, numel: int = NUMEL) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(numel, generator=random) * 0.01 for _ in range(3)]
    return [*tensors, torch.rand(numel, generator=random) * 1e-4]


def spans_of(tensors: list[torch.Tensor], cuts: list[int]) -> np.ndarray:
    edges = [0, *cuts, tensors[0].numel()]
    spans = np.zeros(len(edges) - 1, kernels.SPAN_DTYPE)
    starts = np.array(edges[:-1], np.uint64)
    for name, tensor in zip(("param", "grad", "exp_avg", "exp_avg_sq"), tensors, strict=True):
        spans[name] = np.uint64(tensor.data_ptr()) + starts * np.uint64(4)
    spans["numel"], spans["position"] = np.diff(edges), edges[:-1]
    return spans


def hyper_array() -> np.ndarray:
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "step": 3, "flags": 3}
    for name, value in values.items():
        hypers[name] = value
    return hypers


FORM = kernels.adam_form(param=torch.float32, grad=torch.float32)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("cuts", [[], [1], [15, 16, 17, 50_000], list(range(100, 200_000, 997))])
def test_threads_and_cuts_change_no_bit(threads: int, cuts: list[int]) -> None:
    expected, got = state(), state()
    kernels.adam_step_spans(FORM, spans_of(expected, []), hyper_array(), threads=1)
    kernels.set_threads(threads)
    kernels.adam_step_spans(FORM, spans_of(got, cuts), hyper_array())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_step_to_other_buffers_leaves_its_sources() -> None:
    source, expected = state(), state()
    kernels.adam_step_spans(FORM, spans_of(expected, []), hyper_array())
    target = [torch.full((NUMEL,), 7.0) for _ in range(3)]
    spans = spans_of(source, [])
    for name, tensor in zip(("param_to", "exp_avg_to", "exp_avg_sq_to"), target, strict=True):
        spans[name] = tensor.data_ptr()
    kernels.adam_step_spans(FORM, spans, hyper_array())
    assert all(torch.equal(a, b) for a, b in zip(source, state(), strict=True))
    assert torch.equal(target[0], expected[0])
    assert torch.equal(target[1], expected[2])
    assert torch.equal(target[2], expected[3])


@pytest.mark.parametrize("level", kernels.simd_levels())
@pytest.mark.parametrize("shift", [0, 1])
def test_a_large_step_to_other_buffers_goes_past_the_caches(level: str, shift: int) -> None:
    """Long enough for stores that bypass the caches, at the start of a cache line and elsewhere."""
    numel = (1 << 20) + 77
    source, expected = state(numel=numel + shift), state(numel=numel + shift)
    target = [torch.full((numel + 32,), 7.0) for _ in range(3)]
    starts = [(-(t.data_ptr() // 4) % 16) + shift for t in target]
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    results = []
    for tensors in (expected, source):
        spans = np.zeros(1, kernels.SPAN_DTYPE)
        spans["numel"] = numel
        for name, tensor in zip(names, tensors, strict=True):
            spans[name] = tensor.data_ptr() + 4 * shift
        results.append(spans)
    for name, tensor, start in zip(
        ("param_to", "exp_avg_to", "exp_avg_sq_to"), target, starts, strict=True
    ):
        results[1][name] = tensor.data_ptr() + 4 * start
    before = kernels.simd_level()
    kernels.set_simd_level(level)
    try:
        for spans in results:
            kernels.adam_step_spans(FORM, spans, hyper_array())
    finally:
        kernels.set_simd_level(before)
    untouched = state(numel=numel + shift)
    assert all(torch.equal(a, b) for a, b in zip(source, untouched, strict=True))
    for tensor, start, found in zip(target, starts, (0, 2, 3), strict=True):
        assert torch.equal(tensor[start : start + numel], expected[found][shift:])
        assert (tensor[:start] == 7).all()
        assert (tensor[start + numel :] == 7).all()


def test_many_python_threads_at_once() -> None:
    kernels.set_threads(3)
    results = [state(seed) for seed in range(6)]

    def work(tensors: list[torch.Tensor]) -> None:
        for step in range(1, 9):
            kernels.adam_step(*tensors, step=step)

    workers = [threading.Thread(target=work, args=(tensors,)) for tensors in results]
    for worker in workers:
        worker.start()
    for _ in range(20):  # the pool may be replaced under them
        kernels.set_threads(2)
        kernels.stop_threads()
        kernels.set_threads(3)
    for worker in workers:
        worker.join()
    for seed, tensors in enumerate(results):
        expected = state(seed)
        work(expected)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_a_python_thread_goes_on_during_a_call() -> None:
    """One call of about a second on one thread: with the GIL held the counter would stand still.

    The counter sleeps in each round, so that what it does before the call begins is a few rounds.
    """
    kernels.set_threads(1)
    tensors = state(numel=1 << 16)
    once = spans_of(tensors, [])
    began = time.perf_counter()
    kernels.adam_step_spans(FORM, once, hyper_array())
    repeats = max(1, int(0.7 / max(time.perf_counter() - began, 1e-5)))
    spans = np.repeat(once, min(repeats, 200_000))
    count, stop = [0], threading.Event()

    def counter() -> None:
        while not stop.wait(0.001):
            count[0] += 1

    thread = threading.Thread(target=counter)
    thread.start()
    try:
        before = count[0]
        kernels.adam_step_spans(FORM, spans, hyper_array(), threads=1)
        during = count[0] - before
    finally:
        stop.set()
        thread.join()
    assert during >= 50


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


# Children load the extension alone: importing torch takes seconds, and its OpenMP threads would be
# counted, and do not survive fork.
SETUP = f"""
import importlib.util, os, sys, threading, time, warnings
import numpy as np
spec = importlib.util.spec_from_file_location("swapio._kernels", {_kernels.__file__!r})
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
def step(n=1 << 20):
    arrays = [np.full(n, x, np.float32) for x in (0.1, 0.01, 0.001, 1e-4)]
    spans = np.zeros(1, kernels.SPAN_DTYPE)
    for name, array in zip(("param", "grad", "exp_avg", "exp_avg_sq"), arrays):
        spans[name] = array.ctypes.data
    spans["numel"] = n
    hypers = np.zeros(1, kernels.HYPER_DTYPE)
    hypers["lr"], hypers["eps"], hypers["step"], hypers["flags"] = 1e-3, 1e-8, 2, 3
    hypers["beta1"], hypers["beta2"] = 0.9, 0.999
    kernels.adam_step_spans({FORM}, spans, hypers)
    return float(arrays[0].sum())
"""


@pytest.mark.forks
def test_a_forked_child_steps_on_its_own_threads() -> None:
    result = run_python(
        SETUP
        + """
import signal
kernels.set_threads(2)
first = step()
stop = threading.Event()
def busy():
    while not stop.is_set():
        step()
worker = threading.Thread(target=busy)
worker.start()
warnings.simplefilter("ignore")
codes = []
for _ in range(5):  # with the pool at work in another thread
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(0 if step() == first and kernels.num_threads() == 2 else 1)
    codes.append(os.waitpid(pid, 0)[1])
stop.set()
worker.join()
assert step() == first
print(codes)
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[0, 0, 0, 0, 0]"


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise SystemExit(4)"])
def test_exit_is_clean_while_a_daemon_thread_steps(end: str) -> None:
    code = f"""
kernels.set_threads(2)
def busy():
    while True:
        step()
threading.Thread(target=busy, daemon=True).start()
time.sleep(0.2)
{end}
"""
    result = run_python(SETUP + code)
    assert result.returncode == {"pass": 0, "sys.exit(3)": 3, "raise SystemExit(4)": 4}[end]
    assert result.stderr == ""


def test_budget_follows_affinity_and_local_ranks() -> None:
    code = SETUP + "print(kernels.num_threads(), len(os.sched_getaffinity(0)))"
    threads, cores = map(int, run_python(code).stdout.split())
    assert threads == cores
    shared = run_python(code, LOCAL_WORLD_SIZE=str(cores)).stdout.split()
    assert int(shared[0]) == 1
    crowded = run_python(code, LOCAL_WORLD_SIZE=str(10 * cores)).stdout.split()
    assert int(crowded[0]) == 1
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + code
    assert run_python(pinned).stdout.split() == ["1", "1"]


def test_no_thread_is_made_before_the_first_call_and_no_more_than_the_budget() -> None:
    code = """
def count():
    return len(os.listdir("/proc/self/task"))
before = count()
kernels.set_threads(1)
step()
one = count() - before
kernels.set_threads(4)
idle = count() - before
step()
print(one, idle, count() - before)
kernels.stop_threads()
print(count() - before)
"""
    assert run_python(SETUP + code).stdout.split() == ["0", "0", "3", "0"]


def test_threads_are_bound_to_the_cores_given() -> None:
    core = min(os.sched_getaffinity(0))
    tensors = state()  # before the count: torch makes threads of its own
    before = tasks()
    kernels.set_threads(2, [core])
    assert kernels.thread_cores() == [core]
    kernels.adam_step(*tensors, step=1)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # a thread binds itself as its first act
        fresh = tasks() - before
        masks = [os.sched_getaffinity(int(task)) for task in fresh]
        if masks == [{core}]:
            break
        time.sleep(0.01)
    assert masks == [{core}]
    assert len(os.sched_getaffinity(0)) >= 1
    with pytest.raises(ValueError, match="affinity"):
        kernels.set_threads(2, [100_000])
    for wanted in (0, -1, 4097, 1 << 40):  # refused before the pool that runs is given up
        with pytest.raises(ValueError, match="at least 1 and at most 4096"):
            kernels.set_threads(wanted)
    assert kernels.num_threads() == 2
    kernels.adam_step(*tensors, step=1, threads=1 << 40)  # more than the budget: the budget


def pool_threads() -> dict[str, str]:
    """How often each of the pool's threads went to sleep or was put aside, and how it is now."""
    found = {}
    for task in TASKS.iterdir():
        lines = (task / "status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines)
        if fields["Name"] == "swapio-kernel":
            keys = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            found[task.name] = " ".join(fields[key] for key in keys)
    return found


def settled_pool() -> dict[str, str]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = pool_threads()
        time.sleep(0.05)
        if before == pool_threads() and all(value[0] == "S" for value in before.values()):
            return before
    pytest.fail("the pool's threads do not come to rest")


def test_the_pool_sleeps_while_torch_computes() -> None:
    """Threads that spin between calls would take the cores from torch's own pool."""
    kernels.stop_threads()
    kernels.set_threads(3)
    kernels.adam_step(*state(), step=1)
    asleep = settled_pool()
    assert len(asleep) == 2
    matrix = torch.ones(300, 300)
    for _ in range(30):
        matrix = torch.mm(matrix, matrix).clamp_(max=1.0)
    assert pool_threads() == asleep, "the pool's threads ran without a call"


def test_many_callers_share_one_budget() -> None:
    """Each calling thread works on its own step; the pool's threads are not made once for each."""
    kernels.stop_threads()
    kernels.set_threads(3)
    counts, stop = [], threading.Event()

    def work(seed: int) -> None:
        tensors = state(seed)
        while not stop.is_set():
            kernels.adam_step(*tensors, step=1)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 30
    while len(counts) < 50 or (max(counts) < 2 and time.monotonic() < deadline):
        counts.append(task_names().count("swapio-kernel"))
        time.sleep(0.002)
    stop.set()
    for worker in workers:
        worker.join()
    assert max(counts) == 2


def task_names() -> list[str]:
    return [(task / "comm").read_text().strip() for task in TASKS.iterdir()]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_bound_caller_does_not_bind_the_pool() -> None:
    """Whoever calls first makes the pool's threads, and a thread inherits its maker's mask."""
    every, one = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    tensors, seen = state(), []
    before = tasks()
    kernels.set_threads(3)

    def call() -> None:
        os.sched_setaffinity(0, {one})  # this thread only
        kernels.adam_step(*tensors, step=1)
        time.sleep(0.3)
        fresh = tasks() - before - {str(threading.get_native_id())}
        seen.extend(os.sched_getaffinity(int(task)) for task in fresh)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert seen == [every, every]


@pytest.mark.parametrize("level", ["", "auto", *kernels.simd_levels()])
def test_the_level_can_be_chosen_from_outside(level: str) -> None:
    result = run_python(SETUP + "print(step(), kernels.simd_level())", SWAPIO_SIMD=level)
    got = result.stdout.split()
    plain = level in ("", "auto")
    assert got[1] == (kernels.simd_levels()[-1] if plain else level)
    assert got[0] == run_python(SETUP + "print(step())").stdout.strip()


def test_an_unknown_level_is_a_clear_error() -> None:
    code = SETUP + "step()"
    result = run_python(code, SWAPIO_SIMD="avx9000")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: SWAPIO_SIMD asks for the SIMD level 'avx9000'")
    assert "scalar" in last
    with pytest.raises(ValueError, match="set_simd_level asks for the SIMD level 'neon9'"):
        kernels.set_simd_level("neon9")


def test_replacing_the_pool_ends_its_threads() -> None:
    def replace() -> int:
        for _ in range(30):
            kernels.set_threads(3)
            kernels.adam_step(*state(), step=1)
        kernels.stop_threads()
        return len(tasks())

    assert replace() >= replace()
