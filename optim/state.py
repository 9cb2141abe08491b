# SPDX-License-Identifier: Apache-2.0
"""`opt.state`: torch's mapping of parameter to state, reading through to wherever it is.

Invariants:
- every trainable parameter has an entry from construction, with the same keys always;
- a value read is a copy of the truth, never a placeholder; a value assigned is written through.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

import torch


class StateSource(Protocol):
    """What the mappings ask of an optimizer."""

    def state_names(self, index: int) -> tuple[str, ...]: ...  # noqa: D102
    def get_state(self, index: int, name: str) -> torch.Tensor: ...  # noqa: D102
    def put_state(self, index: int, name: str, value: Any) -> None: ...  # noqa: D102
    def parameter_index(self, param: torch.Tensor) -> int: ...  # noqa: D102
    def parameters(self) -> Iterator[torch.Tensor]: ...  # noqa: D102


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter, by torch's names. Reading a value may block on storage."""

    __slots__ = ("_index", "_source")

    def __init__(self, source: StateSource, index: int) -> None:
        self._source = source
        self._index = index

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._source.state_names(self._index):
            raise KeyError(name)
        return self._source.get_state(self._index, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._source.state_names(self._index):
            known = ", ".join(self._source.state_names(self._index))
            raise KeyError(f"{name!r}: this optimizer's state consists of {known}")
        self._source.put_state(self._index, name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("state of a swapio optimizer cannot be deleted; set it to zeros instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.state_names(self._index))

    def __len__(self) -> int:
        return len(self._source.state_names(self._index))

    def __repr__(self) -> str:
        return f"ParameterState({', '.join(self)})"


class StateMapping(MutableMapping[torch.Tensor, Any]):
    """All states, by parameter."""

    def __init__(self, source: StateSource) -> None:
        self._source = source

    def __getitem__(self, param: torch.Tensor) -> ParameterState:
        return ParameterState(self._source, self._source.parameter_index(param))

    def __setitem__(self, param: torch.Tensor, value: Any) -> None:
        entry = self[param]
        for name, item in dict(value).items():
            entry[name] = item

    def __delitem__(self, param: torch.Tensor) -> None:
        raise TypeError("state of a swapio optimizer cannot be deleted")

    def __contains__(self, param: object) -> bool:
        try:
            self._source.parameter_index(param)  # type: ignore[arg-type]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._source.parameters()

    def __len__(self) -> int:
        return sum(1 for _ in self._source.parameters())
