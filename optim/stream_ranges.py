# SPDX-License-Identifier: Apache-2.0
"""Named ranges for torch.profiler and NVTX: copies, early steps, waits.

Invariant: without a profiler a range costs a comparison.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range `swapio: <name>` for a profiler that runs; else nothing.

    Under `torch.autograd.profiler.emit_nvtx` it is an NVTX range.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    made: AbstractContextManager[Any] = torch.autograd.profiler.record_function(f"swapio: {name}")
    return made
