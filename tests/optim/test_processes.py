# SPDX-License-Identifier: Apache-2.0
"""Forks, workers, signals, `python -O` and every way out of the interpreter."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from support.script import run_script

# Trains a little; `state` is the hash of all parameters and states.
_TRAIN = """
import os, signal, sys, threading, time
import torch
from swapio.errors import ClosedError
from swapio.optim import AdamW

N = 1_100_000
torch.set_num_threads(1)

def make(path, **more):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(N)), torch.nn.Parameter(torch.randn(7))]
    swap = path and {"path": path, "host_memory": "7MiB", "sub_group_numel": 1 << 19, **more}
    return params, AdamW(params, lr=0.1, swap=swap)

def step(params, opt, number):
    for param in params:
        param.grad = torch.full_like(param, float(number)).cos()
    opt.step()

def digest(params, opt):
    total = 0
    for param in params:
        for value in (param.detach(), *opt.state_of(param).values()):
            total = hash((total, value.numpy().tobytes()))
    return total
"""

_SAME = (
    _TRAIN
    + """
found = []
for path in (None, sys.argv[1]):
    params, opt = make(path)
    for number in range(3):
        step(params, opt, number)
    found.append(digest(params, opt))
    opt.close()
print("same" if found[0] == found[1] else "different", threading.active_count())
"""
)


@pytest.mark.parametrize("flag", ["-O", pytest.param("-OO", marks=pytest.mark.slow)])
def test_training_is_the_same_without_asserts(tmp_path, flag):
    """DeepSpeed's I/O sat in asserts: under python -O nothing was read or written."""
    done = subprocess.run(
        (sys.executable, flag, "-c", _SAME, str(tmp_path)),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", "1"]
    assert not any(tmp_path.iterdir())


_ENDS = {
    "falls off": ("", 0),
    "exit code": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('of the user')", 1),
    "os exit": ("sys.stdout.flush(); os._exit(5)", 5),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
    "global reference": ("sys.keep = opt", 0),
    "reference cycle": ("opt.me = opt; del opt", 0),
    "no reference": ("del opt, params; import gc; gc.collect()", 0),
    "other thread": ("threading.Thread(target=lambda: step(params, opt, 9)).start()", 0),
    "during interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
}


_SLOW = ("os exit", "global reference", "exit code", "no reference", "other thread")


@pytest.mark.parametrize(
    "end", [pytest.param(e, marks=[pytest.mark.slow] * (e in _SLOW)) for e in _ENDS]
)
def test_every_way_out_ends_and_is_clean(tmp_path, end):
    """spdl#1591, sglang#33578: threads and destructors kept the interpreter from leaving."""
    code, expected = _ENDS[end]
    source = f"{_TRAIN}\nparams, opt = make(sys.argv[1])\nfor n in range(3): step(params, opt, n)\n"
    source += f"print('trained', flush=True)\n{code}\n"
    done = run_script(source, tmp_path, timeout=100)
    assert done.stdout == "trained\n"
    assert done.returncode == expected, done.stderr
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr or end in ("exception", "during interrupt")
    if end not in ("os exit", "SIGTERM"):
        assert not any(tmp_path.iterdir())
    if end == "SIGTERM":
        again = run_script(_SAME, tmp_path, timeout=100)
        assert again.stdout.split() == ["same", "1"], again.stderr
        assert not any(tmp_path.iterdir())


_FORK = (
    _TRAIN
    + """
params, opt = make(sys.argv[1])
step(params, opt, 0)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    refused = 0
    for call in (opt.step, opt.synchronize, opt.state_dict, lambda: opt.state[params[0]]["exp_avg"],
                 lambda: opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})):
        try:
            call()
        except ClosedError as error:
            refused += "parent" in str(error)
    opt.close()
    params, mine = make(sys.argv[2])
    step(params, mine, 0)
    mine.close()
    print("refused", refused, flush=True)
    sys.exit(0) if sys.argv[3] == "sys.exit" else os._exit(0)
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status))
for number in range(1, 3):
    step(params, opt, number)
found = digest(params, opt)
opt.close()
params, opt = make(None)
for number in range(3):
    step(params, opt, number)
print("same" if found == digest(params, opt) else "different")
"""
)


@pytest.mark.parametrize("way", [pytest.param("os._exit", marks=pytest.mark.slow), "sys.exit"])
def test_a_forked_child_is_told_and_can_make_its_own(tmp_path, way):
    """liburing#612: two processes on one ring corrupt each other."""
    done = run_script(_FORK, tmp_path / "parent", tmp_path / "child", way, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "5", "child", "0", "same"], done.stderr
    assert "Exception ignored" not in done.stderr


_WORKERS = (
    _TRAIN
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        return torch.full((4,), float(at))

def main():
    found = []
    for path in (None, sys.argv[1]):
        params, opt = make(path)
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[2])
        for epoch in range(3):
            for batch in loader:
                step(params, opt, float(batch.sum()))
        found.append(digest(params, opt))
        opt.close()
    print("same" if found[0] == found[1] else "different")

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loader_workers(tmp_path, context):
    script = tmp_path / "script.py"
    script.write_text(_WORKERS)
    done = subprocess.run(
        (sys.executable, str(script), str(tmp_path / "swap"), context),
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"]
    assert "Exception ignored" not in done.stderr


_KILLED = (
    _TRAIN
    + """
params, opt = make(sys.argv[1])
for number in range(10_000):
    step(params, opt, number)
    if number == 2:
        print("running", flush=True)
"""
)


def test_a_killed_run_leaves_nothing_that_stays(tmp_path):
    """DeepSpeed#4416: every run left a new full set of files, until the disk was full."""
    sizes = []
    for _ in range(2):  # kill, start anew over what is left, kill again
        child = subprocess.Popen(
            (sys.executable, "-c", _KILLED, str(tmp_path)), stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout.readline() == "running\n"
        finally:
            child.kill()
            child.communicate()
        sizes.append(sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file()))
    assert sizes[0] > N_BYTES
    assert sizes[1] <= sizes[0]
    done = run_script(_SAME, tmp_path, timeout=100)
    assert done.stdout.split() == ["same", "1"], done.stderr
    assert not any(tmp_path.iterdir())


N_BYTES = 8 * 1_100_000

_BROKEN = """
import sys
sys.modules["swapio._kernels"] = None
import torch
from swapio.optim import AdamW
"""


def test_a_missing_extension_is_one_clear_error():
    """DeepSpeed#1846: a failed build ended in an AttributeError of __del__."""
    done = run_script(_BROKEN)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(r"(ImportError|ModuleNotFoundError): .*_kernels", last)
    assert "Exception ignored" not in done.stderr
