# SPDX-License-Identifier: Apache-2.0
"""Use an installed swapio: `smoke.py FOLDER` trains a few steps with state in RAM and in FOLDER.

Run from a folder that holds no `swapio` source, it proves that a wheel works on its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import swapio
from swapio.optim import AdamW


def train(swap: dict[str, object] | None) -> torch.Tensor:
    """Return the weights after five AdamW steps."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 16))
    optimizer = AdamW(model.parameters(), lr=1e-2, swap=swap)
    for _ in range(5):
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    optimizer.close()
    return weights


def main() -> None:
    """Check the package's place, the law "swapped equals resident", and the command line."""
    folder = Path(sys.argv[1])
    where = Path(swapio.__file__)
    if "site-packages" not in where.parts:
        raise SystemExit(f"swapio comes from {where}, not from an installed wheel")
    swapped = train({"path": str(folder / "state"), "host_memory": "64MiB"})
    if not torch.equal(train(None), swapped):
        raise SystemExit("swapped and resident training differ")
    subprocess.run([sys.executable, "-m", "swapio", "info", "--path", str(folder)], check=True)
    sys.stdout.write(f"swapio {swapio.__version__} from {where.parent}: works\n")


if __name__ == "__main__":
    main()
