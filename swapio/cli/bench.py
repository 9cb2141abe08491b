# SPDX-License-Identifier: Apache-2.0
"""`swapio bench DIR`: what the engine reaches on a folder's device, and what a step would cost."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

    from swapio.cli.measure import EngineSettings, Rate

BYTES_PER_PARAMETER = 20  # a split master of bf16: 10 bytes read and 10 written
SECONDS_PER_DAY = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what bench and tune have in common."""
    parser.add_argument("folder", metavar="DIR", help="folder on the device to measure")
    parser.add_argument("--size", default="1GiB", help="size of the scratch files")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a folder's device with both engines, and estimate a step",
        description="Reads, writes, and does both at once, with both engines, past the page cache "
        "and through it. Scratch files are removed. Writes several GB: flash wears.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement")
    parser.add_argument(
        "--parameters", type=float, default=1e9, help="size of the model to estimate for"
    )
    parser.add_argument("--no-fio", action="store_true", help="do not compare with fio")
    parser.set_defaults(run=run)


def check_folder(args: argparse.Namespace) -> tuple[Path, int]:
    """Return the folder and the size of scratch files in bytes, both checked."""
    import shutil

    from swapio.config_values import parse_size
    from swapio.errors import ConfigError

    folder, nbytes = Path(args.folder).expanduser(), parse_size("--size", args.size)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    free = shutil.disk_usage(folder).free
    if free < 3 * nbytes:
        raise ConfigError(f"{folder}: {free} bytes are free, {3 * nbytes} are needed; lower --size")
    return folder, nbytes


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0."""
    from swapio.cli.fio import find_fio

    folder, nbytes = check_folder(args)
    with_fio = find_fio() is not None and not args.no_fio
    rows = _measure_all(args, folder, nbytes, with_fio=with_fio)
    rates = [rate for rate, _ in rows]
    estimate = _estimate(rates, args.parameters)
    if args.json:
        figures = [asdict(rate) | {"fio_gb_per_second": fio} for rate, fio in rows]
        print(json.dumps({"rates": figures, "estimate": estimate}))
        return 0
    print(_table(rows))
    if with_fio:
        print("fio: io_uring, 512 KiB x 32, huge pages, just before each direct measurement")
    elif not args.no_fio:
        print("fio is not installed: no comparison (apt-get install fio)")
    print(
        f"AdamW, {estimate['parameters']:.3g} bf16 parameters, all state on {folder}: at least "
        f"{estimate['seconds_per_step']:.2f} s of I/O a step with the {estimate['engine']} engine; "
        f"{estimate['gb_written_per_step']:.1f} GB written a step, up to "
        f"{estimate['tb_written_per_day']:.1f} TB a day (flash wears: compare with its TBW)"
    )
    return 0


def settings_to_measure() -> list[EngineSettings]:
    """Return both engines, direct and buffered, without io_uring where it does not work."""
    from swapio.aio import probe_io_uring
    from swapio.cli.measure import EngineSettings

    works, reason = probe_io_uring()
    if not works:
        print(f"io_uring is left out: {reason}", file=sys.stderr)
    settings = [EngineSettings(kind="io_uring", direct=way) for way in ("auto", "off") if works]
    return settings + [EngineSettings(kind="threads", direct=way) for way in ("auto", "off")]


def _measure_all(
    args: argparse.Namespace, folder: Path, nbytes: int, *, with_fio: bool
) -> list[tuple[Rate, float | None]]:
    """Return each rate with fio's of the moment before in GB/s (the device drifts)."""
    from swapio.cli.fio import fio_rate
    from swapio.cli.measure import PATTERNS, Bench

    rows: list[tuple[Rate, float | None]] = []
    for settings in settings_to_measure():
        with Bench(folder, settings, nbytes=nbytes) as bench:
            for pattern in PATTERNS:
                fio = None
                if with_fio and bench.is_direct:
                    fio = fio_rate(folder, pattern, nbytes=nbytes, seconds=args.seconds) / 1e9
                way = "direct" if bench.is_direct else "buffered"
                label = f"{settings.kind:8} {way:8} {pattern:5}"
                with progress_bar(label, quiet=args.quiet) as bar:
                    rate = bench.rate(
                        pattern, seconds=args.seconds, latency=True, progress=bar.update
                    )
                rows.append((rate, fio))
    return rows


def progress_bar(label: str, *, quiet: bool) -> tqdm[Any]:
    """Return a bar that counts bytes."""
    from tqdm import tqdm

    return tqdm(desc=label, unit="B", unit_scale=True, disable=quiet, leave=False)


def _table(rows: list[tuple[Rate, float | None]]) -> str:
    lines = ["engine    I/O       pattern   GB/s  of fio  CPU s/GB  block: p50     p99     max ms"]
    for rate, fio in rows:
        way = "direct" if rate.direct else "buffered"
        share = f"{rate.gb_per_second / fio:6.2f}" if fio else "     -"
        latency = rate.latency_ms
        lines.append(
            f"{rate.engine:9} {way:9} {rate.pattern:7} {rate.gb_per_second:6.2f}  {share}"
            f"  {rate.cpu_seconds_per_gb:8.3f}    {latency['p50']:7.2f} {latency['p99']:7.2f}"
            f" {latency['max']:7.2f}"
        )
    return "\n".join(lines)


def _estimate(rates: list[Rate], num_parameters: float) -> dict[str, Any]:
    """Return what an AdamW step of so many bf16 parameters moves, at the best mixed rate."""
    best = max((r for r in rates if r.pattern == "mixed"), key=lambda rate: rate.gb_per_second)
    moved = num_parameters * BYTES_PER_PARAMETER / 1e9
    seconds = moved / best.gb_per_second
    return {
        "parameters": num_parameters,
        "engine": best.engine,
        "direct": best.direct,
        "seconds_per_step": seconds,
        "gb_written_per_step": moved / 2,
        "tb_written_per_day": moved / 2 / 1e3 * SECONDS_PER_DAY / seconds,
    }
