# SPDX-License-Identifier: Apache-2.0
"""The collectives of swapio, over torch.distributed.

Tensors in RAM travel over a gloo backend of our own, made over the ranks of the user's group: it
waits longer for a slow peer than the user's group may, works beside an NCCL-only one, and can be
given up when a rank fails. Tensors on a GPU travel over the user's group. The backend is no
registered process group: names of those depend on how many groups each rank is in, and making one
without the whole world then hangs.

A rank that cannot go on leaves a note in the store that the ranks met at. Who waits for a peer
looks for it four times a second: gloo itself would wait until the connections are closed, which
happens only when the last reference to them and to all transfers is gone; giving up a backend with
a transfer in flight waits for that too. So both are held here alone, and given up together. A rank
that closes leaves a note as well, which is looked at where a connection was lost: gloo's words for
that name an address.

Invariants:
- every rank makes the same calls in the same order; calls from another thread need `background`;
- each exchange of small values has a place for a failure, so a rank that has failed is heard by
  its peers at their next exchange, whatever that is for; tensors travel only after one;
- a collective that fails on one rank fails on all of them, and so does every later one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,  # type: ignore[attr-defined, unused-ignore]
    _get_default_store,
)

from swapio.errors import ConfigError, SwapioError, describe_error

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup

_TIMEOUT = timedelta(minutes=30)
_REASON_BYTES = 1000
_LOOK_SECONDS = 0.25
_PAUSE_MIN, _PAUSE_MAX = 20e-6, 2e-3  # a waiting rank leaves the processor to its peers
_FAILED, _LEFT = "failed", "left"
_LOST = ("onnection closed", "onnection reset", "roken pipe", "Read error", "Write error")
_NUM_CONNECTED: Counter[tuple[int, ...]] = Counter()

_RESTART = "Restart the job from its last commit or checkpoint"

# Renamed in torch 2.13; the old names warn there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(NamedTuple):
    """A collective in flight."""

    comm: Comm
    name: str
    number: int
    is_polled: bool
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until it is over; raises as the collective, or what a peer has failed with."""
        pause, next_look = _PAUSE_MIN, time.monotonic() + _LOOK_SECONDS
        while self.is_polled and not self.comm.is_over(self.number):
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE_MAX)
            if time.monotonic() > next_look:
                self.comm.look_for_failure(self.name)
                next_look = time.monotonic() + _LOOK_SECONDS
        self.comm.end(self.name, self.number)
        if self.finish is not None:
            self.finish()


class Comm:
    """The collectives over the ranks of one process group.

    Args:
        group: The user's group; None is the default one.
        timeout: How long to wait for a peer; None is torch's default for gloo, half an hour.
        ranks: The ranks, for those of which there is no group; tensors on a GPU cannot travel then.

    Attributes:
        rank: This process, among those of the group.
        world_size: Processes of the group.
        global_rank: This process, among all.
        counts: Collectives begun so far, by name.
        before: Called with the name before each collective; for tests.
        told: The last failure of a rank that all ranks have heard of, as it was raised here.

    Raises:
        ConfigError: There is no process group, or this process is not in it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "ZeRO needs a process group: start the program with torchrun and call "
                "torch.distributed.init_process_group() before making the optimizer"
            )
        self._given = group
        self._timeout = timeout or _TIMEOUT
        self._ranks = None if ranks is None else tuple(ranks)
        self.global_rank = dist.get_rank()
        self.rank = dist.get_rank(group) if ranks is None else list(ranks).index(self.global_rank)
        if self.rank < 0:
            raise ConfigError("this process is not in the process_group that it was given")
        self.world_size = dist.get_world_size(group) if ranks is None else len(ranks)
        self.counts: Counter[str] = Counter()
        self.before: Callable[[str], None] | None = None
        self.told: BaseException | None = None
        self._failure: BaseException | None = None
        self._works: dict[int, Any] = {}  # the only references: one of them keeps connections open
        self._num_started = 0
        self._host: Any = self._connect()

    def _connect(self) -> Any:
        if self._ranks is None:
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, group_src=0, group=self._given)
        else:
            _NUM_CONNECTED[self._ranks] += 1
            token = [f"{'-'.join(map(str, self._ranks))}/{_NUM_CONNECTED[self._ranks]}"]
        self._store = PrefixStore(f"swapio/{token[0]}", _get_default_store())
        host = dist.ProcessGroupGloo(self._store, self.rank, self.world_size, self._timeout)
        # Otherwise a rank that fails now leaves while others connect, and they get gloo's words.
        self._store.set(f"connected/{self.rank}", "")
        self._store.wait([f"connected/{r}" for r in range(self.world_size)], self._timeout)
        return host

    def background(self) -> Comm:
        """Return the same ranks for another thread, beside this one. All ranks must call it."""
        other = Comm(self._given, timeout=self._timeout, ranks=self._ranks)
        other.before = self.before
        return other

    # -- tensors -----------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start to add up `tensor` over all ranks, in place."""
        return self._start(
            "all_reduce",
            tensor,
            "allreduce",
            [[tensor]],
            lambda: dist.all_reduce(tensor, group=self._given, async_op=True),
        )

    def reduce_scatter(
        self, out: torch.Tensor, rows: torch.Tensor, received: torch.Tensor
    ) -> Pending:
        """Start to add up `rows` over all ranks; `out` receives row `rank`.

        In RAM each row goes to its rank, and `wait` adds them up in the order of the ranks: gloo's
        own would move twice the bytes. `received` is memory as large as `rows`, for that.
        """
        sizes = [out.numel()] * self.world_size
        pending = self._start(
            "reduce_scatter",
            rows,
            "alltoall_base",
            [received, rows, sizes, sizes],
            lambda: _reduce_scatter(out, rows, group=self._given, async_op=True),
        )
        if not pending.is_polled:
            return pending

        def add_up() -> None:
            parts = received.view(self.world_size, -1)
            out.copy_(parts[0])
            for part in parts[1:]:
                out.add_(part)

        return pending._replace(finish=add_up)

    def all_gather(self, rows: torch.Tensor, row: torch.Tensor) -> Pending:
        """Start to collect every rank's `row` in `rows`."""
        return self._start(
            "all_gather",
            row,
            "_allgather_base",
            [rows, row],
            lambda: _all_gather(rows, row, group=self._given, async_op=True),
        )

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Start to give every rank what rank 0 has in `tensor`."""
        return self._start(
            "broadcast",
            tensor,
            "broadcast",
            [tensor, 0],
            lambda: dist.broadcast(tensor, group_src=0, group=self._given, async_op=True),
        )

    def all_to_all(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        out_sizes: Sequence[int],
        given_sizes: Sequence[int],
    ) -> Pending:
        """Start to send the r-th run of `given` to rank r; `out` receives a run of each rank."""
        sizes = (list(out_sizes), list(given_sizes))
        return self._start(
            "all_to_all",
            given,
            "alltoall_base",
            [out, given, *sizes],
            lambda: dist.all_to_all_single(out, given, *sizes, group=self._given, async_op=True),
        )

    # -- small values ------------------------------------------------------------------------

    def exchange(
        self, value: float = 0.0, error: BaseException | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the values of all ranks; blocks.

        Raises:
            BaseException: `error`, if it is not None: now the other ranks know of it.
            SwapioError: Another rank has failed; says which, and how.
        """
        mine = torch.tensor([float(error is not None), value], dtype=torch.float64)
        rows = torch.empty(self.world_size * 2, dtype=torch.float64)
        self._start("exchange", mine, "_allgather_base", [rows, mine], None).wait()
        found: npt.NDArray[np.float64] = rows.view(self.world_size, 2).numpy()
        failed = np.flatnonzero(found[:, 0])
        if len(failed):
            text = "" if error is None else describe_error(error).encode()[:_REASON_BYTES].decode()
            reason = self._gather_bytes(text.encode(), _REASON_BYTES)[failed[0]].decode()
            self.told = error or SwapioError(
                f"rank {failed[0]} of {self.world_size} failed: {reason}"
            )
            raise self.told
        return found[:, 1]

    def share(self, value: T) -> T:
        """Return rank 0's value, any that can be pickled, on all ranks; blocks."""
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, any that can be pickled, on all ranks; blocks."""
        data = pickle.dumps(value)
        longest = int(self.exchange(float(len(data))).max())
        return [pickle.loads(theirs) for theirs in self._gather_bytes(data, longest)]

    def _gather_bytes(self, data: bytes, longest: int) -> list[bytes]:
        """Return what each rank gave, at most `longest` bytes."""
        row = torch.zeros(8 + longest, dtype=torch.uint8)
        row[: 8 + len(data)] = torch.frombuffer(
            bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8
        )
        rows = torch.empty(self.world_size * len(row), dtype=torch.uint8)
        self._start("gather", row, "_allgather_base", [rows, row], None).wait()
        found = [theirs.numpy().tobytes() for theirs in rows.view(self.world_size, -1)]
        return [theirs[8 : 8 + int.from_bytes(theirs[:8], "little")] for theirs in found]

    # -- failures ----------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """What broke the communication, or None."""
        return self._failure

    def fail(self, name: str, error: BaseException) -> SwapioError:
        """Tell the peers that this rank cannot go on; return what to raise."""
        reason = f": {describe_error(error)}"
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST):
            reason = f" because {self._who_left()}"
        message = f"rank {self.rank} of {self.world_size} could not take part in {name}{reason}"
        if self._failure is None:
            self._failure = error
            message = self._leave_note(message)
            self.close()
        return SwapioError(f"{message}. {_RESTART}")

    def tell(self, error: BaseException) -> None:
        """Give up after a failure that no exchange has told the others of: they hear of it now."""
        if self._host is not None and self.told is None and self._failure is None:
            self._failure = error
            self._leave_note(
                f"rank {self.rank} of {self.world_size} failed: {describe_error(error)}"
            )
            self.close()

    def _leave_note(self, message: str) -> str:
        """Leave a note that this rank cannot go on, unless there is one; return what it says."""
        with contextlib.suppress(Exception):  # the store may be gone with the rank that had it
            return self._store.compare_set(_FAILED, "", message).decode()
        return message

    def _who_left(self) -> str:
        """Say which peers closed their communication, where they did."""
        left: list[int] = []
        with contextlib.suppress(Exception):
            others = (rank for rank in range(self.world_size) if rank != self.rank)
            left = [rank for rank in others if self._store.check([f"{_LEFT}/{rank}"])]
        if not left:
            return "a peer is gone: its process has died, or dropped its optimizer"
        names = ", ".join(f"rank {rank} of {self.world_size}" for rank in left)
        return f"a peer is gone: {names} closed its optimizer, or left the program"

    def _note(self) -> str | None:
        """What a rank left that cannot go on."""
        return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else None

    def look_for_failure(self, name: str) -> None:
        """Raise if a peer has left a note that it cannot go on."""
        try:
            note = self._note()
        except Exception as error:
            raise self.fail(name, error) from error
        if note is not None:
            self._failure = self._failure or SwapioError(note)
            self.close()
            raise SwapioError(f"{note}. {_RESTART}")

    def close(self) -> None:
        """Give up the connections of our own; the user's group stays. Idempotent."""
        if self._host is not None:
            with contextlib.suppress(Exception):  # the store may be gone already
                self._store.set(f"{_LEFT}/{self.rank}", "")
        self._works.clear()
        self._host = None

    def _require_open(self) -> None:
        if self._host is None:
            raise SwapioError(
                "the communication was closed"
                if self._failure is None
                else f"an earlier collective failed: {describe_error(self._failure)}"
            )

    def _start(
        self, name: str, sample: torch.Tensor, host: str, args: Sequence[Any], other: Any
    ) -> Pending:
        """Begin a collective: a method of our backend in RAM, else `other` on the user's group."""
        self._require_open()
        self.counts[name] += 1
        try:
            if self.before is not None:
                self.before(name)
            is_polled = sample.device.type == "cpu"
            number, self._num_started = self._num_started, self._num_started + 1
            # No local variable holds the backend: a traceback would keep its connections open.
            self._works[number] = getattr(self._host, host)(*args) if is_polled else other()
        except Exception as error:
            raise self.fail(name, error) from error
        return Pending(self, name, number, is_polled)

    def is_over(self, number: int) -> bool:
        """Whether a collective is over, as far as it is known."""
        self._require_open()
        return bool(self._works[number].is_completed())

    def end(self, name: str, number: int) -> None:
        """Block until a collective is over; raises as it."""
        self._require_open()
        try:
            self._works.pop(number).wait()
        except Exception as error:
            raise self.fail(name, error) from error


@contextlib.contextmanager
def joined() -> Iterator[Comm]:
    """The ranks that torchrun started, for the time of a program; gloo, and NCCL for CUDA tensors.

    Raises:
        ConfigError: torchrun did not start this process.
    """
    own = not dist.is_initialized()
    if own:
        if "RANK" not in os.environ:
            raise ConfigError(
                "this needs ranks: start it with torchrun --nproc-per-node 2 -m swapio ..."
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    comm = Comm()
    try:
        yield comm
    finally:
        comm.close()
        if own:
            dist.destroy_process_group()
