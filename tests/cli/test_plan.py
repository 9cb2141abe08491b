# SPDX-License-Identifier: Apache-2.0
"""`swapio plan` reads headers only, plans, and says what is wrong with a model file."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from swapio.cli import main, plan
from swapio.cli.plan_model import read_model
from swapio.errors import ConfigError
from swapio.optim.muon_update import PIECE_NUMEL


def swapio_plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *arguments])
    return int(args.run(args))


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """Write a header as the format says; a sparse file stands for the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "I64": 8}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return path


MODEL = {
    "model.embed_tokens.weight": ("BF16", [32000, 1024]),
    "model.layers.0.mlp.weight": ("BF16", [4096, 4096]),
    "model.layers.1.mlp.weight": ("BF16", [4096, 4096]),
    "model.layers.0.norm.weight": ("F32", [1024]),
    "position_ids": ("I64", [1024]),
}
NUMEL = 32000 * 1024 + 2 * 4096 * 4096 + 1024


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert swapio_plan(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_params_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--params", "7e9", "--dtype", "bf16", "--host-memory", "8GiB")
    assert found["parameters"] == 7_000_000_000
    assert 8 < found["plan"]["read_bytes_per_param"] < 10
    assert found["plan"]["time"]["step"] is None


@pytest.mark.parametrize(
    ("text", "number"), [("7B", 7 * 10**9), ("1.5b", 15 * 10**8), ("350M", 35 * 10**7), ("12", 12)]
)
def test_numbers_of_parameters(text: str, number: int) -> None:
    assert plan.parse_params(text) == number
    with pytest.raises(ConfigError, match="--params is"):
        plan.parse_params("many")


def test_a_safetensors_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = safetensors(tmp_path / "model.safetensors", MODEL)
    found = planned(capsys, str(file), "--host-memory", "64MiB", "--path", str(tmp_path))
    assert found["parameters"] == NUMEL
    assert found["plan"]["numel"] == NUMEL
    assert found["plan"]["disk_free_bytes"] > 0
    everything = planned(capsys, str(file), "--host-memory", "2GiB")["plan"]
    assert everything["read_bytes"] == 0


def test_folders_and_indexes(tmp_path: Path) -> None:
    names = list(MODEL)
    for number, part in enumerate((names[:2], names[2:])):
        safetensors(tmp_path / f"m-{number}.safetensors", {name: MODEL[name] for name in part})
    index = tmp_path / "model.safetensors.index.json"
    files = {name: f"m-{0 if name in names[:2] else 1}.safetensors" for name in names}
    index.write_text(json.dumps({"weight_map": files}))
    assert {t.name for t in read_model(str(tmp_path))} == set(names)
    assert {t.name for t in read_model(str(index))} == set(names)
    (tmp_path / "m-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lists .*m-1\.safetensors, which is not there"):
        read_model(str(index))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_torch_checkpoint(tmp_path: Path, wrapped: bool) -> None:
    state = {"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "step": torch.tensor(3)}
    torch.save({"state_dict": state, "epoch": 1} if wrapped else state, tmp_path / "m.pt")
    found = read_model(str(tmp_path / "m.pt"))
    assert [(t.name, t.shape, t.dtype) for t in found] == [
        ("a.weight", (3, 5), "bfloat16"),
        ("step", (), "int64"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.safetensors", b"", "is no safetensors file"),
        ("m.safetensors", struct.pack("<Q", 1 << 60), "is no safetensors file"),
        ("m.safetensors", struct.pack("<Q", 100) + b"{}", "is cut off: 2 of 100 bytes"),
        ("m.safetensors", struct.pack("<Q", 2) + b"[]", "broken safetensors header"),
        ("m.safetensors", struct.pack("<Q", 8) + b'{"a": 1}', "broken safetensors header"),
        ("m.safetensors", struct.pack("<Q", 2) + b"{}", "holds no tensor"),
        ("m.pt", b"not a checkpoint", "cannot be read as a torch checkpoint"),
        ("m.index.json", b"{}", "has no weight_map"),
        ("m.gguf", b"GGUF", "the name must end in one of"),
    ],
)
def test_bad_model_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_model(str(file))
    assert str(file) in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_model(str(tmp_path / "none.safetensors"))
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a model's files, or --params"),
        (("m.pt", "--params", "1"), "but not both"),
        (("--params", "1e9", "--world-size", "0"), "--world-size is 0"),
        (("--params", "1e9", "--step-seconds", "0"), "--step-seconds is 0.0"),
        (("--params", "1e9", "--dtype", "int8"), "--dtype is 'int8'"),
        (("--params", "1e9", "--host-memory", "1MiB"), "the least that does is"),
        (("--params", "1e9", "--compute-bandwidth", "fast"), "--compute-bandwidth is 'fast'"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swapio_plan(*arguments)


def test_rates_wear_and_bound_in_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tuned.toml"
    config.write_text('read_bandwidth = "3.38GB/s"\nwrite_bandwidth = "4.34GB/s"\n')
    arguments = f"--params 4e8 --host-memory 1GiB --config {config} --step-seconds 2".split()
    arguments += ["--compute-bandwidth", "50GB/s", "--checksum-bandwidth", "20GB/s"]
    assert swapio_plan(*arguments, "--mixed-bandwidth", "3.56GB/s") == 0
    text = capsys.readouterr().out
    assert "bound by mixed" in text
    assert "TB a day at 43,200 steps a day" in text
    assert "adamw on 400,000,000 parameters of bfloat16" in text


def test_a_disk_that_is_too_small_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--params 2e11 --host-memory 16GiB --path {tmp_path}"
    assert swapio_plan(*arguments.split()) == 1
    assert "lower spare_slots or free space" in capsys.readouterr().out


def test_muon_routes_matrices_and_reserves_workspace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(safetensors(tmp_path / "model.safetensors", MODEL))
    found = planned(capsys, file, "--optimizer", "muon", "--host-memory", "1GiB")["plan"]
    # u, a second buffer, two Gram matrices with padded rows, and a piece of the joined master.
    expected = 4 * (4 * 4096 * 4096 + PIECE_NUMEL)
    assert found["workspace_bytes"] == pytest.approx(expected, rel=0.01)
    resident = planned(
        capsys,
        file,
        "--optimizer",
        "muon",
        "--host-memory",
        "1GiB",
        "--resident",
        "momentum_buffer",
    )["plan"]
    assert resident["read_bytes"] <= found["read_bytes"]


def test_ranks_share_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(safetensors(tmp_path / "model.safetensors", MODEL))
    found = planned(capsys, file, "--world-size", "4", "--host-memory", "1GiB")
    assert found["plan"]["numel"] == NUMEL // 4


def test_the_command_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1e9", "--host-memory", "1GiB"]) == 0
    assert "sub-groups stay in RAM" in capsys.readouterr().out
    assert main(["plan", "--params", "1e9", "--host-memory", "1MiB"]) == 1
    assert "the least that does is" in capsys.readouterr().err
