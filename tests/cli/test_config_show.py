# SPDX-License-Identifier: Apache-2.0
"""`swapio config show FILE` prints every effective value and where it came from."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from swapio.cli import config_show, main
from swapio.config import field_names
from swapio.errors import ConfigError

DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "fp16": {"enabled": True, "initial_scale_power": 10},
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SWAPIO_"):
            monkeypatch.delenv(name)


def show(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    config_show.add_parser(parser.add_subparsers())
    args = parser.parse_args(["config", "show", *arguments])
    return int(args.run(args))


def test_every_setting_and_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "swap.toml"
    file.write_text('path = "/a"\n')
    monkeypatch.setenv("SWAPIO_HOST_MEMORY", "2GiB")
    assert show(str(file)) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == list(field_names())
    assert rows["path"].endswith(f"file {file}")
    assert "2GiB" in rows["host_memory"]
    assert rows["host_memory"].endswith("environment SWAPIO_HOST_MEMORY")
    assert show(str(file), "--changed") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "swap.json"
    file.write_text('{"queue_depth": 8}')
    assert show(str(file), "--json", "--changed") == 0
    assert json.loads(capsys.readouterr().out) == {
        "settings": {"queue_depth": {"value": 8, "source": f"file {file}"}},
        "deepspeed": None,
    }


def test_a_file_of_deepspeeds_says_what_became_of_each_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    assert show(str(file)) == 0
    text = capsys.readouterr().out
    assert "optimizer: swapio.optim.AdamW(lr=0.0001)" in text
    assert "scaler: swapio.optim.GradScaler(init_scale=1024.0)" in text
    assert "ZeRO stage: 3" in text
    assert "noted: slots are always written once" in text
    assert show(str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["deepspeed"]["stage"] == 3
    assert found["settings"]["path"]["value"] == "/nvme"


def test_without_a_file_defaults_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--changed") == 0
    assert capsys.readouterr().out.strip() == ""


def test_what_is_refused_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "swap.json"
    file.write_text('{"hostmemory": 1}')
    with pytest.raises(ConfigError, match=r"did you mean 'host_memory'\?"):
        show(str(file))


def test_the_command_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "swap.toml"
    file.write_text('path = "/a"\n')
    assert main(["config", "show", str(file)]) == 0
    assert "/a" in capsys.readouterr().out
    file.write_text("pth = 1\n")
    assert main(["config", "show", str(file)]) == 1
    assert "did you mean 'path'?" in capsys.readouterr().err
