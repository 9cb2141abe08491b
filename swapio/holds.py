# SPDX-License-Identifier: Apache-2.0
"""Holds: slots that stay as they are for a checkpoint, a state_dict or a load.

Invariant: a hold's slots count one hold each until it is released, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from swapio.align import BLOCK_BYTES
from swapio.checksum import Hashes
from swapio.errors import SwapStateError
from swapio.slots import Slot, SubGroup
from swapio.store import FilePiece, Hold, Piece, SlotLocation, TransferFuture
from swapio.transaction import Shared


class FileHold(Hold):
    """Held slots of a `FileStore`; made by `FileStore.hold`.

    Args:
        shared: The store's common parts.
        held: Sub-group and slot by key; their holds are counted already.
        check: Raises when the store was closed.
    """

    def __init__(
        self,
        shared: Shared,
        held: Mapping[str, tuple[SubGroup, Slot]],
        check: Callable[[], None],
    ) -> None:
        self.keys = tuple(held)
        self._shared = shared
        self._held = dict(held)
        self._check = check

    def locate(self, key: str) -> SlotLocation:
        """Return where the held slot lies; see `Hold.locate`."""
        return locate_slot(*self._get(key))

    def read(self, key: str, pieces: Sequence[Piece], *, owner: object = None) -> TransferFuture:
        """Read from the held slot; see `Hold.read`."""
        self._check()
        transfer = self._shared.mover.read(*self._get(key), pieces, owner)
        self._shared.counters.add(bytes_read=transfer.nbytes, num_reads=1)
        return transfer

    def meta(self, key: str) -> bytes:
        """Return the held slot's blob."""
        return self._get(key)[1].meta

    @property
    def slots(self) -> list[tuple[SubGroup, Slot]]:
        """The held sub-groups and slots."""
        return list(self._held.values())

    def hashes(self, key: str, record: str) -> Hashes:
        """Return the checksums of a record's blocks; empty if there are none."""
        sub_group, slot = self._get(key)
        place = sub_group.layout.places[record]
        if not self._shared.mover.has_checksums:
            return slot.hashes[:0].copy()
        end = place.first_block - (-place.nbytes // BLOCK_BYTES)
        return slot.hashes[place.first_block : end].copy()

    def sync(self) -> None:
        """Wait until all that the held slots consist of is on storage."""
        engine = self._shared.mover.engine
        files = {f.fd: f for _, slot in self._held.values() for f in slot.files if f is not None}
        for future in [engine.fsync(file) for file in files.values()]:
            future.result()

    def hand_over(self, links: Mapping[Path, Path]) -> None:
        """Release; the slots stay as they are for as long as the links are there.

        Args:
            links: The other name of each of the slots' files.
        """
        with self._shared.lock:
            for _, slot in self._held.values():
                slot.is_linked = True
                slot.links += [links[Path(f.path)] for f in slot.files if f is not None][:1]
            self.release()

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Let the slots be written again; see `Hold.release`."""
        with self._shared.lock:
            for key in list(self._held) if keys is None else list(keys):
                entry = self._held.pop(key, None)
                if entry is not None:
                    entry[1].num_holds -= 1

    def _get(self, key: str) -> tuple[SubGroup, Slot]:
        try:
            return self._held[key]
        except KeyError:
            raise SwapStateError(f"sub-group {key!r} is not held, or was released") from None


def locate_slot(sub_group: SubGroup, slot: Slot) -> SlotLocation:
    """Return where a slot's table and records lie in its files."""
    layout = sub_group.layout
    paths = [None if file is None else Path(file.path) for file in slot.files]
    records = {
        place.name: tuple(
            FilePiece(_require(paths[path]), slot.bases[path] + offset, nbytes)
            for path, offset, nbytes in place.pieces(0, place.nbytes)
        )
        for place in layout.places.values()
    }
    used = {piece.path: None for pieces in records.values() for piece in pieces}
    table = FilePiece(_require(paths[0]), slot.bases[0], layout.table_bytes)
    return SlotLocation(
        key=sub_group.key,
        slot_index=slot.index,
        generation=slot.generation,
        table_hash=slot.table_hash,
        table=table,
        records=records,
        files=tuple({table.path: None} | used),
    )


def _require(path: Path | None) -> Path:
    if path is None:
        raise SwapStateError("a run lies in a file that its layout gives no bytes")
    return path
