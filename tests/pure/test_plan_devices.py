# SPDX-License-Identifier: Apache-2.0
"""Measured rates are found again by device, and what is damaged is as if it were not there."""

from __future__ import annotations

import pytest

from swapio import plan_rates
from swapio.cli import main
from swapio.config import SwapConfig
from swapio.plan_devices import cache_file, free_bytes, known_rates, remember_rates
from swapio.plan_time import Rates

RATES = {"read": 3.38e9, "write": 4.34e9, "mixed": 3.56e9}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_rates_are_those_of_the_device(tmp_path):
    assert known_rates([str(tmp_path)]) is None
    remember_rates(tmp_path, RATES)
    wanted = Rates(read=3_380_000_000, write=4_340_000_000, mixed=3_560_000_000)
    # Two folders of one device are no faster than one, and a folder may be made later.
    assert known_rates([str(tmp_path / "a" / "b"), str(tmp_path)]) == wanted
    assert known_rates([str(tmp_path), "/proc"]) is None
    assert known_rates([]) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}'])
def test_a_damaged_cache_is_no_cache(tmp_path, content):
    remember_rates(tmp_path, RATES)
    cache_file().write_text(content)
    assert known_rates([str(tmp_path)]) is None
    remember_rates(tmp_path, RATES)
    assert known_rates([str(tmp_path)]) is not None


def test_a_configuration_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_rates, "measure_hash_rate", lambda: 10**10)
    monkeypatch.setattr(plan_rates, "measure_update_rate", lambda: 5 * 10**10)
    monkeypatch.setattr(plan_rates, "measure_product_rate", lambda: 10**11)
    remember_rates(tmp_path, RATES)
    found = plan_rates.rates_of(SwapConfig(path=tmp_path))
    assert (found.mixed, found.checksum) == (3_560_000_000, 10**10)
    assert (found.compute, found.products) == (5 * 10**10, None)
    given = SwapConfig(path=tmp_path, read_bandwidth="1GB/s", checksum=False)
    assert plan_rates.rates_of(given) == Rates(read=10**9, compute=5 * 10**10)
    with_products = plan_rates.rates_of(given, has_products=True)
    assert with_products == Rates(read=10**9, compute=5 * 10**10, products=10**11)
    assert plan_rates.rates_of(SwapConfig()) == Rates()


def test_speeds_of_the_processor_are_work_by_time(monkeypatch) -> None:
    """An fp32 update reads four arrays and writes three; a product has n^3 multiply-adds."""
    assert plan_rates._least_seconds(lambda: None) > 0

    def half_a_second(work) -> float:
        work()
        return 0.5

    monkeypatch.setattr(plan_rates, "_least_seconds", half_a_second)
    assert plan_rates.measure_update_rate.__wrapped__() == 2 * (2 << 20) * 4 * 7
    assert plan_rates.measure_product_rate.__wrapped__() == 2 * 2 * 1024**3


def test_plan_says_where_speeds_come_from_and_that_checksums_limit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_rates, "measure_hash_rate", lambda: 10**9)
    command = ["plan", "--params", "1e9", "--dtype", "bf16", "--path", str(tmp_path),
               "--host-memory", "1GiB", "--spare-slots", "0"]  # fmt: skip
    main(command)
    assert "run `swapio tune`" in capsys.readouterr().out
    remember_rates(tmp_path, RATES)
    main(command)
    text = capsys.readouterr().out
    assert "both at once 3.56 GB/s" in text
    assert "faster than the checksums" in text


def test_free_space_counts_each_device_once(tmp_path):
    one = free_bytes([str(tmp_path)])
    assert one is not None
    assert free_bytes([str(tmp_path), str(tmp_path / "x")]) == pytest.approx(one, rel=0.05)
    assert free_bytes([]) is None
