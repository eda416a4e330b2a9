"""LoRA adapters in vLLM: how it is started for them, and how a worker gets a version of them.

vLLM reads adapters from PEFT's files, so a worker writes what it has received into a directory of
its own, which is gone when vLLM has read it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

#: The ranks that vLLM makes room for.
_ROOMS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NAME, _NUMBER = "policy", 1


@dataclass(frozen=True)
class AdapterShape:
    """The rank of all adapters, and the alpha of which alpha / rank is their scale."""

    rank: int
    alpha: float

    def start_options(self) -> dict[str, Any]:
        """What vLLM is started with to take one adapter of this rank at a time."""
        room = next((room for room in _ROOMS if room >= self.rank), self.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def request_with_adapters(directory: str = "loaded", *, new: bool = False) -> Any:
    """The `LoRARequest` of the policy's adapters; `new`: read them from `directory`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _NUMBER, directory, load_inplace=new)


def use_adapters(worker: Any, adapters: Mapping[str, Tensor], shape: AdapterShape) -> None:
    """Have one of vLLM's workers compute with `adapters`, which have PEFT's names."""
    targets = {name.split(".")[-3] for name in adapters}
    described = {
        "peft_type": "LORA",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": sorted(targets),
        "bias": "none",
    }
    with tempfile.TemporaryDirectory(prefix="megatron_tis_adapters_") as directory:
        (Path(directory) / "adapter_config.json").write_text(json.dumps(described))
        tensors = {name: tensor.cpu() for name, tensor in adapters.items()}
        safetensors.torch.save_file(tensors, Path(directory) / "adapter_model.safetensors")
        worker.add_lora(request_with_adapters(directory, new=True))
