"""What a job says about flags that run, but that an expert would not give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.controller.preflight.advice import Machine, advice
from plugin.controller.preflight.resource_checks import Room

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
PLENTY = Room(memory=1 << 40, rank=1 << 40, engine=1 << 40, weights=0)
ROOMY = Machine(on_cuda=False, multiplies_bfloat16=False, room=PLENTY)


def lines(machine: Machine | None = ROOMY, **flags: Any) -> list[str]:
    config = JobConfig.from_sources({"hf_checkpoint": "model", **flags})
    return advice(config, ModelSource(SHAPE, "model"), machine)


def test_defaults_and_the_built_in_model_need_no_advice() -> None:
    assert lines() == []
    built_in = JobConfig.from_sources({"micro_batch_size": 1, "lr": 3e-3})
    nothing = Room(memory=0, rank=0, engine=0, weights=0)
    native = Machine(on_cuda=False, multiplies_bfloat16=True, room=nothing)
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
    native = Machine(on_cuda=False, multiplies_bfloat16=True, room=PLENTY)
    (found,) = lines(native)
    assert found.startswith("--train-dtype auto: float32")
    assert lines(native, train_dtype="float32") == []


def test_activations_that_do_not_fit_ask_for_recompute_once() -> None:
    # 3 layers of 1,664 float32 numbers (see test_token_budget): 4,096 tokens have 78 MiB.
    room = replace(PLENTY, rank=70 << 20)
    small = Machine(on_cuda=False, multiplies_bfloat16=False, room=room)
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
    h100 = Machine(True, False, replace(PLENTY, memory=80 << 30))
    shared: dict[str, Any] = {"colocate": True, "rollout_engine": "vllm"}
    [told] = lines(h100, **shared)
    assert "vLLM takes 80% of a GPU's 80 GiB" in told and "16.0 GiB are left" in told
    assert "CUDA contexts" in told and "lower it" not in told
    [told] = lines(h100, **shared, vllm_args=("gpu_memory_utilization=0.97",))
    assert "2.4 GiB are left" in told and told.endswith("they take about 4 GiB, so lower it")
    assert lines(h100, **shared, vllm_args=("kv_cache_memory_bytes=1000000000",)) == []
    assert lines(h100, rollout_engine="vllm") == []


#: 2 (keys, values) x 3 layers x 2 heads x 16 channels x 4 bytes = 768 bytes per token.
LONG = {"max_prompt_length": 24, "max_response_length": 1000, "rollout_batch_size": 4}
ROW = 768 * 1024


def with_room(rows: float, **room: int) -> Machine:
    """A machine whose engines have room for so many responses of 1,024 tokens."""
    return Machine(False, False, replace(PLENTY, engine=int(rows * ROW), **room))


def test_an_engine_without_room_for_its_responses_says_how_many_fit() -> None:
    assert lines(with_room(32), **LONG, n_samples_per_prompt=8) == []
    (found,) = lines(with_room(31.5), **LONG, n_samples_per_prompt=8)
    assert found.startswith("the keys and values of 32 responses of up to 1024 tokens have 0.0 GiB")
    assert found.endswith("lower --rollout-max-batch to 31")
    # Two engines have 16 each, and a batch of 31 is never larger.
    assert lines(with_room(31.5), **LONG, n_samples_per_prompt=8, num_rollout_engines=2) == []
    assert lines(with_room(31.5), **LONG, n_samples_per_prompt=8, rollout_max_batch=31) == []
    # Asynchronous engines may have as many as they take.
    flags = {"async_rollouts": True, "use_tis": True}
    (found,) = lines(with_room(255), **LONG, n_samples_per_prompt=8, **flags)
    assert "256 responses" in found and found.endswith("--rollout-max-batch to 255")


def test_what_vllm_reserves_is_held_against_what_is_left_and_what_is_asked() -> None:
    vllm = {**LONG, "rollout_engine": "vllm", "n_samples_per_prompt": 8}
    # By itself 256 rows of 4,096 positions, 768 MiB, of which it has 4 GiB at most.
    assert lines(with_room(2048), **vllm) == []
    (found,) = lines(with_room(512), **vllm)
    assert found.startswith("vLLM takes 0.8 GiB for keys and values, and the ranks and its weights")
    assert found.endswith("leave 0.4 GiB; lower --vllm-args kv_cache_memory_bytes")
    few = {"vllm_args": (f"kv_cache_memory_bytes={31 * ROW}",)}
    (found,) = lines(with_room(2048), **vllm, **few)
    assert found.endswith(
        "raise --vllm-args kv_cache_memory_bytes, or lower --rollout-max-batch to 31"
    )
    # A share is of all of the machine's memory, whoever has it, and includes vLLM's weights.
    half, room = {"vllm_args": ("gpu_memory_utilization=0.5",)}, {"memory": 1024 * ROW}
    assert lines(with_room(512 - 7, **room, weights=7 * ROW), **vllm, **half) == []
    (found,) = lines(with_room(512 - 8, **room, weights=7 * ROW), **vllm, **half)
    assert found.endswith("lower --vllm-args gpu_memory_utilization")


def test_bfloat16_is_advised_only_where_float32_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = {"avx512_f": True, "avx512_bf16": True}
    for name, faster in (("Intel(R) Xeon(R)", True), ("AMD EPYC", False)):
        found = instructions | {"cpu_name": name}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert Machine.here(PLENTY).multiplies_bfloat16 is faster
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not Machine.here(PLENTY).multiplies_bfloat16
