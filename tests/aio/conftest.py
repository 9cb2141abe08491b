# SPDX-License-Identifier: Apache-2.0
"""Engines of both kinds, direct and buffered, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from swapio import _aio_probe
from swapio.aio import DirectMode, Engine, EngineKind, File, probe_io_uring

URING_WORKS, URING_REASON = probe_io_uring()
KINDS = [
    pytest.param(
        "io_uring", marks=pytest.mark.skipif(not URING_WORKS, reason=f"no ring: {URING_REASON}")
    ),
    "threads",
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    return cast(EngineKind, request.param)


@pytest.fixture(params=["auto", "off"], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> DirectMode:
    return cast(DirectMode, request.param)


@pytest.fixture(autouse=True)
def _forget_logged_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_aio_probe, "_logged_kinds", set())


@pytest.fixture
def engine(kind: EngineKind, direct: DirectMode) -> Iterator[Engine]:
    with Engine(kind, direct=direct, queue_depth=8, block_size=64 << 10, num_threads=4) as made:
        yield made


@pytest.fixture
def make_file(engine: Engine, tmp_path: Path) -> Callable[..., File]:
    def make(name: str = "data", **options: Any) -> File:
        return engine.open(tmp_path / name, create=True, **options)

    return make
