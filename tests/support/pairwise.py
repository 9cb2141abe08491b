# SPDX-License-Identifier: Apache-2.0
"""A few combinations of settings in which every pair of values of two settings occurs."""

from __future__ import annotations

import itertools


def pairs_of(row):
    """All pairs of (setting, value) in a combination."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def pairwise(settings):
    """Choose combinations greedily, always the one with the most pairs not seen yet.

    Args:
        settings: Values by name of the setting; hashable. The result is a function of it.
    """
    rows = [
        dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
    ]
    missing = set().union(*map(pairs_of, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
