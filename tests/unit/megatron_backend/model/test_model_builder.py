"""What the model builder reads out of a Hugging Face config, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.model.builder import (
    build_model,
    padded_vocab_size,
    real_vocab_rows,
    transformer_arguments,
)
from plugin.megatron_backend.model.families import FAMILIES, family_of
from plugin.megatron_backend.model.family_arguments import window_arguments
from plugin.megatron_backend.model.layout_rules import check_model
from plugin.megatron_backend.model.rope import inverse_frequencies, rope_factor, rope_parameters
from plugin.megatron_backend.model.rotary_embedding import scale_rotation
from tests.parallel.tiny_models import (
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tests.unit.megatron_backend.rank_places import place


def megatron_arguments(hf_config: Any) -> dict[str, Any]:
    return family_of(hf_config).transformer_arguments(hf_config)


def test_a_vocabulary_is_padded_to_equal_shares_and_only_the_last_rows_are_padding() -> None:
    # 95 tokens on 4 ranks: shares of 24, 96 rows in all, the last rank has 23 tokens and 1 padding row
    assert padded_vocab_size(95, 4) == 96
    assert [real_vocab_rows(95, 4, rank) for rank in range(4)] == [24, 24, 24, 23]
    assert padded_vocab_size(96, 4) == 96
    # 5 tokens on 4 ranks: shares of 2, 8 rows; rank 2 holds token 4 and a padding row, rank 3 none
    assert [real_vocab_rows(5, 4, rank) for rank in range(4)] == [2, 2, 1, 0]


def test_expert_layers_follow_the_sparse_step_and_the_list_of_dense_layers() -> None:
    every_second = tiny_qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[3])
    # layers 0..3: (i + 1) % 2 == 0 picks 1 and 3; 3 is listed as dense
    assert megatron_arguments(every_second)["moe_layer_freq"] == [0, 1, 0, 0]
    assert megatron_arguments(tiny_qwen3_moe())["moe_layer_freq"] == [1, 1, 1, 1]


def test_head_width_is_the_explicit_one_or_the_quotient() -> None:
    assert megatron_arguments(tiny_qwen3(head_dim=16))["kv_channels"] == 16
    config = tiny_llama()
    config.head_dim = None
    assert megatron_arguments(config)["kv_channels"] == 32 // 4


def rope_settings(hf_config: Any) -> dict[str, Any]:
    found = rope_parameters(hf_config)
    return {name: found[name] for name in ("rope_type", "rope_theta", "partial_rotary_factor")}


def test_rope_settings_are_found_where_transformers_5_and_4_put_them() -> None:
    new = tiny_qwen3(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert rope_settings(new) == {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 1.0,
    }
    old = SimpleNamespace(
        rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, partial_rotary_factor=0.5
    )
    assert rope_settings(old) == {
        "rope_type": "linear",
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
    }


def test_default_frequencies_are_powers_of_theta_over_the_rotated_channels() -> None:
    config = SimpleNamespace(rope_theta=100.0, partial_rotary_factor=0.5)
    # 8 channels, half of them rotated: 100 ** -(0, 2) / 4 = 1, 0.1
    torch.testing.assert_close(inverse_frequencies(config, 8), torch.tensor([1.0, 0.1]))


def yarn_rope(**changes: Any) -> dict[str, Any]:
    original = {"original_max_position_embeddings": 32, "factor": 4.0}
    return {"rope_type": "yarn", "rope_theta": 1e4, **original, **changes}


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        # 0.1 * log(4) + 1
        ({}, 1.138629),
        ({"attention_factor": 0.5}, 0.5),
        # (0.1 * 2 * log 4 + 1) / (0.1 * log 4 + 1) = 1.277259 / 1.138629
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.121752),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_factor_of_yarn_follows_its_settings(changes: dict[str, Any], factor: float) -> None:
    config = tiny_llama(rope_parameters=yarn_rope(**changes))
    assert rope_factor(config) == pytest.approx(factor, rel=1e-6)
    settings = SimpleNamespace()
    scale_rotation(settings, rope_factor(config))
    assert _yarn_get_concentration_factor_from_config(settings) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_depends_on_the_length_of_the_sequence_is_refused_by_name(kind: str) -> None:
    config = tiny_llama()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=f"{kind}.*default, linear, llama3, yarn"):
        check_model(config, TrainerConfig())


def test_windows_count_the_token_itself_and_follow_the_kinds_of_layers() -> None:
    assert window_arguments(tiny_mistral(sliding_window=8)) == {
        "window_size": (7, 0),
        "window_attn_skip_freq": [1, 1, 1, 1],
    }
    assert megatron_arguments(tiny_qwen2())["window_attn_skip_freq"] == [0, 0, 1, 1]
    assert "window_size" not in megatron_arguments(tiny_qwen2(use_sliding_window=False))
    assert window_arguments(tiny_mistral(sliding_window=None)) == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_models_that_megatron_would_compute_differently_are_refused(
    change: dict[str, Any], named: str
) -> None:
    config = tiny_llama()
    family_of(config)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=named):
        family_of(config)


def test_a_window_that_a_family_does_not_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_sliding_window=True is not supported"):
        family_of(tiny_qwen3_moe(use_sliding_window=True))


def test_a_model_outside_the_table_is_refused_with_the_table() -> None:
    config = tiny_llama()
    config.model_type = "gpt2"
    with pytest.raises(ConfigError, match=r"'gpt2' .* choose a model of " + ", ".join(FAMILIES)):
        family_of(config)


def test_the_router_fusion_flag_reaches_megatrons_config() -> None:
    for fusion in (True, False):
        settings = TrainerConfig(moe_router_fusion=fusion)
        arguments = transformer_arguments(tiny_qwen3_moe(), settings, place())
        assert TransformerConfig(**arguments).moe_router_fusion is fusion


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA")
def test_router_fusion_without_its_kernel_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match=r"--moe-router-fusion is a CUDA kernel"):
        build_model(tiny_qwen3_moe(), TrainerConfig(moe_router_fusion=True), place())
