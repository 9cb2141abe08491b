# SPDX-License-Identifier: Apache-2.0
"""Where the step finds its gradients, and what it decides from them.

Invariant: nothing here changes a gradient. Scaling and clipping are one factor that the kernels
apply; a gradient in an unsuitable layout is copied, and the copy lives until the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swapio.errors import ConfigError, SwapioError
from swapio.optim import kernels
from swapio.optim.layout import ParameterInfo


@dataclass
class Gradients:
    """The gradients of one step, as addresses.

    Attributes:
        address: Address of each parameter's gradient; 0 where there is none (uint64).
        present: Which parameters have one (bool).
        dtypes: Dtype of each gradient that is not of the common dtype, by parameter index.
        dtype: The dtype that most of them have; None when there is no gradient at all.
        keep: Copies that must outlive the step.
    """

    address: npt.NDArray[np.uint64]
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


def collect(infos: Sequence[ParameterInfo]) -> Gradients:
    """Gather `p.grad` of all parameters.

    Raises:
        ConfigError: A gradient is sparse, or of another shape or device than its parameter.
    """
    grads = [info.param.grad for info in infos]
    count = len(grads)
    found = [grad for grad in grads if grad is not None]
    if not found:
        return Gradients(np.zeros(count, np.uint64), np.zeros(count, bool))
    result = Gradients(np.zeros(count, np.uint64), np.ones(count, bool), dtype=found[0].dtype)
    if len(found) == count and _plain(infos, found):
        addresses = [grad.data_ptr() for grad in found]
        result.address[:] = addresses
        return result
    for index, grad in enumerate(grads):
        if grad is None:
            result.present[index] = False
            continue
        grad = _suitable(infos[index], grad, result.keep)
        result.address[index] = grad.data_ptr()
        if grad.dtype is not result.dtype:
            result.dtypes[index] = grad.dtype
    return result


def _plain(infos: Sequence[ParameterInfo], grads: Sequence[torch.Tensor]) -> bool:
    """The common case, asked in bulk: one dtype, dense, same shape, everything contiguous."""
    strided = torch.strided
    return (
        len({grad.dtype for grad in grads}) == 1
        and all(grad.layout is strided and grad.is_contiguous() for grad in grads)
        and all(info.param.is_contiguous() for info in infos)
        and all(info.param.shape == g.shape for info, g in zip(infos, grads, strict=True))
        and all(not grad.is_cuda for grad in grads)
    )


def _suitable(info: ParameterInfo, grad: torch.Tensor, keep: list[torch.Tensor]) -> torch.Tensor:
    """The gradient itself if the kernels can read it, or a copy laid out as the parameter is."""
    param = info.param
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {info.name} is {grad.layout}; swapio steps dense gradients only "
            "(for an embedding pass sparse=False)"
        )
    if grad.shape != param.shape:
        raise ConfigError(
            f"the gradient of {info.name} has shape {tuple(grad.shape)}, the parameter "
            f"{tuple(param.shape)}"
        )
    if grad.device != param.device:
        raise ConfigError(
            f"the gradient of {info.name} is on {grad.device}, the parameter on {param.device}"
        )
    if grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"the gradient of {info.name} has dtype {grad.dtype}, without a kernel")
    if grad.stride() == param.stride() or grad.numel() == 0:
        return grad
    copy = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype)
    copy.copy_(grad)
    keep.append(copy)
    return copy


def decide(
    infos: Sequence[ParameterInfo],
    gradients: Gradients,
    *,
    max_grad_norm: float | None,
    nonfinite: str,
) -> Decision:
    """Decide whether to step and with which factor, from norms in float64.

    The factor is that of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6) if below 1.

    Raises:
        SwapioError: `nonfinite="raise"` and a gradient has an inf or nan (named).
    """
    if gradients.dtype is None or (max_grad_norm is None and nonfinite == "propagate"):
        return Decision(True, 1.0, None)
    indices = [int(i) for i in np.flatnonzero(gradients.present)]
    numels = np.fromiter((infos[i].param.numel() for i in indices), np.int64, len(indices))
    total = 0.0
    for dtype in {gradients.dtype, *gradients.dtypes.values()}:
        chosen = np.array(
            [gradients.dtypes.get(i, gradients.dtype) is dtype for i in indices], dtype=bool
        )
        square_sum, _ = kernels.grad_stats_spans(
            gradients.address[np.array(indices)[chosen]], numels[chosen], dtype
        )
        total += square_sum
    norm = float(np.sqrt(total))
    if not np.isfinite(total):
        if nonfinite == "raise":
            raise SwapioError(f"inf or nan in the gradient of {_first_nonfinite(infos)}")
        if nonfinite == "skip":
            return Decision(False, 1.0, norm)
    scale = 1.0
    if max_grad_norm is not None:
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
    return Decision(True, scale, norm)


def _first_nonfinite(infos: Sequence[ParameterInfo]) -> str:
    for info in infos:
        if info.param.grad is not None and not bool(torch.isfinite(info.param.grad).all()):
            return info.name
    return "some parameter (the sum of squares overflowed)"
