# SPDX-License-Identifier: Apache-2.0
"""Installing from source where something is missing: one error that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
SCRIPTS = Path(sysconfig.get_path("scripts"))


def install(target: Path, path: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Install into `target` with no program found but those on `path`."""
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    command += ["--target", str(target), str(ROOT), "-C", f"build-dir={target}-build", *options]
    hidden = ("CC", "CXX", "PYTHONPATH", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PATH"] = path
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=100
    )


def test_no_compiler_is_one_error_that_names_it(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        # Not `python -m ninja`, which looks on PATH for what is not beside its interpreter.
        program = SCRIPTS / name
        if not program.is_file():
            pytest.skip(f"{program} is missing: the tools of the build are installed elsewhere")
        (tools / name).symlink_to(program)
    done = install(tmp_path / "site", str(tools))
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "apt-get install g++" in output
    assert output.count("CMake Error") == 1
