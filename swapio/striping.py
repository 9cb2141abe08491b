# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a slot lie: records, blocks, paths and shared files. Pure arithmetic.

A sub-group's region on the first path begins with the slot table; then, on every path, come the
blocks of the records that the stripe pattern gives it, in order, each rounded up to a page. With
one path a record is one run; with several, block `g` of the sub-group (counted over its records)
lies on path `pattern[(g + phase) % len(pattern)]`.

Invariant: the placement is a function of the declarations, the pattern and the order of `add`;
the manifest states it again and a reader compares.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from swapio.align import BLOCK_BYTES, PAGE_BYTES, num_blocks, round_up
from swapio.checksum import hash_bytes
from swapio.errors import ConfigError
from swapio.store import RecordLayout

SMALL_SUB_GROUP_BYTES = 32 << 20
SHARED_FILE_BYTES = 64 << 20
PATTERN_PERIOD_MAX = 32
TABLE_HEADER_BYTES = 64


def stripe_pattern(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the path of each block of one period, in proportion to `weights`, well mixed.

    Raises:
        ConfigError: If a weight is not positive.
    """
    if any(not weight > 0 for weight in weights):
        raise ConfigError(f"the weights of the paths must be positive, not {list(weights)}")
    shares = [1.0] if len(weights) == 1 else [weight / min(weights) for weight in weights]
    scale = min(4.0, PATTERN_PERIOD_MAX / sum(shares)) if len(set(shares)) > 1 else 1.0
    counts = [max(1, round(share * scale)) for share in shares]
    credit = [0] * len(counts)
    pattern = []
    for _ in range(sum(counts)):
        credit = [have + count for have, count in zip(credit, counts, strict=True)]
        path = credit.index(max(credit))
        credit[path] -= sum(counts)
        pattern.append(path)
    return tuple(pattern)


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """One record of a sub-group.

    Attributes:
        name: Its name.
        nbytes: Logical length.
        first_block: Number of its first block among the sub-group's.
        starts: First byte in the record of each run, ascending.
        runs: `(path index, offset in the region of that path)` of each run.
    """

    name: str
    nbytes: int
    first_block: int
    starts: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    def pieces(self, start: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Return `(path index, region offset, nbytes)` of a range of the record, in order."""
        found = []
        end = start + nbytes
        index = bisect.bisect_right(self.starts, start) - 1
        while start < end:
            run_start = self.starts[index]
            index += 1
            run_end = self.starts[index] if index < len(self.starts) else self.nbytes
            path, offset = self.runs[index - 1]
            length = min(end, run_end) - start
            found.append((path, offset + start - run_start, length))
            start += length
        return found


@dataclass(frozen=True, slots=True)
class SubGroupLayout:
    """The placement of one sub-group inside its regions.

    Attributes:
        key: Its name.
        layouts: The records as declared.
        meta_bytes: Room for the blob.
        phase: Where in the stripe pattern its block 0 is.
        places: Each record by name.
        num_blocks: Blocks of all records.
        table_bytes: Size of the table at the start of the region on path 0.
        region_bytes: Size of the region on each path.
        identity: Hash of key and declaration, stored in each slot table.
    """

    key: str
    layouts: tuple[RecordLayout, ...]
    meta_bytes: int
    phase: int
    places: dict[str, RecordPlace] = field(repr=False)
    num_blocks: int
    table_bytes: int
    region_bytes: tuple[int, ...]
    identity: int


def lay_out(
    key: str,
    records: Sequence[RecordLayout],
    meta_bytes: int,
    pattern: Sequence[int],
    phase: int = 0,
) -> SubGroupLayout:
    """Place the records of a sub-group.

    Raises:
        ConfigError: If a record has no bytes or a name occurs twice.
    """
    layouts = tuple(RecordLayout(name, nbytes) for name, nbytes in records)
    names = [layout.name for layout in layouts]
    if not key or not names or len(set(names)) != len(names) or meta_bytes < 0:
        raise ConfigError(f"sub-group {key!r} needs a name and distinct records, not {names}")
    for layout in layouts:
        if layout.nbytes <= 0 or not layout.name:
            raise ConfigError(f"record {layout.name!r} of sub-group {key!r} has no bytes")
    blocks_total = sum(num_blocks(layout.nbytes) for layout in layouts)
    used = TABLE_HEADER_BYTES + 8 * len(layouts) + 8 * blocks_total + meta_bytes
    table_bytes = round_up(used, PAGE_BYTES)
    ends = [0] * (max(pattern) + 1)
    ends[0] = table_bytes
    places = {}
    block = 0
    for layout in layouts:
        places[layout.name] = _place(layout, block, pattern, phase, ends)
        block += num_blocks(layout.nbytes)
    declaration = json.dumps([key, layouts, meta_bytes], separators=(",", ":"))
    return SubGroupLayout(
        key=key,
        layouts=layouts,
        meta_bytes=meta_bytes,
        phase=phase,
        places=places,
        num_blocks=blocks_total,
        table_bytes=table_bytes,
        region_bytes=tuple(ends),
        identity=hash_bytes(declaration.encode()),
    )


def _place(
    layout: RecordLayout, first_block: int, pattern: Sequence[int], phase: int, ends: list[int]
) -> RecordPlace:
    starts: list[int] = []
    runs: list[tuple[int, int]] = []
    if len(pattern) == 1:
        starts, runs = [0], [(0, ends[0])]
        ends[0] += round_up(layout.nbytes, PAGE_BYTES)
    else:
        for index, start in enumerate(range(0, layout.nbytes, BLOCK_BYTES)):
            path = pattern[(first_block + index + phase) % len(pattern)]
            if not runs or runs[-1][0] != path:
                starts.append(start)
                runs.append((path, ends[path]))
            ends[path] += round_up(min(BLOCK_BYTES, layout.nbytes - start), PAGE_BYTES)
    return RecordPlace(layout.name, layout.nbytes, first_block, tuple(starts), tuple(runs))


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Sub-groups that share slot files: one large one, or several small ones.

    Attributes:
        name: Stem of the file names.
        members: `(layout, offset of its region on each path)`.
        file_bytes: Size of a slot's file on each path; 0 means no file there.
    """

    name: str
    members: tuple[tuple[SubGroupLayout, tuple[int, ...]], ...]
    file_bytes: tuple[int, ...]


def group_files(layouts: Sequence[SubGroupLayout], first_index: int = 0) -> list[FileGroup]:
    """Put sub-groups in files: small ones (below 32 MiB) together in files of up to 64 MiB."""
    bins: list[list[SubGroupLayout]] = []
    shared: list[SubGroupLayout] | None = None
    shared_bytes = 0
    for layout in layouts:
        size = sum(layout.region_bytes)
        if size >= SMALL_SUB_GROUP_BYTES:
            bins.append([layout])
            continue
        if shared is None or shared_bytes + size > SHARED_FILE_BYTES:
            shared, shared_bytes = [], 0
            bins.append(shared)
        shared.append(layout)
        shared_bytes += size
    return [_file_group(members, first_index + index) for index, members in enumerate(bins)]


def _file_group(layouts: Sequence[SubGroupLayout], index: int) -> FileGroup:
    ends = [0] * len(layouts[0].region_bytes)
    members = []
    for layout in layouts:
        members.append((layout, tuple(ends)))
        ends = [end + size for end, size in zip(ends, layout.region_bytes, strict=True)]
    stem = "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in layouts[0].key
    )
    return FileGroup(f"{index:05d}-{stem[:48]}", tuple(members), tuple(ends))
