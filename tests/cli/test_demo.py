# SPDX-License-Identifier: Apache-2.0
"""`swapio demo`: equal runs, what it writes, and that it fails when a bit differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swapio.cli import demo, main
from swapio.demo.data import batches, load_text
from swapio.demo.observe import Device, Run, Step
from swapio.demo.report import differences
from swapio.errors import ConfigError

SMALL = ["--layers", "4", "--width", "256", "--heads", "4", "--batch", "1", "--sequence", "32"]
SMALL += ["--steps", "4", "--quiet", "--host-memory", "18MiB", "--sub-group-numel", "512Ki"]


@pytest.fixture(autouse=True)
def quick_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEVICE_BYTES", 32 << 20)
    monkeypatch.setattr(demo, "DEVICE_SECONDS", 0.02)


def test_both_runs_are_equal_and_one_used_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    status = main(["demo", *SMALL, "--path", str(tmp_path), "--plot", str(picture), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["differences"] == []
    assert status == 0
    ram, storage = result["state in RAM"], result["state on storage"]
    assert ram["last_loss"] == storage["last_loss"] < result["losses"][0]
    assert ram["read_bytes_per_parameter"] == 0
    assert 0 < storage["read_bytes_per_parameter"] <= 12
    assert storage["state_bytes_in_ram"] <= 1.02 * (18 << 20) < ram["state_bytes_in_ram"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def test_muon_is_equal_too_and_its_loss_falls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--optimizer", "muon"]
    status = main(["demo", *SMALL, *more, "--path", str(tmp_path), "--plot", "", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (status, result["differences"]) == (0, [])
    ram, storage = result["state in RAM"], result["state on storage"]
    assert ram["last_loss"] == storage["last_loss"] < result["losses"][0]
    assert 0 < storage["read_bytes_per_parameter"] <= 12


def test_a_file_of_ones_own_and_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a trace in a place of one's own: `SWAPIO_TRACE` has the last word."""
    monkeypatch.setenv("SWAPIO_TRACE", str(tmp_path / "mine.json"))
    text = tmp_path / "text.bin"
    text.write_bytes(bytes(range(256)) * 40)
    tiny = ["--layers", "1", "--width", "32", "--heads", "2", "--sequence", "16", "--steps", "2"]
    arguments = ["--data", str(text), "--path", str(tmp_path), "--plot", "", "--quiet"]
    assert main(["demo", *tiny, *arguments]) == 0
    out = capsys.readouterr().out
    assert "equal to the bit: all 2 losses" in out
    assert "10,240 bytes" in out
    assert (tmp_path / "mine.json").stat().st_size > 0


def test_a_difference_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swapio.demo.report.differences", lambda *_: ["3 losses differ"])
    tiny = ["--layers", "1", "--width", "32", "--heads", "2", "--sequence", "16", "--steps", "1"]
    assert main(["demo", *tiny, "--path", str(tmp_path), "--plot", "", "--quiet"]) == 1
    assert "DIFFERENT: 3 losses differ" in capsys.readouterr().out


def test_differences_sees_one_bit() -> None:
    def run(loss: float, value: float) -> Run:
        seen = Run("x", 1, 1, steps=[Step(loss=loss)])
        seen.parameters = [torch.full((3,), value, dtype=torch.bfloat16)]
        return seen

    assert differences(run(1.0, 2.0), run(1.0, 2.0)) == []
    assert "step 1" in differences(run(1.0, 2.0), run(1.0 + 2**-52, 2.0))[0]
    assert "1 of 1 parameters" in differences(run(1.0, 2.0), run(1.0, 2.015625))[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--data", "/no/such/file"], "/no/such/file"),
        (["--path", "/no/such/folder"], "/no/such/folder"),
        (["--heads", "3"], "--heads 3"),
        (["--steps", "0"], "--steps 0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--path", str(tmp_path), "--quiet", *arguments]) == 1
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_the_text_is_reproducible_and_long_enough() -> None:
    text, where = load_text()
    assert text.numel() > 1 << 20
    assert "standard library" in where
    first, second = (
        [x for x, _ in batches(text, steps=3, batch=2, sequence=8, seed=5)] for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(ConfigError, match="needs more than 8"):
        next(batches(text[:8], steps=1, batch=1, sequence=8, seed=1))


def test_share_of_the_device() -> None:
    device = Device(read=3.0, write=4.0, mixed=2.0)
    assert device.share(2.0, 2.0, 2.0) == pytest.approx(1.0)
    assert device.share(3.0, 0.0, 2.0) == pytest.approx(0.5)
    assert Device().share(1.0, 1.0, 1.0) == 0.0
