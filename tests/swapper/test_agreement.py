# SPDX-License-Identifier: Apache-2.0
"""The pipelined swapper against the blocking one and against plain tensors, over random sweeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.pairwise import pairwise
from support.swappers import KINDS, open_swapper, specs_of

SIZES = {"a": (3 << 18) + 77, "b": 1 << 20, "c": (1 << 18) + 1, "d": 2_500_000}


def sweep(swapper, keys, factor, expected, *, skip=()):
    swapper.set_order(keys)
    for key in keys:
        with swapper.swap_in(key) as view:
            for number, chunk in enumerate(view.chunks()):
                if (key, number) in skip:
                    continue
                chunk["exp_avg"].mul_(factor).add_(1)
                chunk.mark_dirty("exp_avg")
                part = expected[key][chunk.start : chunk.stop]
                part.mul_(factor).add_(1)


def check(swapper, expected):
    for key, value in expected.items():
        assert torch.equal(swapper.read(key, "exp_avg"), value), key


SWEEPS = {
    "order": ["alternating", "same", "shuffled"],
    "kind": KINDS,
    "durability": ["checkpoint", "step"],
}
CORE = [tuple(row.values()) for row in pairwise(SWEEPS)]


@pytest.mark.parametrize(
    ("order", "kind", "durability"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row not in CORE), id="-".join(row))
        for row in itertools.product(*SWEEPS.values())
    ],
)
def test_sweeps_in_any_order(tmp_path, kind, order, durability):
    """By default every pair of two settings' values occurs; all combinations are the soak run's."""
    generator = torch.Generator().manual_seed(1)
    with open_swapper(tmp_path, kind, durability=durability) as opened:
        expected = {}
        for key, numel in SIZES.items():
            opened.add(key, specs_of(numel))
            expected[key] = torch.zeros(numel)
        swapper = opened.swapper
        keys = list(SIZES)
        for step in range(1, 7):
            if order == "alternating":
                keys = keys[::-1]
            elif order == "shuffled":
                keys = [keys[i] for i in torch.randperm(len(keys), generator=generator)]
            sweep(swapper, keys, 1 + step / 7, expected, skip={("a", 1)} if step == 3 else ())
            swapper.commit(step)
            if step == 4:
                swapper.drain()
                check(swapper, expected)
        swapper.drain()
        check(swapper, expected)


@pytest.mark.parametrize("stream_mib", [3, 6, 12, 40, 200])
def test_every_budget_gives_the_same_bytes(tmp_path, stream_mib):
    with open_swapper(
        tmp_path,
        "pipelined",
        pool_bytes=(stream_mib + 30) << 20,
        stream_bytes=stream_mib << 20,
        chunk_bytes=1 << 20,
    ) as opened:
        expected = {}
        for key, numel in SIZES.items():
            opened.add(key, specs_of(numel))
            expected[key] = torch.zeros(numel)
        keys = list(SIZES)
        for step in range(5):
            sweep(opened.swapper, keys if step % 2 else keys[::-1], 1.5, expected)
        check(opened.swapper, expected)


def test_what_fits_beside_the_sweep_is_neither_written_nor_read(tmp_path):
    with open_swapper(tmp_path, "pipelined", pool_bytes=80 << 20, stream_bytes=48 << 20) as opened:
        expected = {key: torch.zeros(numel) for key, numel in SIZES.items()}
        for key, numel in SIZES.items():
            opened.add(key, specs_of(numel))
        total = sum(SIZES.values()) * 8
        assert total < 48 << 20
        keys = list(SIZES)
        for step in range(4):
            sweep(opened.swapper, keys if step % 2 else keys[::-1], 1.5, expected)
        opened.swapper.drain()
        stats = opened.swapper.stats()
        assert stats["write_bytes"] == 0
        assert stats["read_bytes"] == total
        check(opened.swapper, expected)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["sweep", "write", "read", "settle", "whole", "drain", "writeback"]),
            st.sampled_from(sorted(SIZES)),
            st.integers(0, 200_000),
        ),
        max_size=14,
    ),
    kind=st.sampled_from(KINDS),
    stream_mib=st.sampled_from([4, 9, 30]),
)
def test_any_mixture_of_verbs_agrees_with_plain_tensors(tmp_path_factory, steps, kind, stream_mib):
    folder = tmp_path_factory.mktemp("mix")
    with open_swapper(
        folder, kind, pool_bytes=100 << 20, stream_bytes=stream_mib << 20, chunk_bytes=2 << 20
    ) as opened:
        expected = {}
        for key, numel in SIZES.items():
            opened.add(key, specs_of(numel))
            expected[key] = torch.zeros(numel)
        swapper = opened.swapper
        for number, (verb, key, start) in enumerate(steps):
            if verb == "sweep":
                sweep(swapper, sorted(SIZES)[:: 1 if start % 2 else -1], 1.25, expected)
            elif verb == "write":
                value = torch.full((50_000,), float(number))
                swapper.write(key, "exp_avg", value, start=start)
                expected[key][start : start + 50_000] = value
            elif verb == "read":
                out = torch.empty(60_000)
                swapper.read(key, "exp_avg", out, start=start)
                assert torch.equal(out, expected[key][start : start + 60_000])
            elif verb == "whole":
                with swapper.swap_in(key) as view:
                    view["exp_avg"].add_(1)
                    view.mark_dirty("exp_avg")
                expected[key].add_(1)
            elif verb == "settle":
                swapper.tag_resident(key, "exp_avg")
                swapper.untag_resident(key, "exp_avg")
            elif verb == "writeback":
                swapper.swap_in(key)["exp_avg"]
                swapper.writeback(key, wait=True)
                swapper.release(key)
            else:
                swapper.drain()
        check(swapper, expected)
