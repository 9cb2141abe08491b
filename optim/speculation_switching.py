# SPDX-License-Identifier: Apache-2.0
"""How long one thread may keep the interpreter, while early steps are taken.

The worker needs the interpreter only for moments, but between two calls of kernels: whoever runs
backward in Python would keep it waiting for 5 ms each time.

Invariant: the interval that was set before is set again when the last optimizer has no early steps
under way, in whatever order they end.
"""

from __future__ import annotations

import sys
import threading

_SWITCH_SECONDS = 2e-4


class QuickSwitches:
    """The interpreter's switch interval, which all optimizers of a process share."""

    def __init__(self) -> None:
        # Reentrant: an optimizer that is collected ends here too, from within any allocation.
        self._lock = threading.RLock()
        self._num_users = 0
        self._usual_seconds = 0.0

    def begin(self) -> None:
        """Switch threads quickly until `end` was called as often."""
        with self._lock:
            if not self._num_users:
                self._usual_seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_seconds, _SWITCH_SECONDS))
            self._num_users += 1

    def end(self) -> None:
        """One optimizer needs no quick switches any more."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                sys.setswitchinterval(self._usual_seconds)


QUICK_SWITCHES = QuickSwitches()
