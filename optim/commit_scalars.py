# SPDX-License-Identifier: Apache-2.0
"""What a step's commit carries beside the records: counters and hyperparameters, as plain data.

Invariant: `decode(encode(x)) == x` bit for bit, also for nan, infinities and tuples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.errors import CheckpointError

_logger = logging.getLogger("swapio.optim")
_warned: set[str] = set()

Counts = npt.NDArray[np.int64]


def encode_runs(values: npt.NDArray[Any]) -> list[list[int]]:
    """Return `[value, length]` of each run of equal values."""
    if not len(values):
        return []
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    lengths = np.diff(np.concatenate([starts, [len(values)]]))
    return [[int(values[at]), int(n)] for at, n in zip(starts, lengths, strict=True)]


def decode_runs(runs: Iterable[Sequence[int]]) -> Counts:
    """Reverse `encode_runs`."""
    parts = [np.full(length, value, np.int64) for value, length in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def encode_value(value: Any) -> Any:
    """Return a hyperparameter as JSON data.

    Raises:
        TypeError: It is of a kind that JSON does not have.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [encode_value(item) for item in value]}
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode_value(item) for key, item in value.items()}}
    raise TypeError(f"{type(value).__name__} is not JSON data")


def decode_value(data: Any) -> Any:
    """Reverse `encode_value`."""
    if isinstance(data, list):
        return [decode_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return torch.tensor(data["tensor"], dtype=getattr(torch, data["dtype"]))
    if "tuple" in data:
        return tuple(decode_value(item) for item in data["tuple"])
    return {key: decode_value(item) for key, item in data["dict"].items()}


def encode_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a param group as JSON data."""
    encoded = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        try:
            encoded[key] = encode_value(value)
        except TypeError as error:
            if key not in _warned:
                _warned.add(key)
                _logger.warning("param group entry %r is not saved: %s", key, error)
    return encoded


def apply_group(group: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Set the hyperparameters of a param group; a tensor that is there already is filled."""
    for key, encoded in data.items():
        value = decode_value(encoded)
        mine = group.get(key)
        if isinstance(mine, torch.Tensor) and mine.numel() == 1:
            mine.fill_(float(value))
        else:
            group[key] = value


def apply_groups(groups: Sequence[dict[str, Any]], data: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyperparameters of all param groups.

    Raises:
        CheckpointError: Their number differs.
    """
    if len(groups) != len(data):
        raise CheckpointError(
            f"what is loaded has {len(data)} param groups, this optimizer has {len(groups)}"
        )
    for group, encoded in zip(groups, data, strict=True):
        apply_group(group, encoded)
