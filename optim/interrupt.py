# SPDX-License-Identifier: Apache-2.0
"""Hold a KeyboardInterrupt back until the step is over; a second one breaks through.

Invariant: the handler in place before is in place after, and outside the main thread (where
Python runs no signal handlers) nothing is touched.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Deliver the first SIGINT at the end of the block, a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return
    count = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            signal.default_int_handler(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if count:
        raise KeyboardInterrupt
