# SPDX-License-Identifier: Apache-2.0
"""Where the step finds its gradients, and what it decides from them.

Invariant: nothing here changes a gradient. Scaling and clipping are one factor that the kernels
apply; a gradient in an unsuitable layout is copied, and the copy lives until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, eq, is_not
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from swapio.errors import ConfigError, SwapioError
from swapio.optim import kernels
from swapio.optim.layout import ParameterInfo
from swapio.optim.parameters import Addresses, ParameterTable

# In the order of the kernels' codes.
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OVERFLOWED = "some parameter (the sum of squares overflowed)"

_grad, _shape, _dtype = map(attrgetter, ("grad", "shape", "dtype"))


@dataclass
class Gradients:
    """The gradients of one step, as addresses.

    Attributes:
        parameters: Address of each parameter (uint64).
        address: Address of each parameter's gradient; 0 where there is none (uint64).
        present: Which parameters have one (bool).
        dtypes: Dtype of each gradient that is not of the common dtype, by parameter index.
        dtype: The dtype that most of them have; None when there is no gradient at all.
        keep: Copies that must outlive the step.
    """

    parameters: Addresses
    address: Addresses
    present: npt.NDArray[np.bool_]
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    keep: list[torch.Tensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every parameter has a gradient."""
        return bool(self.present.all())


class Decision(NamedTuple):
    """Whether the step is taken, and the factor for every gradient."""

    take: bool
    scale: float
    norm: float | None


def collect(table: ParameterTable) -> Gradients:
    """Gather `p.grad` of all parameters; looks at the parameters too (see ParameterTable).

    Raises:
        ConfigError: A gradient is sparse, or of another shape or device than its parameter; or a
            parameter was replaced by something that its state does not fit.
    """
    parameters = table.refresh()
    seen = table.gradients()
    if seen is not None:
        address, code, num_present = seen
        dtype = GRADIENT_DTYPES[code] if num_present else None
        return Gradients(parameters, address, address != 0, dtype=dtype)
    grads = list(map(_grad, table.tensors))
    count = len(grads)
    plain = _plain(table, grads)
    if plain is not None:
        present = np.ones(count, bool)
        return Gradients(parameters, plain, present, dtype=grads[0].dtype if grads else None)
    table.verify()
    result = Gradients(parameters, np.zeros(count, np.uint64), np.zeros(count, bool))
    for index, grad in enumerate(grads):
        if grad is None:
            continue
        result.present[index] = True
        grad = _suitable(table.infos[index], grad, result.keep)
        result.address[index] = grad.data_ptr()
        if result.dtype is None:
            result.dtype = grad.dtype
        if grad.dtype is not result.dtype:
            result.dtypes[index] = grad.dtype
    return result


def _plain(table: ParameterTable, grads: Sequence[torch.Tensor | None]) -> Addresses | None:
    """Addresses in the common case: all there, of one dtype, contiguous, of the right shape.

    No loop in Python: a model may have a hundred thousand parameters.
    """
    if not table.is_contiguous or not all(map(is_not, grads, repeat(None))):
        return None
    found = cast("Sequence[torch.Tensor]", grads)
    if found and found[0].dtype not in GRADIENT_DTYPES:
        return None
    if len(set(map(_dtype, found))) > 1 or not all(map(eq, map(_shape, found), table.shapes)):
        return None
    try:
        if not all(map(torch.Tensor.is_contiguous, found)):
            return None
        if any(map(torch.Tensor.is_neg, found)):
            return None
        address = np.fromiter(map(torch.Tensor.data_ptr, found), np.uint64, len(found))
        return None if (table.numels[address == 0] > 0).any() else address
    except RuntimeError:  # what is not strided has no such thing: it is looked at one by one
        return None


def _suitable(info: ParameterInfo, grad: torch.Tensor, keep: list[torch.Tensor]) -> torch.Tensor:
    """The gradient itself if the kernels can read it, or a copy laid out as the parameter is."""
    param = info.param
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {info.name} is {grad.layout}; swapio steps dense gradients only "
            "(for an embedding pass sparse=False). Nothing was stepped"
        )
    if grad.shape != param.shape:
        raise ConfigError(
            f"the gradient of {info.name} has shape {tuple(grad.shape)}, the parameter "
            f"{tuple(param.shape)}. Nothing was stepped"
        )
    if grad.device != param.device:
        raise ConfigError(
            f"the gradient of {info.name} is on {grad.device}, the parameter on {param.device}. "
            "Nothing was stepped"
        )
    if grad.dtype not in GRADIENT_DTYPES:
        raise ConfigError(
            f"the gradient of {info.name} has dtype {grad.dtype}; there are kernels for "
            f"{', '.join(map(str, GRADIENT_DTYPES))}. Nothing was stepped"
        )
    if grad.numel() and not grad.data_ptr():
        raise ConfigError(
            f"the gradient of {info.name} has no memory: its storage was freed. Nothing was stepped"
        )
    if grad.numel() == 0 or (grad.stride() == param.stride() and not grad.is_neg()):
        return grad
    copy = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype)
    copy.copy_(grad)
    keep.append(copy)
    return copy


def decide(
    total: Callable[[], float],
    *,
    limit: float | None,
    nonfinite: str,
    unscale: float = 1.0,
    culprit: Callable[[], str],
) -> Decision:
    """Decide whether to step and with which factor, from norms in float64.

    The factor is `unscale`, times max_norm / (norm + 1e-6) as torch.nn.utils.clip_grad_norm_ has it
    where that is below 1.

    Args:
        total: Gives the sum of the squares of all gradients as they are; called if it is needed.
        limit: The largest norm after unscaling; None does not clip.
        nonfinite: "propagate", "skip" or "raise".
        unscale: 1 / loss scale.
        culprit: Names a parameter whose gradient is not finite.

    Raises:
        SwapioError: `nonfinite="raise"` and a gradient has an inf or nan (named).
    """
    if limit is None and nonfinite == "propagate":
        return Decision(True, unscale, None)
    squares = total()
    norm = float(np.sqrt(squares)) * unscale
    if not np.isfinite(squares):
        if nonfinite == "raise":
            raise SwapioError(
                f"inf or nan in the gradient of {culprit()}. Nothing was stepped "
                "(nonfinite='raise'; 'skip' leaves such steps out)"
            )
        if nonfinite == "skip":
            return Decision(False, unscale, norm)
    scale = unscale
    if limit is not None and limit / (norm + 1e-6) < 1.0:
        scale *= limit / (norm + 1e-6)
    return Decision(True, scale, norm)


def square_sum(table: ParameterTable, gradients: Gradients) -> float:
    """Sum of the squares of all gradients, in float64; not finite if one of them is not."""
    common = gradients.dtype
    if common is None:
        return 0.0
    total, others = 0.0, gradients.dtypes
    for dtype in dict.fromkeys([common, *others.values()]):
        chosen = gradients.present.copy()
        if dtype is common:
            chosen[list(others)] = False
        else:
            chosen[:] = False
            chosen[[index for index, other in others.items() if other is dtype]] = True
        value, _ = kernels.grad_stats_spans(gradients.address[chosen], table.numels[chosen], dtype)
        total += value
    return total


def first_nonfinite(infos: Sequence[ParameterInfo]) -> str:
    """Name a parameter whose `p.grad` is not finite."""
    for info in infos:
        if info.param.grad is not None and not bool(torch.isfinite(info.param.grad).all()):
            return info.name
    return OVERFLOWED
