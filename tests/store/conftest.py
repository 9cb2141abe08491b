# SPDX-License-Identifier: Apache-2.0
"""Engines and stores for the tests of the storage layer."""

from __future__ import annotations

import pytest

from support.blocking_engine import BlockingEngine
from swapio.aio import Engine
from swapio.filestore import FileStore


@pytest.fixture(params=["blocking", "threads", "auto"])
def any_engine(request):
    """Each engine in turn: what fails on all of them is the store's."""
    with BlockingEngine() if request.param == "blocking" else Engine(request.param) as engine:
        yield engine


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


@pytest.fixture
def make_store(engine, tmp_path):
    """Make stores in `tmp_path`, which are closed at the end."""
    stores = []

    def make(*paths, engine=engine, **options):
        options.setdefault("lock_timeout", 5.0)
        store = FileStore(list(paths) or tmp_path, engine, **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()
