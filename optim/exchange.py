# SPDX-License-Identifier: Apache-2.0
"""Export of an optimizer's state to a plain safetensors folder, and import from one.

Keyed by parameter and state name; hyperparameters and step counts ride along as metadata.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from swapio.checkpoint.safetensors import Source, Stored, read_folder, write_folder
from swapio.errors import CheckpointError
from swapio.optim.commit_scalars import apply_group, encode_group
from swapio.optim.layout import ParameterInfo

FORMAT = "swapio-optimizer-1"


class Exchanged(Protocol):
    """What is asked of an optimizer."""

    param_groups: list[dict[str, Any]]

    def state_names(self, index: int) -> tuple[str, ...]: ...  # noqa: D102
    def get_state(self, index: int, name: str) -> torch.Tensor: ...  # noqa: D102


def export_state(
    optimizer: Exchanged, infos: Sequence[ParameterInfo], folder: Path, *, max_bytes: int
) -> None:
    """Write all state; one state of one parameter is in RAM at a time."""
    tensors: dict[str, Source] = {}
    for info in infos:
        for name in optimizer.state_names(info.index):
            tensors[f"{info.name}.{name}"] = _source(optimizer, info, name)
    name_of = {id(info.listed): info.name for info in infos}
    groups = [
        {
            "hyper": encode_group(group),
            "params": [name_of[id(p)] for p in group["params"] if id(p) in name_of],
        }
        for group in optimizer.param_groups
    ]
    metadata = {"format": FORMAT, "param_groups": json.dumps(groups)}
    write_folder(folder, tensors, metadata, max_bytes=max_bytes)


def _source(optimizer: Exchanged, info: ParameterInfo, name: str) -> Source:
    value: list[torch.Tensor] = []

    def read(start: int, out: torch.Tensor) -> None:
        if not value or start == 0:
            value[:] = [optimizer.get_state(info.index, name).contiguous().view(-1)]
        out.copy_(value[0][start : start + out.numel()])
        if start + out.numel() == value[0].numel():
            value.clear()

    if name == "step":
        return Source(torch.float32, (), read)
    sample = optimizer.get_state(info.index, name)
    return Source(sample.dtype, tuple(info.param.shape), read)


def import_state(
    folder: Path, infos: Sequence[ParameterInfo], groups: Sequence[dict[str, Any]]
) -> dict[int, dict[str, torch.Tensor]]:
    """Read the entries of all parameters, and set the hyperparameters.

    Raises:
        CheckpointError: A parameter or all metadata is missing.
        CorruptionError: A file is malformed.
    """
    stored, metadata = read_folder(folder)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {metadata.get('format')!r}; this swapio reads {FORMAT}"
        )
    by_name: dict[str, dict[str, Stored]] = {}
    for key, tensor in stored.items():
        parameter, _, state = key.rpartition(".")
        by_name.setdefault(parameter, {})[state] = tensor
    missing = [info.name for info in infos if info.name not in by_name]
    if missing:
        raise CheckpointError(f"{folder} lacks the parameters {missing[:5]} ({len(missing)})")
    entries = {
        info.index: {name: tensor.tensor() for name, tensor in by_name[info.name].items()}
        for info in infos
    }
    hyper_of = {
        name: entry["hyper"]
        for entry in json.loads(metadata["param_groups"])
        for name in entry["params"]
    }
    name_of = {id(info.listed): info.name for info in infos}
    for group in groups:
        names = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
        hyper = next((hyper_of[name] for name in names if name in hyper_of), None)
        if hyper is not None:
            apply_group(group, hyper)
    return entries
