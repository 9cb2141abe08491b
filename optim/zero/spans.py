# SPDX-License-Identifier: Apache-2.0
"""Copies between tensors of parameters' shapes and the send buffer of a bucket.

In RAM one native call copies all pieces of a bucket; on a GPU each piece is one copy.

Invariant: pieces are counted in the parameters' memory order, whatever their strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swapio.optim import kernels
from swapio.optim.layout import flat
from swapio.partition import Bucket

Tensors = Callable[[int], torch.Tensor | None]
_Column = npt.NDArray[np.int64]


class BucketSpans:
    """Where the pieces of one bucket are, as columns.

    A row of the buffer has the pieces and then one flag for each: whether its parameter was there.

    Args:
        bucket: The bucket; its parameter indices count from 0.
        has_flags: Whether rows end with flags.

    Attributes:
        params: Parameters of the bucket, in order.
        row_numel: Elements of a row.
        numel: Elements of the buffer.
    """

    def __init__(self, bucket: Bucket, *, has_flags: bool) -> None:
        self.params = bucket.param_indices
        self.num_flags = len(bucket.param_indices) if has_flags else 0
        self.row_numel = bucket.shard_numel + self.num_flags
        self.numel = self.row_numel * bucket.world_size
        self._world_size = bucket.world_size
        position = {index: at for at, index in enumerate(bucket.param_indices)}
        copies = list(bucket.copies())
        rows = [copy.bucket_offset // bucket.shard_numel for copy in copies]
        self._row = np.array(rows, np.int64)
        self._param = np.array([copy.param_index for copy in copies], np.int64)
        self._place = np.array([position[copy.param_index] for copy in copies], np.int64)
        self._offset = np.array([copy.param_offset for copy in copies], np.int64)
        at = np.array([copy.bucket_offset for copy in copies], np.int64)
        self._at = at + self._row * self.num_flags
        self._numel = np.array([copy.numel for copy in copies], np.int64)
        padding = list(bucket.padding())
        start = np.array([offset for offset, _ in padding], np.int64)
        self._pad_at = start + start // max(1, bucket.shard_numel) * self.num_flags
        self._pad_numel = np.array([numel for _, numel in padding], np.int64)

    # -- into the buffer ---------------------------------------------------------------------

    def pack(self, tensor_of: Tensors, buffer: torch.Tensor) -> None:
        """Fill the whole buffer from whole tensors; zeros where there is none, and in padding."""
        tensors = [tensor_of(index) for index in self.params]
        present = np.array([tensor is not None for tensor in tensors], bool)
        there = present[self._place]
        self._copy(np.flatnonzero(there), tensors, buffer, inward=True)
        starts = np.concatenate([self._at[~there], self._pad_at])
        lengths = np.concatenate([self._numel[~there], self._pad_numel])
        _zero(buffer, starts, lengths)
        if self.num_flags:
            flags = torch.from_numpy(present).to(buffer.device, buffer.dtype)
            buffer[: self.numel].view(self._world_size, -1)[:, -self.num_flags :] = flags

    def pack_row(self, tensor_of: Tensors, row: torch.Tensor, rank: int) -> None:
        """Fill one rank's row from whole tensors; padding is left as it is."""
        tensors = [tensor_of(index) for index in self.params]
        chosen = np.flatnonzero(self._row == rank)
        self._copy(chosen, tensors, row, inward=True, shift=rank * self.row_numel)

    def flags(self, row: torch.Tensor) -> npt.NDArray[np.bool_]:
        """Which parameters were there on any rank, from a reduced row."""
        found: npt.NDArray[np.bool_] = (
            (row[self.row_numel - self.num_flags : self.row_numel] > 0).cpu().numpy()
        )
        return found

    # -- out of the buffer -------------------------------------------------------------------

    def unpack(self, buffer: torch.Tensor, tensor_of: Tensors, *, without: int = -1) -> None:
        """Copy the buffer out into whole tensors, but for the row `without`."""
        tensors = [tensor_of(index) for index in self.params]
        there = np.array([tensor is not None for tensor in tensors], bool)[self._place]
        chosen = np.flatnonzero(there & (self._row != without))
        self._copy(chosen, tensors, buffer, inward=False)

    def pieces(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(parameter, first element in it, offset in the row, numel) of one rank's pieces."""
        found = []
        for at in np.flatnonzero(self._row == rank).tolist():
            offset = int(self._at[at]) - rank * self.row_numel
            found.append(
                (int(self._param[at]), int(self._offset[at]), offset, int(self._numel[at]))
            )
        return found

    # -- both --------------------------------------------------------------------------------

    def _copy(
        self,
        chosen: _Column,
        tensors: Sequence[torch.Tensor | None],
        buffer: torch.Tensor,
        *,
        inward: bool,
        shift: int = 0,
    ) -> None:
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
        for dtype in dtypes:
            mine = np.array([t is not None and t.dtype is dtype for t in tensors], bool)
            rows = chosen[mine[self._place[chosen]]]
            if not len(rows):
                continue
            if buffer.device.type == "cpu":
                self._copy_spans(rows, tensors, buffer, dtype, inward=inward, shift=shift)
            else:
                self._copy_each(rows, tensors, buffer, inward=inward, shift=shift)

    def _copy_spans(
        self,
        rows: _Column,
        tensors: Sequence[torch.Tensor | None],
        buffer: torch.Tensor,
        dtype: torch.dtype,
        *,
        inward: bool,
        shift: int,
    ) -> None:
        address = np.array([0 if t is None else t.data_ptr() for t in tensors], np.uint64)
        outer = address[self._place[rows]] + (self._offset[rows] * dtype.itemsize).astype(np.uint64)
        width = buffer.dtype.itemsize
        inner = np.uint64(buffer.data_ptr()) + ((self._at[rows] - shift) * width).astype(np.uint64)
        source, target = (outer, inner) if inward else (inner, outer)
        if dtype is buffer.dtype:
            kernels.copy_spans(source, target, self._numel[rows] * width)
            return
        ends: Any = (dtype, buffer.dtype) if inward else (buffer.dtype, dtype)
        kernels.convert_spans(source, target, self._numel[rows], *ends)

    def _copy_each(
        self,
        rows: _Column,
        tensors: Sequence[torch.Tensor | None],
        buffer: torch.Tensor,
        *,
        inward: bool,
        shift: int,
    ) -> None:
        for row in rows.tolist():
            tensor = tensors[self._place[row]]
            if tensor is None:
                continue
            first, at = int(self._offset[row]), int(self._at[row]) - shift
            count = int(self._numel[row])
            outer, inner = flat(tensor)[first : first + count], buffer[at : at + count]
            if inward:
                inner.copy_(outer)
            else:
                outer.copy_(inner)


def _zero(buffer: torch.Tensor, starts: _Column, lengths: _Column) -> None:
    if not len(starts):
        return
    if buffer.device.type == "cpu":
        width = buffer.dtype.itemsize
        address = np.uint64(buffer.data_ptr()) + (starts * width).astype(np.uint64)
        kernels.fill_spans(address, lengths * width)
        return
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        buffer[start : start + length].zero_()
