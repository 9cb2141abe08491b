# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a device: one process, several at once, several that take turns.

python benchmarks/bench_turns.py DIR [--ranks 3] [--rounds 5] [--seconds 4]

Each process reads and writes its own file in batches of 64 MiB, as the pipelined swapper does. The
ratio that matters is the last one: several ranks with turns, together, against one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

FILE_BYTES = 512 << 20
BATCH_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20


def work(folder: str, index: int, seconds: float, *, takes_turns: bool) -> None:
    """Be one rank: prints "ready", waits for a line, moves bytes, prints GB/s."""
    from swapio.aio import OP_READ, OP_WRITE, Engine, IOFuture, Request
    from swapio.buffers import BufferPool
    from swapio.turns import TurnTakingEngine

    pool = BufferPool(2 * BATCH_BYTES)
    lease = pool.lease(pool.nbytes)
    lease.memory[:] = os.urandom(1 << 16) * (lease.nbytes >> 16)
    engine = TurnTakingEngine([folder]) if takes_turns else Engine()
    path = Path(folder) / f"bench-turns-{index}"
    file = engine.open(path, size=FILE_BYTES, create=True)
    file.allocate(FILE_BYTES)

    def batch(op: int, start: int) -> list[IOFuture]:
        address = lease.address + (BATCH_BYTES if op == OP_WRITE else 0)
        return [
            engine.submit(
                [Request(op, file, address + at, CHUNK_BYTES, start % FILE_BYTES + at)], owner=lease
            )
            for at in range(0, BATCH_BYTES, CHUNK_BYTES)
        ]

    for start in range(0, FILE_BYTES, BATCH_BYTES):
        for future in batch(OP_WRITE, start):
            future.result()
    print("ready", flush=True)
    sys.stdin.readline()
    began, moved, start = time.perf_counter(), 0, 0
    pending: deque[IOFuture] = deque()
    while time.perf_counter() - began < seconds:
        pending += batch(OP_READ, start)
        pending += batch(OP_WRITE, start + FILE_BYTES // 2)
        start += BATCH_BYTES
        while len(pending) > 2 * BATCH_BYTES // CHUNK_BYTES:
            moved += pending.popleft().result()
    while pending:
        moved += pending.popleft().result()
    print(moved / (time.perf_counter() - began) / 1e9, flush=True)
    file.close()
    engine.close()
    path.unlink()


def together(folder: str, ranks: int, seconds: float, *, takes_turns: bool) -> float:
    """Return the GB/s of all ranks together."""
    command = [sys.executable, __file__, folder, "--seconds", str(seconds)]
    command += ["--turns"] if takes_turns else []
    children = [
        subprocess.Popen(
            [*command, "--rank", str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(ranks)
    ]
    outputs: list[Any] = [child.stdout for child in children]
    for output in outputs:
        output.readline()
    for child in children:
        if child.stdin is not None:
            child.stdin.write("go\n")
            child.stdin.flush()
    total = sum(float(output.readline()) for output in outputs)
    for child in children:
        child.communicate()
    return total


def main() -> None:
    """Run the rounds in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.folder, args.rank, args.seconds, takes_turns=args.turns)
        return
    kinds = {"one": (1, False), "at once": (args.ranks, False), "in turns": (args.ranks, True)}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, (ranks, takes_turns) in kinds.items():
            rates[name].append(together(args.folder, ranks, args.seconds, takes_turns=takes_turns))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [b / a for a, b in zip(rates["one"], rates["in turns"], strict=True)]
    found = {**medians, "in turns / one": statistics.median(ratios)}
    if args.json:
        print(json.dumps({"ranks": args.ranks, **found}))
        return
    for name, value in found.items():
        print(f"{name:>16}  {value:.2f}" + (" GB/s" if name in medians else ""))


if __name__ == "__main__":
    main()
