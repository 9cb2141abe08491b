# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's files are read as they are: each key is mapped, noted or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swapio.config import SwapConfig, field_names
from swapio.config_deepspeed import known_keys, map_deepspeed, map_deepspeed_file
from swapio.config_deepspeed_keys import SECTIONS, TOP_LEVEL
from swapio.config_sources import from_dict, from_file
from swapio.errors import ConfigError

INFINITY: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
            "pipeline_read": True,
            "pipeline_write": False,
        },
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e8,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 16,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
}


def config(data: dict[str, Any]) -> SwapConfig:
    return from_dict(data, environment={})


def test_a_whole_infinity_file_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(INFINITY))
    found = from_file(file, environment={})
    assert found == SwapConfig(
        path="/local_nvme",
        pin_memory=True,
        pipeline_read=True,
        pipeline_write=False,
        sub_group_numel=100_000_000,
        block_size=262144,
        queue_depth=16,
        io_threads=1,
    )
    key = "zero_optimization.offload_optimizer.nvme_path"
    assert found.sources["path"] == f"file {file}: {key}"
    assert found.sources["host_memory"] == "default"


def test_the_parts_that_are_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(INFINITY))
    mapping = map_deepspeed_file(file)
    assert (mapping.optimizer, mapping.stage) == ("AdamW", 3)
    assert mapping.arguments == {"betas": [0.9, 0.95], "eps": 1e-8, "max_grad_norm": 1.0}
    assert mapping.scaler == {"init_scale": 65536.0, "growth_interval": 1000}
    outcomes = {note.key: note.outcome for note in mapping.notes}
    assert outcomes["optimizer.params.lr"] == "left to the trainer"
    assert outcomes["scheduler"] == "noted"
    assert outcomes["aio.block_size"] == "mapped"


def test_every_key_that_was_given_is_accounted_for() -> None:
    mapping = map_deepspeed(INFINITY)
    accounted = {note.key for note in mapping.notes}
    for name, section in INFINITY.items():
        keys = {name} if not isinstance(section, dict) or name == "scheduler" else set()
        if name == "optimizer":
            keys = {"optimizer.type", *(f"optimizer.params.{key}" for key in section["params"])}
        elif not keys:
            keys = {
                f"{name}.{key}" for key, value in section.items() if not isinstance(value, dict)
            }
        assert keys <= accounted


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}, "aio": {"queue_depth": 8}},
            {"path": "/n", "queue_depth": 8},
        ),
        ({"device": "nvme", "nvme_path": "/n", "buffer_count": 5}, {"path": "/n"}),
        ({"nvme_path": "/n", "device": "cpu"}, {}),
        ({"block_size": 1048576, "intra_op_parallelism": 2, "use_gds": False}, "aio"),
        ({"sub_group_size": "1e8"}, {"sub_group_numel": 100_000_000}),
        ({"save_muon_momentum_buffer_in_memory": True}, {"resident": ("momentum_buffer",)}),
        ({"bf16": {"bf16_optimizer_states": True}}, {"state_dtype": "bfloat16"}),
        ({"bf16_optimizer_states": True}, {"state_dtype": "bfloat16"}),
        ({"bfloat16": {"enabled": True}}, {}),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            {"master": "none", "accumulation_dtype": "bfloat16"},
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {"accumulation_dtype": "bfloat16"}),
        ({"data_types": {"grad_accum_dtype": None}}, {}),
        ({"zero_optimization": {"cpu_offload": True, "stage": 2}}, {}),
        ({"zero_optimization": {"cpu_offload_use_pin_memory": True}}, {"pin_memory": True}),
        ({"zero_optimization": True, "allgather_size": 5e8}, {}),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": None}}, {}),
        ({"aio": {"io_backend": "posix"}}, {"engine": "threads"}),
        ({"aio": {"io_backend": "async_io"}}, {}),
        ({"gradient_allreduce_op": "mean", "ns_method": "gram"}, {}),
        ({"data_types": {"keep_in_fp32_modules": "auto", "param_dtype": "bf16"}}, {}),
        (
            {"offload_optimizer": {"device": "none", "pipeline": True, "ratio": 0.3}},
            {"pipeline_read": True},
        ),
        ({"path": "/own", "nvme_path": "/n", "host_memory": "1GiB"}, "own"),
        ({"pin_memory": "auto", "block_size": "auto"}, {}),
    ],
)
def test_sections_bare_keys_and_old_names(data: dict[str, Any], expected: Any) -> None:
    if expected == "aio":
        expected = {"block_size": 1 << 20, "io_threads": 2}
    if expected == "own":
        expected = {"path": "/own", "host_memory": 1 << 30}
    assert config(
        {k: v for k, v in data.items() if v != "auto" or k == "pin_memory"}
    ) == SwapConfig(**expected)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"aio": {"use_gds": True}}, "aio.use_gds is True: swapio steps on the CPU"),
        ({"offload_param": {"device": "nvme"}}, "offload_param.device is 'nvme'"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "quantized collectives"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "use a 2-D mesh"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.05}}}, "ZenFlow's delayed updates"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "an fp16 master loses updates"),
        ({"per_head_muon": True}, "set num_heads on the param groups"),
        ({"gradient_allreduce_op": "sum"}, "gradients are averaged; scale the loss"),
        ({"compression_training": {"weight_quantization": {}}}, "compression changes the model"),
        ({"ns_method": "cubic"}, "ns_method is 'cubic'"),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "apex AMP"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is 'OneBitAdam'"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "amsgrad has no kernel"),
        ({"optimizer": {"params": {"bias_correction": False}}}, "is always applied"),
        ({"offload_optimizer": {"device": "disk"}}, "want one of 'none', 'cpu', 'nvme'"),
        ({"offload_optimizer": {"device": "nvme"}}, "there is no nvme_path"),
        ({"offload_optimizer": {"device": "cpu", "buffer_count": 0}}, "want at least 1"),
        ({"offload_optimizer": {"ratio": 1.5}}, "want a share from 0 to 1"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer is 'nvme' in dict; want a section"),
        ({"zero_optimization": {"stage": 4}}, "want 0, 1, 2 or 3"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "accumulation_dtype is 'fp16'"),
        ({"aio": {"block_size": 1000}}, "from dict: aio.block_size"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_with_the_reason(
    data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        ({"aio": {"queue_dept": 1}}, "'queue_depth'"),
        ({"zero_optimization": {"sub_group_sise": 1}}, "'sub_group_size'"),
        ({"zero_optimization": {"offload_optimiser": {}}}, "'offload_optimizer'"),
        ({"offload_optimizer": {"nvme_pathh": "/a"}}, "'nvme_path'"),
        ({"optimizer": {"parms": {}}}, "'params'"),
        ({"optimizer": {"params": {"weight_decy": 0}}}, "'weight_decay'"),
    ],
)
def test_unknown_keys_name_section_and_nearest(data: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {nearest}"):
        config(data)


def test_one_error_names_all_refusals() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"aio": {"use_gds": True, "typo": 1}, "amp": {"enabled": True}})
    for part in ("aio.use_gds", "'typo'", "amp is"):
        assert part in str(caught.value)


def test_switches_that_are_off_are_fine() -> None:
    data = {
        "amp": {"enabled": False},
        "zero_optimization": {
            "zero_quantized_weights": False,
            "zero_hpz_partition_size": 1,
            "mics_shard_size": -1,
            "zenflow": None,
        },
        "per_head_muon": False,
    }
    assert config(data) == SwapConfig()


def test_adam_of_deepspeed_decays_like_adamw_unless_told() -> None:
    def optimizer(**params: bool) -> str | None:
        return map_deepspeed({"optimizer": {"type": "Adam", "params": params}}).optimizer

    assert optimizer() == "AdamW"
    assert optimizer(adam_w_mode=True) == "AdamW"
    assert optimizer(adam_w_mode=False) == "Adam"
    assert map_deepspeed({"optimizer": {"type": "Muon"}}).optimizer == "Muon"
    assert map_deepspeed({"optimizer": {"type": "auto"}}).optimizer is None


def test_speculation_ratio_and_cores() -> None:
    mapping = map_deepspeed(
        {"super_offload": True, "ratio": 0.25, "cpuadam_cores_perc": 0.01, "gradient_clipping": 0}
    )
    assert mapping.arguments == {"speculate": "adaptive", "ratio": 0.25, "max_grad_norm": None}
    assert mapping.settings["cpu_threads"] == (1, "cpuadam_cores_perc")


def test_learning_rates_of_muons_groups() -> None:
    params = {"muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.95}
    mapping = map_deepspeed({"optimizer": {"type": "Muon", "params": params}})
    assert mapping.groups == {"muon": {"lr": 0.02}, "adamw": {"lr": 3e-4}}
    assert mapping.arguments == {"momentum": 0.95}


def test_a_static_loss_scale_wins_and_fp16_off_means_no_scaler() -> None:
    static = {"initial_scale_power": 16, "loss_scale_window": 10, "loss_scale": 128}
    mapping = map_deepspeed({"fp16": static})
    assert mapping.scaler == {"init_scale": 128.0, "growth_interval": 2**31 - 1}
    assert map_deepspeed({"fp16": static | {"enabled": False}}).scaler == {}


def test_own_section_beside_deepspeeds_wins() -> None:
    data = {
        "zero_optimization": {"offload_optimizer": {"device": "nvme"}},
        "swapio": {"path": "/own", "durability": "step"},
    }
    found = config(data)
    assert (found.path, found.durability) == ("/own", "step")
    assert found.sources["durability"] == "dict [swapio]"


def test_tables_are_consistent() -> None:
    assert set(field_names()) & set(known_keys()) == {
        "block_size",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "queue_depth",
    }
    for rules in (*SECTIONS.values(), TOP_LEVEL):
        for rule in rules.values():
            assert rule.outcome in ("mapped", "noted", "refused")
            assert rule.text
