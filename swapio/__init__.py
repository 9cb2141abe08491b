# SPDX-License-Identifier: Apache-2.0
"""swapio keeps optimizer state on NVMe, with exact numerics, inside a memory budget.

Importing this package starts no thread and opens no file.
"""

from __future__ import annotations

__version__ = "0.1.0"
