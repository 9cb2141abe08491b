# SPDX-License-Identifier: Apache-2.0
"""The command line: help, errors as one line, and `info`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swapio.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
DENY = [sys.executable, str(ROOT / "scripts" / "deny_io_uring.py")]


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    help_text = capsys.readouterr().out
    assert all(command in help_text for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("swapio 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "show"] if command == "config" else [command]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--path", str(tmp_path / "nowhere")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "nowhere" in err


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """Also when all that is written fits in the buffer that is flushed at the end."""
    command = [sys.executable, "-m", "swapio", "info", "--path", str(tmp_path)]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100)
    finally:
        os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_info_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--path", str(tmp_path)]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert sections["engine"]["kind"] in ("io_uring", "threads")
    assert sections["kernels"]["simd"] in sections["kernels"]["simd levels here"]
    assert sections["folder"]["writable"]
    assert sections["folder"]["free bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_info_names_the_cause_when_io_uring_is_denied(tmp_path: Path) -> None:
    command = [*DENY, "EPERM", sys.executable, "-m", "swapio", "info", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "EPERM" in done.stdout
    assert "seccomp" in done.stdout
    assert done.stderr == ""


def test_info_names_the_simd_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPIO_SIMD", "scalar")
    command = [sys.executable, "-m", "swapio", "info", "--json", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert json.loads(done.stdout)["kernels"]["simd"] == "scalar"
