# SPDX-License-Identifier: Apache-2.0
"""What the paired benchmarks share: random order, ratios within a round, intervals, peers.

Machines drift by tens of per cent within minutes, so a figure is only ever a ratio of two runs that
followed each other. `run_pairs` repeats each pair, the two sides in random order, until the 95 %
interval of the median of its ratios is narrow enough or the rounds are used up.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

PEER_SCRIPT = Path(__file__).with_name("peer_deepspeed.py")


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of a 95 % interval of it, from order statistics.

    No distribution is assumed. With fewer than six values the interval is their range, and holds
    with less than 95 %.
    """
    ordered, count = sorted(values), len(values)
    skip, tail, term = 0, 0.0, 0.5**count
    while skip < count // 2 and tail + term <= 0.025:
        tail += term
        skip += 1
        term *= (count - skip + 1) / skip
    skip = max(skip - 1, 0)
    return statistics.median(ordered), ordered[skip], ordered[count - 1 - skip]


@dataclass
class Pair:
    """Two rows whose costs are compared within a round.

    Attributes:
        name: What the ratio is called.
        row: Runs the contender once and returns its cost, such as seconds per byte.
        base: Runs what it is compared with.
        rounds: (cost of the row, cost of the base) of each round.
    """

    name: str
    row: Callable[[], float]
    base: Callable[[], float]
    rounds: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Speed of the row as a share of the base's."""
        return [base / row for row, base in self.rounds]

    def is_narrow(self, half_width: float) -> bool:
        median, low, high = interval(self.ratios)
        return high - low <= 2 * half_width * median


def run_pairs(
    pairs: Sequence[Pair],
    *,
    rounds: int,
    max_rounds: int,
    half_width: float,
    max_seconds: float,
    seed: int = 0,
) -> None:
    """Run every pair `rounds` times in random order, then those whose interval is still wide.

    Args:
        pairs: What to run; their `rounds` are filled.
        rounds: Rounds for every pair.
        max_rounds: Where to stop although an interval is wide.
        half_width: Half of the interval as a share of the median, below which a pair is done.
        max_seconds: Where to stop after a whole round, whatever the intervals.
        seed: Of the order.
    """
    order = random.Random(seed)
    end = time.monotonic() + max_seconds
    for number in range(max_rounds):
        todo = [pair for pair in pairs if number < rounds or not pair.is_narrow(half_width)]
        if not todo or (number and time.monotonic() > end):
            break
        order.shuffle(todo)
        print(f"\rround {number + 1}, {len(todo)} pairs ", end="", file=sys.stderr, flush=True)
        for pair in todo:
            if order.random() < 0.5:
                row = pair.row()
                pair.rounds.append((row, pair.base()))
            else:
                base = pair.base()
                pair.rounds.append((pair.row(), base))
    print(file=sys.stderr)


class PeerFailed(Exception):
    """The peer's process has ended or could not do what it was asked."""


class Peer:
    """DeepSpeed in a process of its own, driven by lines: peer_deepspeed.py in `python`."""

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(PEER_SCRIPT), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            self.facts = self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> dict[str, Any]:
        """Run one command and return its result, such as seconds."""
        if self._process.stdin is None:
            raise PeerFailed("no input")
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        # The peer's libraries print to standard output as well.
        for line in self._process.stdout or ():
            if line.startswith("RESULT "):
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return result
        raise PeerFailed(f"the peer ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
