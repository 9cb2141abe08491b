# SPDX-License-Identifier: Apache-2.0
"""README's example runs as it stands, but for the folder, the sizes and the number of steps."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, flags=re.S)[0]
    assert len(example.strip().splitlines()) <= 25
    for old, new in (("/nvme/run1", str(tmp_path)), ("4096", "256"), ("range(1000)", "range(3)")):
        assert old in example
        example = example.replace(old, new)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert list(tmp_path.iterdir()) == []


def test_the_durability_example_runs_and_goes_on(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    (example,) = [text for text in examples if "resume=True" in text]
    replaced = (
        ("/nvme/run1", str(tmp_path / "run")),
        ("/nvme/checkpoints", str(tmp_path / "checkpoints")),
        ("4096", "256"),
        ("% 100 == 99", "% 2 == 1"),
    )
    for old, new in replaced:
        assert old in example
        example = example.replace(old, new)
    assert "1000" in example
    for steps in (4, 6):  # the second run goes on where the first has ended
        names: dict[str, object] = {}
        code = "import torch\nfrom swapio.optim import AdamW\n" + example.replace(
            "1000", str(steps)
        )
        exec(compile(code, "README.md", "exec"), names)
        assert names["step"] == steps - 1
        found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert found == [f"step-{steps - 3}", f"step-{steps - 1}"]
    assert (tmp_path / "run").exists()


def test_commands_and_links_exist() -> None:
    from swapio.cli import COMMANDS

    for command in re.findall(r"^\| `swapio (\w+)", README, flags=re.M):
        assert command in COMMANDS
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)", README):
        assert f"\n{target}:" in makefile
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_measured_tables_are_those_of_the_results() -> None:
    """Nothing is typed by hand, and no table is wider than a page."""
    script = ROOT / "benchmarks" / "make_readme_tables.py"
    spec = importlib.util.spec_from_file_location("make_readme_tables", script)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    section = README.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert section == "\n" + tables.render()
    assert max(line.count("|") for line in section.splitlines()) <= 2 + tables.COLUMNS_MAX
    wide = {"case": {f"n{i}": float(i) for i in range(7)} | {"n0_range": [0.5, 1.5]}}
    assert tables.as_table("t", wide)[1:4] == [
        "| t | case |",
        "| --- | ---: |",
        "| n0 | 0 (0.5 to 1.5) |",
    ]
