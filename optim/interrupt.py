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
    """Deliver the first SIGINT at the end of the block, a second one at once.

    A handler of the user's, in Python, is called as it would have been, but after the block: it
    may raise, and an exception in the middle of a step would leave half of it done.
    """
    previous = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(previous):
        yield
        return
    frames: list[FrameType | None] = []

    def note(signum: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) > 1:
            signal.default_int_handler(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if frames:
        previous(signal.SIGINT, frames[0])
