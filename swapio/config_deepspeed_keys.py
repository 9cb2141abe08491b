# SPDX-License-Identifier: Apache-2.0
"""The keys of DeepSpeed's configuration and what each means here. Pure; standard library only.

The keys are those of DeepSpeed 0.19 and the names that it had before.
"""

from __future__ import annotations

from typing import Any

from swapio.config_deepspeed_rules import (
    DeepSpeedMapping,
    Note,
    Rule,
    custom,
    noted,
    refused_above,
    refused_if_on,
    to_argument,
    to_field,
    to_group,
)
from swapio.config_values import automatic, choice, flag, parse_size, seconds
from swapio.errors import ConfigError
from swapio.host_limits import auto_cpu_threads

_COMMUNICATION = "communication is set on ZeroOptimizer, or by FSDP2; results do not depend on it"
_ENGINE = "parameters are sharded, gathered and prefetched by FSDP2"
_TRAINER = "belongs to the training loop or trainer, not to the optimizer"
_BUFFERS = "buffers are cut from host_memory and sized by the planner"


def _device(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    device = choice("none", "cpu", "nvme")(key, value)
    if device != "nvme":
        mapping.set("path", None, key)
    else:
        mapping.needs_path = key
        mapping.note(key, "state goes to nvme_path")


def _nvme_path(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if mapping.settings.get("path", (0, ""))[0] is None:
        mapping.note(key, "device keeps the state in RAM, so no folder is used")
    else:
        mapping.set("path", value, key)


def _buffer_count(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    parse_size(key, value, minimum=1)
    mapping.note(key, _BUFFERS)


def _cores(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    share = seconds(key, value)
    if share > 1:
        raise ConfigError(f"{key} is {value!r}; want a share of the CPUs, from 0 to 1")
    mapping.set("cpu_threads", max(1, int(share * auto_cpu_threads())), key)


def _super_offload(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    speculate: Any = "adaptive" if flag(key, value) else False
    mapping.arguments["speculate"] = speculate
    mapping.notes.append(Note(key, "mapped", f"optimizer argument speculate = {speculate!r}"))


def _ratio(name: str, value: object) -> object:
    share = seconds(name, value)
    if share > 1:
        raise ConfigError(f"{name} is {value!r}; want a share from 0 to 1")
    return share


def _backend(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    backend = choice("async_io", "aio", "async", "deepnvme", "posix", "sync", "simple")(key, value)
    mapping.set("engine", "threads" if backend in ("posix", "sync", "simple") else "auto", key)


def _stage(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    stage = parse_size(key, value)
    if stage > 3:
        raise ConfigError(f"{key} is {value!r}; want 0, 1, 2 or 3")
    mapping.stage = stage
    mapping.notes.append(Note(key, "mapped", "stage of ZeroOptimizer; 3 is FSDP2's fully_shard"))


def _cpu_offload(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if flag(key, value):
        mapping.set("path", None, key)
    else:
        mapping.note(key, "off")


def _offload_param_device(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    device = choice("none", "cpu", "nvme")(key, value)
    if device == "nvme":
        raise ConfigError(
            f"{key} is 'nvme': swapio keeps optimizer state on storage, not parameters; "
            "keep parameters in RAM with FSDP2's CPUOffloadPolicy"
        )
    mapping.note(key, "parameters stay where the model or FSDP2's CPUOffloadPolicy puts them")


def _momentum_in_memory(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if flag(key, value):
        mapping.set("resident", ("momentum_buffer",), key)
    else:
        mapping.note(key, "off: the budget decides what is resident")


def _bf16_states(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.set("state_dtype", "bfloat16" if flag(key, value) else "float32", key)


def _bf16_master(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if flag(key, value):
        mapping.set("master", "none", key)
        mapping.set("accumulation_dtype", "bfloat16", key)
    else:
        mapping.note(key, "off: master weights are fp32")


def _grad_overflow(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.arguments["nonfinite"] = "skip" if flag(key, value) else "propagate"
    mapping.notes.append(Note(key, "mapped", "optimizer argument nonfinite"))


def _accumulation(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.set("accumulation_dtype", value, key)


def _clipping(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    norm = seconds(key, value)
    mapping.arguments["max_grad_norm"] = norm or None
    mapping.notes.append(Note(key, "mapped", "optimizer argument max_grad_norm; 0 is none"))


def _per_head(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if flag(key, value):
        raise ConfigError(
            f"{key} is {value!r}: the number of heads differs by parameter; set num_heads on the "
            "param groups of swapio.optim.Muon instead"
        )
    mapping.note(key, "off, as here")


def _ns_method(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    choice("gram", "standard")(key, value)
    mapping.note(key, "chosen by the shape of the matrix; every form computes the same polynomial")


def _fp16_enabled(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.uses_scaler = flag(key, value)
    mapping.note(key, "the dtype is the model's; use swapio.optim.GradScaler or torch's")


def _loss_scale(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    scale = seconds(key, value)
    if scale:
        mapping.scaler |= {"init_scale": scale, "growth_interval": _NEVER}
        mapping.notes.append(Note(key, "mapped", f"GradScaler(init_scale={scale}), never grown"))
    else:
        mapping.note(key, "dynamic")


def _scale_power(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    power = parse_size(key, value)
    if power > 64:
        raise ConfigError(f"{key} is {value!r}; want at most 64")
    mapping.scaler.setdefault("init_scale", 2.0**power)
    mapping.notes.append(Note(key, "mapped", "GradScaler argument init_scale"))


def _scale_window(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.scaler.setdefault("growth_interval", parse_size(key, value, minimum=1))
    mapping.notes.append(Note(key, "mapped", "GradScaler argument growth_interval"))


def _pipeline(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.set("pipeline_read", flag(key, value), key)
    mapping.set("pipeline_write", flag(key, value), key)


def _fp32_states(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    mapping.set("state_dtype", "float32" if flag(key, value) else "bfloat16", key)


def _bias_correction(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if not flag(key, value):
        raise ConfigError(f"{key} is {value!r}: bias correction is always applied")
    mapping.note(key, "on, as here")


def _reduce_op(mapping: DeepSpeedMapping, key: str, value: Any) -> None:
    if choice("mean", "sum")(key, value) == "sum":
        raise ConfigError(f"{key} is 'sum': gradients are averaged; scale the loss instead")
    mapping.note(key, "gradients are averaged over ranks")


def _all_noted(why: str, names: str, *, prefix: str = "") -> dict[str, Rule]:
    return {prefix + name: noted(why) for name in names.split()}


_NEVER = 2**31 - 1

_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps")

_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
    "max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save "
    "gather_fp16_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size"
)

OFFLOAD_OPTIMIZER: dict[str, Rule] = {
    "device": custom("`path`: None (RAM) for cpu and none, `nvme_path` for nvme", _device),
    "nvme_path": custom("`path`", _nvme_path),
    "buffer_count": custom(f"{_BUFFERS}; 0 is refused", _buffer_count, outcome="noted"),
    "buffer_size": noted(_BUFFERS),
    "pin_memory": to_field("pin_memory", automatic(flag)),
    "pipeline": custom("`pipeline_read` and `pipeline_write`", _pipeline),
    "pipeline_read": to_field("pipeline_read", flag),
    "pipeline_write": to_field("pipeline_write", flag),
    "fast_init": noted("slots are always written once: a fresh file is 19 % slower to write"),
    "ratio": to_argument("ratio", _ratio),
    "super_offload": custom("optimizer argument `speculate`: 'adaptive' or False", _super_offload),
    "cpuadam_cores_perc": custom("`cpu_threads`: that share of the usable CPUs", _cores),
    "convert_grad_on_cpu": noted("the kernel converts gradients in the pass that uses them"),
    "max_in_cpu": noted("host_memory says how much state stays in RAM"),
}

AIO: dict[str, Rule] = {
    "block_size": to_field("block_size"),
    "queue_depth": to_field("queue_depth"),
    "thread_count": to_field("io_threads"),
    "intra_op_parallelism": to_field("io_threads"),
    "single_submit": noted("requests are submitted in batches whenever there are several"),
    "overlap_events": noted("submission and completion always overlap"),
    "use_gds": refused_if_on(
        "swapio steps on the CPU and reads into RAM; GPUDirect Storage is not used"
    ),
    "io_backend": custom("`engine`: 'threads' for posix, 'auto' for async_io", _backend),
    "enabled": noted("transfers are always asynchronous"),
}

OFFLOAD_PARAM: dict[str, Rule] = {
    "device": Rule("refused", "when nvme: swapio does not move parameters", _offload_param_device),
    **_all_noted(
        "parameters are not moved by swapio",
        "nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read "
        "pipeline_write fast_init",
    ),
}

ZERO: dict[str, Rule] = {
    "stage": custom("stage of ZeroOptimizer; 3 is FSDP2's fully_shard", _stage),
    "sub_group_size": to_field("sub_group_numel"),
    "save_muon_momentum_buffer_in_memory": custom(
        "`resident`: ('momentum_buffer',)", _momentum_in_memory
    ),
    "cpu_offload": custom("`path`: None (RAM)", _cpu_offload),
    "cpu_offload_params": noted(_ENGINE),
    "cpu_offload_param": noted(_ENGINE),
    "cpu_offload_use_pin_memory": to_field("pin_memory", flag),
    "zenflow": refused_if_on("ZenFlow's delayed updates change the result"),
    "zero_quantized_weights": refused_if_on("quantized collectives change the result"),
    "zero_quantized_nontrainable_weights": refused_if_on("swapio does not quantize parameters"),
    "zero_quantized_gradients": refused_if_on("quantized collectives change the result"),
    "zeropp_loco_param": refused_if_on("quantized collectives change the result"),
    "zero_hpz_partition_size": refused_above(1, "use a 2-D mesh (HSDP) with fully_shard"),
    "mics_shard_size": refused_above(0, "use a 2-D mesh (HSDP) with fully_shard"),
    "elastic_checkpoint": noted("checkpoints load on any world size"),
    "load_from_fp32_weights": noted("checkpoints hold the fp32 masters, bit for bit"),
    "compute_grad_norm": noted("the norm is known whenever clipping or grad_norm needs it"),
    "parameter_alignment": noted("kernels take any alignment"),
    "ignore_unused_parameters": noted("a parameter without gradient on all ranks is left alone"),
    **_all_noted(
        _COMMUNICATION,
        "contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions "
        "use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm "
        "round_robin_gradients legacy_stage1 allgather_size",
    ),
    **_all_noted(_ENGINE, _STAGE3),
    **_all_noted(_ENGINE, _STAGE3, prefix="stage3_"),
    **_all_noted(
        _ENGINE,
        "leaf_module memory_efficient_linear pipeline_loading_checkpoint "
        "override_module_apply mics_hierarchical_params_gather log_trace_cache_warnings "
        "enable_sanity_checks",
    ),
}

BF16: dict[str, Rule] = {
    "enabled": noted("the dtype is the model's; bf16 parameters get a lossless split master"),
    "immediate_grad_update": noted("gradients are taken as autograd accumulates them"),
    "check_grad_overflow": custom("optimizer argument `nonfinite`", _grad_overflow),
    "check_overflow": custom("optimizer argument `nonfinite`", _grad_overflow),
    "bf16_master_weights_and_grads": custom(
        "`master`: 'none' and `accumulation_dtype`: 'bfloat16'", _bf16_master
    ),
    "bf16_optimizer_states": custom("`state_dtype`: 'bfloat16'", _bf16_states),
}

FP16: dict[str, Rule] = {
    "enabled": custom("whether there is a `swapio.optim.GradScaler`", _fp16_enabled),
    "auto_cast": noted(_TRAINER),
    "loss_scale": custom("`GradScaler(init_scale=)`, never grown; 0 is dynamic", _loss_scale),
    "initial_scale_power": custom("`GradScaler(init_scale=)`, as 2 ** n", _scale_power),
    "loss_scale_window": custom("`GradScaler(growth_interval=)`", _scale_window),
    "hysteresis": noted("the scaler backs off at the first overflow, as torch's does"),
    "consecutive_hysteresis": noted("the scaler backs off at the first overflow, as torch's does"),
    "min_loss_scale": noted("the scaler has no floor, as torch's has none"),
    "fused_mode": noted("one fused kernel is always used"),
    "fp16_master_weights_and_grads": refused_if_on("an fp16 master loses updates; keep it fp32"),
}

OPTIMIZER_PARAMS: dict[str, Rule] = {
    **{name: to_argument(name) for name in _ARGUMENTS},
    "max_grad_norm": custom("optimizer argument `max_grad_norm`", _clipping),
    "torch_adam": noted("swapio's own kernel is used; it equals torch's within rounding"),
    "fused": noted("one fused kernel is always used"),
    "adam_w_mode": noted("decides between AdamW (the default of DeepSpeed's Adam) and Adam"),
    "bias_correction": custom(
        "when false: it is always applied", _bias_correction, outcome="refused"
    ),
    "amsgrad": refused_if_on("amsgrad has no kernel"),
    "fp32_optimizer_states": custom("`state_dtype`", _fp32_states),
    "muon_lr": to_group("muon", "lr"),
    "adam_lr": to_group("adamw", "lr"),
    "per_head_muon": custom(
        "when on: set num_heads on the param groups", _per_head, outcome="refused"
    ),
    "ns_method": custom("chosen by the shape of the matrix", _ns_method, outcome="noted"),
}

ZERO["per_head_muon"] = OPTIMIZER_PARAMS["per_head_muon"]
ZERO["ns_method"] = OPTIMIZER_PARAMS["ns_method"]

TOP_LEVEL: dict[str, Rule] = {
    "gradient_clipping": custom("optimizer argument `max_grad_norm`; 0 is none", _clipping),
    "zero_allow_untested_optimizer": noted("swapio's optimizers are tested with every stage"),
    "zero_force_ds_cpu_optimizer": noted("the CPU kernels are always used"),
    "amp": refused_if_on("apex AMP owns the master weights; use bf16 or torch.amp"),
    "sparse_gradients": refused_if_on("sparse gradients are not supported; use dense ones"),
    "gradient_allreduce_op": custom(
        "when sum: gradients are averaged over ranks", _reduce_op, outcome="refused"
    ),
    "compression_training": refused_if_on("compression changes the model; swapio leaves it alone"),
    "quantize_training": refused_if_on("quantization changes the model; swapio leaves it alone"),
    "checkpoint": noted("checkpoints are made by save(); the manifest is published last"),
    **_all_noted(
        _COMMUNICATION,
        "communication_data_type seq_parallel_communication_data_type "
        "seq_parallel_comm_data_type prescale_gradients gradient_predivide_factor "
        "disable_allgather comms_logger tensor_parallel sequence_parallel_size "
        "use_data_before_expert_parallelism data_parallel_group allgather_size",
    ),
    **_all_noted(
        _TRAINER,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "scheduler steps_per_print wall_clock_breakdown memory_breakdown dump_state "
        "flops_profiler activation_checkpointing sparse_attention autotuning elasticity "
        "data_efficiency curriculum_learning monitor_config tensorboard wandb csv_monitor "
        "comet aim eigenvalue progressive_layer_drop "
        "dataloader_drop_last graph_harvesting vocabulary_size hybrid_engine compile "
        "torch_autocast pipeline nebula weight_quantization domino timers inference "
        "checkpoint_engine gradient_checkpointing disable_python_gc log_level "
        "managed_gradient_accumulation expert_parallel",
    ),
}

DATA_TYPES: dict[str, Rule] = {
    "grad_accum_dtype": custom("`accumulation_dtype`", _accumulation),
    **_all_noted("dtypes are the model's", "param_dtype buffer_dtype keep_in_fp32_modules"),
}

SECTIONS: dict[str, dict[str, Rule]] = {
    "zero_optimization": ZERO,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "aio": AIO,
    "bf16": BF16,
    "bfloat16": BF16,
    "fp16": FP16,
    "data_types": DATA_TYPES,
    "offload_param": OFFLOAD_PARAM,
}
"""Sections by name; `optimizer` has its own shape and is handled by the mapper."""
