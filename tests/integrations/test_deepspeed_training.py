# SPDX-License-Identifier: Apache-2.0
"""The released DeepSpeed, unmodified, on swapio's engine and kernels; CPU, one process each.

The oracle is DeepSpeed itself with its optimizer state in RAM (and swapio's Adam): what goes
through files must come back as it was. Errors are provoked from outside of both.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_zero3.py"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: make test-integrations",
    ),
    pytest.mark.timeout(300),
]

# Runs the example with something done to it between steps 2 and 3.
HARNESS = """
import pathlib, runpy, sys
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine

sys.argv = sys.argv[1:]
example = runpy.run_path(sys.argv[0])
original, steps = DeepSpeedEngine.step, []

def step(self, *args, **kwargs):
    steps.append(1)
    if len(steps) == 3:
        spoil(pathlib.Path(folder))
    return original(self, *args, **kwargs)

DeepSpeedEngine.step = step
folder = sys.argv[sys.argv.index("--nvme") + 1]
"""
TRUNCATE = """
def spoil(folder):
    for file in folder.rglob("*.swp"):
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 2)
"""
NO_SPACE = """
def spoil(folder):
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def run(*command: object) -> subprocess.CompletedProcess[str]:
    # On a CPU DeepSpeed compiles its shared-memory collective, with the ninja beside this Python.
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    chosen = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PATH": tools}
    # Threads that spin while they wait would take the CPUs from the process that works.
    chosen |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, **chosen}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True, text=True, env=environment, check=False, timeout=280,
    )  # fmt: skip


def train(folder: Path, name: str, *arguments: object) -> tuple[str, list[torch.Tensor]]:
    """Run the example; return its line of losses and the weights."""
    done = run(EXAMPLE, "--steps", 4, "--weights", folder / name, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    return losses[0], torch.load(folder / name, weights_only=True)


def test_state_on_the_drive_is_state_in_ram(tmp_path: Path) -> None:
    losses, resident = train(tmp_path, "ram.pt")
    for swapper in ("pipelined", "partitioned"):
        folder = tmp_path / swapper
        folder.mkdir()
        arguments = ("--nvme", folder, "--swapper", swapper)
        found, weights = train(tmp_path, "nvme.pt", *arguments)
        assert found == losses
        assert list(folder.rglob("*.swp")), "nothing was swapped"
        assert all(torch.equal(a, b) for a, b in zip(weights, resident, strict=True))
    first, last = (float(loss) for loss in (losses.split()[1], losses.split()[-1]))
    assert last < first


@pytest.mark.parametrize(
    ("spoil", "told"),
    [(TRUNCATE, ("pread", "wanted", "got")), (NO_SPACE, ("File too large", "ulimit -f"))],
    ids=["a file was cut", "a write is refused"],
)
@pytest.mark.parametrize("swapper", ["pipelined", "partitioned"])
def test_io_errors_end_the_training(
    tmp_path: Path, spoil: str, told: tuple[str, ...], swapper: str
) -> None:
    """What DeepSpeed's own extension does instead is the next test."""
    source = HARNESS + spoil + 'example["main"]()\n'
    options = ("--steps", 6, "--nvme", tmp_path, "--swapper", swapper)
    done = run("-c", source, EXAMPLE, *options)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "AioError" in done.stderr
    assert str(tmp_path) in done.stderr
    assert ".tensor.swp" in done.stderr
    for words in told:
        assert words in done.stderr
    assert "losses" not in done.stdout


OWN = "import swapio.integrations.deepspeed as shim; shim.install = lambda: None\n"
HAS_LIBAIO = """
from deepspeed.ops.op_builder import AsyncIOBuilder
raise SystemExit(0 if AsyncIOBuilder().is_compatible() else 7)
"""


@pytest.mark.slow
def test_deepspeeds_own_extension_lets_errors_pass(tmp_path: Path) -> None:
    """What docs/deepspeed.md and docs/comparison.md say of it: these lines fail when it learns."""
    if run("-c", HAS_LIBAIO).returncode == 7:
        pytest.skip("DeepSpeed's async_io needs libaio-dev")
    ends = {}
    for name, spoil in (("as it is", ""), ("refused", NO_SPACE), ("cut", TRUNCATE)):
        folder = tmp_path / name
        folder.mkdir()
        source = OWN + HARNESS + (spoil or "def spoil(folder): pass\n") + 'example["main"]()\n'
        ends[name] = run("-c", source, EXAMPLE, "--steps", 6, "--nvme", folder)
    losses = {
        name: [line for line in done.stdout.splitlines() if line.startswith("losses ")]
        for name, done in ends.items()
    }
    assert ends["as it is"].returncode == 0, ends["as it is"].stderr[-2000:]
    assert ends["refused"].returncode == 0
    assert len(losses["refused"][0].split()) == 7
    assert losses["refused"] != losses["as it is"]
    assert ends["cut"].returncode == -signal.SIGABRT
    assert not losses["cut"]


def test_install_and_uninstall_are_clean() -> None:
    source = """
import sys
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
import swapio.integrations.deepspeed as shim

before = dict(OpBuilder._loaded_ops)
shim.install()
shim.install(engine="threads", ops=["cpu_adam", "async_io"])
module = AsyncIOBuilder().load()
handle = module.aio_handle(1 << 20, 4, False, True, 1)
assert handle._engine.kind == "threads"
assert PinMemoryBuilder().load().pin_handle().is_pinned
assert CPUAdamBuilder().load().create_adam(0) == 0
for function in ("zenflow_adam_create", "gds_handle"):
    try:
        getattr(CPUAdamBuilder().load(), function)
    except AttributeError as error:
        assert "leave 'cpu_adam' out of install" in str(error)
    else:
        raise SystemExit(f"{function} is there")
optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam([__import__("torch").nn.Parameter(
    __import__("torch").ones(5))])
assert optimizer.ds_opt_adam.__name__ == "swapio_cpu_adam"
assert shim.is_installed()
shim.uninstall()
shim.uninstall()
assert not shim.is_installed()
assert OpBuilder._loaded_ops == before
assert not hasattr(sys, "_deepspeed_pin_memory_op_module")
print("clean")
"""
    done = run("-c", source)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "clean" in done.stdout
