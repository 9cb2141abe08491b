# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer by parameter and name, and as torch's state dict.

Invariants: a value read is a copy of the truth, or a private map of it; a loaded state is neither
cast to the parameter's dtype nor moved to its device; nothing here calls `step()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from swapio.checkpoint.placement import Placement
from swapio.errors import ConfigError, SwapStateError
from swapio.optim.filling import DictSource, Source, fill, shaped, warn_of_conversion
from swapio.optim.layout import MasterForm
from swapio.optim.registration import Registration
from swapio.optim.snapshot import Snapshots


class StateAccess(Registration):
    """The part of SwapOptimizer that reads and replaces state."""

    _snapshots: Snapshots

    # -- one parameter -----------------------------------------------------------------------

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters of all groups, in order."""
        for info in self._layout.infos:
            yield info.listed

    def parameter_index(self, param: torch.Tensor) -> int:
        """Position of a parameter; raises KeyError if it is not one of this optimizer's."""
        return self._table.index_of(param)

    def state_names(self, index: int) -> tuple[str, ...]:
        """Names of a parameter's state: torch's, and `master` where there is one."""
        bucket = self._layout.infos[index].bucket
        names = ("step", *self.state_records(bucket.rule))
        has_master = bucket.form in (MasterForm.SEPARATE, MasterForm.SPLIT)
        return (*names, "master") if has_master else names

    def get_state(self, index: int, name: str) -> torch.Tensor:
        """A copy of one state of a parameter, in its logical shape. May block on storage."""
        self._check_open(failed_ok=True)
        if name == "step":
            return torch.tensor(float(self._counts[index]))
        if name == "master":
            return self._masters.read(index)
        info = self._layout.infos[index]
        dtype = self.state_records(info.bucket.rule)[name]
        out = torch.empty(info.param.numel(), dtype=dtype)
        for span in self._layout.spans(index):
            part = out[span.offset : span.offset + span.numel]
            self._runtime.swapper.read(span.key, name, part, start=span.position)
        return shaped(out, info.param)

    def put_state(self, index: int, name: str, value: Any) -> None:
        """Replace one state of a parameter. May block on storage.

        Raises:
            ValueError: The shape is wrong.
        """
        self._check_open()
        info = self._layout.infos[index]
        if name == "step":
            self._counts[index] = int(value)
            return
        value = torch.as_tensor(value)
        if value.shape != info.param.shape:
            raise ValueError(
                f"state {name} of {info.name} has shape {tuple(info.param.shape)}, got "
                f"{tuple(value.shape)}"
            )
        dtype = torch.float32 if name == "master" else self.state_records(info.bucket.rule)[name]
        memory = torch.empty(info.param.numel(), dtype=dtype)
        shaped(memory, info.param).copy_(value)
        if name == "master":
            self._masters.write(index, memory)
            self._owned[index] = True
            return
        for span in self._layout.spans(index):
            part = memory[span.offset : span.offset + span.numel]
            self._runtime.swapper.write(span.key, name, part, start=span.position)

    def state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of all state of one parameter, by name. May block on storage."""
        index = self.parameter_index(param)
        return {name: self.get_state(index, name) for name in self.state_names(index)}

    def set_state(self, param: torch.Tensor, name: str, value: Any) -> None:
        """Replace one state of a parameter; see `put_state` for errors."""
        index = self.parameter_index(param)
        if name not in self.state_names(index):
            known = ", ".join(self.state_names(index))
            raise ConfigError(f"no state {name!r}: this parameter has {known}")
        self.put_state(index, name, value)

    def name_of(self, index: int) -> str:
        """The name of a parameter, as checkpoints have it."""
        return self._layout.infos[index].name

    def place_of(self, index: int) -> Placement:
        """Which elements of a whole parameter this optimizer has."""
        return self._layout.infos[index].place

    # -- all of them -------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Torch's state dict, with `master` for parameters whose master is elsewhere.

        A snapshot: later steps do not change it. Large state on storage is given as private,
        copy-on-write maps of the slots, which stay held until the tensors are gone; everything
        else is copied. Blocks until writes are done and what must be copied was.

        Raises:
            SwapStateError: There is no spare slot that training could go on with.
        """
        self._check_open(failed_ok=True)
        packed, start = [], 0
        for group in self.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            count = len(group["params"])
            packed.append({**plain, "params": list(range(start, start + count))})
            start += count
        tensors = self._snapshots.take(self.state_records)
        state: dict[int, dict[str, torch.Tensor]] = {}
        for position, param in enumerate(p for g in self.param_groups for p in g["params"]):
            if param not in self.state:  # a frozen parameter has no state
                continue
            index = self.parameter_index(param)
            count_of = torch.tensor(float(self._counts[index]))
            has_elements = self._layout.infos[index].param.numel() > 0
            found = tensors[index] if has_elements else self.state_of(param)
            found = {name: self.to_outer(index, v) for name, v in found.items() if name != "step"}
            state[position] = {"step": count_of, **found}
        result: dict[str, Any] = {"state": state, "param_groups": packed}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, result)
            result = result if changed is None else changed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's optimizer of the same name.

        State is neither cast to the parameter's dtype nor moved; it is streamed to where this
        optimizer keeps it. A `master` sets its parameter as well; entries may lack it, and the
        masters are then the parameters.

        Raises:
            ValueError: Groups, parameters, names or shapes do not match; nothing was changed.
        """
        self._check_open()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"]
        lengths = [len(group["params"]) for group in groups]
        if lengths != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"the loaded state dict has param groups of {lengths} parameters, this optimizer "
                f"of {[len(group['params']) for group in self.param_groups]}"
            )
        entries: dict[int, dict[str, Any]] = {}
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            for param, key in zip(mine["params"], theirs["params"], strict=True):
                if param in self.state:
                    entries[self.parameter_index(param)] = state_dict["state"].get(key, {})
        entries = {
            index: {name: self.to_inner(index, value) for name, value in entry.items()}
            for index, entry in entries.items()
        }
        self._check_entries(entries)
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k not in ("params", "param_names")})
        self._fill_from(entries)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def to_outer(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """What `state_dict` gives for the state of a parameter: a DTensor for that of a DTensor.

        Raises:
            SwapStateError: This rank has a part only, for which there is no form: a plain tensor
                would be taken for a copy of the whole.
        """
        info = self._layout.infos[index]
        if info.part is None:
            return value
        outer = self._ranks.outer(info, value)
        if outer is not None:
            return outer
        if info.is_whole and self._ranks.is_whole(info.listed):
            return value
        raise SwapStateError(
            f"state_dict() has no form for {info.name}, of which this rank has a part only: use "
            "save(dir) and load(dir), which take any number of ranks"
        )

    def to_inner(self, index: int, value: Any) -> Any:  # noqa: ARG002
        """What this rank keeps of a value of a state dict; a DTensor's local tensor."""
        return value.to_local() if hasattr(value, "to_local") else value

    @torch.no_grad()
    def load_from(
        self,
        source: Source,
        counts: Mapping[int, int],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Load from anything that reads runs of elements; blocks, in bounded memory.

        Args:
            source: Gives state by parameter index, name and offset.
            counts: Step counts by parameter index; others become 0.
            groups: Hyperparameters of each param group.

        Raises:
            ValueError: The number of groups differs; nothing was changed.
        """
        self._check_open()
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"there are {len(groups)} param groups to load, this optimizer has "
                f"{len(self.param_groups)}"
            )
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k not in ("params", "param_names")})
        for info in self._layout.infos:
            self._counts[info.index] = counts.get(info.index, 0)
            self._owned[info.index] |= source.has(info.index, "master")
        self._fill(source)

    def _check_entries(self, entries: dict[int, dict[str, Any]]) -> None:
        """Look at everything before anything is changed."""
        conversions: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        for index, entry in entries.items():
            info = self._layout.infos[index]
            names = self.state_names(index)
            extra = set(entry) - set(names) - {"master"}
            if extra:
                raise ValueError(f"state {sorted(extra)[0]!r} of {info.name} is unknown to {names}")
            for name in set(entry) - {"step"}:
                value = torch.as_tensor(entry[name])
                if value.shape != info.param.shape:
                    raise ValueError(
                        f"state {name} of {info.name} has shape {tuple(info.param.shape)}, got "
                        f"{tuple(value.shape)}"
                    )
                wanted = self.state_records(info.bucket.rule).get(name, torch.float32)
                if value.dtype is not wanted:
                    conversions[name] = (value.dtype, wanted)
        for name, (found, wanted) in conversions.items():
            warn_of_conversion(name, found, wanted)

    def _fill_from(self, entries: dict[int, dict[str, Any]]) -> None:
        for index, entry in entries.items():
            self._counts[index] = int(entry.get("step", 0))
            self._owned[index] |= "master" in entry
        self._fill(DictSource(self._layout.infos, entries))

    def _fill(self, source: Source) -> None:
        swapper = self._runtime.swapper
        try:
            fill(self._layout, swapper, self._masters, source, self._record_names())
        except BaseException as error:
            swapper.fail(error)  # some sub-groups are filled, others are not
            raise

    def _record_names(self) -> set[str]:
        rules = {info.bucket.rule for info in self._layout.infos}
        return {name for rule in rules for name in self.state_records(rule)}
