# SPDX-License-Identifier: Apache-2.0
"""SwapConfig: canonical values whatever form was given, and clear refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from swapio.config import SwapConfig, coerce, field_names, setting_of
from swapio.errors import ConfigError

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SWAPIO_"):
            monkeypatch.delenv(name)


def test_defaults_are_canonical_and_documented() -> None:
    config = SwapConfig()
    for field in dataclasses.fields(config):
        about = setting_of(field.name)
        assert getattr(config, field.name) == field.default
        assert about.doc.endswith(".")
        assert about.unit
        assert about.evidence.endswith(".")
        assert ": " in about.evidence
    assert set(config.sources.values()) == {"default"}


def test_every_value_survives_json() -> None:
    config = SwapConfig(path=("/a", "/b"), resident={"exp_avg"}, cpu_affinity=(0, 1, 2), trace="/t")
    again = SwapConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config


@pytest.mark.parametrize(
    ("given", "expected"),
    [("8GiB", 8 * GIB), ("1e9", 10**9), (1e9, 10**9), ("2 GB", 2 * 10**9), ("auto", "auto")],
)
def test_host_memory_forms(given: Any, expected: Any) -> None:
    assert SwapConfig(host_memory=given).host_memory == expected


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert SwapConfig(path="run").paths == (str(tmp_path / "run"),)
    assert SwapConfig(path=Path("~/run")).path == "/home/someone/run"
    assert SwapConfig(path=["/a:b", "/ü"]).paths == ("/a:b", "/ü")
    assert SwapConfig().paths == ()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("path", "", "path contains ''"),
        ("path", [], "empty list"),
        ("path", ["/a", "/a/"], "given twice"),
        ("path", 3, "path is 3; want a folder"),
        ("path", "a\0b", "want the path of a folder"),
        ("path", b"/a", "path is b'/a'; want a folder"),
        ("host_memory", "8 apples", "host_memory is '8 apples'"),
        ("host_memory", 0, "at least 1, or 'auto'"),
        ("host_memory", float("nan"), "want a number"),
        ("host_memory", None, "want a number"),
        ("queue_depth", True, "queue_depth is True"),
        ("queue_depth", 1.5, "not a whole number"),
        ("queue_depth", 0, "want at least 1"),
        ("queue_depth", 4097, "want at most 4096"),
        ("block_size", 5000, "multiple of 4096"),
        ("chunk_numel", 1000, "at least 262144, or 'auto'"),
        ("chunk_numel", 262145, "multiple of 262144"),
        ("engine", "libaio", "want one of 'auto', 'io_uring', 'threads'"),
        ("checksum", "maybe", "want true or false"),
        ("checksum", 2, "want true or false"),
        ("state_dtype", "int8", "want one of float32, bfloat16"),
        ("resident", [1], "want names"),
        ("resident", {"a": 1}, "want names"),
        ("cpu_affinity", "3-1", "want CPU numbers"),
        ("cpu_affinity", [], "at least one CPU"),
        ("namespace", "../up", "want letters"),
        ("spare_slots", -1, "want at least 0"),
        ("lock_timeout", float("inf"), "want a number"),
        ("read_bandwidth", 0, "at least one byte per second"),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SwapConfig(**{name: value})
    assert message in str(caught.value)


def test_combinations_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs master='none'"):
        SwapConfig(stochastic_rounding=True)
    with pytest.raises(ConfigError, match="path_weights has 2 shares for 1 paths"):
        SwapConfig(path="/a", path_weights=(1, 2))
    with pytest.raises(ConfigError, match="Sizes need a unit"):
        SwapConfig(path="/a", host_memory=8)


def test_frozen_keyword_only_hashable_and_copyable() -> None:
    config = SwapConfig(path="/a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.path = "/b"  # type: ignore[misc]
    with pytest.raises(TypeError):
        SwapConfig("/a")  # type: ignore[call-arg]
    assert hash(config) == hash(SwapConfig(path="/a"))
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.sources == config.sources


def test_replace_validates_and_keeps_sources() -> None:
    config = SwapConfig(path="/a").replace(queue_depth="16")
    assert config.queue_depth == 16
    assert (config.sources["path"], config.sources["queue_depth"]) == ("argument", "argument")
    with pytest.raises(ConfigError, match=r"unknown key 'queue_dept' in replace\(\); did you mean"):
        config.replace(queue_dept=1)


def test_swapper_follows_the_pipeline_switches() -> None:
    assert SwapConfig().swapper == "pipelined"
    assert SwapConfig(pipeline_read=False).swapper == "pipelined"
    assert SwapConfig(pipeline_read=False, pipeline_write=False).swapper == "partitioned"


def test_coerce_takes_every_form(tmp_path: Path) -> None:
    assert coerce(None) == SwapConfig()
    assert coerce("/a") == coerce(Path("/a")) == coerce({"path": "/a"}) == SwapConfig(path="/a")
    assert coerce(["/a", "/b"]).paths == ("/a", "/b")
    same = SwapConfig(path="/a")
    assert coerce(same) is same
    file = tmp_path / "swap.json"
    file.write_text('{"path": "/a", "host_memory": "1GiB"}')
    assert coerce(file) == SwapConfig(path="/a", host_memory=GIB)
    with pytest.raises(ConfigError, match="swap is 3, a int"):
        coerce(3)


def test_resolved_values() -> None:
    config = SwapConfig(host_memory="1GiB", cpu_threads=3)
    assert config.resolve_host_memory() == GIB
    assert config.resolve_cpu_threads() == 3
    assert SwapConfig(cpu_affinity=(0, 2)).resolve_cpu_threads() == 2
    assert SwapConfig().resolve_host_memory() > 0
    assert 1 <= SwapConfig().resolve_cpu_threads() <= (os.cpu_count() or 1)


def test_describe_names_every_field_and_its_source() -> None:
    text = SwapConfig(host_memory="1GiB").describe()
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == list(field_names())
    assert lines[2].split() == ["host_memory", "1GiB", "argument"]
