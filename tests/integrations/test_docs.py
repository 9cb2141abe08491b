# SPDX-License-Identifier: Apache-2.0
"""The documentation's code compiles, its commands parse, its links and names exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from swapio import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles_and_imports_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swapio"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["swapio"]:
            parser = cli._build_parser([words[1]])
            parser.parse_args(words[1:])
        elif words[:1] == ["make"]:
            assert f"\n{words[1]}:" in makefile, line
        elif words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:examples|scripts|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "docs" / "site.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in site


def test_every_setting_that_pages_name_exists() -> None:
    from swapio.config import field_names

    known = set(field_names())
    for page in PAGES:
        for block in blocks(page, "python"):
            for settings in re.findall(r"swap=\{(.*?)\}", block, flags=re.S):
                assert set(re.findall(r'"(\w+)":', settings)) <= known, page.name
