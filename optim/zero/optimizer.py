# SPDX-License-Identifier: Apache-2.0
"""ZeroOptimizer: AdamW or Muon with state sharded over the ranks of a process group (ZeRO-1, 2).

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models",
arXiv:1910.02054. Stage 3, where parameters are sharded too, is FSDP2's: pass its DTensor
parameters to the optimizer itself.

Invariant: an error on one rank is raised on every rank, and no rank waits for one that has failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from swapio.checksum import span_hashes
from swapio.config import SwapConfig
from swapio.config_values import format_size
from swapio.errors import ConfigError
from swapio.optim.adamw import AdamW
from swapio.optim.base import SwapOptimizer
from swapio.optim.checkpointing import Loaded
from swapio.optim.layout import PackedGroup, ParameterInfo, flat, is_dense
from swapio.optim.zero.comm import Comm, ProcessGroup
from swapio.optim.zero.flat import FlatRanks
from swapio.optim.zero.reduction import Accumulate

_logger = logging.getLogger("swapio.optim")

BUCKET_BYTES_MIN, BUCKET_BYTES_MAX = 1 << 18, 25 << 20
_BUCKETS_OF_BUDGET = 64
_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ZeroOptimizer(SwapOptimizer):
    """A swapio optimizer whose state is sharded over ranks; every rank calls it alike.

    Each rank keeps and steps one run of each parameter's elements, then all runs are gathered.
    `save` and `load` write and read one checkpoint, whatever the number of ranks.

    Args:
        params: A module, parameters, named parameters, or param groups; the same on every rank.
            Where values differ, rank 0's are taken.
        optimizer_class: AdamW, Adam or Muon of swapio.optim.
        stage: 1 shards the state; `p.grad` is the average over ranks when backward returns. 2
            shards gradients too: `p.grad` is freed during backward, and step() consumes the sum.
        process_group: The ranks; None is all of them.
        accumulate: Of stage 2. "local" adds up gradients of `no_sync()` passes in `p.grad` and
            reduces at the first pass outside; "shard" reduces each pass into the shards.
        reduce_dtype: Dtype in which gradients are summed over ranks; the sum is multiplied by
            1 / world size once.
        bucket_bytes: Most bytes of a collective's buffer; there are up to five of them. None: 25
            MiB, or with a stated host_memory at most 1/64 of it.
        timeout: How long to wait for another rank; half an hour if None.
        **settings: As for `optimizer_class`: lr, swap, max_grad_norm, ... `nonfinite` is "skip" by
            default.

    Raises:
        ConfigError: There is no process group, the ranks' parameters differ in shape or dtype, a
            setting is unsuitable, or stage 2 is asked for the parameters of a
            DistributedDataParallel module.
        SwapioError: Another rank failed.

    Example:
        >>> opt = ZeroOptimizer(model, AdamW, stage=2, lr=1e-3, swap="/nvme/run1")
    """

    _ranks: FlatRanks

    if TYPE_CHECKING:  # what a rule gives comes from `optimizer_class`: __new__ adds it as a base
        update_chunk: Any
        early_update: Any
        fill_hyper: Any
        rule_of: Any
        state_records: Any

    def __new__(
        cls,
        params: Any,  # noqa: ARG004
        optimizer_class: type[SwapOptimizer] = AdamW,
        **settings: Any,  # noqa: ARG004
    ) -> ZeroOptimizer:
        """Make an object that is both, a ZeroOptimizer and an `optimizer_class`."""
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, SwapOptimizer)):
            raise ConfigError(
                f"optimizer_class={optimizer_class!r} is not an optimizer of swapio: pass "
                "swapio.optim.AdamW, Adam or Muon"
            )
        made = type(f"Zero{optimizer_class.__name__}", (cls, optimizer_class), {})
        return object.__new__(made)

    def __init__(
        self,
        params: Any,
        optimizer_class: type[SwapOptimizer] = AdamW,  # noqa: ARG002
        *,
        stage: int = 1,
        process_group: ProcessGroup | None = None,
        accumulate: Accumulate = "local",
        reduce_dtype: torch.dtype = torch.float32,
        bucket_bytes: int | None = None,
        timeout: timedelta | None = None,
        **settings: Any,
    ) -> None:
        _check(stage, accumulate, reduce_dtype, bucket_bytes)
        comm = Comm(process_group, timeout=timeout)
        try:
            listed, tensors = _listed(params)
            is_ddp = _is_wrapped(params, tensors)
            if is_ddp and stage == 2:
                raise ConfigError(
                    "stage=2 reduces gradients itself, but these parameters belong to a "
                    "DistributedDataParallel module, which averages them too: pass the plain "
                    "module, or use stage=1, which leaves the averaging to it"
                )
            settings.setdefault("nonfinite", "skip")
            settings["swap"] = named_by_rank(settings.get("swap"), comm)
            self._ranks = FlatRanks(
                comm,
                stage=stage,
                reduces=not is_ddp,
                accumulate=accumulate,
                reduce_dtype=reduce_dtype,
                bucket_bytes=bucket_bytes or _bucket_bytes(settings["swap"]),
            )
            self._ranks.together(lambda: None)
            _require_same_kind(comm, tensors)
            _share_values(comm, tensors)
            build: Any = super().__init__
            self._ranks.together(lambda: build(listed, **settings))
            self._follow()
            if self.recovered_step is not None:
                self._ranks.publish(self._layout.infos)
        except BaseException:
            if getattr(self, "_ready", False):
                self._runtime.close()
            comm.close()
            raise

    # -- gradients ---------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """1 or 2."""
        return self._ranks.stage

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients have left `p.grad` when step() is called: in stage 2."""
        return self.stage == 2

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward passes are not reduced, but with accumulate="shard" in stage 2."""
        self._check_open()
        reducer = self._ranks.reducer
        return contextlib.nullcontext() if reducer is None else reducer.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; drops what was reduced into shards as well. Collective after a backward."""
        if self._ready and self._ranks.reducer is not None:
            self._ranks.reducer.release()
        super().zero_grad(set_to_none)

    def _step(self) -> None:
        super()._step()
        if self._ranks.reducer is not None:
            self._ranks.reducer.release()

    # -- groups ------------------------------------------------------------------------------

    def workspace_bytes(self, groups: Iterable[PackedGroup]) -> int:
        """As the optimizer's, with the buffers of the collectives."""
        params = [info.listed for info in self._layout.infos]
        return super().workspace_bytes(groups) + self._ranks.scratch_bytes(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on every rank alike."""
        if not self._ready:
            super().add_param_group(param_group)
            return
        add = super().add_param_group
        self._ranks.together(lambda: add(param_group))

    def _enlarge(self, infos: Sequence[ParameterInfo]) -> None:
        super()._enlarge(infos)
        if infos:
            self._follow()

    def _follow(self) -> None:
        """Reduce and gather all parameters that there are, and show it in the trace."""
        self._ranks.follow(self._layout.infos)
        reducer, tracer = self._ranks.reducer, self._runtime.tracer
        if reducer is not None and tracer is not None:
            reducer.trace = tracer.add

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> NoReturn:
        """Refuse: a rank's dict would have a part of the state.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NO_DICT.format("state_dict()"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        """Refuse, as state_dict.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NO_DICT.format("load_state_dict()"))

    @torch.no_grad()
    def load(self, *args: Any, **options: Any) -> Loaded:
        """As the optimizer's; parameters are set as a whole, on every rank. Collective."""
        loaded = super().load(*args, **options)
        self._ranks.publish(self._layout.infos)
        return loaded

    @torch.no_grad()
    def recover(self) -> int:
        """As the optimizer's; parameters are set as a whole, on every rank. Collective."""
        step = super().recover()
        self._ranks.publish(self._layout.infos)
        return step

    def export_safetensors(self, *args: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse: an export has whole tensors.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NO_DICT.format("export_safetensors()"))

    def import_safetensors(self, *args: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse, as export_safetensors.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NO_DICT.format("import_safetensors()"))

    @torch.no_grad()
    def full_state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole state of one parameter, on every rank. Blocks. Collective."""
        index = self.parameter_index(param)
        info = self._layout.infos[index]
        mine = self._ranks.together(lambda: self.state_of(param))
        whole: dict[str, torch.Tensor] = {}
        for name, value in mine.items():
            if name == "step":
                whole[name] = value
                continue
            out = torch.empty_strided(param.shape, param.stride(), dtype=value.dtype)
            start = 0
            for part in self._ranks.comm.gather(value):
                flat(out)[start : start + part.numel()] = part
                start += part.numel()
            whole[name] = out
        if any(run.numel != info.param.numel() for run in info.place.runs):
            raise ConfigError(f"the run of {info.name} on this rank is not contiguous")
        return whole

    def describe(self) -> str:
        """As the optimizer's, with the ranks, and what accumulation costs each way."""
        ranks = self._ranks
        numels = [info.listed.numel() for info in self._layout.infos]
        grads = sum(info.listed.nbytes for info in self._layout.infos)
        shards = 4 * sum(-(-numel // ranks.world_size) for numel in numels)
        lines = [
            f"ZeRO stage {ranks.stage}: rank {ranks.rank} of {ranks.world_size}; gradients "
            + (
                f"averaged here in {str(ranks.reduce_dtype).removeprefix('torch.')}"
                if ranks.reduces
                else "averaged by DistributedDataParallel"
            ),
            f"collectives of a step: {self.planned_collectives()}",
        ]
        if ranks.stage == 2:
            lines.append(
                f"accumulate={ranks.accumulate!r}; gradients held over micro-batches: 'local' "
                f"{format_size(grads)} in p.grad, 'shard' {format_size(shards)} in shards"
            )
        return "\n".join([super().describe(), "", *lines])


_NO_DICT = (
    "{} of a ZeroOptimizer would cover this rank's shards only. Use save(dir) and load(dir), which "
    "write and read one checkpoint for any number of ranks, or full_state_of(param)"
)


def named_by_rank(swap: Any, comm: Comm) -> SwapConfig:
    """Give each rank a folder of its own below the paths, whoever started the processes."""
    config = SwapConfig.coerce(swap)
    if config.paths and not config.namespace and comm.world_size > 1:
        config = dataclasses.replace(config, namespace=f"rank{comm.global_rank}")
    return config


def _bucket_bytes(config: SwapConfig) -> int:
    """Large enough for speed, and small beside the budget."""
    if isinstance(config.host_memory, str):
        return BUCKET_BYTES_MAX
    share = config.host_memory // _BUCKETS_OF_BUDGET
    return min(BUCKET_BYTES_MAX, max(BUCKET_BYTES_MIN, share))


def _check(stage: int, accumulate: str, dtype: torch.dtype, bucket_bytes: int | None) -> None:
    if stage not in (1, 2):
        raise ConfigError(
            f"stage={stage!r} is neither 1 nor 2; for stage 3 shard the module with FSDP2's "
            "fully_shard and pass its parameters to swapio.optim.AdamW or Muon"
        )
    if accumulate not in ("local", "shard"):
        raise ConfigError(f"accumulate={accumulate!r} is neither 'local' nor 'shard'")
    if dtype not in _REDUCE_DTYPES:
        raise ConfigError(f"reduce_dtype={dtype} is none of {_REDUCE_DTYPES}")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes={bucket_bytes} must be at least 1")


def _listed(params: Any) -> tuple[Any, list[torch.Tensor]]:
    """What the optimizer is given, and all tensors in it."""
    if isinstance(params, torch.nn.Module):
        module = getattr(params, "module", None) if _is_ddp(params) else params
        params = list((module or params).named_parameters())
    params = list(params)
    entries: list[Any] = []
    for item in params:
        if isinstance(item, dict):
            group = item["params"]
            item["params"] = [group] if isinstance(group, torch.Tensor) else list(group)
            entries += item["params"]
        else:
            entries.append(item)
    return params, [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def _is_ddp(module: object) -> bool:
    return issubclass(type(module), torch.nn.parallel.DistributedDataParallel)


def _is_wrapped(params: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the parameters are those of a DistributedDataParallel module, seen or found."""
    if _is_ddp(params):
        return True
    wanted = {id(tensor) for tensor in tensors}
    return any(id(p) in wanted for module in _ddp_modules() for p in module.parameters())


def _ddp_modules() -> list[torch.nn.Module]:
    """All such modules that are alive: parameters do not say who averages their gradients."""
    # An object refers to its type. To ask each of some 300,000 for its type took a second.
    kinds = _with_subclasses(torch.nn.parallel.DistributedDataParallel)
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _require_same_kind(comm: Comm, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError on every rank unless all have the same list of shapes and dtypes."""
    mine = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors]
    for rank, theirs in enumerate(comm.gather(mine)):
        if theirs != mine:
            at = next(
                (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(mine), len(theirs)),
            )
            raise ConfigError(
                f"the parameters of rank {comm.rank} and rank {rank} differ from number {at} on "
                f"({len(mine)} and {len(theirs)} of them): every rank must list the same ones"
            )


def _share_values(comm: Comm, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the values of rank 0, where they differ."""
    host = [t for t in tensors if t.device.type == "cpu" and is_dense(t)]
    addresses = np.array([t.data_ptr() for t in host], np.uint64)
    hashes = span_hashes(addresses, np.array([t.nbytes for t in host], np.int64)).tolist()
    other = [t for t in tensors if t.device.type != "cpu" or not is_dense(t)]
    theirs = comm.gather(hashes)
    differing = [t for at, t in enumerate(host) if len({entry[at] for entry in theirs}) > 1]
    if differing:
        _logger.info("%d parameters differed over the ranks: rank 0's are taken", len(differing))
    for tensor in differing + other:
        if tensor.numel():
            with torch.no_grad():
                comm.broadcast(flat(tensor) if is_dense(tensor) else tensor.data).wait()
            torch.autograd.graph.increment_version([tensor])
