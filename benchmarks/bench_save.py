#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of swapped state costs, and what durability costs in a step.

For each size: the seconds of `save` on the same file system after the writeback has drained, the
bytes it linked and wrote, the bytes that the steps before and after it moved, the growth of
anonymous memory, and for comparison the seconds of copying the swapped bytes (cp of the slot
files, synced). With --master separate nothing is left in RAM to be written. Then seconds and bytes
of a step with one slot and with two ("checkpoint" with spare_slots 0, and with every step going to
another slot), and under "step" and "power": those of --ways in turn in each round, and the ratio to
one slot round by round. With --load-numel the growth of anonymous memory while so many parameters
are loaded.

The last line of standard output is JSON. GB is 1e9 bytes. The defaults take about 40 s.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from swapio.optim import AdamW

WIDTH = 1 << 22
WAYS = {
    "one slot": {"spare_slots": 0},
    "two slots": {},
    "step": {"durability": "step"},
    "power": {"durability": "power"},
}


def anonymous_bytes():
    fields = ("RssAnon:", "RssShmem:")
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(fields))


def make(folder, numel, host_memory, **swap):
    count = max(1, numel // WIDTH)
    params = [torch.nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(WIDTH, dtype=torch.bfloat16) * 1e-2
    settings = {"path": str(folder), "host_memory": host_memory, "min_swap_bytes": 0, **swap}
    return AdamW([(f"p{i}", p) for i, p in enumerate(params)], swap=settings), params


def moved(opt):
    stats = opt.stats()
    names = ("bytes_read", "bytes_written", "bytes_copied", "bytes_allocated")
    return {name: stats[name] for name in names}


def difference(before, after):
    return {name: after[name] - before[name] for name in after}


def copy_seconds(folder, target):
    """Copy the slots that a save links, through the page cache, and sync."""
    began = time.perf_counter()
    for path in folder.rglob("*slot0.bin"):
        with path.open("rb") as source, (target / path.name).open("wb") as copy:
            while block := source.read(8 << 20):
                copy.write(block)
            os.fsync(copy.fileno())
    return time.perf_counter() - began


def bench_save(root, numel, host_memory, master, with_copy):
    folder = root / f"save-{numel}"
    opt, params = make(folder, numel, host_memory, master=master)
    with opt:
        marks = [moved(opt)]
        for _ in range(2):
            opt.step()
            opt.synchronize()
            marks.append(moved(opt))
        gc.collect()
        memory = anonymous_bytes()
        began = time.perf_counter()
        handle = opt.save(root / "checkpoints", f"n{numel}")
        seconds = time.perf_counter() - began
        memory = anonymous_bytes() - memory
        marks.append(moved(opt))
        for _ in range(2):
            opt.step()
            opt.synchronize()
            marks.append(moved(opt))
        copied = None
        if with_copy:
            (root / "copy").mkdir(exist_ok=True)
            copied = copy_seconds(folder, root / "copy")
    steps = [difference(a, b) for a, b in itertools.pairwise(marks)]
    return {
        "numel": sum(p.numel() for p in params),
        "save_seconds": seconds,
        "copy_seconds": copied,
        "linked_bytes": handle.stats.linked_bytes,
        "ram_bytes": handle.stats.ram_bytes,
        "anonymous_growth": memory,
        "step_before": steps[1],
        "in_save": steps[2],
        "step_after": steps[3],
        "second_step_after": steps[4],
    }


def timed_step(name, opt):
    """One step, all its writes included; "two slots" writes to the slot that it does not read.

    What the buffers keep is on storage before, in every way, as only that can be held.
    """
    opt._runtime.swapper.flush()
    held = opt._runtime.store.hold() if name == "two slots" else None
    began = time.perf_counter()
    opt.step()
    opt.synchronize()
    seconds = time.perf_counter() - began
    if held is not None:
        held.release()
    return seconds


def bench_steps(root, numel, host_memory, rounds, ways):
    """Steps of all `ways` in turn, so that each round's ratios are of neighbours in time."""
    seconds = {name: [] for name in ways}
    with contextlib.ExitStack() as stack:
        opts = {}
        for name in ways:
            opts[name], _ = make(root / f"step-{name}", numel, host_memory, **WAYS[name])
            stack.enter_context(opts[name])
            timed_step(name, opts[name])
        before = {name: moved(opt) for name, opt in opts.items()}
        names = list(ways)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds[name].append(timed_step(name, opts[name]))
        rows = []
        for name, opt in opts.items():
            ratios = [a / b for a, b in zip(seconds[name], seconds["one slot"], strict=True)]
            total = difference(before[name], moved(opt))
            rows.append(
                {
                    "name": name,
                    "seconds": statistics.median(seconds[name]),
                    "ratio": statistics.median(ratios),
                    "ratio_of_medians": statistics.median(seconds[name])
                    / statistics.median(seconds["one slot"]),
                    "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2] if rounds > 1 else [],
                    "bytes": {key: value / rounds for key, value in total.items()},
                }
            )
    return rows


def print_steps(rows, numel):
    for row in rows:
        read, written, copied = (
            row["bytes"][f"bytes_{what}"] / numel for what in ("read", "written", "copied")
        )
        low, high = row["ratio_quartiles"] or (row["ratio"], row["ratio"])
        print(
            f"step {row['name']:10} {row['seconds']:.3f} s, {row['ratio']:.3f} [{low:.3f}, "
            f"{high:.3f}] of one slot; bytes per parameter: read {read:.2f}, written "
            f"{written:.2f}, copied {copied:.2f}"
        )


def bench_load(root, numel, host_memory):
    """Load a checkpoint of that many parameters into storage; growth of anonymous memory."""
    opt, _ = make(root / "load", numel, host_memory)
    with opt:
        opt.step()
        opt.save(root / "loaded")
        gc.collect()
        before, peak, stop = anonymous_bytes(), [0], threading.Event()

        def watch():
            while not stop.wait(0.005):
                peak[0] = max(peak[0], anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        found = opt.load(root / "loaded")
        seconds = time.perf_counter() - began
        stop.set()
        watcher.join()
    return {
        "bytes": found.bytes_read,
        "seconds": seconds,
        "anonymous_growth": max(0, peak[0] - before),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=".", help="folder on the device to measure")
    parser.add_argument("--numel", type=float, nargs="*", default=[16e6, 64e6])
    parser.add_argument("--step-numel", type=float, default=64e6, help="0: no steps")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--load-numel", type=float, default=0, help="0: no load")
    parser.add_argument("--host-memory", default="128MiB")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--master", default="auto", help='"separate": nothing is left in RAM')
    parser.add_argument("--no-copy", action="store_true", help="do not copy for comparison")
    args = parser.parse_args()
    result = {"saves": [], "steps": [], "load": None}
    for numel in map(int, args.numel):
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-save-") as name:
            row = bench_save(Path(name), numel, args.host_memory, args.master, not args.no_copy)
        result["saves"].append(row)
        print(
            f"save {row['numel'] / 1e6:8.0f} M: {row['save_seconds']:.3f} s, linked "
            f"{row['linked_bytes'] / 1e9:.3f} GB, wrote {row['ram_bytes'] / 1e9:.3f} GB of "
            f"RAM; copying the slots takes {row['copy_seconds']} s; memory grew by "
            f"{row['anonymous_growth'] / 1e6:.1f} MB; bytes of the step before "
            f"{sum(row['step_before'].values())}, after {sum(row['step_after'].values())}"
        )
    if args.step_numel:
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-save-") as name:
            numel = int(args.step_numel) // WIDTH * WIDTH
            result["steps"] = bench_steps(
                Path(name),
                numel,
                args.host_memory,
                args.rounds,
                dict.fromkeys(["one slot", *args.ways]),
            )
        print_steps(result["steps"], numel)
    if args.load_numel:
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-save-") as name:
            row = result["load"] = bench_load(Path(name), int(args.load_numel), args.host_memory)
        print(
            f"load {row['bytes'] / 1e9:.2f} GB in {row['seconds']:.1f} s; memory grew by "
            f"{row['anonymous_growth'] / 1e6:.1f} MB"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
