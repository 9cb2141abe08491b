# SPDX-License-Identifier: Apache-2.0
"""A submission that is made once more, to the same place, when it fails.

A device or a path to it may fail once and work the next time. The retry is down here because the
memory of a write is given up by its user as soon as the write is over: nobody could do it later.

The second try comes behind whatever was submitted meanwhile: nothing may be submitted to the same
blocks while one is on its way, which `FileTransaction.write` and `FileStore.read` see to.

Syncs are not for this: after a failed fsync the kernel may count pages as written that are not, and
a second one would succeed for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from swapio.aio import Engine, IOFuture, Request
from swapio.errors import AioError, SwapioError

_logger = logging.getLogger("swapio.store")


class PersistentIO:
    """A submission that is made once more when it fails. Thread safe.

    Args:
        engine: Where it is submitted, at once.
        requests: Its transfers.
        owner: Keeps their memory until the end, the second try included.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], owner: object) -> None:
        self._engine = engine
        self._requests = requests
        self._owner = owner
        self._lock = threading.Lock()
        self._has_failed = False
        self._io: IOFuture = engine.submit(requests, owner=owner)

    def result(self, timeout: float | None = None) -> int:
        """Wait for the end; see `IOFuture.result`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            io = self._io
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                value = io.result(left)
            except AioError as error:
                if not self._submit_again(io, error):
                    raise
            else:
                self._let_go()
                return value

    def done(self) -> bool:
        """Return whether `result` would not wait; never blocks."""
        io = self._io
        while io.done():
            error = io.exception()
            if not isinstance(error, AioError) or not self._submit_again(io, error):
                return True
            io = self._io
        return False

    def _submit_again(self, failed: IOFuture, error: AioError) -> bool:
        """Whether `failed` was, or has just been, replaced by a second try."""
        with self._lock:
            if self._io is not failed:
                return True
            if self._has_failed:
                self._let_go()
                return False
            self._has_failed = True
            try:
                self._io = self._engine.submit(self._requests, owner=self._owner)
            except SwapioError:  # closed meanwhile: the first error is the one to tell
                return False
            _logger.warning("%s; trying this transfer once more", error)
            return True

    def _let_go(self) -> None:
        self._owner = None
        self._requests = ()
