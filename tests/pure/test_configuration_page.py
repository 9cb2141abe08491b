# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md is what the code says; run docs/make_configuration.py when this fails."""

from __future__ import annotations

import runpy
from pathlib import Path

from swapio.config import field_names

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_reference_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script["render"](), "run: python docs/make_configuration.py"
    for name in field_names():
        assert f"### `{name}`" in page
