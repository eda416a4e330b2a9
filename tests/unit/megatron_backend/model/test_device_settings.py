"""What Megatron-Core is told on CPU, on CUDA, and on CUDA with Transformer Engine."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.megatron_backend.model import device_settings
from plugin.megatron_backend.model.builder import transformer_arguments
from plugin.megatron_backend.model.device_settings import ddp_settings, set_cuda_environment
from tests.parallel.tiny_models import tiny_qwen3, tiny_qwen3_moe
from tests.unit.megatron_backend.rank_places import place

CUDA = Capabilities(cuda=True, transformer_engine=True, gradient_fusion=True)
FUSIONS = (
    *("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion"),
    *("moe_grouped_gemm", "bias_activation_fusion"),
)


def arguments(hf_config: Any, found: Capabilities, **settings: Any) -> dict[str, Any]:
    return transformer_arguments(hf_config, TrainerConfig(**settings), place(), found)


def fusions(hf_config: Any, found: Capabilities, **settings: Any) -> tuple[Any, ...]:
    chosen = arguments(hf_config, found, **settings)
    return tuple(chosen[name] for name in FUSIONS)


def test_a_moe_model_on_cuda_has_every_fusion_and_one_on_cpu_none() -> None:
    assert fusions(tiny_qwen3_moe(), CUDA) == (True, True, True, True, True)
    assert fusions(tiny_qwen3_moe(), Capabilities()) == (False,) * 5
    assert fusions(tiny_qwen3(), CUDA) == (True, True, False, False, True)


def test_fusions_of_packages_that_are_missing_are_off() -> None:
    assert fusions(tiny_qwen3_moe(), Capabilities(cuda=True)) == (False,) * 4 + (True,)
    without_apex = Capabilities(cuda=True, transformer_engine=True)
    assert fusions(tiny_qwen3_moe(), without_apex) == (False, True, True, True, True)


def test_a_rope_that_the_fused_kernel_would_ignore_a_part_of_is_not_fused() -> None:
    # The kernel for packed rows takes neither YaRN's factor on cosine and sine nor interleaved pairs.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled = tiny_qwen3(rope_parameters={**yarn, "rope_theta": 1e4})
    assert arguments(scaled, CUDA)["apply_rope_fusion"] is False
    assert arguments(tiny_qwen3(), CUDA)["apply_rope_fusion"] is True


def test_weights_are_bfloat16_on_cuda_and_gradients_are_reduced_in_float32() -> None:
    assert arguments(tiny_qwen3(), CUDA)["bf16"] is True
    assert arguments(tiny_qwen3(), Capabilities())["bf16"] is False
    everything = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    assert ddp_settings(on_device(TrainerConfig(), CUDA)) == everything


def test_the_environment_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    set_cuda_environment(TrainerConfig(tensor_model_parallel_size=2))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_a_run_without_transformer_engine_says_once_what_it_loses() -> None:
    device_settings.warn_of_local_layers.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            device_settings.warn_of_local_layers()
    assert len(caught) == 1 and "RoPE and experts are not fused" in str(caught[0].message)
