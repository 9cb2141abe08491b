# SPDX-License-Identifier: Apache-2.0
"""What stands in `p.grad` while the gradient itself is in swapio's memory.

`torch.nn.utils.clip_grad_norm_` skips parameters without gradient and returns 0.0, and
`torch.amp.GradScaler` finds nothing to unscale: training would go on unclipped, or scaled. So
`p.grad` holds an object that has the gradient's shape and raises when anything reads it.

Invariants: only accumulation (`add_` of a tensor of the same shape) and zeroing reach the object
without an error, and neither is forgotten; it owns no memory of the gradient's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from swapio.errors import SwapStateError

_ADD = torch.ops.aten.add_.Tensor
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
_DETACH = torch.ops.aten.detach.default

STREAMED = (
    "the optimizer streams away during backward (gradients='stream'). To clip, pass max_grad_norm= "
    "to the optimizer or call optimizer.clip_grad_norm_(max_norm); to scale, use "
    "swapio.optim.GradScaler; or set gradients='keep'"
)
SHARDED = (
    "ZeRO stage 2 has reduced into shards during backward. To clip, pass max_grad_norm= to the "
    "optimizer or call optimizer.clip_grad_norm_(max_norm); to scale, use swapio.optim.GradScaler; "
    "for what must read p.grad, use stage=1"
)


class StreamedGradient(torch.Tensor):
    """Stands for a gradient that was copied away; see the module.

    Attributes:
        arrived: The gradient of a further backward pass, until the hook takes it, or what somebody
            else added, until the step takes it.
        was_zeroed: Whether somebody zeroed the gradient since it was copied.
        whereabouts: Ends the sentence that begins with the gradient: where it is, and what to do.
    """

    arrived: torch.Tensor | None
    was_zeroed: bool
    whereabouts: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[StreamedGradient], param: torch.Tensor, whereabouts: str = STREAMED
    ) -> StreamedGradient:
        """Make one with the shape, dtype and device of `param`."""
        made: StreamedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            requires_grad=False,
        )
        made.arrived = None
        made.was_zeroed = False
        made.whereabouts = whereabouts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take what autograd adds, note zeroing, and refuse everything else."""
        if func is _ADD and not kwargs and _is_gradient_of(args[0], args[1]):
            args[0].arrived = args[1]
            return args[0]
        if func in _ZERO:
            zeroed = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            for one in zeroed:
                if isinstance(one, cls):
                    one.was_zeroed = True
                    one.arrived = None
                else:
                    one.zero_()
            return args[0]
        if func is _DETACH:
            return args[0]
        found = _stand_ins((*args, *(kwargs or {}).values()))
        whereabouts = next((one.whereabouts for one in found), STREAMED)
        raise SwapStateError(f"{func} reads a gradient that {whereabouts}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is, without reading anything."""
        return f"StreamedGradient({tuple(self.shape)}, {self.dtype})"


def _stand_ins(values: Iterable[Any]) -> Iterator[StreamedGradient]:
    """The stand-ins among arguments, which may be in lists."""
    for value in values:
        if isinstance(value, StreamedGradient):
            yield value
        elif isinstance(value, list | tuple):
            yield from _stand_ins(value)


def _is_gradient_of(streamed: object, added: object) -> bool:
    """Whether `added` is what autograd would add; one waits at most, so that none is lost."""
    return (
        isinstance(streamed, StreamedGradient)
        and streamed.arrived is None
        and isinstance(added, torch.Tensor)
        and not isinstance(added, StreamedGradient)
        and added.shape == streamed.shape
    )
