# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saving slots without copying them, and reading them from anywhere.

folders     tags, latest, retention           manifest    which bytes are which elements
save        hold, link, write, publish        reader      runs of elements, verified
linking     hard links, reflinks, copies      verify      all of it
datafile    what lives in RAM                 agreement   several ranks, one checkpoint
"""

from __future__ import annotations

from swapio.checkpoint.folders import find_checkpoint, list_checkpoints
from swapio.checkpoint.manifest import CheckpointManifest, read_manifest
from swapio.checkpoint.reader import CheckpointReader
from swapio.checkpoint.save import Contents, PackContents, RamArray, SaveHandle, start_save
from swapio.checkpoint.verify import verify_checkpoint

__all__ = [
    "CheckpointManifest",
    "CheckpointReader",
    "Contents",
    "PackContents",
    "RamArray",
    "SaveHandle",
    "find_checkpoint",
    "list_checkpoints",
    "read_manifest",
    "start_save",
    "verify_checkpoint",
]
