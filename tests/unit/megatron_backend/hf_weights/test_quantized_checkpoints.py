"""Quantized weights are never read as plain numbers, and no tensor of a checkpoint is ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from plugin.cluster.model_source import directory_source
from plugin.config import JobConfig
from plugin.errors import ConfigError, WeightError
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.megatron_backend.model import families
from tests.parallel.tiny_models import FAMILIES, hf_state_dict, tiny_qwen3_moe

pytestmark = pytest.mark.hostile


FLOAT8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [2, 3],
}
NAME = "model.layers.0.mlp.up_proj.weight"


def write(directory: Path, tensors: dict[str, Any], quantization: Any = None) -> Path:
    config = FAMILIES["qwen3"]().to_dict()
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_float8_blocks_are_not_read_without_their_scales(tmp_path: Path) -> None:
    # 3 x 4 weights in blocks of 2 x 3: scales [2, 2]. 448, the largest float8, times 0.0004 is 0.1792.
    weight = torch.tensor([[448.0, -2, 1, 8], [0.5, 448, 3, 8], [448, 1, 2, -448]])
    scales = torch.tensor([[0.0004, 0.5], [0.25, 2.0]])
    stored = {NAME: weight.to(torch.float8_e4m3fn), f"{NAME}_scale_inv": scales}
    read = HfDirectory(write(tmp_path, stored, FLOAT8))
    expected = torch.tensor(
        [
            [448 * 0.0004, -2 * 0.0004, 1 * 0.0004, 8 * 0.5],
            [0.5 * 0.0004, 448 * 0.0004, 3 * 0.0004, 8 * 0.5],
            [448 * 0.25, 1 * 0.25, 2 * 0.25, -448 * 2.0],
        ]
    )
    torch.testing.assert_close(read[NAME], expected, rtol=1e-6, atol=0)
    assert f"{read[NAME][0, 0]:.2f}" == "0.18"
    assert list(read) == [NAME]


def float8(shape: tuple[int, ...] = (3, 4)) -> Any:
    return torch.ones(shape).to(torch.float8_e4m3fn)


SCALES = torch.ones(2, 2)


@pytest.mark.parametrize(
    "tensors, quantization, message",
    [
        ({NAME: float8()}, None, f"{NAME} is stored as F8_E4M3 without {NAME}_scale_inv"),
        ({NAME: float8(), f"{NAME}_scale_inv": SCALES}, None, f"{NAME} is stored as F8_E4M3"),
        ({NAME: float8()}, FLOAT8, f"F8_E4M3 without {NAME}_scale_inv"),
        ({NAME: float8(), f"{NAME}_scale_inv": torch.ones(2, 1)}, FLOAT8, "need [2, 2]"),
        ({NAME: float8((5, 4)), f"{NAME}_scale_inv": SCALES}, FLOAT8, "need [3, 2]"),
        ({NAME: float8(), f"{NAME}_scale_inv": SCALES.int()}, FLOAT8, "with scales I32"),
        ({NAME: torch.ones(3, 4), f"{NAME}_scale_inv": SCALES}, FLOAT8, f"{NAME} is stored as F32"),
        ({f"{NAME}_scale_inv": SCALES}, FLOAT8, f"{NAME}_scale_inv scales a weight that is not there"),
        ({NAME: torch.ones(3, 4).to(torch.float8_e5m2)}, FLOAT8, f"{NAME} is stored as F8_E5M2"),
        ({NAME: torch.ones(3, 4, dtype=torch.int8)}, None, f"{NAME} is stored as I8"),
        ({NAME: torch.ones(3, 4, dtype=torch.uint8)}, None, f"{NAME} is stored as U8"),
        ({NAME: float8()}, FLOAT8 | {"weight_block_size": None}, "of method fp8 (weight_block_size None)"),
        ({NAME: float8()}, FLOAT8 | {"weight_block_size": [128, 0]}, "weight_block_size [128, 0]"),
        ({NAME: torch.ones(3, 4)}, {"quant_method": "gptq", "bits": 4}, "of method gptq"),
        ({NAME: torch.ones(3, 4)}, {"quant_method": "compressed-tensors"}, "of method compressed-tensors"),
    ],
)  # fmt: skip
def test_other_formats_are_not_taken_for_numbers(
    tmp_path: Path, tensors: Any, quantization: Any, message: str
) -> None:
    write(tmp_path, tensors, quantization)
    with pytest.raises(WeightError, match=re.escape(message)) as caught:
        HfDirectory(tmp_path)
    assert "unquantized checkpoint" in str(caught.value)


def whole(**changes: Any) -> dict[str, Any]:
    """The weights of the model that `write` describes, but for `changes` (None: without it)."""
    tensors = hf_state_dict(FAMILIES["qwen3"]()) | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def refusal(directory: Path, tensors: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, WeightError)) as caught:
        directory_source(str(write(directory, tensors)), "--hf-checkpoint", JobConfig())
    return str(caught.value)


def test_the_driver_does_not_start_a_job_with_them(tmp_path: Path) -> None:
    assert f"{NAME} is stored as I8" in refusal(tmp_path, whole(**{NAME: torch.ones(3, 4).char()}))
    bias = "model.layers.0.mlp.up_proj.bias"
    assert f"1 tensors that a qwen3 model of its config.json has no place for, the first of them {bias}" in refusal(tmp_path, whole(**{bias: torch.ones(3)}))  # fmt: skip
    # Names that the family knows, with numbers that this model does not have.
    deeper = "model.layers.4.mlp.up_proj.weight"
    assert f"no place for, the first of them {deeper}" in refusal(tmp_path, whole(**{deeper: torch.ones(3, 4)}))  # fmt: skip
    assert f"lacks 1 tensors of a qwen3 model of its config.json, the first of them {NAME}" in refusal(tmp_path, whole(**{NAME: None}))  # fmt: skip


def test_of_two_files_with_the_same_tensor_none_is_chosen_silently(tmp_path: Path) -> None:
    write(tmp_path, whole())
    save_file({NAME: torch.ones(48, 32)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(WeightError, match=rf"model\.safetensors holds {NAME}, which another file"):
        HfDirectory(tmp_path)


def test_engines_and_saved_models_do_not_inherit_the_quantization(tmp_path: Path) -> None:
    """What they get are the trainer's weights, which are plain."""
    scales = {NAME: float8((48, 32)), f"{NAME}_scale_inv": torch.ones(24, 11)}
    write(tmp_path, whole(**scales), FLOAT8)
    source = directory_source(str(tmp_path), "--hf-checkpoint", JobConfig())
    assert "quantization_config" not in source.hf_config
    assert not hasattr(source.as_config(), "quantization_config")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_a_family_is_unknown_or_missing_in_its_table(family: str) -> None:
    config = FAMILIES[family]()
    if family == "qwen3_moe":
        config = FAMILIES[family](mlp_only_layers=[0])
    names = set(hf_state_dict(config))
    assert names == families.FAMILIES[family].tensor_names(config)
    assert families.FAMILIES[family].misfits(config, names | {"x.rotary_emb.inv_freq"}) == ([], [])


def test_experts_that_the_config_does_not_have_are_not_ignored() -> None:
    names = hf_state_dict(tiny_qwen3_moe())
    few = tiny_qwen3_moe(num_experts=2, mlp_only_layers=[0])
    unknown, missing = families.FAMILIES["qwen3_moe"].misfits(few, names)
    # Layer 0 is dense: its router and 4 experts; layers 1 to 3: experts 2 and 3; 3 tensors each.
    assert len(unknown) == 1 + 4 * 3 + 3 * 2 * 3
    assert missing == [f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "gate", "up")]


def test_a_tied_output_layer_may_be_there_or_not() -> None:
    tied = FAMILIES["llama"](tie_word_embeddings=True)
    names = set(hf_state_dict(tied))
    for held in (names - {"lm_head.weight"}, names | {"lm_head.weight"}):
        assert families.FAMILIES["llama"].misfits(tied, held) == ([], [])
