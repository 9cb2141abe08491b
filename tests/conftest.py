# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests. Keep it small: what one layer's tests share is in tests/support."""

from __future__ import annotations

from hypothesis import settings

# No deadline: other work on the machine must not fail a test.
settings.register_profile("swapio", deadline=None, print_blob=True)
settings.load_profile("swapio")
