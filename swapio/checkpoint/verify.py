# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint whole to see that storage still holds what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swapio.aio import Engine
from swapio.checkpoint.manifest import CheckpointManifest
from swapio.checkpoint.reader import WINDOW_BYTES, CheckpointReader
from swapio.errors import AioError, CorruptionError


class Problem(NamedTuple):
    """Something in a checkpoint that is not as it was saved."""

    pack: int
    record: str
    message: str


def verify_checkpoint(
    folder: Path,
    manifest: CheckpointManifest,
    engine: Engine,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Read and check every block of every record; blocks. Returns what is wrong.

    Raises:
        CorruptionError: A file is missing or short.
    """
    problems: list[Problem] = []
    memory = np.empty(WINDOW_BYTES, np.uint8)
    total = sum(r.nbytes for pack in manifest.packs for r in pack.records.values())
    done = 0
    with CheckpointReader(folder, manifest, engine) as reader:
        for index, pack in enumerate(manifest.packs):
            for name, record in pack.records.items():
                for start in range(0, record.nbytes, WINDOW_BYTES):
                    nbytes = min(WINDOW_BYTES, record.nbytes - start)
                    try:
                        reader.read_bytes(index, name, start, memory[:nbytes])
                    except (CorruptionError, AioError) as error:
                        problems.append(Problem(index, name, str(error)))
                    done += nbytes
                    if progress is not None:
                        progress(done, total)
    return problems
