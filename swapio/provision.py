# SPDX-License-Identifier: Apache-2.0
"""Making the slots of file groups: what is reused, what is removed, what is written once.

Invariant: either all files of a call are there, reserved and written once, or those it made are
removed again and the error is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swapio.aio import File
from swapio.filesystem import check_space, raise_descriptor_limit
from swapio.manifest import sync_folder
from swapio.slotfiles import SlotFiles, SlotFileSet, is_reusable
from swapio.store import Progress
from swapio.striping import FileGroup

_logger = logging.getLogger("swapio.store")


def provide_slots(
    files: SlotFiles,
    wanted: Sequence[tuple[FileGroup, int]],
    *,
    may_reuse: bool,
    before_create: Callable[[], None],
    progress: Progress | None = None,
) -> tuple[list[SlotFileSet], int]:
    """Make slots of file groups, on top of what a dead run left.

    Args:
        files: Where they are opened.
        wanted: `(group, slot index)` of each slot to make.
        may_reuse: Whether files that are there already were written once.
        before_create: Called when the space was checked, before the first file is made.
        progress: Called with bytes done and in total.

    Returns:
        The files of each slot, and the bytes that were written.

    Raises:
        ConfigError: If there is not enough space or not enough open files; nothing was made.
        AioError: If the storage failed; what was made is removed.
    """
    sizes = {path: size for slot in wanted for path, size in files.paths(*slot)}
    reused = {path for path, size in sizes.items() if may_reuse and is_reusable(path, size)}
    removed = [path for path in files.leftovers() if path not in reused]
    files.remove_leftovers(removed)
    if removed or reused:
        _logger.warning(
            "a dead run left files in %s: reusing %d, removed %d",
            files.folders[0],
            len(reused),
            len(removed),
        )
    check_space([(path.parent, size) for path, size in sizes.items() if path not in reused])
    raise_descriptor_limit(2 * len(sizes))  # a direct file has a buffered descriptor as well
    before_create()
    made: list[SlotFileSet] = []
    try:
        made.extend(files.create(*slot) for slot in wanted)
        written = files.write_once(_unwritten(made, sizes, reused), progress)
        for folder in files.folders:
            sync_folder(folder)
    except BaseException:
        for file_set in made:
            files.discard(file_set)
        raise
    return made, written


def _unwritten(
    made: Iterable[SlotFileSet], sizes: dict[Path, int], reused: set[Path]
) -> list[tuple[File, int]]:
    return [
        (file, sizes[Path(file.path)])
        for file_set in made
        for file in file_set
        if file is not None and Path(file.path) not in reused
    ]
