# SPDX-License-Identifier: Apache-2.0
"""Parts of parameters: boxes as runs, and joining the parts of ranks; against plain indexing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.checkpoint.manifest import ParameterEntry, Run
from swapio.checkpoint.merge import Part, merge_parts
from swapio.checkpoint.placement import box_placement, whole
from swapio.errors import CheckpointError


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    starts = [draw(st.integers(0, length)) for length in shape]
    sizes = [draw(st.integers(0, n - first)) for n, first in zip(shape, starts, strict=True)]
    return shape, starts, sizes


@given(boxes(), st.data())
def test_a_box_is_what_indexing_gives(box, data):
    shape, starts, sizes = box
    numbers = np.arange(math.prod(shape)).reshape(shape)
    part = numbers[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))].reshape(-1)
    place = box_placement(shape, starts, sizes)
    found = [run.offset + i for run in place.runs for i in range(run.numel)]
    assert found == part.tolist()
    assert [run.local for run in place.runs] == [
        0,
        *itertools.accumulate(run.numel for run in place.runs),
    ][: len(place.runs)]
    first = data.draw(st.integers(0, len(part)))
    count = data.draw(st.integers(0, len(part) - first))
    cut = [
        (run.local, run.offset + i) for run in place.find(first, count) for i in range(run.numel)
    ]
    assert [offset for _, offset in cut] == part[first : first + count].tolist()


def test_a_box_that_leaves_the_parameter_is_refused():
    with pytest.raises(ValueError, match="leaves"):
        box_placement((4, 4), (0, 2), (4, 3))
    assert whole((), ()).runs == ((0, 0, 1),)
    assert whole((0, 3), (0, 1)).runs == ()


def part_of(runs, *, shape=(10,), dtype="float32", about=(1, "x"), payload=b""):
    entry = ParameterEntry("w", shape, (0,), dtype, 1, tuple(runs))
    return Part([], [], [entry], [{"hyper": {}, "params": ["w"]}], payload, about)


def test_parts_are_joined_in_order():
    merged = merge_parts(
        [part_of([Run(0, 6, 0, 4)], payload=b"a"), part_of([Run(0, 0, 3, 6)], payload=b"b")]
    )
    assert merged.parameters[0].runs == (Run(0, 0, 3, 6), Run(0, 6, 0, 4))
    assert len(merged.scalars["payloads"]) == 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part_of([Run(0, 0, 0, 6)]), part_of([Run(0, 5, 0, 5)])], "5 to 6 .* twice"),
        ([part_of([Run(0, 0, 0, 4)]), part_of([Run(0, 6, 0, 4)])], "4 to 6 .* on no rank"),
        ([part_of([Run(0, 0, 0, 4)])], "4 to 10 .* on no rank"),
        ([part_of([Run(0, 0, 0, 10)]), part_of([], about=(2, "x"))], "different things"),
        ([part_of([Run(0, 0, 0, 10)]), part_of([], shape=(11,))], "differ about parameter 'w'"),
        ([part_of([Run(0, 0, 0, 10)]), part_of([], dtype="float16")], "differ about"),
    ],
)
def test_parts_that_are_no_whole_are_refused(parts, message):
    with pytest.raises(CheckpointError, match=message):
        merge_parts(parts)
