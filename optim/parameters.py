# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer as columns, and the watch over what users do to them.

`p.data = other`, `model.half()` or `model.to(memory_format=...)` give a parameter other memory,
which is fine, or another dtype, shape or order of elements, to which its state no longer fits.

Invariants:
- no address is used before `refresh` has seen that dtype, shape and strides are those of
  registration: the kernels would read and write whatever lies there;
- one pass over 100,000 parameters makes no list of temporaries (shapes and sizes are interned).

Parameters and gradients are looked at in one native pass (`TensorLayouts`, through DLPack's
exchange table), or, with a torch that has none and for tensor subclasses, property by property.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter, eq, is_

import numpy as np
import numpy.typing as npt
import torch

from swapio import _kernels
from swapio.errors import ConfigError
from swapio.optim.layout import ParameterInfo

Addresses = npt.NDArray[np.uint64]

_data_ptr = torch.Tensor.data_ptr
_nbytes = attrgetter("nbytes")


class ParameterTable:
    """Tensors, shapes and addresses of all registered parameters, in order of their index.

    Attributes:
        infos: What is known of each parameter; the list of the Layout itself.
        tensors: What is stepped of them: as a rule the parameters themselves.
        listed: What the user listed; the same list where that is what is stepped.
        shapes: Their shapes.
        numels: Their numbers of elements (int64).
        first_element: How many elements of parameters come before each one's first (int64).
        is_contiguous: Whether all of them are.
    """

    def __init__(self, infos: list[ParameterInfo]) -> None:
        self.infos = infos
        self.tensors: list[torch.Tensor] = []
        self.listed = self.tensors
        self.shapes: list[torch.Size] = []
        self.numels: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.first_element: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.is_contiguous = True
        self._strides: dict[int, tuple[int, ...]] = {}
        self._nbytes: list[int] = []
        self._address: Addresses = np.zeros(0, np.uint64)
        self._ids: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._layouts = _new_layouts()

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self.infos)

    def check(self, infos: Sequence[ParameterInfo]) -> None:
        """Raise ConfigError if one of these shares memory with another or a registered one."""
        everything = [*self.infos, *infos]
        tensors = [info.param for info in everything]
        address = np.fromiter(map(_data_ptr, tensors), np.uint64, len(tensors))
        sizes = np.fromiter(map(_nbytes, tensors), np.int64, len(tensors))
        check_overlap(everything, address, sizes)

    def update(self) -> None:
        """Follow `infos`, to whose end something was added or from which it was taken."""
        count = len(self.infos)
        for column in (self.tensors, self.shapes, self._nbytes):
            del column[count:]
        kept = len(self.tensors)
        self._strides = {i: strides for i, strides in self._strides.items() if i < count}
        shapes: dict[torch.Size, torch.Size] = {shape: shape for shape in set(self.shapes)}
        numbers: dict[int, int] = {}
        for info in self.infos[len(self.tensors) :]:
            param, shape = info.param, info.param.shape
            self.tensors.append(param)
            self.shapes.append(shapes.setdefault(shape, shape))
            self._nbytes.append(numbers.setdefault(param.nbytes, param.nbytes))
            if not param.is_contiguous():
                self._strides[info.index] = param.stride()
        listed = [info.listed for info in self.infos]
        self.listed = self.tensors if all(map(is_, listed, self.tensors)) else listed
        self.numels = np.fromiter(map(torch.Tensor.numel, self.tensors), np.int64, count)
        self.first_element = _first_elements(self.infos, self.numels)
        self._address = np.fromiter(map(_data_ptr, self.tensors), np.uint64, count)
        self.is_contiguous = not self._strides
        if self._layouts is not None:
            self._layouts.truncate(kept)
            if not self._layouts.extend(self.tensors[kept:]):
                self._layouts = None
        ids = np.fromiter((id(info.listed) for info in self.infos), np.int64, count)
        self._order = np.argsort(ids)
        self._ids = ids[self._order]

    def index_of(self, param: object) -> int:
        """Position of a parameter; raises KeyError if it is not one of this optimizer's."""
        at = int(np.searchsorted(self._ids, id(param)))
        if at == len(self._ids) or self._ids[at] != id(param):
            raise KeyError("the tensor is not one of this optimizer's trainable parameters")
        return int(self._order[at])

    def indices_of(self, params: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
        """Positions of parameters; -1 for those that are not registered."""
        if not len(self._ids):
            return np.full(len(params), -1, np.int64)
        ids = np.fromiter(map(id, params), np.int64, len(params))
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._order[at], -1)

    def refresh(self) -> Addresses:
        """Address of each parameter's first element, as of now.

        Raises:
            ConfigError: A parameter was replaced by something that its state does not fit.
        """
        now, same = self._look()
        if not (same and np.array_equal(now, self._address)):
            self.verify()
            if not same:
                now = self._addresses()
            check_overlap(self.infos, now, np.array(self._nbytes, np.int64))
            self._address = now
        return now

    def _look(self) -> tuple[Addresses, bool]:
        """Addresses as of now, and whether all parameters are what they were at registration."""
        if self._layouts is None:
            return self._addresses(), all(map(eq, map(_nbytes, self.tensors), self._nbytes))
        now = np.empty(len(self.tensors), np.uint64)
        return now, self._layouts.addresses(self.tensors, now) < 0

    def _addresses(self) -> Addresses:
        return np.fromiter(map(_data_ptr, self.tensors), np.uint64, len(self.tensors))

    def gradients(self) -> tuple[Addresses, int, int] | None:
        """Addresses of all gradients (0: none), the code of their dtype, and how many there are.

        None if they are not all of one dtype, laid out as their parameters, or cannot be looked at
        in one pass: then each must be looked at by itself.
        """
        if self._layouts is None:
            return None
        address = np.empty(len(self.tensors), np.uint64)
        found = self._layouts.grad_addresses(self.tensors, address)
        return None if found is None else (address, *found)

    def verify(self) -> None:
        """Look at every parameter closely; raises as `refresh`."""
        for index, (info, shape) in enumerate(zip(self.infos, self.shapes, strict=True)):
            param, bucket = info.param, info.bucket
            strides = self._strides.get(index)
            if param.numel() and not param.data_ptr():
                raise ConfigError(
                    f"parameter {info.name} has no memory: its storage was freed. Nothing was "
                    "stepped. Let what frees it (a sharding wrapper, say) bring it back before step"
                )
            if (
                param.dtype is bucket.dtype
                and param.shape == shape
                and str(param.device) == bucket.device
                and (param.is_contiguous() if strides is None else param.stride() == strides)
            ):
                continue
            order = "contiguous" if strides is None else f"strides {strides}"
            raise ConfigError(
                f"parameter {info.name} no longer fits its state: the optimizer was made for "
                f"{tuple(shape)}, {bucket.dtype} on {bucket.device}, {order}; now it is "
                f"{tuple(param.shape)}, {param.dtype} on {param.device}, strides {param.stride()}. "
                "Nothing was stepped. Convert, move or reshape a model before its optimizer is "
                "made, or assign p.data of the same kind"
            )


def _first_elements(
    infos: Sequence[ParameterInfo], numels: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Count the elements before each parameter's first one, those of other ranks included."""
    sizes, within = numels.copy(), np.zeros_like(numels)
    for index, info in enumerate(infos):
        if info.part is not None:
            sizes[index] = math.prod(info.part.shape)
            within[index] = info.part.runs[0].offset if info.part.runs else 0
    return sizes.cumsum() - sizes + within


def _new_layouts() -> _kernels.TensorLayouts | None:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:  # torch before 2.10
        return None
    try:
        return _kernels.TensorLayouts(exchange, (torch.nn.Parameter, torch.Tensor))
    except (TypeError, ValueError):  # a later DLPack, or no capsule
        return None


def check_overlap(
    infos: Sequence[ParameterInfo], address: Addresses, nbytes: npt.NDArray[np.int64]
) -> None:
    """Raise ConfigError if two parameters share memory: they would be stepped at the same time."""
    used = np.flatnonzero(nbytes)
    used = used[np.argsort(address[used], kind="stable")]
    ends = address[used] + nbytes[used].astype(np.uint64)
    clash = np.flatnonzero(ends[:-1] > address[used[1:]])
    if len(clash):
        one, other = sorted(int(i) for i in used[clash[0] : clash[0] + 2])
        raise ConfigError(
            f"parameters {infos[one].name} and {infos[other].name} share memory. Tie weights by "
            "using one Parameter in both places, and list it once"
        )
