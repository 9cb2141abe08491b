# SPDX-License-Identifier: Apache-2.0
"""SwapConfig: every setting of swapio, validated. Pure; standard library only.

Each field carries, as metadata, what it means, its unit and why its default is what it is; the
reference page, the command-line flags and `swapio config show` are made from that.

Invariants:
    A SwapConfig that exists is valid by itself; what depends on the machine (is the path a folder,
    does the budget suffice) is checked where the machine is used.
    A field holds its canonical value whatever form was given: bytes as int, paths absolute.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swapio import config_values as values
from swapio.align import BLOCK_BYTES, PAGE_BYTES
from swapio.config_setting import Setting, one_of, setting
from swapio.errors import ConfigError

DEFAULT_SOURCE = "default"
ARGUMENT_SOURCE = "argument"


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """All settings of the swapper, its files and its engine; frozen, keyword-only, validated.

    Sizes are ints or text with a unit ("8GiB"). See docs/configuration.md for every field with
    its unit and the evidence for its default.

    Raises:
        ConfigError: A value has no meaning; the message names field, value and accepted forms.
    """

    path: str | os.PathLike[str] | Sequence[str] | None = setting(  # noqa: RUF009
        None,
        values.paths,
        "folder, or several",
        "Where the state lives. None keeps all state in RAM, with the same kernels. Several folders"
        " stripe each slot over them. `~` is expanded; relative paths are made absolute.",
        "None: nothing is written to a drive unless its folder is named.",
    )
    path_weights: tuple[float, ...] | None = setting(
        None,
        values.optional(values.weights),
        "shares",
        "How much of each slot goes to each path, as relative numbers; None measures at start.",
        "None: a wrong share makes the slowest drive the pace of all.",
    )
    host_memory: int | str = setting(
        "auto",
        values.automatic(values.size(1)),
        "bytes, or auto",
        "RAM for everything swapio allocates: staging, resident state, small records, checksum"
        " tables, streamed gradients, workspaces; reserved at construction. The parameters and"
        " p.grad are not in it. State that fits is kept in RAM. 'auto' is half of what the machine"
        " or its cgroup has left, divided by the ranks on this host.",
        "half: the other half is for gradients, activations and the page cache; no"
        " measurement says that a different share is better for all.",
    )
    sub_group_numel: int = setting(
        16 << 20,
        values.size(1),
        "elements",
        "Most elements of a sub-group, the unit that is swapped, kept resident and stepped.",
        "16 Mi: slot files of 160 to 200 MB, few enough files for any model and small enough that"
        " the budget is used to within a few percent.",
    )
    chunk_numel: int | Literal["auto"] = setting(
        "auto",
        values.automatic(values.size(1 << 18, multiple=1 << 18)),
        "elements, or auto",
        "Elements that are read, updated and written as one piece of a sub-group; a multiple of"
        " 262144, rounded up to whole 1 MiB blocks of the smallest record. 'auto' takes it from the"
        " planner.",
        "auto: records of 8 to 64 MiB together, which is what keeps 16 MiB in flight, the most that"
        " does not slow reads (measured).",
    )
    pipeline_read: bool = setting(
        True,
        values.flag,
        "true or false",
        "Read ahead while other sub-groups are updated. With pipeline_write false too, the blocking"
        " swapper is used.",
        "true: reads are hidden behind the update and backward.",
    )
    pipeline_write: bool = setting(
        True,
        values.flag,
        "true or false",
        "Write back while the next sub-groups are updated, and after step() has returned.",
        "true: writes are hidden behind the update and the next forward.",
    )
    engine: Literal["auto", "io_uring", "threads"] = one_of(
        "auto",
        "auto io_uring threads",
        "How files are read and written. 'auto' tries io_uring and falls back to threads.",
        "auto: io_uring needs half the CPU of other ways for reads (measured), but may be denied.",
    )
    queue_depth: int = setting(
        32,
        values.size(1, maximum=4096),
        "requests",
        "Most requests of block_size in flight at once.",
        "32: with 512 KiB it is 16 MiB in flight; more slowed reads (measured on two drives).",
    )
    block_size: int = setting(
        512 << 10,
        values.size(PAGE_BYTES, maximum=1 << 30, multiple=PAGE_BYTES),
        "bytes",
        "Size of one request to the drive; larger transfers are cut into it.",
        "512 KiB: it and 1 MiB x 16 were the best of a sweep (measured on two drives).",
    )
    io_threads: int = setting(
        8,
        values.size(1, maximum=256),
        "threads",
        "Threads of the threads engine; io_uring does not use it.",
        "8: one request of 512 KiB a thread; a guess that holds for drives of a few GB/s.",
    )
    direct: Literal["auto", "required", "off"] = one_of(
        "auto",
        "auto required off",
        "Whether transfers go past the page cache (O_DIRECT). 'auto' tries, and logs if it cannot.",
        "auto: buffered transfers add more memory traffic than the update itself.",
    )
    on_fallback: Literal["log", "error"] = one_of(
        "log",
        "log error",
        "What happens when something falls back (no io_uring, O_DIRECT, huge pages, pinning, ...).",
        "log: a slower run is better than none; 'error' is for machines that must be right.",
    )
    huge_pages: Literal["auto", "off"] = one_of(
        "auto",
        "auto off",
        "Whether buffers ask for 2 MiB pages.",
        "auto: reads were 1.3 to 1.8 and writes 1.5 to 1.9 times faster than with 4 KiB pages.",
    )
    pin_memory: bool | Literal["auto"] = setting(
        "auto",
        values.automatic(values.flag),
        "true, false or auto",
        "Whether buffers are page-locked for CUDA. 'auto' does so if there is a CUDA device.",
        "auto: copies from pageable memory cannot overlap; without a GPU it only costs.",
    )
    min_swap_bytes: int = setting(
        1 << 20,
        values.size(0),
        "bytes",
        "Sub-groups whose records are smaller, and gradient fragments that are, stay in RAM.",
        "1 MiB: one block; smaller transfers do not reach the bandwidth of a drive.",
    )
    resident: Collection[str] = setting(
        (),
        values.names,
        "names",
        "State that stays in RAM: a name ('momentum_buffer') or a pattern 'parameter:state' with"
        " shell wildcards ('*.bias:exp_avg').",
        "empty: the budget decides, sub-group by sub-group.",
    )
    master: Literal["auto", "param", "split", "separate", "none"] = one_of(
        "auto",
        "auto param split separate none",
        "Where the fp32 master weights are: the fp32 parameter itself, split into the bf16"
        " parameter and a stored lower half, stored whole, or nowhere (lossy). 'auto': fp32"
        " on the CPU is 'param', bf16 is 'split', else 'separate'.",
        "auto: the fewest bytes that lose no bit.",
    )
    stochastic_rounding: bool = setting(
        False,
        values.flag,
        "true or false",
        "Round updates of bf16 parameters without a master at random; needs master='none'.",
        "false: the other master forms lose nothing.",
    )
    state_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        values.dtype("float32", "bfloat16"),
        "float32 or bfloat16",
        "How moments are stored. 'bfloat16' halves their bytes and loses bits.",
        "float32: exact.",
    )
    accumulation_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        values.dtype("float32", "bfloat16"),
        "float32 or bfloat16",
        "How streamed gradients are accumulated over micro-batches.",
        "float32: sums of bf16 lose small gradients.",
    )
    swap_gradients: bool = setting(
        False,
        values.flag,
        "true or false",
        "Keep gradient fragments of at least min_swap_bytes on storage until the update.",
        "false: it adds bytes written and read for each parameter and step.",
    )
    checksum: bool = setting(
        True,
        values.flag,
        "true or false",
        "Checksum (xxh3-64) each 1 MiB block and verify it before it is used.",
        "true: drives and memory do flip bits; at most 3 % of a step where CPU is idle.",
    )
    durability: Literal["checkpoint", "step", "power"] = one_of(
        "checkpoint",
        "checkpoint step power",
        "What survives a crash: the last save; each step (kill -9); each step, power loss too.",
        "checkpoint: the others write the parameters too and need two spare sets of slots.",
    )
    spare_slots: int | None = setting(
        None,
        values.optional(values.size(0)),
        "slots of each sub-group",
        "Slots beyond what durability needs, which let a save or a state_dict hold the current"
        " state while training goes on. None is one full set.",
        "None: one set lets one save at a time cost nothing.",
    )
    keep_last: int | None = setting(
        None,
        values.optional(values.size(1)),
        "checkpoints",
        "Checkpoints that save() keeps in its folder; older ones are removed and their slots"
        " reused. None keeps all.",
        "None: nothing of the user's is deleted unless asked.",
    )
    on_param_change: Literal["resync", "error"] = one_of(
        "resync",
        "resync error",
        "What happens when somebody else changed a parameter: take it as the new master with one"
        " warning, or raise.",
        "resync: load_state_dict and averaging of weights work as they do in torch.",
    )
    cpu_threads: int | Literal["auto"] = setting(
        "auto",
        values.automatic(values.size(1, maximum=4096)),
        "threads, or auto",
        "Threads of the update kernels. 'auto' is the CPUs that this process may use (affinity and"
        " cgroup), divided by the ranks on this host.",
        "auto: more threads than CPUs slow each other down.",
    )
    cpu_affinity: tuple[int, ...] | None = setting(
        None,
        values.optional(values.cpus),
        "CPU numbers",
        "CPUs that kernel threads are bound to ('0-3,8'); None leaves it to the system.",
        "None: binding on a shared machine does more harm than good.",
    )
    lock_timeout: float = setting(
        30.0,
        values.seconds,
        "seconds",
        "How long to wait for files that another run, or the last writes of a killed one, hold.",
        "30: after SIGKILL with 256 MiB queued the kernel needed 110 to 140 ms (measured).",
    )
    namespace: str = setting(
        "",
        values.word,
        "text",
        "Name of the sub-folder of this optimizer; empty picks one that is free, named by the rank"
        " where there are several (RANK, WORLD_SIZE).",
        "empty: two optimizers of one process never share files.",
    )
    read_bandwidth: int | None = setting(
        None,
        values.optional(values.rate),
        "bytes per second",
        "Measured read bandwidth of the paths together; `swapio tune` writes it. Used by the"
        " planner and to report the share of the device that was reached.",
        "None: not assumed; devices differ.",
    )
    write_bandwidth: int | None = setting(
        None,
        values.optional(values.rate),
        "bytes per second",
        "Measured write bandwidth of the paths together; `swapio tune` writes it.",
        "None: not assumed; devices differ.",
    )
    mixed_bandwidth: int | None = setting(
        None,
        values.optional(values.rate),
        "bytes per second",
        "Measured bandwidth, read and written together, of both at once; `swapio tune` writes it.",
        "None: not assumed; devices differ.",
    )
    take_turns: Literal["auto", "on", "off"] = one_of(
        "auto",
        "auto on off",
        "Whether transfers wait for those of other processes (ranks) on the same device. 'auto' is"
        " 'off'.",
        "auto: two ranks at once moved more than two that took turns wherever it was measured"
        " (benchmarks/bench_turns.py: try it on a drive that dislikes mixed directions).",
    )
    trace: str | None = setting(
        None,
        values.optional(values.file_path),
        "file",
        "Write a time line of reads, updates, writes and waits (Chrome/Perfetto) to this file.",
        "None: no trace.",
    )

    def __post_init__(self) -> None:
        """Make every value canonical, or raise ConfigError."""
        sources = {}
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            value = setting_of(field.name).parse(field.name, given)
            object.__setattr__(self, field.name, value)
            is_default = value == field.default
            sources[field.name] = DEFAULT_SOURCE if is_default else ARGUMENT_SOURCE
        # Not a field: where a value came from is no part of what the configuration is.
        object.__setattr__(self, "_sources", sources)
        _check_together(self)

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders, () when state stays in RAM."""
        if self.path is None:
            return ()
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)  # type: ignore[arg-type]

    @property
    def swapper(self) -> Literal["pipelined", "partitioned"]:
        """The swapper that the pipeline switches ask for; "partitioned" when both are off."""
        return "pipelined" if self.pipeline_read or self.pipeline_write else "partitioned"

    @property
    def sources(self) -> dict[str, str]:
        """Where each value came from, by field: "default", "argument", a file, a variable, ..."""
        return dict(self._sources)  # type: ignore[attr-defined]

    def resolve_host_memory(self) -> int:
        """Return host_memory in bytes; "auto" reads /proc and the cgroup's limits now."""
        if isinstance(self.host_memory, int):
            return self.host_memory
        from swapio.host_limits import auto_host_memory

        return auto_host_memory()

    def resolve_cpu_threads(self) -> int:
        """Return the number of kernel threads; "auto" reads affinity and the cgroup's quota now."""
        if self.cpu_threads != "auto":
            return self.cpu_threads
        from swapio.host_limits import auto_cpu_threads

        return auto_cpu_threads(self.cpu_affinity)

    def resolve_take_turns(self) -> bool:
        """Return whether transfers wait for other ranks."""
        return self.take_turns == "on"

    def replace(self, **changes: Any) -> SwapConfig:
        """Return a copy with some fields changed, validated anew.

        Raises:
            ConfigError: An unknown field, or a value that is not valid.
        """
        from swapio.config_sources import check_names, with_sources

        check_names(changes, "replace()")
        sources = self.sources | dict.fromkeys(changes, ARGUMENT_SOURCE)
        return with_sources(self.to_dict() | changes, sources)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values that json and `from_dict` accept."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}

    def describe(self) -> str:
        """Return a table of every field, its value and where the value came from."""
        from swapio.config_sources import describe

        return describe(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "dict") -> SwapConfig:
        """Build from swapio's names or DeepSpeed's sections; SWAPIO_* variables override.

        Raises:
            ConfigError: An unknown key, with the nearest known one, or a value that is not valid.
        """
        from swapio.config_sources import from_dict

        return from_dict(data, source=source)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> SwapConfig:
        """Build from a JSON file of swapio's or DeepSpeed's; SWAPIO_* variables override.

        Raises:
            ConfigError: The file cannot be read, is not JSON, or holds what `from_dict` refuses.
        """
        from swapio.config_sources import from_file

        return from_file(path, kind="json")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> SwapConfig:
        """Build from a TOML file (also its [swapio] or [tool.swapio]); SWAPIO_* override.

        Raises:
            ConfigError: The file cannot be read, is not TOML, or holds what `from_dict` refuses.
        """
        from swapio.config_sources import from_file

        return from_file(path, kind="toml")

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> SwapConfig:
        """Build from SWAPIO_* variables alone (SWAPIO_PATH, SWAPIO_HOST_MEMORY, ...).

        Raises:
            ConfigError: A variable that is nearly a known one, or a value that is not valid.
        """
        from swapio.config_sources import from_env

        return from_env(environment)

    @classmethod
    def coerce(cls, value: object) -> SwapConfig:
        """Return what `swap=` means: None, a path or several, a file, a dict, a SwapConfig.

        SWAPIO_* variables override what is given, except that SWAPIO_PATH does not move state to
        storage where None, or a SwapConfig without a path, keeps it in RAM.

        Args:
            value: None for state in RAM; text or a PathLike that ends in .json or .toml is read as
                a configuration file, any other is the folder.

        Raises:
            ConfigError: A value of another type, or one that is not valid.
        """
        from swapio.config_sources import coerce

        return coerce(value)


def setting_of(name: str) -> Setting:
    """Return what is known about a field of SwapConfig.

    Raises:
        KeyError: There is no such field.
    """
    found: Setting = SwapConfig.__dataclass_fields__[name].metadata["setting"]
    return found


def field_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the reference page."""
    return tuple(field.name for field in dataclasses.fields(SwapConfig))


def coerce(value: object) -> SwapConfig:
    """Return what `swap=` means; see SwapConfig.coerce."""
    return SwapConfig.coerce(value)


def _check_together(config: SwapConfig) -> None:
    """Refuse combinations without meaning."""
    if config.stochastic_rounding and config.master != "none":
        raise ConfigError(
            f"stochastic_rounding needs master='none', but master is {config.master!r}: with a "
            "master nothing is rounded away. Set master='none' or stochastic_rounding=False"
        )
    if config.path_weights is not None and len(config.path_weights) != len(config.paths):
        raise ConfigError(
            f"path_weights has {len(config.path_weights)} shares for {len(config.paths)} paths; "
            "give one for each, or None to measure them"
        )
    if isinstance(config.host_memory, int) and config.host_memory < BLOCK_BYTES and config.paths:
        raise ConfigError(
            f"host_memory is {config.host_memory} bytes; not even one block of {BLOCK_BYTES} bytes"
            " fits. Sizes need a unit: '8GiB' is 8 * 1024 ** 3 bytes"
        )
