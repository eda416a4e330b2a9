"""What a job says about flags that run, but that an expert would not give."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.controller.preflight.advice import Machine, advice

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
ROOMY = Machine(on_cuda=False, multiplies_bfloat16=False, room=1 << 40)


def lines(machine: Machine | None = ROOMY, **flags: Any) -> list[str]:
    config = JobConfig.from_sources({"hf_checkpoint": "model", **flags})
    return advice(config, ModelSource(SHAPE, "model"), machine)


def test_defaults_and_the_built_in_model_need_no_advice() -> None:
    assert lines() == []
    built_in = JobConfig.from_sources({"micro_batch_size": 1, "lr": 3e-3})
    native = Machine(on_cuda=False, multiplies_bfloat16=True, room=0)
    assert advice(built_in, ModelSource(SHAPE), native) == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"micro_batch_size": 1}, "--micro-batch-size 1: a pass"),
        ({"max_tokens_per_gpu": 3}, "--max-tokens-per-gpu 3 is less"),
        ({"num_rollout_engines": 9, "rollout_batch_size": 8}, "--num-rollout-engines 9"),
        ({"lr": 3e-4}, "--lr 0.0003 is typical of pretraining"),
        ({"train_dtype": "bfloat16", "rollout_dtype": "float32"}, "--rollout-dtype float32"),
    ],
)
def test_each_flag_gets_its_line(flags: dict[str, Any], line: str) -> None:
    (found,) = lines(**flags)
    assert found.startswith(line)


def test_adapters_take_larger_learning_rates() -> None:
    assert lines(lr=3e-4, lora_rank=8) == []


def test_a_cpu_that_multiplies_bfloat16_is_named_where_the_dtype_is_open() -> None:
    native = Machine(on_cuda=False, multiplies_bfloat16=True, room=1 << 40)
    (found,) = lines(native)
    assert found.startswith("--train-dtype auto: float32")
    assert lines(native, train_dtype="float32") == []


def test_activations_that_do_not_fit_ask_for_recompute_once() -> None:
    # 3 layers of 1,664 float32 numbers (see test_token_budget): 4,096 tokens have 78 MiB.
    small = Machine(on_cuda=False, multiplies_bfloat16=False, room=70 << 20)
    (found,) = lines(small, max_tokens_per_gpu=4096)
    assert "4096 tokens has about 0.1 GiB" in found
    assert "--recompute-granularity full" in found
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert lines(small, max_tokens_per_gpu=4096, **recompute) == []
    assert lines(None, max_tokens_per_gpu=4096) == []


def test_a_job_on_shared_gpus_says_what_vllm_leaves_and_for_whom() -> None:
    # 80 GiB: 16 are left by default, 2.4 with 0.97, less than two contexts are assumed to take.
    h100 = Machine(on_cuda=True, multiplies_bfloat16=False, room=1 << 40, gpu=80 << 30)
    shared: dict[str, Any] = {"colocate": True, "rollout_engine": "vllm"}
    [told] = lines(h100, **shared)
    assert "vLLM takes 80% of a GPU's 80 GiB" in told and "16.0 GiB are left" in told
    assert "CUDA contexts" in told and "lower it" not in told
    [told] = lines(h100, **shared, vllm_args=("gpu_memory_utilization=0.97",))
    assert "2.4 GiB are left" in told and told.endswith("they take about 4 GiB, so lower it")
    assert lines(h100, **shared, vllm_args=("kv_cache_memory_bytes=1000000000",)) == []
    assert lines(h100, rollout_engine="vllm") == []
