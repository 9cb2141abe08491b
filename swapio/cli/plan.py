# SPDX-License-Identifier: Apache-2.0
"""`swapio plan`: what stays in RAM, what a step moves, and how long it will take."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swapio.cli.plan_model import TensorInfo, read_model
from swapio.errors import ConfigError

if TYPE_CHECKING:
    from swapio.config import SwapConfig
    from swapio.plan_forms import SubGroupSize

_FLAGS = (
    "path host_memory sub_group_numel chunk_numel pipeline_read pipeline_write queue_depth "
    "block_size min_swap_bytes resident master state_dtype checksum durability spare_slots "
    "read_bandwidth write_bandwidth mixed_bandwidth"
)
_NOT_MUON = ("embed", "lm_head", "wte", "wpe", "output.weight")
_SECONDS_PER_DAY = 86400.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    from swapio.config_flags import add_arguments

    parser = subparsers.add_parser(
        "plan",
        help="what stays in RAM, what a step moves, and how long it will take",
        description="Plans the optimizer state of a model: from file headers (nothing is loaded), "
        "or from a number of parameters. Bandwidths come from flags, or from a file that `swapio "
        "tune` wrote (--config).",
        epilog="example: swapio plan --params 7e9 --dtype bf16 --path /nvme --host-memory 16GiB",
    )
    add = parser.add_argument
    add("model", nargs="*", metavar="MODEL", help="safetensors file, torch checkpoint, or folder")
    add("--params", metavar="N", help="parameters, when there is no file: 7e9, 1.5B")
    add("--dtype", help="dtype to train in: bf16, fp32, fp16; the file's if not given")
    add("--optimizer", choices=("adamw", "adam", "muon"), default="adamw", help="default: adamw")
    add("--world-size", type=int, default=1, metavar="N", help="ranks that share the state")
    add("--gpu", action="store_true", help="parameters are on a GPU")
    add("--step-seconds", type=float, metavar="S", help="seconds of an iteration, for the wear")
    add("--compute-bandwidth", metavar="RATE", help="RAM traffic of the update: 50GB/s")
    add("--checksum-bandwidth", metavar="RATE", help="bytes hashed in a second: 20GB/s")
    add("--json", action="store_true", help="print JSON")
    add_arguments(parser, prefix="", only=_FLAGS.split())
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 when the disk is too small, ConfigError when host_memory is."""
    from swapio.config_flags import from_arguments
    from swapio.plan import PlanRequest, make_plan
    from swapio.plan_devices import free_bytes

    config = from_arguments(args, prefix="")
    if args.world_size < 1:
        raise ConfigError(f"--world-size is {args.world_size}; want at least 1")
    if args.step_seconds is not None and not args.step_seconds > 0:
        raise ConfigError(f"--step-seconds is {args.step_seconds}; want more than 0")
    tensors = _model(args)
    groups, workspace = sub_groups(
        tensors,
        config,
        optimizer=args.optimizer,
        world_size=args.world_size,
        on_cpu=not args.gpu,
    )
    request = PlanRequest.from_config(
        config,
        groups,
        workspace_bytes=workspace,
        rates=_rates(args, config),
        disk_free_bytes=free_bytes(config.paths),
        has_storage=True,
    )
    plan = make_plan(request)
    per_day = _SECONDS_PER_DAY / args.step_seconds if args.step_seconds else None
    total = sum(tensor.numel for tensor in tensors)
    if args.json:
        day = None if per_day is None else plan.write_bytes_per_day(per_day)
        found = {"parameters": total, "optimizer": args.optimizer, "world_size": args.world_size}
        print(json.dumps(found | {"plan": plan.to_dict(), "write_bytes_per_day": day}, indent=2))
    else:
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        share = f", one of {args.world_size} ranks" if args.world_size > 1 else ""
        where = ", ".join(config.paths) or "no path given"
        print(f"{args.optimizer} on {total:,} parameters of {dtypes}{share}; state in {where}\n")
        print(plan.table(per_day))
        source = _source_of_rates(config)
        if source:
            print(source)
    return 0 if plan.disk_fits else 1


def _model(args: argparse.Namespace) -> list[TensorInfo]:
    """Return the trainable tensors that the arguments mean."""
    from swapio.config_values import dtype as dtype_of

    wanted = ""
    if args.dtype is not None:
        wanted = str(dtype_of("float32", "bfloat16", "float16")("--dtype", args.dtype))
    if bool(args.model) == (args.params is not None):
        raise ConfigError("give a model's files, or --params 7e9 (and --dtype), but not both")
    if args.params is not None:
        return [TensorInfo("parameters", (parse_params(args.params),), wanted or "bfloat16")]
    tensors = [tensor for path in args.model for tensor in read_model(path)]
    floats = [t for t in tensors if t.dtype.startswith(("float", "bfloat"))]
    if not floats:
        raise ConfigError(f"{', '.join(args.model)}: no tensor of floating point, nothing to train")
    return [t._replace(dtype=wanted or t.dtype) for t in floats]


def parse_params(text: str) -> int:
    """Return a number of parameters: 7e9, 7000000000, 7B, 350M.

    Raises:
        ConfigError: Not a whole number of at least 1.
    """
    from swapio.config_values import parse_size

    units = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}
    last = text.strip()[-1:].lower()
    plain = text.strip()[:-1] + units[last] if last in units else text
    return parse_size("--params", plain, minimum=1)


def sub_groups(
    tensors: Sequence[TensorInfo],
    config: SwapConfig,
    *,
    optimizer: str,
    world_size: int,
    on_cpu: bool,
) -> tuple[list[SubGroupSize], int]:
    """Return the sub-groups of one rank, and the workspace that Muon needs for a matrix.

    Args:
        tensors: The model.
        config: Master form, durability, resident state, sub-group size.
        optimizer: "adamw", "adam" or "muon"; Muon leaves embeddings, heads and vectors to AdamW.
        world_size: Ranks that share the state evenly.
        on_cpu: Whether the parameters are in RAM.

    Raises:
        ConfigError: A dtype, or a master form that does not fit it.
    """
    from swapio import plan_forms as forms
    from swapio.partition import shard_bounds

    routes: dict[tuple[str, str], list[int]] = {}
    matrices: list[TensorInfo] = []
    flops: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        rule = _rule(tensor, optimizer)
        if rule == "muon" and len(tensor.shape) > 1:
            matrices.append(tensor)
            route = (rule, tensor.dtype)
            # Each matrix is worked on by one rank.
            flops[route] = flops.get(route, 0) + _flops(tensor) // world_size
        share = shard_bounds(tensor.numel, world_size, 0).numel
        routes.setdefault((rule, tensor.dtype), []).append(share)
    found: list[SubGroupSize] = []
    for (rule, dtype), numels in routes.items():
        master = forms.resolve_master(config.master, dtype, on_cpu=on_cpu)
        records = forms.record_sizes(
            rule,
            master=master,
            param_dtype=dtype,
            state_dtype="float32" if rule == "muon" else config.state_dtype,
            durability=config.durability,
            resident=tuple(config.resident),
        )
        # Momentum is elementwise on shards; whole matrices only meet in the workspace.
        whole = rule == "muon" and world_size == 1 and len(numels) > 1
        sizes = forms.sub_group_sizes(
            numels,
            records,
            config.sub_group_numel,
            touched=forms.touched_bytes(records, master, dtype),
            is_whole=whole,
        )
        each = flops.get((rule, dtype), 0) // max(1, len(sizes))
        found += [size._replace(flops=each) for size in sizes]
    return found, _workspace(matrices, config, on_cpu=on_cpu) if matrices else 0


def _rule(tensor: TensorInfo, optimizer: str) -> str:
    if optimizer != "muon" or tensor.name == "parameters":
        return optimizer
    is_matrix = sum(size > 1 for size in tensor.shape) >= 2
    return "muon" if is_matrix and not any(n in tensor.name for n in _NOT_MUON) else "adamw"


def _flops(matrix: TensorInfo) -> int:
    """Return the operations of Newton-Schulz for a tensor, on the CPU."""
    from swapio.optim.muon_math import matrix_layout
    from swapio.optim.newton_schulz import newton_schulz_flops

    return newton_schulz_flops(matrix_layout(matrix.shape).shape)


def _workspace(matrices: Sequence[TensorInfo], config: SwapConfig, *, on_cpu: bool) -> int:
    """Return the scratch memory of Muon for these matrices, one after the other."""
    from swapio.optim.muon_math import matrix_layout
    from swapio.optim.muon_update import ScratchNeed, scratch_need
    from swapio.optim.newton_schulz import DEFAULT_COEFFICIENTS, DEFAULT_STEPS
    from swapio.plan_forms import resolve_master

    group = {"ns_coefficients": DEFAULT_COEFFICIENTS, "ns_steps": DEFAULT_STEPS}
    need = ScratchNeed()
    for shape, dtype in dict.fromkeys((tensor.shape, tensor.dtype) for tensor in matrices):
        master = resolve_master(config.master, dtype, on_cpu=on_cpu)
        joins = master == "split" or (master == "none" and dtype != "float32")
        layout = matrix_layout(shape)
        need |= scratch_need(
            layout,
            group,
            is_contiguous=True,
            joins=joins,
            ns_dtype=None,
            on_device=not on_cpu,
        )
    return need.nbytes


def _rates(args: argparse.Namespace, config: SwapConfig) -> Any:
    from swapio.config_values import rate
    from swapio.plan_rates import rates_of

    def given(name: str) -> int | None:
        text = getattr(args, name)
        return None if text is None else rate(f"--{name.replace('_', '-')}", text)

    rates = rates_of(config, has_products=args.optimizer == "muon")
    return dataclasses.replace(
        rates,
        compute=given("compute_bandwidth") or rates.compute,
        checksum=given("checksum_bandwidth") or rates.checksum,
    )


def _source_of_rates(config: SwapConfig) -> str:
    """Say where the speeds of the drives come from."""
    from swapio.plan_devices import known_rates

    if config.read_bandwidth or config.write_bandwidth:
        return ""
    known = known_rates(config.paths) if config.paths else None
    if known is None:
        return "speeds of the drives are not known: run `swapio tune` on the path, or give flags"
    read, write, mixed = ((value or 0) / 1e9 for value in (known.read, known.write, known.mixed))
    return (
        f"speeds of the drives as `swapio tune` found them: read {read:.2f}, write {write:.2f}, "
        f"both at once {mixed:.2f} GB/s"
    )
