# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests of ZeRO, shared by all of them."""

from __future__ import annotations

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Four processes with gloo between them."""
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
