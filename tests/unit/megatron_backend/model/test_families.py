"""What the table of families reads out of configs and checkpoints, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend import cpu_runtime
from plugin.megatron_backend.hf_weights.files import ExpertsByNumber, joined_experts
from plugin.megatron_backend.model.families import FAMILIES, family_of
from plugin.megatron_backend.model.layout_rules import check_model
from plugin.megatron_backend.model.rope import inverse_frequencies, rope_factor
from tests.parallel.tiny_models import (
    ALL_FAMILIES,
    hf_state_dict,
    tiny_deepseek_v3,
    tiny_gemma3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_moonlight,
)

CONFIGS = {name: make() for name, make in ALL_FAMILIES.items()} | {"Moonlight": tiny_moonlight()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_checkpoint_of_every_family_holds_exactly_the_expected_tensors(name: str) -> None:
    config = CONFIGS[name]
    assert family_of(config).misfits(config, hf_state_dict(config)) == ([], [])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tensor_too_many_or_too_few_is_named(name: str) -> None:
    config = CONFIGS[name]
    names = set(hf_state_dict(config))
    lost = "model.layers.2.self_attn.o_proj.weight"
    unknown, missing = family_of(config).misfits(config, names - {lost} | {"model.layers.9.x"})
    assert (unknown, missing) == (["model.layers.9.x"], [lost])


def test_layers_for_multi_token_prediction_are_left_out() -> None:
    config = tiny_deepseek_v3(num_mtp_layers=1)
    names = [*hf_state_dict(config), "model.layers.4.eh_proj.weight"]
    assert family_of(config).misfits(config, names) == ([], [])
    names.append("model.layers.5.eh_proj.weight")
    assert family_of(config).misfits(config, names)[0] == ["model.layers.5.eh_proj.weight"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (tiny_glm4_moe(norm_topk_prob=False), "norm_topk_prob=False"),
        (tiny_deepseek_v3(num_experts_per_tok=2), "num_experts_per_tok 2 with topk_group 2"),
        (tiny_deepseek_v3(rope_interleave=False), "rope_interleave=False"),
        (tiny_deepseek_v3(attention_bias=True), "attention_bias=True"),
        (tiny_gemma3(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (tiny_gemma3(hidden_activation="silu"), "hidden_activation 'silu'"),
    ],
)
def test_settings_that_megatron_would_compute_otherwise_are_refused(
    config: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_model(config, TrainerConfig())


def test_experts_with_biases_are_not_cut() -> None:
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    check_model(tiny_gpt_oss(), TrainerConfig(**sizes, expert_tensor_parallel_size=1))
    with pytest.raises(ConfigError, match="--expert-tensor-parallel-size 2: experts of gpt_oss"):
        check_model(tiny_gpt_oss(), TrainerConfig(**sizes, expert_tensor_parallel_size=2))


def test_megatrons_own_yarn_of_latent_attention_turns_by_the_same_angles() -> None:
    # Transformer Engine's layers use Megatron's module, the local ones transformers' frequencies.
    cpu_runtime.activate()
    config = tiny_deepseek_v3()
    found = FAMILIES["deepseek_v3"].transformer_arguments(config)
    names = (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    )
    yarn = YarnRotaryEmbedding(
        found["qk_pos_emb_head_dim"],
        rotary_base=found["rotary_base"],
        scaling_factor=found["rotary_scaling_factor"],
        use_cpu_initialization=True,
        **{name: found[name] for name in names},
    )
    angles, factor = yarn.get_emb(5)
    frequencies = inverse_frequencies(config, found["qk_pos_emb_head_dim"])
    expected = torch.outer(torch.arange(5.0), frequencies)
    torch.testing.assert_close(angles[:, 0, 0, : len(frequencies)], expected)
    assert factor == pytest.approx(rope_factor(config))


def test_experts_are_taken_out_of_one_tensor_and_put_back() -> None:
    fused = "model.layers.0.mlp.experts.down_proj"
    weights = ExpertsByNumber({fused: torch.arange(6.0).view(3, 2), "norm": torch.ones(1)})
    assert weights["model.layers.0.mlp.experts.1.down_proj"].tolist() == [2.0, 3.0]
    assert "model.layers.0.mlp.experts.2.down_proj" in weights
    assert "model.layers.1.mlp.experts.2.down_proj" not in weights
    parts = [(f"model.layers.0.mlp.experts.{n}.down_proj", torch.full((2,), n)) for n in (2, 0, 1)]
    joined = list(joined_experts([parts[0], ("norm", torch.ones(1)), *parts[1:]], 3))
    assert [name for name, _ in joined] == ["norm", fused]
    assert joined[1][1].tolist() == [[0, 0], [1, 1], [2, 2]]
