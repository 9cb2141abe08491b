# SPDX-License-Identifier: Apache-2.0
"""Sizes and other values mean the same as text and as numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio import config_values as values
from swapio.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1_000_000", 10**6),
        ("1e9", 10**9),
        ("1.5E3", 1500),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("8Gi", 8 << 30),
        ("8GB", 8 * 10**9),
        ("512KiB", 512 << 10),
        ("512k", 512 << 10),
        ("1.5GiB", 3 << 29),
        ("0.5TB", 5 * 10**11),
        (" 16Mi ", 16 << 20),
        ("1PiB", 1 << 50),
        ("7B", 7),
        (2.0, 2),
        (7, 7),
    ],
)
def test_sizes(text: str, expected: Any) -> None:
    assert values.parse_size("size", text) == expected


@pytest.mark.parametrize(
    "bad",
    ["", "GiB", "8 GiBs", "8XB", "1.0.0", "0x10", "-1", -1, "1.5", 1.5, True, None, [], "\u0661"],
)
def test_what_is_no_size_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(ConfigError, match="budget is "):
        values.parse_size("budget", bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "nan", "inf"])
def test_sizes_are_finite(bad: Any) -> None:
    with pytest.raises(ConfigError, match="budget is "):
        values.parse_size("budget", bad)


@given(st.integers(0, 1 << 60))
def test_ints_and_their_text_agree(number: int) -> None:
    assert values.parse_size("n", number) == number
    assert values.parse_size("n", str(number)) == number
    assert values.parse_size("n", f"{number}KiB") == number << 10


@given(st.integers(0, 1 << 50))
def test_format_size_is_exact_for_whole_units_and_near_otherwise(number: int) -> None:
    text = values.format_size(number)
    back = float(text.rstrip("KMGTiB") or 0)
    unit = text[len(text.rstrip("KMGTiB")) :]
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(back * scale - number) <= 0.005 * scale


def test_numpy_like_integers_are_accepted() -> None:
    class Index:
        def __index__(self) -> int:
            return 5

    assert values.parse_size("n", Index()) == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), ("Yes", True), ("on", True), (1, True), ("FALSE", False), (0, False)],
)
def test_flags(value: Any, expected: Any) -> None:
    assert values.flag("f", value) is expected


@pytest.mark.parametrize("bad", ["", "maybe", 2, None, 0.5])
def test_flags_refuse_the_rest(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"^f is .*; want true or false"):
        values.flag("f", bad)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3.4GB/s", 34 * 10**8), ("1GiB", 1 << 30), (3.38e9, 3380000000), (1.5, 1)],
)
def test_rates(value: Any, expected: Any) -> None:
    assert values.rate("bw", value) == expected


def test_cpus() -> None:
    assert values.cpus("c", "0-3,8") == (0, 1, 2, 3, 8)
    assert values.cpus("c", [2, 1, 2]) == (1, 2)
    for bad in ("", "a", "3-1", "-1", "0-99999999", 5, [-1]):
        with pytest.raises(ConfigError, match=r"^c is "):
            values.cpus("c", bad)


def test_names_keep_their_order_and_sets_are_sorted() -> None:
    assert values.names("r", "b, a,,b") == ("b", "a")
    assert values.names("r", ["b", "a"]) == ("b", "a")
    assert values.names("r", {"b", "a"}) == ("a", "b")
    assert values.names("r", "") == ()


def test_dtypes_of_torch_and_short_names() -> None:
    parse = values.dtype("float32", "bfloat16")
    assert [parse("d", text) for text in ("torch.bfloat16", "bf16", "FP32")] == [
        "bfloat16",
        "bfloat16",
        "float32",
    ]
    with pytest.raises(ConfigError, match="d is 'fp16'"):
        parse("d", "fp16")


def test_weights_are_positive() -> None:
    assert values.weights("w", "2, 1") == (2.0, 1.0)
    for bad in ([], [0], "1,-1", 5, {"a": 1}):
        with pytest.raises(ConfigError, match="w is "):
            values.weights("w", bad)
