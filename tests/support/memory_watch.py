# SPDX-License-Identifier: Apache-2.0
"""How far a process's anonymous memory grows, which host_memory bounds (law 7).

Imports nothing but the standard library: tests put its source in front of scripts that they run in
processes of their own.
"""

from __future__ import annotations

import threading
import time

MIB = 1 << 20


def anonymous_bytes() -> int:
    """Bytes of this process in RAM that no file has."""
    total = 0
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        for line in status:
            if line.startswith(("RssAnon", "RssShmem")):
                total += 1024 * int(line.split()[1])
    return total


class Growth:
    """Watches from its making on, 300 times a second."""

    def __init__(self) -> None:
        self._before = self._peak = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self._peak = max(self._peak, anonymous_bytes())
            time.sleep(0.003)

    def end(self) -> int:
        """Stop watching; bytes from the beginning to the peak."""
        self._is_over.set()
        self._thread.join()
        return self._peak - self._before


def check_growth(growth: int, budget: int) -> None:
    """Raise unless the growth is within a budget and what the law grants beyond it."""
    assert growth <= budget + max(budget // 50, 32 * MIB), f"{growth / MIB:.1f} MiB"
