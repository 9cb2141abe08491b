#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of swapped state costs, and what durability costs in a step.

For each size: the seconds of `save` on the same file system after the writeback has drained, the
bytes it linked and wrote, the bytes that the steps before and after it moved, the growth of
anonymous memory, and for comparison the seconds of copying the swapped bytes (cp of the slot
files, synced). Then seconds and bytes of a step with one slot and with two ("checkpoint" with
spare_slots 0, and with every step going to another slot), and under "step" and "power".

The last line of standard output is JSON. GB is 1e9 bytes. The defaults take about 20 s.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from swapio.optim import AdamW

WIDTH = 1 << 22


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


def bench_save(root, numel, host_memory):
    folder = root / f"save-{numel}"
    opt, params = make(folder, numel, host_memory)
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


def bench_step(root, numel, host_memory, name, steps, **swap):
    opt, _ = make(root / f"step-{name}", numel, host_memory, **swap)
    with opt:
        opt.step()
        opt.synchronize()
        before, seconds = moved(opt), []
        for _ in range(steps):
            held = opt._runtime.store.hold() if name == "two slots" else None
            began = time.perf_counter()
            opt.step()
            opt.synchronize()
            seconds.append(time.perf_counter() - began)
            if held is not None:
                held.release()
        total = difference(before, moved(opt))
    return {
        "name": name,
        "seconds": statistics.median(seconds),
        "bytes": {key: value / steps for key, value in total.items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=".", help="folder on the device to measure")
    parser.add_argument("--numel", type=float, nargs="*", default=[16e6, 64e6])
    parser.add_argument("--host-memory", default="128MiB")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-save-") as name:
        root = Path(name)
        saves = [bench_save(root, int(numel), args.host_memory) for numel in args.numel]
        for row in saves:
            print(
                f"save {row['numel'] / 1e6:8.0f} M: {row['save_seconds']:.3f} s, linked "
                f"{row['linked_bytes'] / 1e9:.3f} GB, wrote {row['ram_bytes'] / 1e9:.3f} GB of "
                f"RAM; copying the slots takes {row['copy_seconds']:.3f} s; memory grew by "
                f"{row['anonymous_growth'] / 1e6:.1f} MB"
            )
        numel = int(args.numel[-1])
        ways = {
            "one slot": {"spare_slots": 0},
            "two slots": {},
            "step": {"durability": "step"},
            "power": {"durability": "power"},
        }
        rows = [
            bench_step(root, numel, args.host_memory, name, args.steps, **swap)
            for name, swap in ways.items()
        ]
        for row in rows:
            ratio = row["seconds"] / rows[0]["seconds"]
            read, written, copied = (
                row["bytes"][f"bytes_{what}"] / numel for what in ("read", "written", "copied")
            )
            print(
                f"step {row['name']:10} {row['seconds']:.3f} s, {ratio:.3f} of one slot; bytes per "
                f"parameter: read {read:.2f}, written {written:.2f}, copied {copied:.2f}"
            )
        print(json.dumps({"saves": saves, "steps": rows}))


if __name__ == "__main__":
    main()
