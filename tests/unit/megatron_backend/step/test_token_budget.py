"""The token budget that a job chooses by itself, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3Config

from plugin.config import JobConfig, TrainerConfig
from plugin.config.device_defaults import engine_dtype
from plugin.megatron_backend.step.token_budget import (
    activation_bytes_per_token,
    token_budget,
    tokens_in,
)

MODEL = Qwen3Config(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=100,
)


def test_activations_of_a_token_by_hand() -> None:
    # 10 x 64 around norms; q 64, k and v 32 each: 3 x (64 + 64) + 2 x 64; gate, up and two more of
    # 128: 640 + 384 + 128 + 512 = 1,664 numbers per layer.
    config = TrainerConfig(train_dtype="float32")
    assert activation_bytes_per_token(MODEL, config) == 3 * 1664 * 4
    half = TrainerConfig(train_dtype="bfloat16")
    assert activation_bytes_per_token(MODEL, half) == 3 * 1664 * 2
    # Two tensor parallel ranks share all but norms and residuals.
    tensor = TrainerConfig(train_dtype="float32", tensor_model_parallel_size=2)
    assert activation_bytes_per_token(MODEL, tensor) == 3 * (640 + 1024 // 2) * 4
    # Recomputed: the input of every layer, and one layer at a time.
    recomputed = TrainerConfig(
        train_dtype="float32",
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert activation_bytes_per_token(MODEL, recomputed) == (3 * 64 + 1664) * 4


def test_half_of_the_room_is_for_activations_in_powers_of_two() -> None:
    config = TrainerConfig(train_dtype="float32")
    per_token = 3 * 1664 * 4
    assert tokens_in(2 * 5000 * per_token, MODEL, config) == 4096
    assert tokens_in(-1, MODEL, config) == 256  # the model itself hardly fits: the least


@pytest.mark.parametrize(
    ("fitting", "device", "longest", "expected"),
    [
        (1 << 20, "cpu", 500, 2048),
        (1 << 20, "cuda", 500, 16384),
        (1024, "cuda", 500, 1024),
        (1 << 20, "cuda", 32_768, 32_768),  # the longest sample need not be alone
        (8192, "cuda", 32_768, 8192),
    ],
)
def test_a_budget_saturates_the_device_and_fits_into_memory(
    fitting: int, device: str, longest: int, expected: int
) -> None:
    assert token_budget(fitting, device, longest) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"hf_checkpoint": "model"}, "auto"),
        ({"hf_checkpoint": "model", "lora_rank": 4}, "auto"),
        ({"hf_checkpoint": "model", "micro_batch_size": 2}, None),
        ({"hf_checkpoint": "model", "max_tokens_per_gpu": 512}, 512),
        ({}, None),
    ],
)
def test_a_model_of_the_users_own_gets_a_budget_unless_a_microbatch_is_given(
    flags: dict[str, Any], expected: Any
) -> None:
    assert JobConfig.from_sources(flags).max_tokens_per_gpu == expected


@pytest.mark.parametrize(
    ("settings", "cuda", "expected"),
    [
        ({}, False, "float32"),
        ({}, True, "bfloat16"),
        ({"train_dtype": "bfloat16"}, False, "bfloat16"),
        ({"train_dtype": "float16"}, True, "float16"),
        ({"train_dtype": "bfloat16", "rollout_dtype": "float32"}, True, "float32"),
    ],
)
def test_an_engine_follows_the_trainers_dtype(
    settings: dict[str, Any], cuda: bool, expected: str
) -> None:
    assert engine_dtype(JobConfig(**settings), cuda=cuda) == expected
