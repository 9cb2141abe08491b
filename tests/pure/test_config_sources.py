# SPDX-License-Identifier: Apache-2.0
"""Precedence, provenance, and errors that name the nearest known key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from swapio import config_flags
from swapio.config import SwapConfig, field_names
from swapio.config_sources import coerce, from_dict, from_env, from_file
from swapio.errors import ConfigError

GIB = 1 << 30


def parser(**options: Any) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(exit_on_error=False)
    config_flags.add_arguments(found, **options)
    return found


def flags(text: str, environment: dict[str, str] | None = None) -> SwapConfig:
    return config_flags.from_arguments(
        parser().parse_args(text.split()), environment=environment or {}
    )


def test_variables_override_files_and_flags_override_variables(tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text('path = "/file"\nhost_memory = "1GiB"\nqueue_depth = 4\nengine = "threads"\n')
    environment = {"SWAPIO_HOST_MEMORY": "2GiB", "SWAPIO_QUEUE_DEPTH": "8"}
    config = flags(f"--swap-config {file} --swap-queue-depth 16", environment)
    assert (config.path, config.engine) == ("/file", "threads")
    assert (config.host_memory, config.queue_depth) == (2 * GIB, 16)
    assert config.sources["engine"] == f"file {file}"
    assert config.sources["host_memory"] == "environment SWAPIO_HOST_MEMORY"
    assert config.sources["queue_depth"] == "flag --swap-queue-depth"
    assert config.sources["checksum"] == "default"


def test_coerce_does_not_let_variables_override_flags() -> None:
    config = flags("--swap-path /a --swap-queue-depth 16")
    again = coerce(config, {"SWAPIO_QUEUE_DEPTH": "8", "SWAPIO_ENGINE": "threads"})
    assert (again.queue_depth, again.engine) == (16, "threads")


def test_variables_override_arguments() -> None:
    config = coerce(SwapConfig(path="/a", checksum=True), {"SWAPIO_CHECKSUM": "no"})
    assert config.checksum is False
    assert config.sources["path"] == "argument"


def test_path_variable_moves_state_only_where_a_path_is_meant() -> None:
    environment = {"SWAPIO_PATH": "/env"}
    assert coerce("/a", environment).path == "/env"
    assert coerce({}, environment).path == "/env"
    assert from_env(environment).path == "/env"
    assert coerce(None, environment).path is None
    assert coerce({"path": None}, environment).path is None
    assert coerce({"offload_optimizer": {"device": "cpu"}}, environment).path is None
    assert coerce(SwapConfig(), environment).path is None
    assert from_env({"SWAPIO_PATH": "/a:/b"}).paths == ("/a", "/b")
    assert coerce("/a", {"SWAPIO_PATH": "none"}).path is None


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("SWAPIO_HOSTMEMORY", "SWAPIO_HOST_MEMORY"), ("SWAPIO_CHECKSUMS", "SWAPIO_CHECKSUM")],
)
def test_a_variable_that_is_nearly_known_is_refused(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is no setting; did you mean {nearest}"):
        from_env({variable: "1"})


def test_an_empty_variable_is_as_if_it_were_not_set() -> None:
    assert from_env({"SWAPIO_PATH": "", "SWAPIO_HOST_MEMORY": " "}) == SwapConfig()


def test_other_variables_pass() -> None:
    config = from_env({"SWAPIO_SIMD": "avx2", "SWAPIO_WERROR": "1", "PATH": "/bin"})
    assert config == SwapConfig()


def test_a_bad_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"queue_depth .*from environment SWAPIO_QUEUE_DEPTH"):
        from_env({"SWAPIO_QUEUE_DEPTH": "many"})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("host_mem", "unknown key 'host_mem' in dict; did you mean 'host_memory'?"),
        ("Queue_Depth", "did you mean 'queue_depth'?"),
        ("nvme_pth", "did you mean 'nvme_path'?"),
        ("zero_optimisation", "did you mean 'zero_optimization'?"),
        ("xyzzy", "unknown key 'xyzzy' in dict; known are path, "),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict({key: 1}, environment={})
    assert message in str(caught.value)


def test_keys_that_are_no_text() -> None:
    with pytest.raises(ConfigError, match="key 1 in dict is a int"):
        from_dict({1: 2}, environment={})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"swapio": {"path": "/a"}}'),
        ("a.toml", '[swapio]\npath = "/a"\n'),
        ("pyproject.toml", '[project]\nname = "x"\n[tool.swapio]\npath = "/a"\n'),
        ("b.json", '{"train_batch_size": 4, "swap": {"path": "/a"}}'),
    ],
)
def test_sections_of_larger_files(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert from_file(file, environment={}) == SwapConfig(path="/a")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.toml", "= 1", "is not TOML"),
        ("a.json", "[1]", "holds a list"),
        ("a.yaml", "", r"must end in .json or .toml"),
        ("a.toml", "[tool.black]\n", r"has no \[tool.swapio\] table"),
        ("a.toml", "[tool.swapio]\npth = 1\n", r"\[tool.swapio\]; did you mean 'path'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(file, environment={})
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json cannot be read: No such file"):
        from_file(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        coerce(str(tmp_path / "no.toml"))


def test_every_setting_has_a_flag_and_none_changes_anything_by_itself() -> None:
    assert flags("") == SwapConfig()
    help_text = parser().format_help()
    for name in field_names():
        assert config_flags.flag_of(name) in help_text


def test_flags_of_every_kind() -> None:
    config = flags(
        "--swap-path /a --swap-path /b:/c --no-swap-checksum --swap-gradients "
        "--swap-resident exp_avg,*.bias:exp_avg_sq --swap-cpu-affinity 0-1 --swap-spare-slots none"
        " --swap-host-memory 1GiB --swap-engine threads --swap-read-bandwidth 3.4GB/s"
    )
    assert config == SwapConfig(
        path=("/a", "/b", "/c"),
        checksum=False,
        swap_gradients=True,
        resident=("exp_avg", "*.bias:exp_avg_sq"),
        cpu_affinity=(0, 1),
        host_memory=GIB,
        engine="threads",
        read_bandwidth=3_400_000_000,
    )
    assert flags("--swap-path none", {"SWAPIO_PATH": "/env"}).path is None


def test_flags_with_another_prefix() -> None:
    namespace = parser(prefix="opt-state").parse_args(["--opt-state-path", "/a"])
    config = config_flags.from_arguments(namespace, prefix="opt-state", environment={})
    assert config.path == "/a"


def test_a_bad_flag_is_a_usage_error() -> None:
    with pytest.raises(argparse.ArgumentError, match="queue_depth is 'x'"):
        parser().parse_args(["--swap-queue-depth", "x"])
    with pytest.raises(argparse.ArgumentError, match="want one of 'auto', 'io_uring', 'threads'"):
        parser().parse_args(["--swap-engine", "aio"])
