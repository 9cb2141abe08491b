# SPDX-License-Identifier: Apache-2.0
"""`swapio tune DIR`: a short sweep over engine settings that ends in a configuration file."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapio.cli.bench import add_arguments, check_folder

if TYPE_CHECKING:
    from swapio.cli.measure import EngineSettings

# Few candidates: on the drives that were measured, 16 MiB in flight was best and the rest flat.
URING_CANDIDATES = ((512 << 10, 32), (1 << 20, 16), (1 << 20, 32), (256 << 10, 64))
THREAD_CANDIDATES = ((512 << 10, 8), (1 << 20, 8), (1 << 20, 16))
NUM_FINALISTS = 2
NUM_ROUNDS = 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "tune",
        help="find engine settings for a folder's device and write them to a file",
        description="Measures reading and writing at once with a few settings, the best of them "
        "again in turns, and writes a TOML file for SwapConfig with the bandwidths it saw.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each measurement")
    parser.add_argument("--output", default="swapio.toml", metavar="FILE", help="file to write")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep, write the file, print what it holds; 0."""
    from swapio.plan_devices import remember_rates

    folder, nbytes = check_folder(args)
    settings, rates = sweep(args, folder, nbytes)
    config = as_config(folder, settings, rates)
    output = Path(args.output)
    output.write_text(as_toml(config), encoding="utf-8")
    with contextlib.suppress(OSError):  # the file has it all; the cache saves a flag
        remember_rates(folder, rates)
    if args.json:
        print(json.dumps(config))
    else:
        print(as_toml(config) + f"written to {output}; use it as swap={str(output)!r}")
    return 0


def sweep(
    args: argparse.Namespace, folder: Path, nbytes: int
) -> tuple[EngineSettings, dict[str, float]]:
    """Return the best settings, and their median rates in bytes per second by pattern."""
    from tqdm import tqdm

    from swapio.cli.measure import PATTERNS, Bench

    candidates = _candidates()
    total = len(candidates) + NUM_FINALISTS * NUM_ROUNDS * len(PATTERNS)
    bar = tqdm(total=total, desc="tune", unit="run", disable=args.quiet)

    def measure(settings: EngineSettings, patterns: Sequence[str]) -> list[float]:
        with Bench(folder, settings, nbytes=nbytes) as bench:
            rates = []
            for pattern in patterns:
                rates.append(bench.rate(pattern, seconds=args.seconds).gb_per_second * 1e9)
                bar.set_postfix_str(f"{settings.kind} {pattern} {rates[-1] / 1e9:.2f} GB/s")
                bar.update()
            return rates

    with bar:
        first = {settings: measure(settings, ["mixed"])[0] for settings in candidates}
        finalists = sorted(first, key=lambda settings: -first[settings])[:NUM_FINALISTS]
        # In turns: the device drifts, and must not favour whoever came first.
        runs: dict[EngineSettings, list[list[float]]] = {settings: [] for settings in finalists}
        for _ in range(NUM_ROUNDS):
            for settings in finalists:
                runs[settings].append(measure(settings, PATTERNS))
    medians: dict[EngineSettings, dict[str, float]] = {
        settings: dict(zip(PATTERNS, map(statistics.median, zip(*rows, strict=True)), strict=True))
        for settings, rows in runs.items()
    }

    def score(settings: EngineSettings) -> float:
        # io_uring leaves more of the CPU to the kernels; a thread pool has to be clearly faster.
        return medians[settings]["mixed"] * (1.05 if settings.kind == "io_uring" else 1.0)

    best = max(finalists, key=score)
    return best, medians[best]


def _candidates() -> list[EngineSettings]:
    from swapio.aio import probe_io_uring
    from swapio.cli.measure import EngineSettings

    works, _ = probe_io_uring()
    uring = [
        EngineSettings(kind="io_uring", block_size=block, queue_depth=depth)
        for block, depth in URING_CANDIDATES
        if works
    ]
    return uring + [
        EngineSettings(kind="threads", block_size=block, num_threads=threads)
        for block, threads in THREAD_CANDIDATES
    ]


def as_config(folder: Path, settings: EngineSettings, rates: dict[str, float]) -> dict[str, Any]:
    """Return the fields of SwapConfig, and prove that it accepts them."""
    from swapio.config import SwapConfig

    fields: dict[str, Any] = {
        "path": str(folder.resolve()),
        # "auto" keeps the file usable where io_uring is denied.
        "engine": "auto" if settings.kind == "io_uring" else "threads",
        "queue_depth": settings.queue_depth,
        "block_size": settings.block_size,
        "io_threads": settings.num_threads,
        "read_bandwidth": int(rates["read"]),
        "write_bandwidth": int(rates["write"]),
        "mixed_bandwidth": int(rates["mixed"]),
    }
    SwapConfig(**fields)
    return fields


def as_toml(config: dict[str, Any]) -> str:
    """Return the fields as TOML; JSON's strings and numbers are TOML's."""
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in config.items()]
    return "# written by swapio tune\n" + "\n".join(lines) + "\n"
