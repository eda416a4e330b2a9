"""Flags that save memory or hide messages: what they need, and which of Megatron's cannot hold here."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.cli import main
from plugin.config import JobConfig, TrainerConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.config.other_frameworks import NOT_HERE
from plugin.errors import ConfigError
from plugin.megatron_backend.model.layout_rules import check_model
from tests.parallel import tiny_models

CPU = Capabilities()
BARE_CUDA = Capabilities(cuda=True)
APEX = Capabilities(cuda=True, gradient_fusion=True)
CUDA = Capabilities(cuda=True, transformer_engine=True)
SELECTIVE = {"recompute_granularity": "selective"}
FLEX = {"moe_token_dispatcher_type": "flex"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recompute_modules": "mlp"}, "needs --recompute-granularity selective"),
        ({**SELECTIVE, "recompute_modules": "mlp,atention"}, "'atention' cannot be recomputed"),
        ({"optimizer_offload_fraction": 0.5}, "needs --optimizer-cpu-offload"),
        ({"exp_avg_dtype": "bfloat16"}, "needs --use-precision-aware-optimizer"),
        (
            {"optimizer_cpu_offload": True, "use_distributed_optimizer": False},
            "--optimizer-cpu-offload with --no-use-distributed-optimizer",
        ),
        (
            {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
            "the host updates in float32",
        ),
        ({"variable_seq_lengths": False}, "needs --pipeline-model-parallel-size above 1"),
        ({"moe_flex_dispatcher_backend": "hybridep"}, "needs --moe-token-dispatcher-type flex"),
    ],
)
def test_what_cannot_hold_is_refused_where_it_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(given)


@pytest.mark.parametrize(
    ("given", "found", "message"),
    [
        ({"optimizer_cpu_offload": True}, CPU, "needs --use-distributed-optimizer, which is off"),
        (
            {"optimizer_cpu_offload": True, "train_dtype": "float32"},
            CUDA,
            "--optimizer-cpu-offload with --train-dtype float32",
        ),
        (
            {
                "use_precision_aware_optimizer": True,
                "train_dtype": "bfloat16",
                "use_distributed_optimizer": True,
            },
            CPU,
            "there is no CUDA here",
        ),
        ({**SELECTIVE, "recompute_modules": "moe_act"}, BARE_CUDA, "this run has local layers"),
        (FLEX, CPU, "needs the CUDA kernels of DeepEP"),
        ({"gradient_accumulation_fusion": True}, BARE_CUDA, "Transformer Engine's layers or APEX"),
        (
            {"gradient_accumulation_fusion": True, "lora_rank": 4},
            CUDA,
            "frozen weights have no gradient buffer",
        ),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_the_reason(
    given: dict[str, Any], found: Capabilities, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_device(TrainerConfig(**given), found)


@pytest.mark.parametrize(
    ("found", "given", "fuses"),
    [
        (CPU, {}, False),
        (BARE_CUDA, {}, False),
        (APEX, {}, True),
        (CUDA, {}, True),
        (CUDA, {"lora_rank": 4}, False),
        (CUDA, {"gradient_accumulation_fusion": False}, False),
    ],
)
def test_weight_gradients_are_added_up_inside_products_where_a_kernel_does_it(
    found: Capabilities, given: dict[str, Any], fuses: bool
) -> None:
    config = on_device(TrainerConfig(**given), found)
    assert config.gradient_accumulation_fusion is fuses
    assert on_device(config, found) == config


@pytest.mark.parametrize(
    ("family", "part", "fits"),
    [
        ("qwen3", "moe", False),
        ("qwen3_moe", "moe", True),
        ("qwen3_moe", "shared_experts", False),
        ("deepseek_v3", "shared_experts", True),
        ("qwen3", "mla_up_proj", False),
        ("deepseek_v3", "mla_up_proj", True),
        ("qwen3", "mlp", True),
    ],
)
def test_a_part_that_the_model_lacks_is_refused(family: str, part: str, fits: bool) -> None:
    model = tiny_models.ALL_FAMILIES[family]()
    config = TrainerConfig(**SELECTIVE, recompute_modules=f"core_attn,{part}")
    if fits:
        check_model(model, config)
    else:
        with pytest.raises(ConfigError, match=f"--recompute-modules {part}: {family} has no such"):
            check_model(model, config)


def test_a_dispatcher_between_ranks_needs_several() -> None:
    model = tiny_models.tiny_qwen3_moe()
    with pytest.raises(ConfigError, match="nothing to dispatch"):
        check_model(model, TrainerConfig(**FLEX))
    check_model(model, TrainerConfig(**FLEX, expert_model_parallel_size=2))


@pytest.mark.parametrize(
    ("given", "half", "other"),
    [
        # a float32 main weight and two moments; a float32 weight is its own
        ({}, 12, 8),
        ({"optimizer_cpu_offload": True}, 0, 0),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}, 3, 2),
        (
            {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": "bfloat16",
                "exp_avg_sq_dtype": "fp8",
            },
            4 + 2 + 1,
            2 + 1,
        ),
    ],
)
def test_what_an_optimizer_keeps_on_the_device(
    given: dict[str, Any], half: float, other: float
) -> None:
    config = TrainerConfig(**given)
    assert (config.state_bytes(half=True), config.state_bytes(half=False)) == (half, other)


@pytest.mark.parametrize("name", NOT_HERE)
def test_a_flag_of_megatrons_that_cannot_hold_is_answered_with_the_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(SystemExit):
        main(["train", option])
    assert f"{option} is not supported: {NOT_HERE[name]}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not supported, because "):
        JobConfig.from_sources({name: True})
