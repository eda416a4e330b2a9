"""What Megatron-Core is told on CPU, on CUDA, and on CUDA with Transformer Engine."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.errors import ConfigError
from plugin.megatron_backend.model import device_settings
from plugin.megatron_backend.model.builder import transformer_arguments
from plugin.megatron_backend.model.device_settings import (
    capabilities,
    ddp_settings,
    on_this_device,
    set_cuda_environment,
)
from plugin.megatron_backend.model.layout_rules import check_model, with_engine_for
from tests.parallel.tiny_models import (
    tiny_deepseek_v3,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_mistral,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)
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
            device_settings.warn_of_local_layers("libcudnn is not there")
    assert len(caught) == 1 and "RoPE and experts are not fused" in str(caught[0].message)
    assert "(libcudnn is not there)" in str(caught[0].message)


@pytest.fixture
def broken_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA, and a Transformer Engine whose library was built for another torch."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("raise OSError('undefined symbol:\\n _ZN3c105Error')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    before = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.startswith("transformer_engine")
    }
    device_settings._engine_fault.cache_clear()
    device_settings.warn_of_local_layers.cache_clear()
    yield
    device_settings._engine_fault.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(before)


def test_a_transformer_engine_that_cannot_be_imported_is_none_and_the_reason_is_told(
    broken_engine: None,
) -> None:
    found = capabilities()
    assert found.cuda and not found.transformer_engine
    with pytest.warns(
        UserWarning, match=r"cannot be imported here \(OSError: undefined symbol: _ZN3c105Error\)"
    ):
        assert on_this_device(TrainerConfig(), tiny_qwen3()).transformer_impl == "local"
    with pytest.raises(ConfigError, match="undefined symbol: _ZN3c105Error"):
        on_this_device(TrainerConfig(transformer_impl="transformer_engine"), tiny_qwen3())


@pytest.mark.parametrize(
    ("model", "settings", "capability", "because"),
    [
        (tiny_gpt_oss, {}, (9, 0), "sinks of gpt_oss"),
        (tiny_qwen3_next, {}, (9, 0), "gated delta rule of qwen3_next"),
        (tiny_deepseek_v3, {}, (8, 0), "latent attention of deepseek_v3"),
        # 2 groups of queries, which four ranks cannot share
        (
            tiny_mistral,
            {"context_parallel_size": 4},
            (9, 0),
            r"num_query_groups\) .* mistral .* --context-parallel-size 4",
        ),
    ],
)
def test_models_that_transformer_engine_cannot_compute_have_local_layers(
    model: Any, settings: dict[str, Any], capability: tuple[int, int], because: str
) -> None:
    config, found = TrainerConfig(**settings), replace(CUDA, compute_capability=capability)
    decided = with_engine_for(model(), config, found)
    assert on_device(config, decided).transformer_impl == "local"
    asked = TrainerConfig(**settings, transformer_impl="transformer_engine")
    with pytest.raises(ConfigError, match=because):
        on_device(asked, decided)
    if capability == (9, 0):  # what is known on the driver, before anything starts
        with pytest.raises(ConfigError, match=because):
            check_model(model(), asked)


def test_windows_have_ranks_exchange_heads_and_other_models_keys_and_values() -> None:
    two = {"context_parallel_size": 2}
    assert arguments(tiny_mistral(), CUDA, **two)["cp_comm_type"] == "a2a"
    assert arguments(tiny_gemma3(), CUDA, **two)["cp_comm_type"] == "a2a"
    assert arguments(tiny_qwen3(), CUDA, **two)["cp_comm_type"] is None
    assert arguments(tiny_mistral(), CUDA)["cp_comm_type"] is None
    # The local layers have their own way.
    assert arguments(tiny_mistral(), Capabilities(cuda=True), **two)["cp_comm_type"] is None
