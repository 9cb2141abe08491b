# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

SPAN_DTYPE: np.dtype[np.void]
HYPER_DTYPE: np.dtype[np.void]
DECOUPLED: int
BIAS_CORRECTION: int
MAXIMIZE: int
PACKED_GROUP: int
has_xxh3: bool

def adam_step_spans(
    form: int,
    spans: NDArray[np.void],
    hypers: NDArray[np.void],
    *,
    grad_scale: float = 1.0,
    ties: NDArray[np.uint32] | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> NDArray[np.uint32] | None: ...
def adam_rescale_spans(
    form: int,
    spans: NDArray[np.void],
    hypers: NDArray[np.void],
    *,
    old_scale: float,
    new_scale: float,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None: ...
def adam_rollback_spans(
    form: int,
    spans: NDArray[np.void],
    hypers: NDArray[np.void],
    *,
    grad_scale: float = 1.0,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint32] | None: ...
def grad_stats_spans(
    addresses: ArrayLike, numels: ArrayLike, dtype: int, *, threads: int | None = None
) -> tuple[float, bool]: ...
def square_sum_spans(
    addresses: ArrayLike, numels: ArrayLike, dtype: int, *, threads: int | None = None
) -> NDArray[np.float64]: ...
def hash_spans(
    addresses: ArrayLike, nbytes: ArrayLike, *, threads: int | None = None
) -> NDArray[np.uint64]: ...
def hash_blocks(
    ranges: Sequence[tuple[int, int]], block_bytes: int, *, threads: int | None = None
) -> NDArray[np.uint64]: ...
def convert_spans(
    src: ArrayLike,
    dst: ArrayLike,
    numels: ArrayLike,
    src_dtype: int,
    dst_dtype: int,
    *,
    threads: int | None = None,
) -> None: ...
def copy_spans(
    src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike, *, threads: int | None = None
) -> None: ...
def fill_spans(
    dst: ArrayLike, nbytes: ArrayLike, *, value: int = 0, threads: int | None = None
) -> None: ...
def split_master_spans(
    master: ArrayLike,
    high: ArrayLike,
    low: ArrayLike,
    numels: ArrayLike,
    positions: ArrayLike,
    *,
    threads: int | None = None,
) -> NDArray[np.uint32]: ...
def join_master_spans(
    high: ArrayLike,
    low: ArrayLike,
    master: ArrayLike,
    numels: ArrayLike,
    positions: ArrayLike,
    *,
    ties: NDArray[np.uint32] | None = None,
    threads: int | None = None,
) -> None: ...
def symmetric_group_rows() -> int: ...
def symmetric_product(
    left: tuple[int, int, int, int, int, bool],
    right: tuple[int, int, int, int, int, bool],
    out: int,
    out_stride: int,
    order: int,
    depth: int,
    *,
    add: int = 0,
    add_stride: int = 0,
    beta: float = 0.0,
    alpha: float = 1.0,
    threads: int | None = None,
) -> None: ...
def simd_level() -> str: ...
def simd_levels() -> list[str]: ...
def set_simd_level(name: str) -> None: ...
def set_threads(num_threads: int, cores: Sequence[int] = ...) -> None: ...
def num_threads() -> int: ...
def thread_cores() -> list[int]: ...
def default_num_threads() -> int: ...
def stop_threads() -> None: ...

class TensorLayouts:
    def __init__(self, exchange: object, types: tuple[type, ...]) -> None: ...
    def __len__(self) -> int: ...
    def extend(self, tensors: list[torch.Tensor]) -> bool: ...
    def truncate(self, count: int) -> None: ...
    def addresses(self, tensors: list[torch.Tensor], out: NDArray[np.uint64]) -> int: ...
    def grad_addresses(
        self, tensors: list[torch.Tensor], out: NDArray[np.uint64]
    ) -> tuple[int, int] | None: ...
