"""The tensors of a Hugging Face checkpoint by name; no Megatron is imported.

Of the quantized formats, float8 with one scale per block of the weight is read (`quant_method` fp8
with `weight_block_size`: DeepSeek-V3, Qwen3-FP8). Everything else that is not a plain weight of the
model is an error that names it: read as plain numbers, quantized weights would train a wrong model.

Most families' checkpoints hold one tensor per expert; transformers 5 models in memory hold one per
layer, and gpt-oss has one per layer in both. Megatron numbers its experts, so both forms are
converted to and from numbered ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plugin.errors import WeightError
from plugin.json_lines import read_settings, require_file

_PLAIN = {"F64", "F32", "F16", "BF16"}
_FLOAT8, _SCALE = "F8_E4M3", "_scale_inv"
_FIX = "give the model's unquantized checkpoint, or one in block-wise float8"
_FUSED = re.compile(r"(.+\.mlp\.experts)\.([a-z]\w*)$")
_NUMBERED = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)$")


def open_weights(file: Path) -> Any:
    """An open safetensors file; reads its header, which also shows whether it is whole."""
    try:
        require_file(file)
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"{file} is not a whole safetensors file ({error}); copy or download it again"
        ) from error


class HfDirectory(Mapping[str, Tensor]):
    """The weights of a Hugging Face directory by name; checked when it is opened."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise WeightError(
                f"{directory} is not a directory; pass a local Hugging Face model directory"
            )
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightError(
                f"{directory} holds no *.safetensors file; convert the model with "
                "save_pretrained(safe_serialization=True)"
            )
        held: dict[str, Any] = {}
        for path in files:
            file = open_weights(path)
            names = set(file.keys())
            if twice := sorted(names & held.keys()):
                raise WeightError(
                    f"{path} holds {twice[0]}, which another file beside it holds as well; delete "
                    "the file that is not of this model"
                )
            held |= dict.fromkeys(names, file)
        self._directory = directory
        self._block = _block_size(directory)
        self._scales = {name: file for name, file in held.items() if name.endswith(_SCALE)}
        self._file_of = {name: file for name, file in held.items() if name not in self._scales}
        for name in self._file_of:
            self._check_format(name)
        for scale in self._scales:
            if scale.removesuffix(_SCALE) not in self._file_of:
                raise WeightError(f"{directory}: {scale} scales a weight that is not there; {_FIX}")

    def _check_format(self, name: str) -> None:
        stored = self._file_of[name].get_slice(name)
        kind, where = stored.get_dtype(), f"{self._directory}: {name} is stored as"
        scale = self._scales.get(name + _SCALE)
        if kind in _PLAIN and scale is None:
            return
        if kind != _FLOAT8 or scale is None or self._block is None:
            lacks = "" if kind != _FLOAT8 or scale is not None else f" without {name}{_SCALE}"
            raise WeightError(
                f"{where} {kind}{lacks}; weights are read from {', '.join(sorted(_PLAIN))} or "
                f"from {_FLOAT8} with scales per block that quantization_config describes; {_FIX}"
            )
        shape, of_scale = stored.get_shape(), scale.get_slice(name + _SCALE)
        blocks = [-(-size // block) for size, block in zip(shape, self._block, strict=False)]
        if len(shape) != 2 or of_scale.get_shape() != blocks or of_scale.get_dtype() not in _PLAIN:
            raise WeightError(
                f"{where} {kind} {shape} with scales {of_scale.get_dtype()} "
                f"{of_scale.get_shape()}; blocks of {self._block} need {blocks}; {_FIX}"
            )

    def shapes(self) -> dict[str, list[int]]:
        """Shapes by name, from the files' headers."""
        return {n: list(file.get_slice(n).get_shape()) for n, file in self._file_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        stored = self._file_of[name].get_tensor(name)
        scale = self._scales.get(name + _SCALE)
        if scale is None or self._block is None:
            return stored
        return dequantized(stored, scale.get_tensor(name + _SCALE), self._block)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def dequantized(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [rows, columns] of a weight whose blocks [block] are multiplied by `scale` each."""
    rows, columns = weight.shape
    by_row = scale.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]


def _block_size(directory: Path) -> tuple[int, int] | None:
    """The blocks of a float8 checkpoint; None of one that is not quantized."""
    file = directory / "config.json"
    try:
        config = json.loads(read_settings(file)) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(f"{file} cannot be read ({error}); copy or download it again") from error
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    if settings is None:
        return None
    found = settings if isinstance(settings, dict) else {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    sizes = [n for n in block if isinstance(n, int) and n > 0] if isinstance(block, list) else []
    if method != "fp8" or len(sizes) != 2:
        raise WeightError(
            f"{file} has a quantization_config of method {method} (weight_block_size {block}), "
            f"which is not read; {_FIX} (quant_method fp8 with weight_block_size)"
        )
    return sizes[0], sizes[1]


def split_by_expert(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the fused expert tensors of transformers 5 models split by expert."""
    tensors = dict(source)
    for fused in [name for name in tensors if name.endswith(".mlp.experts.gate_up_proj")]:
        prefix = fused.removesuffix(".gate_up_proj")
        gate_up = tensors.pop(fused)  # [experts, 2 * ffn, hidden]
        down = tensors.pop(f"{prefix}.down_proj")  # [experts, hidden, ffn]
        for expert in range(gate_up.shape[0]):
            gate, up = gate_up[expert].chunk(2)
            tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
            tensors[f"{prefix}.{expert}.up_proj.weight"] = up
            tensors[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
    return tensors


def numbered_experts(name: str, num_experts: int) -> list[str]:
    """The names under which `ExpertsByNumber` has the experts of a fused tensor; others as is."""
    match = _FUSED.match(name)
    if match is None:
        return [name]
    return [f"{match.group(1)}.{number}.{match.group(2)}" for number in range(num_experts)]


class ExpertsByNumber(Mapping[str, Tensor]):
    """Weights with fused experts, from which `...experts.3.down_proj` can be taken as well.

    The last fused tensor is kept: a layer's experts are read one after the other.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._kept: dict[str, tuple[str, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        match = _NUMBERED.match(name)
        if match is None:
            return self._weights[name]
        prefix, number, part = match.groups()
        fused, kept = f"{prefix}.{part}", self._kept.get(part)
        if kept is None or kept[0] != fused:
            kept = self._kept[part] = (fused, self._weights[fused])
        return kept[1][int(number)]

    def __contains__(self, name: object) -> bool:
        match = _NUMBERED.match(str(name))
        return (f"{match.group(1)}.{match.group(3)}" if match else name) in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def joined_experts(
    tensors: Iterable[tuple[str, Tensor]], num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """Numbered experts stacked into one tensor once a layer has all; others as they are."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = _NUMBERED.match(name)
        if match is None:
            yield name, tensor
            continue
        fused = f"{match.group(1)}.{match.group(3)}"
        experts = waiting.setdefault(fused, {})
        experts[int(match.group(2))] = tensor
        if len(experts) == num_experts:
            yield fused, torch.stack([experts[number] for number in range(num_experts)])
            del waiting[fused]
