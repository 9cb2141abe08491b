# SPDX-License-Identifier: Apache-2.0
"""Buffers, interrupts, the GIL, fork and exit: nothing is freed, lost, hung or torn down early."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from support.script import run_script
from swapio.aio import Engine, EngineKind, File, IOFuture
from swapio.errors import ClosedError

MakeFile = Callable[..., File]
MIB = 1 << 20


@pytest.mark.parametrize("rounds", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_memory_outlives_a_dropped_tensor(engine: Engine, make_file: MakeFile, rounds: int) -> None:
    """liburing#733: memory that was freed and used again was still written by the kernel."""
    nbytes = 8 * MIB if rounds > 100 else 2 * MIB
    with make_file(size=nbytes) as file:
        for _ in range(rounds):
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            future = engine.pread(file, tensor)
            del tensor
            gc.collect(0)
            other = torch.full((nbytes,), 7, dtype=torch.uint8)
            future.result()
            assert bool((other == 7).all())
        for _ in range(10):
            engine.pread(file, torch.empty(nbytes, dtype=torch.uint8))
        engine.drain()


def test_owners_are_given_back(engine: Engine, make_file: MakeFile) -> None:
    with make_file(size=MIB) as file:
        array = np.zeros(MIB, dtype=np.uint8)
        before = sys.getrefcount(array)
        future = engine.pread(file, array)
        future.result()
        assert sys.getrefcount(array) == before
        engine.pread(file, array)
        engine.drain()
        assert sys.getrefcount(array) == before


class _Interrupt(Exception):
    pass


def test_interrupts_while_waiting(engine: Engine, make_file: MakeFile) -> None:
    """Signals between any two byte codes of submit and result change nothing but the caller."""

    def interrupt(*_: object) -> None:
        raise _Interrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    content = np.random.default_rng(3).integers(0, 256, 4 * MIB, dtype=np.uint8)
    num_interrupts = 0
    try:
        with make_file() as file:
            engine.pwrite(file, content).result()
            for attempt in range(100):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002 + attempt * 0.00003)
                    while True:
                        engine.pread(file, np.empty(4 * MIB, dtype=np.uint8)).result()
                except _Interrupt:
                    num_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            engine.drain(timeout=30)
            target = np.zeros_like(content)
            assert engine.pread(file, target).result() == content.nbytes
            assert np.array_equal(target, content)
            assert not engine._handle.pending
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_interrupts == 100


def test_python_runs_while_transfers_are_waited_for(engine: Engine, make_file: MakeFile) -> None:
    """DeepSpeed#7727: waiting with the GIL held hung when a worker needed it."""
    stop = threading.Event()
    counts = [0]

    def count() -> None:
        while not stop.is_set():
            counts[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with make_file() as file:
            for round_number in range(8):
                tensor = torch.ones(16 * MIB, dtype=torch.uint8)
                future = engine.pwrite(file, tensor)
                if round_number % 2:
                    del tensor
                before = counts[0]
                future.result()
                while counts[0] == before:
                    time.sleep(0)
    finally:
        stop.set()
        thread.join()


def _switches(threads: set[Path]) -> dict[Path, int]:
    """How often each thread has gone to sleep; a thread that is not asleep is -1."""
    found = {}
    for thread in threads:
        status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
        asleep = status["State"].startswith("S")
        found[thread] = int(status["voluntary_ctxt_switches"]) if asleep else -1
    return found


def test_an_idle_engine_sleeps(kind: EngineKind, tmp_path: Path) -> None:
    """liburing#2 and kin: a polling thread burns a core."""
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    with Engine(kind) as engine, engine.open(tmp_path / "data", create=True) as file:
        engine.pwrite(file, b"x" * MIB).result()
        time.sleep(0.2)
        threads = {task for task in set(tasks.iterdir()) - before if task.exists()}
        asleep = _switches(threads)
        time.sleep(0.5)
        assert _switches(threads) == asleep  # nobody woke up in between
        assert -1 not in asleep.values()
        assert threads or kind == "io_uring"


def test_far_more_requests_than_the_queue_has(kind: EngineKind, tmp_path: Path) -> None:
    """tokio io-uring#302 and kin: the completion queue overflowed and completions were lost."""
    memory = np.zeros(4096 * 16, dtype=np.uint8)
    with (
        Engine(kind, queue_depth=4, num_threads=4) as engine,
        engine.open(tmp_path / "data", create=True, size=4096 * 100) as file,
    ):
        gc.collect()
        num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        futures = [
            engine.pread(file, memory[4096 * (i % 16) : 4096 * (i % 16 + 1)], 4096 * (i % 100))
            for i in range(10_000)
        ]
        assert sum(future.result() for future in futures) == 10_000 * 4096
        assert engine.stats().num_reads == 10_000
        assert len(os.listdir("/proc/self/fd")) <= num_open  # noqa: PTH208


def test_many_engines(kind: EngineKind, tmp_path: Path) -> None:
    """liburing#35 and kin: rings add up, and their memory is accounted for late."""
    for _ in range(500):
        Engine(kind, queue_depth=4, num_threads=2).close()
    # A tiny memory lock limit leaves room for a few rings only; the others are thread pools then.
    mixed = "auto" if kind == "io_uring" else kind
    engines = [Engine(mixed, queue_depth=4, num_threads=2) for _ in range(64)]
    files = [
        engine.open(tmp_path / f"{i}", create=True, lock=True) for i, engine in enumerate(engines)
    ]
    futures = [
        engine.pwrite(file, b"x" * 5000) for engine, file in zip(engines, files, strict=True)
    ]
    assert sum(future.result() for future in futures) == 64 * 5000
    for engine in engines:
        engine.close()


def test_closing_from_many_threads(kind: EngineKind, tmp_path: Path) -> None:
    """Whoever closes, transfers submitted before complete, and later ones raise ClosedError."""
    memory = np.ones(MIB, dtype=np.uint8)
    errors: list[BaseException] = []
    for _ in range(10):
        engine = Engine(kind, queue_depth=4, block_size=4096, num_threads=2)
        file = engine.open(tmp_path / "data", create=True)
        before = [engine.pwrite(file, memory, i * MIB) for i in range(4)]

        def write(engine: Engine = engine, file: File = file) -> None:
            try:
                while True:
                    engine.pwrite(file, memory).result(timeout=30)
            except ClosedError:
                pass
            except BaseException as error:
                errors.append(error)

        calls = [file.close, file.close, engine.close, engine.close, engine.close, write, write]
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert errors == []
        assert engine.closed
        assert [future.result(timeout=0) for future in before] == [MIB] * 4


def test_dropped_engines_and_files_are_swept(kind: EngineKind, tmp_path: Path) -> None:
    def use_and_drop() -> None:
        engine = Engine(kind)
        file = engine.open(tmp_path / "data", create=True, lock=True)
        engine.pwrite(file, b"x" * MIB)

    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    use_and_drop()
    gc.collect()
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) > num_open:  # noqa: PTH208
        Engine("threads", num_threads=1).close()
        assert time.monotonic() < deadline
    with Engine(kind) as engine:
        engine.open(tmp_path / "data", lock=True).close()


# fork() with threads is what is tested here; Python 3.12 and later warn about it.
@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("leave", ["os._exit", "sys.exit"])
def test_fork_with_transfers_in_flight(
    engine: Engine, make_file: MakeFile, tmp_path: Path, leave: str
) -> None:
    """liburing#612 and kin: a child shared the ring, and both corrupted it."""
    source = np.random.default_rng(5).integers(0, 256, 32 * MIB, dtype=np.uint8)
    file = make_file()
    engine.pwrite(file, source).result()
    target = np.zeros_like(source)
    futures = [engine.pread(file, target[i * MIB : (i + 1) * MIB], i * MIB) for i in range(32)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _use_in_child(engine, file, futures[-1], tmp_path / "child")
        finally:
            if leave == "sys.exit":
                gc.collect()
            os._exit(code)
    assert sum(future.result() for future in futures) == source.nbytes
    assert np.array_equal(source, target)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    file.close()


def _use_in_child(engine: Engine, file: File, future: IOFuture, path: Path) -> int:
    calls = [
        lambda: engine.pread(file, bytearray(1)),
        lambda: engine.open(path),
        lambda: file.size,
        engine.drain,
        engine.close,
        engine.stats,
        file.close,
        *([] if future._done else [future.result]),
    ]
    for call in calls:
        try:
            call()
        except ClosedError as error:
            if "parent process" not in str(error):
                return 2
        else:
            return 3
    with Engine(engine.kind) as own, own.open(path, create=True) as mine:
        own.pwrite(mine, b"child").result()
        back = bytearray(5)
        own.pread(mine, back).result()
        return 0 if back == b"child" else 4


CHILD_EXITS = """
import os, sys
import numpy as np
from swapio.aio import Engine
engine = Engine(sys.argv[2])
file = engine.open(sys.argv[1], create=True, size=32 << 20)
target = np.zeros(32 << 20, dtype=np.uint8)
future = engine.pread(file, target)
if os.fork() == 0:
    sys.exit(0)  # runs atexit handlers and finalizers
pid, status = os.wait()
print(future.result(), status)
"""


@pytest.mark.forks
def test_child_that_exits_normally(kind: EngineKind, tmp_path: Path) -> None:
    done = run_script(CHILD_EXITS, tmp_path / "data", kind)
    assert (done.returncode, done.stdout.strip()) == (0, f"{32 * MIB} 0"), done.stderr


class _Dataset(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@pytest.mark.forks
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_data_loader_workers(kind: EngineKind, tmp_path: Path, method: str) -> None:
    with Engine(kind) as engine, engine.open(tmp_path / "data", create=True) as file:
        loader = torch.utils.data.DataLoader(
            _Dataset(), batch_size=4, num_workers=2, multiprocessing_context=method
        )
        for _ in range(2):
            total = torch.zeros(4)
            for batch in loader:
                engine.pwrite(file, batch).result()
                engine.pread(file, batch).result()
                total += batch.sum(0)
            assert bool((total == 66).all())


EXIT = """
import sys
import numpy as np
import swapio.aio
engine = swapio.aio.Engine(sys.argv[2])
file = engine.open(sys.argv[1], create=True)
memory = np.ones(16 << 20, dtype=np.uint8)
for i in range(20):
    engine.pwrite(file, memory, i * (16 << 20))
class Cycle: pass
"""
ENDINGS = {
    "falls off the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "raises": ("raise RuntimeError('on purpose')", 1),
    "SIGTERM": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "global reference": ("sys.keep = (engine, file)", 0),
    "cycle": ("c = Cycle(); c.me = c; c.engine = engine; c.file = file; del c, engine, file", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_with_transfers_in_flight(kind: EngineKind, tmp_path: Path, ending: str) -> None:
    """spdl#1591 and kin: the interpreter hung at exit, or crashed."""
    source, code = ENDINGS[ending]
    done = run_script(EXIT + source, tmp_path / "data", kind)
    assert done.returncode == code
    assert "Exception ignored" not in done.stderr
    if code >= 0:
        assert (tmp_path / "data").stat().st_size == 20 * (16 << 20)
