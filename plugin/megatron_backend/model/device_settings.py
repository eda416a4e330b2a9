"""What this process's device can do, and the settings of Megatron-Core that follow from it."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, cuda_environment, on_device

Config = TypeVar("Config", bound=TrainerConfig)


def capabilities() -> Capabilities:
    """What this process finds: CUDA and the packages that need it."""
    return Capabilities(
        cuda=torch.cuda.is_available(),
        transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
        gradient_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


def on_this_device(config: Config) -> Config:
    """The configuration with `auto` and unset flags decided for this process."""
    return on_device(config, capabilities())


def transformer_settings(
    config: TrainerConfig, found: Capabilities, model: Mapping[str, Any], *, fuses_rope: bool
) -> dict[str, Any]:
    """Arguments of Megatron's `TransformerConfig` that depend on the device.

    config: as `on_device` returns it; model: the arguments that the model family decides
    fuses_rope: whether the fused kernel computes the model's RoPE; it ignores what it lacks
    """
    engine = config.transformer_impl == "transformer_engine"
    moe = "num_moe_experts" in model
    return {
        # gloo matches batched messages of one pair of ranks in posting order, which mixes up the
        # two directions that the interleaved schedule exchanges at once
        "batch_p2p_comm": found.cuda,
        "use_cpu_initialization": not found.cuda,
        "gradient_accumulation_fusion": found.cuda and found.gradient_fusion,
        "masked_softmax_fusion": False,
        # Megatron fuses SwiGLU; other gates are computed by their function
        "bias_activation_fusion": found.cuda and model["activation_func"] is F.silu,
        "bias_dropout_fusion": found.cuda,
        "persist_layer_norm": engine,
        # Unfused, RoPE of packed rows waits for the device to learn their lengths, in every layer.
        "apply_rope_fusion": engine and fuses_rope,
        "moe_grouped_gemm": engine and moe,
        "moe_permute_fusion": engine and moe,
        "fp8": config.fp8,
        "fp8_recipe": config.fp8_recipe,
    }


def ddp_settings(config: TrainerConfig) -> dict[str, bool]:
    """Arguments of Megatron's `DistributedDataParallelConfig`.

    config: as `on_device` returns it
    """
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": bool(config.use_distributed_optimizer),
        "overlap_grad_reduce": bool(config.overlap_grad_reduce),
        "overlap_param_gather": bool(config.overlap_param_gather),
    }


def set_cuda_environment(config: TrainerConfig) -> None:
    """Set the variables that CUDA and its allocator read at start; the user's values stay."""
    for name, value in cuda_environment(config).items():
        os.environ.setdefault(name, value)


@cache
def warn_of_local_layers() -> None:
    """Warn of what a CUDA run without Transformer Engine's layers loses."""
    warnings.warn(
        "the trainer runs on CUDA without Transformer Engine's layers: attention is computed by "
        "torch in batches of samples, and norms, RoPE and experts are not fused. Install it "
        "(make venv-gpu) and use --train-dtype bfloat16",
        stacklevel=3,
    )
