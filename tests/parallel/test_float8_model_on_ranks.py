"""A float8 checkpoint in the trainer is the model it stands for, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import WeightError
from plugin.megatron_backend.hf_weights.export import export_hf_weights
from plugin.megatron_backend.hf_weights.loading import load_hf_weights
from plugin.megatron_backend.model.builder import build_model
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.rank_pool import RankError
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3

pytestmark = pytest.mark.hostile


BLOCK = 12  # divides none of the tiny model's sizes


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float8 values, scales per block, and the float32 weight that both stand for."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    values, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = values[part].float() * scales[i, j]
    return values, scales, meant


def round_trip(groups: ParallelGroups, config: Any, source: Any) -> dict[str, Tensor]:
    chunks = build_model(config, TrainerConfig(), groups)
    load_hf_weights(chunks, source, groups)
    return {name: tensor.clone() for name, tensor in export_hf_weights(chunks, groups)}


def test_float8_weights_do_not_load_as_their_codes(run_ranks: Any, tmp_path: Path) -> None:
    config = tiny_qwen3()
    state = hf_state_dict(config)
    stored, expected = dict(state), dict(state)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        stored[name], stored[f"{name}_scale_inv"], expected[name] = quantized(state[name])
    save_file(stored, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    described = config.to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(described))
    for exported in run_ranks(round_trip, 2, config, str(tmp_path), tensor_model_parallel_size=2):
        assert exported.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(exported[name], tensor, rtol=0, atol=0)
            torch.testing.assert_close(exported[name], state[name], rtol=0.07, atol=0.02)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}, "holds model.layers.1.self_attn"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight is torch.int8"),
    ],
)  # fmt: skip
def test_a_state_dict_of_codes_or_of_another_model_does_not_load(
    run_ranks: Any, extra: dict[str, Tensor], message: str
) -> None:
    config = tiny_qwen3()
    with pytest.raises(RankError) as failure:
        run_ranks(round_trip, 1, config, hf_state_dict(config) | extra)
    assert isinstance(failure.value.__cause__, WeightError)
    assert message in str(failure.value.__cause__)
