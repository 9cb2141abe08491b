# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch.cuda on a machine without one: streams that log what they are told.

Copies happen at once, so what can be seen is the order in which they were queued and which event
each stream waited for before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FakeCuda:
    def __init__(self):
        self.log = []
        self.num_streams = 0
        self.num_events = 0
        self.current = FakeStream(self)

    def Stream(self, device=None, priority=0):  # noqa: ARG002
        return FakeStream(self)

    def Event(self):
        return FakeEvent(self)

    def current_stream(self, device=None):  # noqa: ARG002
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(("run", stream.number))
        yield


class FakeStream:
    def __init__(self, cuda):
        self.cuda, self.number = cuda, cuda.num_streams
        cuda.num_streams += 1

    def wait_event(self, event):
        self.cuda.log.append(("wait", self.number, event.number))

    def synchronize(self):
        self.cuda.log.append(("synchronize", self.number))


class FakeEvent:
    def __init__(self, cuda):
        self.cuda, self.number, self.was_waited = cuda, cuda.num_events, False
        cuda.num_events += 1

    def record(self, stream):
        self.cuda.log.append(("record", stream.number, self.number))

    def query(self):
        return True

    def synchronize(self):
        self.was_waited = True
