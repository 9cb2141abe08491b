#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write README's measured tables from the JSON in benchmarks/results/.

`--add NAME FILE` stores a benchmark's last line as results/NAME.json, with the machine it ran on;
`--storage DIR` names the folder it used, whose file system and drive are noted too.
Each result is a JSON object; its tables are the values that map a row's name to an object of
figures, and its other plain values go in the line below the title. So a benchmark decides by itself
what README shows, and nothing is typed by hand. A table `X` stays in the results where there is one
of its ratios, `X_ratios`. `NAME_range` is shown behind `NAME`; a table with more figures than fit
beside each other has a row for each figure and a column for each row's name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured -->", "<!-- end measured -->"
ORDER = ("engine", "kernels", "step", "memory")
COLUMNS_MAX = 6


def machine() -> dict[str, Any]:
    """Return what figures depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo)
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.group(1)) / 2**20) if memory else None,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }


def storage(folder: Path) -> str:
    """Return the file system and the drive under a folder, as the kernel names them."""
    target, best = str(folder.resolve()), ("", "", "")
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        source, mount, kind, *_ = line.split()
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[1]):
            best = (source, mount, kind)
    name = Path(best[0]).name
    block = Path("/sys/class/block") / name
    if not block.exists():
        return f"{best[2]} on {best[0]}"
    gigabytes = int((block / "size").read_text(encoding="ascii")) * 512 / 1e9
    driver = (block / "device" / "driver").resolve().name if (block / "device").exists() else "?"
    model = block / "device" / "model"
    named = model.read_text(encoding="utf-8").strip() if model.exists() else driver
    return f"{best[2]} on {name} ({named}, {gigabytes:.0f} GB)"


def add(name: str, file: Path, folder: Path | None = None) -> None:
    lines = file.read_text(encoding="utf-8").strip().splitlines()
    result = json.loads(lines[-1])
    RESULTS.mkdir(exist_ok=True)
    box = machine() | ({} if folder is None else {"storage": storage(folder)})
    text = json.dumps({"machine": box, **result}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def is_table(value: object) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(row, dict) for row in value.values())


def cell(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(cell, value)) if len(value) == 2 else ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def with_range(row: dict[str, Any], figure: str) -> str:
    """Return the cell of a figure, its range in parentheses where there is one."""
    shown = cell(row.get(figure))
    spread = row.get(f"{figure}_range")
    return f"{shown} ({cell(spread)})" if shown and spread else shown


def as_table(title: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(key for row in rows.values() for key in row)
    figures = [name for name in names if name.removesuffix("_range") not in names.keys() - {name}]
    cells = [[with_range(row, figure) for figure in figures] for row in rows.values()]
    down, across = list(rows), [figure.replace("_", " ") for figure in figures]
    if len(across) > COLUMNS_MAX:
        down, across, cells = across, down, [list(column) for column in zip(*cells, strict=True)]
    lines = ["", f"| {title} | " + " | ".join(across) + " |", "| --- |" + " ---: |" * len(across)]
    lines += [
        f"| {name} | " + " | ".join(line) + " |" for name, line in zip(down, cells, strict=True)
    ]
    return lines


def section(name: str, result: dict[str, Any]) -> list[str]:
    tables = {key: value for key, value in result.items() if is_table(value)}
    plain = {
        key: value
        for key, value in result.items()
        if key not in tables and key not in ("machine", "bench") and not isinstance(value, dict)
    }
    box = result.get("machine", {})
    lines = [f"### {name.replace('_', ' ').capitalize()}", ""]
    facts = [f"{key.replace('_', ' ')} {cell(value)}" for key, value in plain.items()]
    where = f"{box.get('cpu')}, {box.get('cores')} cores, Linux {box.get('kernel')}"
    where += f", {box['storage']}" if "storage" in box else ""
    script = f"benchmarks/bench_{result.get('bench', name)}.py"
    lines.append(f"{where}; {', '.join(facts)}. `{script}`")
    for key, rows in tables.items():
        if f"{key}_ratios" in tables:
            continue
        lines += as_table(key.replace("_", " "), rows)
    return [*lines, ""]


def render() -> str:
    """Return the text between README's markers."""
    found = {path.stem: path for path in RESULTS.glob("*.json")}
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    if not names:
        return ""
    lines = [
        "## Measured",
        "",
        "Ratios are of a ceiling measured in the same run, with the range over the rounds in",
        "parentheses; GB is 1e9 bytes. The docstring of each script says what its figures are.",
        "",
    ]
    for name in names:
        lines += section(name, json.loads(found[name].read_text(encoding="utf-8")))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", nargs=2, metavar=("NAME", "FILE"), help="store a result first")
    parser.add_argument("--storage", type=Path, metavar="DIR", help="the folder that was measured")
    args = parser.parse_args()
    if args.add:
        add(args.add[0], Path(args.add[1]), args.storage)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    readme.write_text(text[:start] + "\n" + render() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
