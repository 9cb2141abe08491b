# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests. Keep it small: what one layer's tests share is in tests/support."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadline: other work on the machine must not fail a test.
settings.register_profile("swapio", deadline=None, print_blob=True)
settings.load_profile("swapio")

# Many tests compare two trainings bit by bit. With several threads torch's own matrix products may
# not repeat: the first pass of about one process in 300 gives other bits, on a loaded machine.
torch.set_num_threads(1)

# A shell that starts a job in the background has it ignore Ctrl-C, and so would every test of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates that `swapio tune` measured here must neither be seen nor replaced by tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
