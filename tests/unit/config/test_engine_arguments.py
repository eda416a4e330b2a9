"""--vllm-args and --sglang-args: what they mean, and what they may not say."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.config.engines import check_names
from plugin.errors import ConfigError


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("gpu_memory_utilization=0.8 enforce-eager=true",),
         {"gpu_memory_utilization": 0.8, "enforce_eager": True}),
        (('{"compilation_config": {"mode": 0}}', "--block-size=32"),
         {"compilation_config": {"mode": 0}, "block_size": 32}),
        (("kv_cache_dtype=fp8 quantization=none swap_space=4",),
         {"kv_cache_dtype": "fp8", "quantization": None, "swap_space": 4}),
        ((), {}),
    ],
)  # fmt: skip
def test_pairs_and_json_become_typed_arguments(
    texts: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert JobConfig(rollout_engine="vllm", vllm_args=texts).vllm_arguments() == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("block_size",), "holds 'block_size'; expected key=value"),
        (('{"a": 1',), "expected key=value pairs .* or a JSON object"),
        (("a=1", "a=2"), "a is given twice"),
        (("a=1 a=2",), "a is given twice"),
        (('{"a": 1, "a": 2}',), "a is given twice"),
        (('hf_overrides={"vocab_size":9}',), "hf_overrides is set by --hf-checkpoint"),
        (("model=/m",), "model is set by --hf-checkpoint"),
        (("tensor-parallel-size=2",), "tensor_parallel_size is set by --rollout-num-gpus-per-eng"),
        (('{"dtype": "half"}',), "dtype is set by --rollout-dtype"),
        (("seed=3",), "seed is set by --seed"),
        (("load_format=auto",), "load_format is set by the job"),
    ],
)
def test_malformed_and_owned_arguments_are_refused_with_our_flag(
    texts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--vllm-args.*{message}"):
        JobConfig(rollout_engine="vllm", vllm_args=texts)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    check_names("--vllm-args", {"block_size": 1}, {"block_size", "max_num_batched_tokens"})
    with pytest.raises(ConfigError, match="has no argument blok_size; did you mean block_size"):
        check_names("--vllm-args", {"blok_size": 1}, {"block_size", "max_num_batched_tokens"})


def test_arguments_of_another_engine_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="needs --rollout-engine vllm"):
        JobConfig.from_sources({"vllm_args": ["block_size=1"]})


def test_an_engine_on_one_device_refuses_several() -> None:
    with pytest.raises(ConfigError, match="is 2: --rollout-engine transformers runs on one"):
        JobConfig(rollout_num_gpus_per_engine=2)
    assert JobConfig(rollout_engine="vllm", rollout_num_gpus_per_engine=2)
    assert JobConfig(rollout_engine="own.module:fn", rollout_num_gpus_per_engine=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_rollouts": True, "use_tis": True}, "cannot generate while it trains"),
        ({"rollout_engine": "sglang"}, "servers keep their memory"),
        ({"rollout_engine": "vllm_server"}, "servers keep their memory"),
        (
            {
                "rollout_engine": "http",
                "rollout_url": "http://127.0.0.1:1",
                "rollout_weights_dir": "/w",
            },
            "servers keep their memory",
        ),
        ({"weight_sync": "broadcast"}, "NCCL cannot join two processes"),
        ({"colocate_sleep_level": 3}, "is 3; choose 1 or 2"),
    ],
)
def test_devices_are_not_shared_where_it_cannot_work(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(colocate=True, **settings)
    assert JobConfig(colocate=True, rollout_engine="vllm", colocate_sleep_level=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_engine": "sglang"}, "servers load whole tensors"),
        ({"rollout_engine": "vllm_server"}, "only the tensors that changed are written anyway"),
        ({"rollout_engine": "own.module:fn"}, "only the engines transformers and vllm"),
        ({"colocate": True}, "an engine that sleeps has none to apply a delta to"),
        ({"lora_rank": 4, "lora_sync": "adapter"}, "nearly all of whose elements change"),
        ({"rollout_quantization": "int8"}, "does not keep the values that a delta is applied to"),
    ],
)
def test_deltas_are_refused_where_they_would_not_help_or_not_be_exact(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(weight_sync="delta", **settings)


def test_deltas_are_not_chosen_by_themselves_and_full_versions_belong_to_them() -> None:
    assert JobConfig().weight_transport == "broadcast"
    assert JobConfig(rollout_engine="vllm", weight_sync="delta").weight_transport == "delta"
    with pytest.raises(ConfigError, match="--full-weights-every"):
        JobConfig.from_sources({"full_weights_every": 5})
