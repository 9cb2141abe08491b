# SPDX-License-Identifier: Apache-2.0
"""Who else wrote to parameters on a device, by autograd's version counters.

A parameter on a device whose master is separate is never read by the update, and hashing it would
cost a copy. What torch counts is compared instead: in-place operations (load_state_dict, an EMA
swap under no_grad) and another tensor in `p.data` are seen; those on `p.data` itself are not.

Invariant: what the optimizer itself writes is never taken for somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterable

from swapio.optim.layout import Bucket, Layout, MasterForm, ParameterInfo

Stamp = tuple[int, int]


class Versions:
    """Version counters of the parameters that have no digest.

    Args:
        layout: The optimizer's parameters; what is added to it later is seen.

    Attributes:
        changed: Parameters that somebody else wrote to since the last step.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._stamps: dict[int, Stamp] | None = None
        self.changed: set[int] = set()

    def look(self) -> None:
        """Take note of what was changed until now; later changes are not seen before `note`."""
        stamps, self._stamps = self._stamps, None
        if stamps is not None:
            self.changed |= {i for i in stamps if stamps[i] != stamp_of(self._layout.infos[i])}

    def note(self) -> None:
        """A step is over: from now on every change is somebody else's."""
        self.changed.clear()
        if not any(map(_has_versions, {group.bucket for group in self._layout.groups.values()})):
            return
        self._stamps = {
            info.index: stamp_of(info) for info in self._layout.infos if _has_versions(info.bucket)
        }

    def forget(self, indices: Iterable[int]) -> None:
        """The masters of some parameters were set, and the parameters with them."""
        self.changed.difference_update(indices)

    def is_changed(self, index: int) -> bool:
        """Whether somebody else wrote to a parameter, as far as is known now."""
        if index in self.changed:
            return True
        stamp = None if self._stamps is None else self._stamps.get(index)
        return stamp is not None and stamp != stamp_of(self._layout.infos[index])


def _has_versions(bucket: Bucket) -> bool:
    return bucket.device != "cpu" and bucket.form is MasterForm.SEPARATE


def stamp_of(info: ParameterInfo) -> Stamp:
    """The parameter's address, and how often torch saw it written."""
    return info.param.data_ptr(), info.param._version
