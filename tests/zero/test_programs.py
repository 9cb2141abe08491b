# SPDX-License-Identifier: Apache-2.0
"""What users start with torchrun: the demo, and the example with another number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "zero_training.py"


def torchrun(ranks, *arguments):
    """Run a program on so many ranks of this host; return what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_the_demo_runs_on_two_ranks(tmp_path) -> None:
    small = ["--layers", 2, "--width", 256, "--steps", 4, "--host-memory", "4MiB"]
    small += ["--sub-group-numel", "256Ki", "--plot", "", "--quiet", "--path", tmp_path]
    printed = torchrun(2, "-m", "swapio", "demo", "--stage", 2, *small)
    assert printed.count("equal to the bit: all 4 losses") == 1


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_ranks(tmp_path) -> None:
    checkpoint, whole, parts = (tmp_path / name for name in ("ckpt", "whole.pt", "parts.pt"))
    torchrun(1, EXAMPLE, "--steps", 4, "--weights", whole)
    torchrun(2, EXAMPLE, "--steps", 2, "--save", checkpoint, "--swap", tmp_path / "swap")
    torchrun(3, EXAMPLE, "--steps", 4, "--resume", checkpoint, "--weights", parts, "--stage", 1)
    for one, other in zip(torch.load(whole), torch.load(parts), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
