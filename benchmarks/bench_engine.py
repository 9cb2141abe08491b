# SPDX-License-Identifier: Apache-2.0
"""The async file engine against fio, in paired rounds on the same folder and the same files.

In each round every row runs once, in random order; a ratio is formed within a round, and the table
shows the median of the ratios with a 95 % interval of that median. Rounds go on, up to
--max-rounds, while an interval is wider than --half-width on either side.
The ceiling of a pattern is fio's io_uring job (fixed buffers, registered file, huge-page buffers)
with the better median of 512 KiB x 32 and 1 MiB x 16. "mixed" moves as many bytes in as out; its
ceiling is the better of one 50/50 stream and of a reader beside a writer (counted as twice the
slower side). CPU seconds are user and system time of the process that does the I/O.

DeepSpeed's aio_handle joins, at its best setting of several, when --peer-python has it. The last
line of standard output is JSON. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from paired import Peer, PeerFailed, interval

from swapio.aio import OP_READ, OP_WRITE, Engine, File, IOFuture, Request, probe_io_uring

MIB = 1 << 20
CONFIGS = {"512k_x32": (512 << 10, 32), "1m_x16": (MIB, 16)}
NUM_THREADS = 8
AHEAD_BYTES = 128 * MIB
NUM_PER_SUBMIT = 8  # of 8 MiB: a chunk of state, as the store submits it
PATTERNS = ("read", "write", "mixed")


@dataclass
class Sample:
    """What one run moved."""

    gbs: float
    cpu_seconds_per_gb: float


@dataclass
class Row:
    """One contender of a pattern."""

    name: str
    run: Callable[[], Sample]
    samples: list[Sample] = field(default_factory=list)

    @property
    def median_gbs(self) -> float:
        return statistics.median(sample.gbs for sample in self.samples)


@dataclass
class Bench:
    """The folder, its files and the length of a run."""

    folder: Path
    nbytes: int
    seconds: float

    def path(self, tag: str) -> Path:
        return self.folder / tag

    def lay_out(self) -> None:
        """Write the files once: no run pays for block allocation."""
        block = np.random.default_rng(0).bytes(8 * MIB)
        for tag in "ab":
            with self.path(tag).open("wb", buffering=0) as file:
                for _ in range(0, self.nbytes, len(block)):
                    file.write(block)
                os.fsync(file.fileno())


def huge_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory at a multiple of 2 MiB, on huge pages where the kernel gives them."""
    # Private: shared anonymous memory is shmem, which gets no huge pages.
    memory = mmap.mmap(-1, nbytes + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    view = np.frombuffer(memory, dtype=np.uint8)
    view[:] = 1
    return memory, -(-start // (2 * MIB)) * 2 * MIB


# --- fio ---


def fio_jobs(bench: Bench, pattern: str) -> list[str]:
    reads = ["--name=r", "--rw=read", f"--filename={bench.path('a')}"]
    writes = ["--name=w", "--rw=write", f"--filename={bench.path('b')}"]
    stream = ["--name=m", "--rw=rw", "--rwmixread=50", f"--filename={bench.path('a')}"]
    return {"read": reads, "write": writes, "pair": reads + writes, "stream": stream}[pattern]


def run_fio(bench: Bench, pattern: str, options: list[str]) -> Sample:
    command = [
        *("fio", "--output-format=json", "--direct=1", f"--runtime={bench.seconds}s"),
        *("--time_based=1", "--thread=1", "--invalidate=0", "--fallocate=none"),
        *("--iomem_align=2m", *options, *fio_jobs(bench, pattern)),
    ]
    # glibc 2.35 and later then put fio's buffers on transparent huge pages.
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"fio failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    sides = [sum(job[side]["bw_bytes"] for job in jobs) / 1e9 for side in ("read", "write")]
    moved = sum(job[side]["io_bytes"] for job in jobs for side in ("read", "write")) / 1e9
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    return Sample(2 * min(sides) if pattern == "pair" else sum(sides), cpu / moved)


def fio_uring(bench: Bench, pattern: str, block: int, depth: int) -> Sample:
    uring = ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"]
    sized = [f"--size={bench.nbytes}", f"--bs={block}", f"--iodepth={depth}"]
    return run_fio(bench, pattern, uring + sized)


def fio_psync(bench: Bench, pattern: str) -> Sample:
    share = bench.nbytes // NUM_THREADS
    parts = [f"--numjobs={NUM_THREADS}", f"--size={share}", f"--offset_increment={share}"]
    return run_fio(bench, pattern, ["--ioengine=psync", f"--bs={512 << 10}", *parts])


# --- swapio ---


def requests_for(
    bench: Bench, files: dict[str, File], pattern: str, address: int, memory_bytes: int, nbytes: int
) -> Iterator[Request]:
    """Walk over the files for ever; slots of memory are used in turn.

    The memory is as large as fio's, one block for each place in the queue, and requests that are
    in flight together share it: how much memory the disk's data is spread over changes the speed.
    """
    num_slots = max(1, memory_bytes // nbytes)
    count = 0
    while True:
        for op, tag in ((OP_READ, "a"), (OP_WRITE, "b")):
            if pattern in ("mixed", "read" if op == OP_READ else "write"):
                turn = count // 2 if pattern == "mixed" else count
                offset = turn * nbytes % bench.nbytes
                yield Request(op, files[tag], address + count % num_slots * nbytes, nbytes, offset)
                count += 1


def run_engine(
    bench: Bench, pattern: str, *, kind: str, block: int, depth: int,
    request_bytes: int = 8 * MIB, num_per_submit: int = NUM_PER_SUBMIT,
) -> Sample:  # fmt: skip
    """Keep 128 MiB of requests submitted, and wait for the oldest submission."""
    memory_bytes = block * (depth if kind == "io_uring" else NUM_THREADS)
    request_bytes = min(request_bytes, memory_bytes)
    num_ahead = max(2, AHEAD_BYTES // (request_bytes * num_per_submit))
    memory, address = huge_pages(memory_bytes)
    with Engine(
        kind, queue_depth=depth, block_size=block, num_threads=NUM_THREADS, direct="required"
    ) as engine:
        engine.register(address, memory_bytes)
        files = {tag: engine.open(bench.path(tag)) for tag in "ab"}
        requests = requests_for(bench, files, pattern, address, memory_bytes, request_bytes)
        ahead: deque[IOFuture] = deque()
        moved = 0
        usage = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        end = start + bench.seconds
        while time.perf_counter() < end:
            while len(ahead) < num_ahead:
                batch = [next(requests) for _ in range(num_per_submit)]
                ahead.append(engine.submit(batch, owner=memory))
            moved += ahead.popleft().result()
        moved += sum(future.result() for future in ahead)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return Sample(moved / seconds / 1e9, cpu / (moved / 1e9))


# --- DeepSpeed ---


def peer_for(python: str, bench: Bench) -> Peer | None:
    if not python:
        return None
    try:
        peer = Peer(python, "aio", str(bench.folder), str(bench.nbytes))
    except (OSError, PeerFailed) as error:
        print(f"DeepSpeed is left out: {error}", file=sys.stderr)
        return None
    print(f"DeepSpeed's best settings: {peer.facts['settings']}", file=sys.stderr)
    return peer


def run_peer(bench: Bench, peer: Peer, pattern: str) -> Sample:
    """Whole files, again and again, as long as the other rows run."""
    seconds = cpu = nbytes = 0.0
    while seconds < bench.seconds:
        result = peer.ask(pattern)
        seconds += result["seconds"]
        cpu += result["cpu_seconds"]
        nbytes += result["nbytes"] / 1e9
    return Sample(nbytes / seconds, cpu / nbytes)


# --- rounds and ratios ---


def rows_for(bench: Bench, pattern: str, peer: Peer | None) -> list[Row]:
    rows = []
    fio_patterns = ("pair", "stream") if pattern == "mixed" else (pattern,)
    for name, (block, depth) in CONFIGS.items():
        rows += [
            Row(
                f"fio_uring_{name}_{fio_pattern}",
                lambda p=fio_pattern, b=block, d=depth: fio_uring(bench, p, b, d),
            )
            for fio_pattern in fio_patterns
        ]
        if probe_io_uring()[0]:
            rows.append(
                Row(
                    f"swapio_uring_{name}",
                    lambda b=block, d=depth: run_engine(
                        bench, pattern, kind="io_uring", block=b, depth=d
                    ),
                )
            )
    rows.append(
        Row(
            "swapio_threads",
            lambda: run_engine(bench, pattern, kind="threads", block=512 << 10, depth=NUM_THREADS),
        )
    )
    if pattern != "mixed":
        rows.append(Row("fio_psync", lambda: fio_psync(bench, pattern)))
    if peer is not None:
        rows.append(Row("deepspeed", lambda: run_peer(bench, peer, pattern)))
    return rows


def small_rows(bench: Bench, pattern: str) -> list[Row]:
    """Transfers of 64 KiB, one to a submission, and 16."""
    small = 64 << 10
    rows = [Row("fio_uring_64k", lambda: fio_uring(bench, pattern, small, 32))]
    for name, num_per_submit in (("swapio_64k_single", 1), ("swapio_64k_batched", 16)):
        rows.append(
            Row(
                name,
                lambda n=num_per_submit: run_engine(
                    bench,
                    pattern,
                    kind=best_kind(),
                    block=small,
                    depth=32,
                    request_bytes=small,
                    num_per_submit=n,
                ),
            )
        )
    return rows


def best_kind() -> str:
    return "io_uring" if probe_io_uring()[0] else "threads"


def run_rounds(
    rows: list[Row], title: str, *, rounds: int, max_rounds: int, half_width: float
) -> None:
    shuffled = random.Random(0)
    for number in range(max_rounds):
        if number >= rounds and is_narrow(rows, half_width):
            break
        order = list(rows)
        shuffled.shuffle(order)
        for row in order:
            print(f"\r{title}: round {number + 1} {row.name:32s}", end="",
                  file=sys.stderr, flush=True)  # fmt: skip
            row.samples.append(row.run())
    print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def is_narrow(rows: list[Row], half_width: float) -> bool:
    """Whether every ratio's interval is at most `half_width` of it to each side."""
    return all(
        high - low <= 2 * half_width * median for median, low, high in compare(rows).values()
    )


def ratio(over: Row, under: Row, value: Callable[[Sample], float]) -> list[float]:
    pairs = zip(over.samples, under.samples, strict=True)
    return [round(end, 4) for end in interval([value(a) / value(b) for a, b in pairs])]


def speed(sample: Sample) -> float:
    return sample.gbs


def cpu(sample: Sample) -> float:
    return sample.cpu_seconds_per_gb


def best(rows: list[Row], prefix: str) -> Row | None:
    return max(
        (row for row in rows if row.name.startswith(prefix)),
        key=lambda row: row.median_gbs, default=None,
    )  # fmt: skip


def compare(rows: list[Row]) -> dict[str, list[float]]:
    """Form the ratios that the targets are stated in."""
    ceiling = best(rows, "fio_uring")
    uring = best(rows, "swapio_uring")
    threads, psync = best(rows, "swapio_threads"), best(rows, "fio_psync")
    result = {}
    if ceiling and uring:
        result["uring_of_fio"] = ratio(uring, ceiling, speed)
        # CPU time is compared at the same block size and depth; pairs of jobs are left out.
        config = uring.name.removeprefix("swapio_uring_")
        same = best([row for row in rows if not row.name.endswith("_pair")], f"fio_uring_{config}")
        if same:
            result["uring_cpu_of_fio"] = ratio(uring, same, cpu)
    if threads and psync:
        result["threads_of_psync"] = ratio(threads, psync, speed)
        result["threads_cpu_of_psync"] = ratio(threads, psync, cpu)
    if threads and uring:
        result["threads_of_uring"] = ratio(threads, uring, speed)
    for row in rows:
        if ceiling and row.name.startswith(("swapio_64k", "deepspeed")):
            result[f"{row.name}_of_fio"] = ratio(row, ceiling, speed)
            result[f"{row.name}_cpu_of_fio"] = ratio(row, ceiling, cpu)
        if uring and row.name == "deepspeed":
            result["uring_of_deepspeed"] = ratio(uring, row, speed)
            result["uring_cpu_of_deepspeed"] = ratio(uring, row, cpu)
    return result


def report(title: str, rows: list[Row]) -> dict[str, dict[str, dict[str, object]]]:
    """Print a pattern's figures and return its tables."""
    print(f"\n{title:34s}{'GB/s':>8s}{'CPU s/GB':>10s}")
    table: dict[str, dict[str, object]] = {}
    for row in rows:
        used = statistics.median(sample.cpu_seconds_per_gb for sample in row.samples)
        print(f"  {row.name:32s}{row.median_gbs:8.2f}{used:10.4f}")
        table[row.name] = {"gb_per_s": round(row.median_gbs, 3), "cpu_s_per_gb": round(used, 4)}
    ratios: dict[str, dict[str, object]] = {}
    for name, (median, low, high) in compare(rows).items():
        print(f"  {name:32s}{median:8.3f}  [{low:.3f}, {high:.3f}]")
        ratios[name] = {"ratio": median, "interval_95": [low, high], "rounds": len(rows[0].samples)}
    return {title: table, f"{title}_ratios": ratios}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="folder on the disk to measure (scratch inside)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-rounds", type=int, default=7, help="while intervals are wide")
    parser.add_argument("--half-width", type=float, default=0.03, help="share of the median")
    parser.add_argument("--peer-python", default="", help="a Python that has DeepSpeed")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--mib", type=int, default=1024, help="size of each of the two files")
    parser.add_argument(
        "--patterns", default="read,write,mixed,small_read,small_write",
        help="comma-separated (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if shutil.which("fio") is None:
        raise SystemExit("this benchmark compares with fio: install it (Debian: apt install fio)")
    results: dict[str, object] = {"bench": "engine", "files_mib": arguments.mib}
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-engine-") as folder:
        bench = Bench(Path(folder).resolve(), arguments.mib * MIB, arguments.seconds)
        bench.lay_out()
        peer = peer_for(arguments.peer_python, bench)
        for pattern in arguments.patterns.split(","):
            small = pattern.startswith("small_")
            rows = small_rows(bench, pattern[6:]) if small else rows_for(bench, pattern, peer)
            run_rounds(
                rows, pattern, rounds=arguments.rounds, half_width=arguments.half_width,
                max_rounds=max(arguments.rounds, arguments.max_rounds),
            )  # fmt: skip
            results |= report(pattern, rows)
        if peer is not None:
            peer.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
