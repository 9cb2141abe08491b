# SPDX-License-Identifier: Apache-2.0
"""The seam between what swaps state and where it is stored: `SwapStore` and its types.

A store holds sub-groups, each a fixed set of named records of bytes. A sub-group has one LIVE
slot that is read; a write transaction fills a target slot and makes it LIVE when it is sealed.

Invariants: what a read returns was verified against the checksums of what was written; content
changes only by `seal`, and under the durabilities "step" and "power", or while the LIVE slot is
held, the old content stays whole until then.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

Durability = Literal["checkpoint", "step", "power"]
Progress = Callable[[int, int], None]  # (bytes done, bytes in total)


class RecordLayout(NamedTuple):
    """A named record of a sub-group and its logical length in bytes."""

    name: str
    nbytes: int


class Piece(NamedTuple):
    """Whole blocks of one record, and the memory they are read into or written from.

    Attributes:
        record: Name of the record.
        start: First byte in the record, a multiple of `BLOCK_BYTES`.
        nbytes: A multiple of `BLOCK_BYTES`, or up to the record's end.
        address: First byte in memory; any alignment works, 4096 avoids a copy.
    """

    record: str
    start: int
    nbytes: int
    address: int


class FilePiece(NamedTuple):
    """A contiguous run of a record's bytes in a file."""

    path: Path
    offset: int
    nbytes: int


class SlotLocation(NamedTuple):
    """Where one slot of a sub-group lies; all that a reader needs to map or link it.

    Attributes:
        key: The sub-group.
        slot_index: Number of the slot among the sub-group's.
        generation: The step whose state the slot holds.
        table_hash: Checksum in the slot table, which covers records, lengths and checksums.
        table: The slot table.
        records: For each record its runs in order; one run where one path is used.
        files: Every file that a run or the table lies in.
    """

    key: str
    slot_index: int
    generation: int
    table_hash: int
    table: FilePiece
    records: dict[str, tuple[FilePiece, ...]]
    files: tuple[Path, ...]


class CommitRecord(NamedTuple):
    """What makes a step durable: its number, its slots, and what else must be restored."""

    step: int
    payload: bytes
    scalars: dict[str, Any]
    keys: tuple[str, ...]


# Chooses one of some commits, newest first; None for none of them.
ChooseCommit = Callable[[Sequence[CommitRecord]], CommitRecord | None]


class PreviousRun(NamedTuple):
    """What an earlier run left in the folder.

    Attributes:
        was_closed: False when the run ended without `close`: killed, or crashed.
        durability: The durability it ran with.
        steps: Steps with a readable commit record, newest first (their slots are not checked).
        pid: Its process id.
        host: Where it ran.
        started: When, in seconds since the epoch.
        checkpoint: The last checkpoint it saved or loaded; empty if there was none.
    """

    was_closed: bool
    durability: str
    steps: tuple[int, ...]
    pid: int
    host: str
    started: float
    checkpoint: str = ""


class StoreStats(NamedTuple):
    """Counters since construction. Bytes are logical payload, padding not counted.

    Attributes:
        bytes_read: Read on behalf of `read`.
        bytes_written: Written on behalf of `write`.
        bytes_copied: Unwritten blocks carried from the LIVE slot to another target.
        bytes_allocated: Written once to make slots.
        bytes_tables: Slot tables and commit records.
        num_reads: Calls of `read`.
        num_writes: Calls of `write`.
        num_commits: Commit records written.
        hash_seconds: Wall time in checksums, in whichever thread called.
        commit_seconds: Wall time in which commits synced data and wrote their records.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0
    bytes_allocated: int = 0
    bytes_tables: int = 0
    num_reads: int = 0
    num_writes: int = 0
    num_commits: int = 0
    hash_seconds: float = 0.0
    commit_seconds: float = 0.0


class TransferFuture(abc.ABC):
    """The result of a transfer that was started; as `concurrent.futures.Future` where it can be.

    Attributes:
        nbytes: Logical bytes the transfer moves.
        wait_seconds: Time that callers spent waiting in `result` so far.
    """

    nbytes: int = 0
    wait_seconds: float = 0.0

    @abc.abstractmethod
    def result(self, timeout: float | None = None) -> int:
        """Wait, verify, and return `nbytes`; releases the GIL while waiting.

        Raises:
            AioError: If the transfer failed; the same error at each call.
            CorruptionError: If what was read is not what was written.
            TimeoutError: If `timeout` seconds passed; the transfer goes on.
        """

    @abc.abstractmethod
    def done(self) -> bool:
        """Return whether `result` would return without waiting for storage."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does and return the error instead of raising it."""
        try:
            self.result(timeout)
        except TimeoutError:
            raise
        except Exception as error:
            return error
        return None


class WriteTransaction(abc.ABC):
    """New content of one sub-group, which becomes LIVE as a whole when it is sealed.

    Attributes:
        key: The sub-group.
        generation: The step that the content belongs to.
        slot_index: The target slot.
        is_in_place: The target is the LIVE slot: an abort or a failure loses what was overwritten.
    """

    key: str
    generation: int
    slot_index: int
    is_in_place: bool

    @abc.abstractmethod
    def write(self, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Hash and start to write blocks; returns after queueing.

        Writes of the same blocks that are still on their way are waited for. The memory must not
        change until the result is there; `owner` is kept alive until then.
        """

    @abc.abstractmethod
    def leave_out(self, pieces: Sequence[Piece]) -> None:
        """Say that newer bytes of these blocks are in memory, and will be written later.

        If the target is another slot than the LIVE one, they are not copied there. Until they are
        written a read of them raises SwapStateError, and the sub-group cannot be held. Not for a
        transaction that is going to be committed.
        """

    @abc.abstractmethod
    def seal(self, meta: bytes = b"") -> TransferFuture:
        """Make the content LIVE once all is written; blocks never written keep their content.

        Returns at once; the work goes on in the background and in `result`. Reads and
        transactions of this sub-group that start later wait for it.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop the transaction: waits for its transfers; the LIVE slot stays as it was.

        An in-place transaction that wrote something cannot be undone: the blocks it wrote raise
        when they are read, until they are written again.
        """


class Hold(abc.ABC):
    """Keeps slots as they are, whatever is written later; a context manager.

    Attributes:
        keys: The sub-groups whose LIVE slots of the time are held.
    """

    keys: tuple[str, ...]

    @abc.abstractmethod
    def locate(self, key: str) -> SlotLocation:
        """Return where the held slot of `key` lies."""

    @abc.abstractmethod
    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Read from the held slot, as `SwapStore.read` does from the LIVE one."""

    @abc.abstractmethod
    def meta(self, key: str) -> bytes:
        """Return the blob that the held slot was sealed with."""

    @abc.abstractmethod
    def release(self, keys: Iterable[str] | None = None) -> None:
        """Let slots be written again (all, or those of `keys`); idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.release()


class SwapStore(abc.ABC):
    """Storage of sub-groups. One caller thread per sub-group; any threads for different ones."""

    @abc.abstractmethod
    def add(self, key: str, records: Sequence[RecordLayout], meta_bytes: int = 0) -> None:
        """Declare a sub-group; it has storage after the next `allocate` or `recover`.

        Args:
            key: Its stable name.
            records: Names and logical lengths in bytes.
            meta_bytes: Room for the blob that `WriteTransaction.seal` stores.

        Raises:
            ConfigError: If the key exists or a record is invalid.
        """

    @abc.abstractmethod
    def allocate(self, progress: Progress | None = None) -> None:
        """Reserve and write once the storage of every declared sub-group; blocks.

        Discards what an earlier run left. Callable again after more `add`.

        Raises:
            ConfigError: If there is not enough free space; nothing was written.
            AioError: If the storage failed; what was created is removed.
        """

    @abc.abstractmethod
    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Start to read blocks of the LIVE slot; returns after queueing.

        Blocks that a transaction in place has written already are read as it wrote them; writes of
        them that are still on their way are waited for.

        Args:
            key: The sub-group.
            pieces: What to read, and where to.
            owner: Kept alive until the transfer is complete.

        Raises:
            SwapStateError: If nothing was ever written.
        """

    @abc.abstractmethod
    def begin_write(self, key: str, generation: int) -> WriteTransaction:
        """Open the sub-group's one write transaction and choose its target slot.

        May wait for a commit that is still being written and would free a slot.

        Raises:
            SwapStateError: If a transaction is open, or no slot is free.
        """

    @abc.abstractmethod
    def meta(self, key: str) -> bytes:
        """Return the blob that the LIVE slot was sealed with."""

    @abc.abstractmethod
    def generation(self, key: str) -> int:
        """Return the generation of the LIVE slot; -1 when nothing was written."""

    @abc.abstractmethod
    def is_written(self, key: str) -> bool:
        """Return whether the sub-group has a LIVE slot."""

    @abc.abstractmethod
    def hold(self, keys: Iterable[str] | None = None) -> Hold:
        """Pin the current LIVE slots of all written sub-groups, or of `keys`.

        Waits for seals on their way.

        Raises:
            SwapStateError: If one is being written in place, or lost blocks that way, or was
                never written.
        """

    @abc.abstractmethod
    def commit(
        self, step: int, payload: bytes = b"", scalars: Mapping[str, Any] | None = None
    ) -> TransferFuture:
        """Make all that was sealed before this call the committed state; returns at once.

        Raises:
            SwapStateError: If the durability is "checkpoint", or a transaction is open or failed.
        """

    @abc.abstractmethod
    def confirm(self, step: int) -> None:
        """Say that every rank has committed `step`: the slots of older commits are free again."""

    @abc.abstractmethod
    def recover(self, step: int | None = None) -> CommitRecord | None:
        """Take up the newest commit of an earlier run, or that of `step`; blocks.

        Afterwards the sub-groups are those of the commit. None means that there is nothing to
        recover and `allocate` is next.

        Raises:
            CheckpointError: If there are commits but none is whole, or the layout differs.
        """

    @abc.abstractmethod
    def drain(self) -> None:
        """Wait for seals and commits; raise the first error nobody has seen."""

    @abc.abstractmethod
    def close(self, *, remove: bool | None = None) -> None:
        """Finish what was started, unlock, and remove the files or leave them.

        Args:
            remove: None removes them unless a commit is to stay.
        """

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """Return the counters."""

    @abc.abstractmethod
    def num_free_slots(self, key: str) -> int:
        """Return how many slots the next write transaction could choose from.

        Waits for a seal on its way.
        """

    @property
    @abc.abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The declared sub-groups, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()
