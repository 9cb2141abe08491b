# SPDX-License-Identifier: Apache-2.0
"""Each example runs as a user would run it, and its result does not depend on where state is.

The examples of trainers need the packages of requirements-integrations.txt; `make
test-integrations` installs them. Nothing is downloaded by the examples.
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

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Of so little memory that the larger tensors' state is on the drive.
SETTINGS = {"SWAPIO_HOST_MEMORY": "20MiB", "SWAPIO_SUB_GROUP_NUMEL": "256Ki"}


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed: make test-integrations")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **SETTINGS, **quiet},
        check=False, timeout=280,
    )  # fmt: skip


def weights(script: str, folder: Path, name: str, *arguments: object) -> list[torch.Tensor]:
    """Run an example and return the weights that it saved."""
    file = folder / name
    done = run(script, *arguments, "--weights", file)
    assert done.returncode == 0, done.stderr
    found = torch.load(file, weights_only=True)
    if isinstance(found, torch.Tensor):
        return [found]
    return list(found.values()) if isinstance(found, dict) else found


def assert_equal(*runs: list[torch.Tensor]) -> None:
    for other in runs[1:]:
        assert len(other) == len(runs[0])
        for first, second in zip(runs[0], other, strict=True):
            assert torch.equal(first, second)


def assert_different(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs("accelerate")
@pytest.mark.timeout(300)
def test_accelerate_resumes_to_the_bit(tmp_path: Path) -> None:
    script, swap = "accelerate_training.py", ("--cpu", "--swap-path", tmp_path / "state")
    resident = weights(script, tmp_path, "ram.pt", "--cpu", "--steps", 6)
    whole = weights(script, tmp_path, "whole.pt", *swap, "--steps", 6)
    save = (*swap, "--save", tmp_path / "saved")
    half = weights(script, tmp_path, "half.pt", *save, "--steps", 4)
    resume = (*swap, "--resume", tmp_path / "saved")
    resumed = weights(script, tmp_path, "resumed.pt", *resume, "--steps", 6)
    assert_equal(resident, whole, resumed)
    assert_different(half, resumed)


@needs("accelerate")
def test_prepare_moves_no_state(tmp_path: Path) -> None:
    import accelerate

    from swapio.errors import ConfigError
    from swapio.integrations.accelerate import keep_state_in_place
    from swapio.optim import AdamW

    model = torch.nn.Linear(1024, 1024)
    swap = {"path": str(tmp_path), "host_memory": "20MiB", "sub_group_numel": "256Ki"}
    accelerator = accelerate.Accelerator(cpu=True)
    with AdamW(model.parameters(), swap=swap) as optimizer:
        before = optimizer.stats()
        assert keep_state_in_place(accelerator) is accelerator
        keep_state_in_place(accelerator)
        _, prepared, plain = accelerator.prepare(
            model, optimizer, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        after = optimizer.stats()
        for name in ("read_bytes", "write_bytes", "bytes_read", "bytes_written", "num_reads"):
            assert after[name] == before[name]
        assert prepared.optimizer is optimizer
        assert not prepared.device_placement
        assert plain.device_placement
    with pytest.raises(ConfigError, match="accelerator is a Linear"):
        keep_state_in_place(model)


@needs("transformers")
@pytest.mark.timeout(300)
def test_trainer_takes_either_and_resumes_to_the_bit(tmp_path: Path) -> None:
    script = "hf_trainer.py"
    common = ("--cpu", "--save-steps", 2, "--steps", 4)
    swap = ("--swap", tmp_path / "state")
    for through in ("optimizers", "class"):
        out = tmp_path / through
        given = (*common, "--through", through)
        resident = weights(script, tmp_path, "ram.pt", *given, "--output", tmp_path / "ram")
        whole = weights(script, tmp_path, "whole.pt", *given, *swap, "--output", out)
        assert_equal(resident, whole)
        for leftover in sorted(out.glob("checkpoint-4/*")):
            leftover.unlink()
        (out / "checkpoint-4").rmdir()
        again = (*given, *swap, "--output", out, "--resume")
        assert_equal(whole, weights(script, tmp_path, "again.pt", *again))


@needs("lightning")
@pytest.mark.timeout(300)
def test_lightning_resumes_to_the_bit(tmp_path: Path) -> None:
    script, swap = "lightning_training.py", ("--cpu", "--swap", tmp_path / "state")
    out = ("--output", tmp_path / "out")
    resident = weights(script, tmp_path, "ram.pt", "--cpu", "--epochs", 3, *out)
    whole = weights(script, tmp_path, "whole.pt", *swap, "--epochs", 3, *out)
    half = weights(script, tmp_path, "half.pt", *swap, "--epochs", 2, *out)
    resumed = weights(script, tmp_path, "resumed.pt", *swap, "--epochs", 3, *out, "--resume")
    assert_equal(resident, whole, resumed)
    assert_different(half, resumed)


def sharded(ranks: int, folder: Path, name: str, *arguments: object) -> list[torch.Tensor]:
    """Run the FSDP2 example on some ranks and return the whole weights."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    script = (EXAMPLES / "fsdp2_dcp.py", *arguments, "--weights", folder / name)
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, (*launcher, *script))],
        capture_output=True, text=True, env={**os.environ, **SETTINGS, **quiet},
        check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[torch.Tensor] = torch.load(folder / name, weights_only=True)
    return found


@pytest.mark.timeout(300)
def test_fsdp2_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = sharded(2, tmp_path, "whole.pt", "--steps", 5)
    for own, ranks in (((), 2), (("--own",), 1)):
        given = (*("--swap", tmp_path / "state"), *own)
        saved = tmp_path / f"saved by {ranks}"
        half = sharded(2, tmp_path, "half.pt", *given, "--steps", 3, "--save", saved)
        again = (*given, "--steps", 5, "--resume", saved)
        resumed = sharded(ranks, tmp_path, "resumed.pt", *again)
        assert_different(half, resumed)
        if ranks == 2:
            assert_equal(whole, resumed)
        # Another number of ranks adds up gradients in another order.
        for mine, theirs in zip(whole, resumed, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_custom_engine_is_exact_and_survives_a_kill(tmp_path: Path) -> None:
    script, steps = "custom_engine.py", ("--steps", 6)
    resident = weights(script, tmp_path, "ram.pt", *steps)
    swap = ("--swap-path", tmp_path / "state")
    assert_equal(resident, weights(script, tmp_path, "swapped.pt", *steps, *swap))
    durable = (*swap, "--swap-durability", "step")
    command = [sys.executable, str(EXAMPLES / script), *map(str, (*durable, "--steps", 1000))]
    environment = {**os.environ, **SETTINGS}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:
            if line.startswith("step 4 "):
                victim.send_signal(signal.SIGKILL)
                break
    # The weights of the killed run may be a step or two beyond: go on to a step after those.
    resumed = run(script, *durable, "--steps", 60, "--weights", tmp_path / "resumed.pt")
    assert resumed.returncode == 0, resumed.stderr
    first = int(resumed.stdout.split()[1])
    assert 2 <= first < 60
    longer = weights(script, tmp_path, "longer.pt", "--steps", 60)
    assert_equal(longer, [torch.load(tmp_path / "resumed.pt", weights_only=True)])


def test_custom_engine_is_its_rule(tmp_path: Path) -> None:
    """Against AdEMAMix written down plainly, in float64, for one fp32 parameter."""
    spec = importlib.util.spec_from_file_location("custom_engine", EXAMPLES / "custom_engine.py")
    assert spec is not None
    assert spec.loader is not None
    custom_engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(custom_engine)
    from swapio import SwapConfig

    torch.manual_seed(2)
    model = torch.nn.Linear(700, 500)
    param = model.weight.detach().double().clone()
    fast, slow, square = (torch.zeros_like(param) for _ in range(3))
    config = SwapConfig(path=str(tmp_path), host_memory="24MiB", sub_group_numel="256Ki")
    engine = custom_engine.AdEMAMixEngine(model, config, lr=1e-2)
    for step in range(1, 5):
        grad = torch.randn(500, 700)
        model.weight.grad, model.bias.grad = grad.clone(), torch.randn(500)
        engine.step()
        grad = grad.double()
        fast = 0.9 * fast + 0.1 * grad
        slow = 0.9999 * slow + 0.0001 * grad
        square = 0.999 * square + 0.001 * grad * grad
        root = (square / (1 - 0.999**step)).sqrt() + 1e-8
        param -= 1e-2 * (fast / (1 - 0.9**step) + 5.0 * slow) / root
    engine.close()
    torch.testing.assert_close(model.weight.detach().double(), param, rtol=1e-4, atol=1e-5)
