# SPDX-License-Identifier: Apache-2.0
"""Placement: every byte once, pages kept apart, paths in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.align import BLOCK_BYTES, PAGE_BYTES
from swapio.errors import ConfigError
from swapio.store import RecordLayout
from swapio.striping import SHARED_FILE_BYTES, group_files, lay_out, stripe_pattern

SIZES = st.lists(st.integers(1, 9 * BLOCK_BYTES), min_size=1, max_size=4)
WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@given(SIZES, WEIGHTS, st.integers(0, 40), st.data())
def test_runs_cover_each_record_and_never_share_a_page(sizes, weights, phase, data):
    pattern = stripe_pattern(weights)
    records = [RecordLayout(f"r{i}", n) for i, n in enumerate(sizes)]
    layout = lay_out("g", records, 0, pattern, phase)
    pages = set()
    for place in layout.places.values():
        runs = place.pieces(0, place.nbytes)
        assert sum(nbytes for _, _, nbytes in runs) == place.nbytes
        for path, offset, nbytes in runs:
            assert offset % PAGE_BYTES == 0
            own = {
                (path, page)
                for page in range(offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES))
            }
            assert not own & pages
            pages |= own
            assert offset + nbytes <= layout.region_bytes[path]
            assert path or offset >= layout.table_bytes
        start = data.draw(st.integers(0, place.nbytes - 1))
        nbytes = data.draw(st.integers(1, place.nbytes - start))
        part = place.pieces(start, nbytes)
        assert sum(length for _, _, length in part) == nbytes
        flat = [(path, offset + i) for path, offset, length in runs for i in (0, length - 1)]
        assert part[0][0] in {path for path, _ in flat}
        if start == 0 and nbytes == place.nbytes:
            assert part == runs


@given(WEIGHTS)
def test_shares_follow_the_weights(weights):
    pattern = stripe_pattern(weights)
    assert set(pattern) == set(range(len(weights)))
    for path, weight in enumerate(weights):
        share = pattern.count(path) / len(pattern)
        assert abs(share - weight / sum(weights)) < 0.15


@pytest.mark.parametrize("weights", [[0.0], [1, -1], [1, float("nan")]])
def test_weights_must_be_positive(weights):
    with pytest.raises(ConfigError):
        stripe_pattern(weights)


@given(st.lists(st.integers(1, 40 * BLOCK_BYTES), min_size=1, max_size=30))
def test_groups_hold_everything_once(sizes):
    layouts = [lay_out(f"g{i}", [RecordLayout("x", n)], 0, (0,)) for i, n in enumerate(sizes)]
    groups = group_files(layouts, 7)
    members = [layout.key for group in groups for layout, _ in group.members]
    assert sorted(members) == sorted(layout.key for layout in layouts)
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        end = 0
        for layout, bases in group.members:
            assert bases == (end,)
            end += layout.region_bytes[0]
        assert group.file_bytes == (end,)
        assert len(group.members) == 1 or end <= SHARED_FILE_BYTES


@pytest.mark.parametrize(
    ("key", "records"),
    [("", [("x", 1)]), ("g", []), ("g", [("x", 0)]), ("g", [("x", 1), ("x", 2)])],
)
def test_declarations_that_make_no_sense(key, records):
    with pytest.raises(ConfigError):
        lay_out(key, [RecordLayout(*record) for record in records], 0, (0,))
