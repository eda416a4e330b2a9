"""Flags of LoRA, and what a model makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from plugin.cluster.model_source import policy_source
from plugin.config import JobConfig, TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.lora.targets import chosen_targets
from tests.parallel import tiny_models

LORA = {"lora_rank": 4}


def test_adapters_of_a_real_model_have_ten_times_the_learning_rate_unless_it_is_given(
    tmp_path: Path,
) -> None:
    model = {"hf_checkpoint": "/a/model"}
    assert JobConfig.from_sources(model).lr == 1e-6
    assert JobConfig.from_sources({**model, **LORA}).lr == 1e-5
    assert JobConfig.from_sources({**model, **LORA, "lr": 1e-6}).lr == 1e-6
    assert JobConfig.from_sources(LORA).lr == JobConfig.from_sources({}).lr == 3e-3
    file = tmp_path / "job.yaml"
    file.write_text("hf-checkpoint: /a/model\nlora-rank: 4\n")
    assert JobConfig.from_sources({}, file).lr == 1e-5
    file.write_text("hf-checkpoint: /a/model\nlora-rank: 4\nlr: 0.0003\n")
    assert JobConfig.from_sources({}, file).lr == 3e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_rank": -1}, "--lora-rank is -1; it must be at least 0"),
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0 would do nothing: it needs --lora-rank"),
        ({**LORA, "lora_alpha": 0.0}, "--lora-alpha is 0.0; it must be greater than 0"),
        ({**LORA, "lora_target": "query"}, "'query' cannot have an adapter; choose all-linear, or"),
        ({**LORA, "lora_target": "lm_head"}, "LM head stay as they are"),
        ({**LORA, "lora_target": "all-linear,q_proj"}, "'all-linear' cannot"),
        ({**LORA, "lora_target": "q_proj, q_proj"}, "names a layer twice"),
        (
            {**LORA, "lora_sync": "adapter", "weight_sync": "object-store"},
            "by broadcast only; use --lora-sync merged",
        ),
        (
            {**LORA, "lora_sync": "adapter", "rollout_engine": "vllm_server"},
            "--lora-sync adapter with --rollout-engine vllm_server",
        ),
        (
            {**LORA, "use_kl_loss": True, "reference_offload": True},
            "has no weights of its own; drop it",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_target": "q_proj,kv_b_proj"}, "qwen3 has no linear layer kv_b_proj of its own; it"),
        (
            {"embedded_model": "qwen3_moe", "lora_sync": "adapter"},
            "adapters on experts, which the engine holds in one tensor per layer",
        ),
        ({"lora_path": "nowhere"}, "holds no adapter_config.json"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_starts(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_source(JobConfig.from_sources({**LORA, **given}))


def test_all_linear_means_the_linear_layers_of_the_model() -> None:
    config = TrainerConfig(**LORA)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    latent = ("o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    for family, expected in (
        ("qwen3", attention + mlp),
        ("qwen3_moe", attention + mlp),
        ("deepseek_v3", latent + mlp),
        ("glm4", (*attention, "down_proj")),  # gate and up are one layer
        ("gpt_oss", attention),  # all experts are one tensor
    ):
        assert chosen_targets(tiny_models.ALL_FAMILIES[family](), config) == expected


def adapter_directory(path: Path, **changes: Any) -> str:
    """A PEFT adapter on the queries of the built-in model, which has two layers."""
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(described | changes))
    halves = {"A": torch.zeros(4, 64), "B": torch.zeros(64, 4)}
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": tensor.clone()
            for layer in range(2)
            for half, tensor in halves.items()
        },
        path / "adapter_model.safetensors",
    )
    return str(path)


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({}, {}, None),
        ({"r": 8}, {}, "has r 8 and --lora-rank is 4; set --lora-rank 8"),
        ({"use_dora": True}, {}, "has use_dora True"),
        ({"peft_type": "IA3"}, {}, "only LORA can be trained"),
        ({}, {"lora_target": "q_proj,v_proj"}, "lacks .*v_proj.lora_A.weight"),
        ({}, {"lora_target": "o_proj"}, "o_proj.lora_A.weight"),
    ],
)
def test_an_adapter_of_peft_has_to_fit_the_flags(
    tmp_path: Path, changes: dict[str, Any], flags: dict[str, Any], message: str | None
) -> None:
    given = {
        **LORA,
        "lora_alpha": 8.0,
        "lora_target": "q_proj",
        "lora_path": adapter_directory(tmp_path, **changes),
    }
    config = JobConfig.from_sources(given | flags)
    if message is None:
        policy_source(config)
        return
    with pytest.raises(ConfigError, match=message):
        policy_source(config)
