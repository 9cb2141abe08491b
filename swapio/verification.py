# SPDX-License-Identifier: Apache-2.0
"""Reading slots whole to see that storage still holds what was written.

Invariant: nothing is kept or changed; one buffer of 4 MiB is enough for any slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from swapio.errors import CorruptionError
from swapio.slots import Slot, SubGroup
from swapio.store import Piece, Progress
from swapio.transaction import SCRATCH_BYTES, Shared, read_table


def verify_slots(
    shared: Shared, slots: Sequence[tuple[SubGroup, Slot]], progress: Progress | None = None
) -> int:
    """Read the table and every block of each slot; blocks; returns the payload bytes read.

    Raises:
        CorruptionError: At the first difference; names it.
        AioError: If a transfer failed.
    """
    total = sum(record.nbytes for sub_group, _ in slots for record in sub_group.layout.layouts)
    done = 0
    for sub_group, slot in slots:
        _verify_table(shared, sub_group, slot)
        for record in sub_group.layout.layouts:
            for start in range(0, record.nbytes, SCRATCH_BYTES):
                nbytes = min(SCRATCH_BYTES, record.nbytes - start)
                with shared.scratch.borrow(SCRATCH_BYTES) as lease:
                    piece = Piece(record.name, start, nbytes, lease.address)
                    shared.mover.read(sub_group, slot, [piece], lease).result()
                done += nbytes
                if progress is not None:
                    progress(done, total)
    return done


def _verify_table(shared: Shared, sub_group: SubGroup, slot: Slot) -> None:
    table = read_table(shared, sub_group, slot)
    if table.table_hash != slot.table_hash:
        raise CorruptionError(
            f"slot {slot.index} of {sub_group.key!r} holds another table: generation "
            f"{table.generation}, sealed was {slot.generation}"
        )
