# SPDX-License-Identifier: Apache-2.0
"""What the durability tests share: one process that forks training processes for all of them."""

from __future__ import annotations

import pytest

from support.crashes import Crashes


@pytest.fixture(scope="session")
def crashes(tmp_path_factory):
    with Crashes(tmp_path_factory.mktemp("crashes")) as server:
        yield server
