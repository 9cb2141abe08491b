# SPDX-License-Identifier: Apache-2.0
"""`python -m swapio` is the command `swapio`."""

from __future__ import annotations

import sys

from swapio.cli import main

if __name__ == "__main__":
    sys.exit(main())
