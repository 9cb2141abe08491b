# SPDX-License-Identifier: Apache-2.0
"""`swapio bench` and `swapio tune` on tiny files: what they report, write and leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swapio.cli import main
from swapio.cli.fio import find_fio
from swapio.cli.measure import PATTERNS, Bench, EngineSettings
from swapio.config import SwapConfig

TINY = ["--size", "32MiB", "--seconds", "0.05", "--quiet", "--json"]


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_rates_and_files_are_removed(kind: str, direct: str, tmp_path: Path) -> None:
    settings = EngineSettings(kind=kind, direct=direct)  # type: ignore[arg-type]
    with Bench(tmp_path, settings, nbytes=16 << 20) as bench:
        for pattern in PATTERNS:
            moved: list[int] = []
            rate = bench.rate(pattern, seconds=0.02, latency=True, progress=moved.append)
            assert rate.gb_per_second > 0
            assert rate.latency_ms["p50"] <= rate.latency_ms["p99"] <= rate.latency_ms["max"]
    assert list(tmp_path.iterdir()) == []


def test_bench_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), "--no-fio", *TINY]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["pattern"] for row in result["rates"]} == set(PATTERNS)
    assert {row["direct"] for row in result["rates"]} == {True, False}
    assert result["estimate"]["gb_written_per_step"] == pytest.approx(10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_fio() is None, reason="fio is not installed")
def test_bench_prints_the_share_of_fio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), *TINY[:-1]]) == 0
    out = capsys.readouterr().out
    assert "fio: io_uring" in out
    assert "TB a day" in out


def test_bench_refuses_a_full_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), "--size", "1000TiB"]) == 1
    assert "lower --size" in capsys.readouterr().err


def test_tune_writes_what_swap_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tuned.toml"
    assert main(["tune", str(tmp_path), "--output", str(file), *TINY]) == 0
    printed = json.loads(capsys.readouterr().out)
    config = SwapConfig.coerce(file)
    assert config.paths == (str(tmp_path),)
    assert config.mixed_bandwidth == printed["mixed_bandwidth"]
    assert config.block_size == printed["block_size"]
    assert list(tmp_path.iterdir()) == [file]
