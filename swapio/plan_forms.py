# SPDX-License-Identifier: Apache-2.0
"""Bytes of each record by optimizer, master form and durability. Pure; standard library only.

    AdamW per parameter, read + written     "checkpoint"   "step", "power"
    param    (fp32 parameter)                  8 +  8          8 + 12
    split    (bf16 parameter)                 10 + 10         10 + 12
    separate                                  12 + 12         12 + 12
    none     (no master, bf16 parameter)       8 +  8          8 + 10

Under "step" and "power" a slot holds all that rebuilds the parameter, so where the parameter is its
own master, or half of it, the new parameter is written too and never read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from swapio.align import BLOCK_BYTES, num_blocks
from swapio.errors import ConfigError
from swapio.partition import pack, pack_whole

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
}
TIE_BYTES_PER_BLOCK = 256
"""Room for 64 positions a block of int16: 4 are expected of 2^19 random values."""


class RecordSize(NamedTuple):
    """One record of a sub-group, as the planner needs it.

    Attributes:
        name: State name, "master", "low" (the stored half of a split master) or "param".
        item_bytes: Bytes of one element.
        is_read: Whether the update needs it from storage; a written parameter is not read.
        is_resident: Tagged: stays in RAM whatever the budget.
        numel: Elements, where they are not those of the sub-group (which is whole then); else 0.
    """

    name: str
    item_bytes: int
    is_read: bool = True
    is_resident: bool = False
    numel: int = 0


class SubGroupSize(NamedTuple):
    """One sub-group, as the planner needs it.

    Attributes:
        numel: Elements.
        records: Its records.
        touched_bytes: Bytes of RAM that the update reads and writes for one element.
        small_bytes: Bytes that stay in RAM beside the records (lists of ties).
        is_whole: It cannot be cut into chunks (Muon needs whole matrices).
        flops: Operations of the matrix products of its update.
    """

    numel: int
    records: tuple[RecordSize, ...]
    touched_bytes: int = 0
    small_bytes: int = 0
    is_whole: bool = False
    flops: int = 0


def resolve_master(master: str, param_dtype: str, *, on_cpu: bool = True) -> str:
    """Return the master form that "auto" means, or check that the given one is possible.

    Raises:
        ConfigError: The form does not fit the parameter's dtype or device.
    """
    if param_dtype not in ITEM_BYTES:
        raise ConfigError(f"parameters are {param_dtype}; want one of {', '.join(ITEM_BYTES)}")
    if master == "auto":
        if param_dtype == "bfloat16":
            return "split"
        return "param" if param_dtype == "float32" and on_cpu else "separate"
    if master == "split" and param_dtype != "bfloat16":
        raise ConfigError(f"master='split' needs bfloat16 parameters, but they are {param_dtype}")
    if master == "param" and (param_dtype != "float32" or not on_cpu):
        where = "the CPU" if on_cpu else "a GPU"
        raise ConfigError(
            f"master='param' needs float32 parameters on the CPU, but they are {param_dtype} on "
            f"{where}"
        )
    return master


def record_sizes(
    optimizer: str,
    *,
    master: str,
    param_dtype: str,
    state_dtype: str = "float32",
    durability: str = "checkpoint",
    resident: Collection[str] = (),
) -> tuple[RecordSize, ...]:
    """Return the records of a sub-group.

    Args:
        optimizer: "adamw", "adam" or "muon".
        master: "param", "split", "separate" or "none"; see `resolve_master`.
        param_dtype: dtype of the parameters.
        state_dtype: dtype of the moments.
        durability: Under "step" and "power" the parameter may be written too.
        resident: Names or patterns of state that stays in RAM; of a pattern "parameter:state" only
            the state is looked at, and only when the parameter is "*".

    Raises:
        ConfigError: An optimizer without known state.
    """
    if optimizer not in STATE_NAMES:
        raise ConfigError(f"optimizer is {optimizer!r}; want one of {', '.join(STATE_NAMES)}")
    stored = {"split": ("low", 2), "separate": ("master", 4)}.get(master)
    sizes = [stored] if stored else []
    sizes += [(name, ITEM_BYTES[state_dtype]) for name in STATE_NAMES[optimizer]]
    patterns = [pattern.removeprefix("*:") for pattern in resident]
    records = [
        RecordSize(name, size, is_resident=any(fnmatchcase(name, p) for p in patterns))
        for name, size in sizes
    ]
    if durability != "checkpoint" and master != "separate":
        records.append(RecordSize("param", ITEM_BYTES[param_dtype], is_read=False))
    return tuple(records)


def touched_bytes(records: Sequence[RecordSize], master: str, param_dtype: str) -> int:
    """Return the bytes of RAM that the update of one element reads and writes.

    Each record is read and written, the gradient is read in the parameter's dtype, and the
    parameter is written, and read too where it is (half of) its own master.
    """
    param = ITEM_BYTES[param_dtype]
    records_bytes = sum(2 * record.item_bytes for record in records if record.is_read)
    return records_bytes + param + (param if master == "separate" else 2 * param)


def sub_group_sizes(
    numels: Sequence[int],
    records: tuple[RecordSize, ...],
    sub_group_numel: int,
    *,
    touched: int = 0,
    is_whole: bool = False,
) -> list[SubGroupSize]:
    """Pack parameters into sub-groups and return what the planner needs to know of each."""
    plans = (pack_whole if is_whole else pack)(numels, sub_group_numel)
    found = []
    for plan in plans:
        ties = sum(
            num_blocks(plan.numel * record.item_bytes) * TIE_BYTES_PER_BLOCK
            for record in records
            if record.name == "low"
        )
        found.append(SubGroupSize(plan.numel, records, touched, ties, is_whole))
    return found


def block_numel(records: Sequence[RecordSize]) -> int:
    """Return the elements that are whole blocks of every record: 2^18 for fp32, 2^19 with int16."""
    return BLOCK_BYTES // min((record.item_bytes for record in records), default=4)
