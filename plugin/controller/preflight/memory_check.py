"""What a checkpoint's shapes alone tell within a second: the least that a rank must hold.

A lower bound: weights, gradients and optimizer state of the mean rank, no activations. A job that
is refused here cannot run; one that passes may still be too large, which `megatron-tis plan` says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.errors import ConfigError
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.megatron_backend.model.families import is_extra_layer


@dataclass(frozen=True)
class LeastBytes:
    """Bytes of the mean rank between steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of a whole model: in experts, which are cut by expert ranks, and elsewhere."""

    dense: int
    experts: int


def count_weights(shapes: Mapping[str, Sequence[int]]) -> WeightCounts:
    """Numbers of the tensors with these names and shapes."""
    dense = experts = 0
    for name, shape in shapes.items():
        if ".experts." in name:
            experts += math.prod(shape)
        else:
            dense += math.prod(shape)
    return WeightCounts(dense, experts)


def least_bytes(counts: WeightCounts, config: JobConfig, *, on_cuda: bool) -> LeastBytes:
    """The least that a rank of the job holds of a model with these weights."""
    config = on_device(config, Capabilities(cuda=on_cuda, transformer_engine=on_cuda))
    stage = config.world_size // config.pipeline_model_parallel_size
    parameters = gradients = optimizer = 0.0
    for numbers, cut in (
        (counts.dense, config.tensor_model_parallel_size),
        (counts.experts, config.expert_model_parallel_size * config.expert_tensor_parallel_size),
    ):
        held = numbers / (cut * config.pipeline_model_parallel_size)
        copies = stage / cut if config.use_distributed_optimizer else 1
        half = config.train_dtype != "float32"
        parameters += held * (2 if half else 4)
        if config.lora_rank:
            continue  # adapters are small beside the model, which has neither of these
        gradients += held * 4
        # two moments, and the main weights of half-precision ones
        optimizer += held * (12 if half else 8) / copies
    return LeastBytes(int(parameters), int(gradients), int(optimizer))


def refuse_what_cannot_fit(least: LeastBytes, memory: int, where: str) -> None:
    """Raise a `ConfigError` with the numbers if a rank's least does not fit into `memory` bytes."""
    if least.total <= memory:
        return
    gib = {
        name: f"{value / 2**30:.1f}"
        for name, value in (*vars(least).items(), ("total", least.total), ("memory", memory))
    }
    raise ConfigError(
        f"a rank holds at least {gib['total']} GiB ({gib['parameters']} of weights, "
        f"{gib['gradients']} of gradients, {gib['optimizer']} of optimizer state), and there are "
        f"{gib['memory']} GiB {where}; use more ranks with --use-distributed-optimizer, or raise "
        "--tensor-model-parallel-size, --pipeline-model-parallel-size or "
        "--expert-model-parallel-size; megatron-tis plan shows what each would save"
    )


def check_memory(config: JobConfig, policy: ModelSource) -> int | None:
    """Bytes of a rank that weights, gradients and optimizer state leave; refuses less than 0.

    None where this machine does not tell: for the built-in model, and on a cluster.
    """
    if policy.directory is None or config.address is not None:
        return None
    on_cuda = torch.cuda.is_available()
    described = SimpleNamespace(**policy.hf_config)
    tied = {"lm_head.weight"} if policy.hf_config.get("tie_word_embeddings") else set()
    shapes = {
        name: shape
        for name, shape in HfDirectory(Path(policy.directory)).shapes().items()
        if name not in tied and not is_extra_layer(name, described)
    }
    least = least_bytes(count_weights(shapes), config, on_cuda=on_cuda)
    if on_cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
        refuse_what_cannot_fit(least, memory, "on its GPU")
        return memory - least.total
    ranks = config.ranks_per_node
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    refuse_what_cannot_fit(least, memory, f"of this machine's memory for each of its {ranks} ranks")
    return memory - least.total
