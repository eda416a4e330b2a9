"""What the model builder reads out of a Hugging Face config, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.model.builder import (
    build_model,
    padded_vocab_size,
    real_vocab_rows,
    transformer_arguments,
    uses_transformer_engine,
)
from plugin.megatron_backend.model.families import FAMILIES, family_of, rotary_arguments
from tests.parallel.tiny_models import tiny_llama, tiny_qwen3, tiny_qwen3_moe
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


def test_rope_theta_is_found_where_transformers_5_and_4_put_it() -> None:
    new = tiny_qwen3(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert rotary_arguments(new) == {"rotary_base": 1e6}

    old = SimpleNamespace(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert rotary_arguments(old) == {
        "rotary_base": 5e5,
        "seq_len_interpolation_factor": 2.0,
    }


def llama3_rope(**changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        **changes,
    }


def test_llama3_scaling_passes_its_factor_and_refuses_constants_that_megatron_fixes() -> None:
    supported = rotary_arguments(tiny_llama(rope_parameters=llama3_rope()))
    assert supported["rope_scaling"] is True
    assert supported["rope_scaling_factor"] == 32.0
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        rotary_arguments(
            tiny_llama(rope_parameters=llama3_rope(original_max_position_embeddings=4096))
        )


def test_an_unknown_rope_type_is_refused_by_name() -> None:
    config = tiny_llama()
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(ConfigError, match="longrope"):
        rotary_arguments(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA")
def test_without_cuda_auto_is_local_and_asking_for_transformer_engine_is_an_error() -> None:
    assert uses_transformer_engine("auto") is False
    assert uses_transformer_engine("local") is False
    with pytest.raises(ConfigError, match="--transformer-impl"):
        uses_transformer_engine("transformer_engine")
