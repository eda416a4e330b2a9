"""What this process's device can do, and the settings of Megatron-Core that follow from it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, cuda_environment, on_device
from plugin.megatron_backend.model.layout_rules import context_exchange, with_engine_for

Config = TypeVar("Config", bound=TrainerConfig)


def capabilities() -> Capabilities:
    """What this process finds: CUDA and the packages that need it."""
    cuda = torch.cuda.is_available()
    fault = _engine_fault() if cuda else None
    return Capabilities(
        cuda=cuda,
        transformer_engine=cuda and fault is None,
        compute_capability=torch.cuda.get_device_capability() if cuda else None,
        no_engine_because=fault,
        gradient_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


@cache
def _engine_fault() -> str | None:
    """Why Transformer Engine cannot be used here; None if it can.

    It is a package of three parts that are built for one version of torch and of CUDA: that it is
    there says little.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        return f"transformer_engine cannot be imported here ({type(error).__name__}: {reason})"
    return None


def on_this_device(config: Config, hf_config: Any) -> Config:
    """The configuration with `auto` and unset flags decided for this process and this model."""
    found = with_engine_for(hf_config, config, capabilities())
    decided = on_device(config, found)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    could = found.cuda and config.transformer_impl == "auto" and decided.train_dtype != "float32"
    if could and decided.transformer_impl == "local" and is_first:
        warn_of_local_layers(found.no_engine_because or "it is not installed")
    return decided


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
        # APEX's kernel; Transformer Engine's layers have one of their own.
        "gradient_accumulation_fusion": bool(config.gradient_accumulation_fusion)
        and found.gradient_fusion,
        "masked_softmax_fusion": False,
        # Megatron fuses SwiGLU; other gates are computed by their function
        "bias_activation_fusion": found.cuda and model["activation_func"] is F.silu,
        "bias_dropout_fusion": found.cuda,
        "persist_layer_norm": engine,
        # Unfused, RoPE of packed rows waits for the device to learn their lengths, in every layer.
        "apply_rope_fusion": engine and fuses_rope,
        "cp_comm_type": context_exchange(config, model) if engine else None,
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
def warn_of_local_layers(because: str) -> None:
    """Warn of what a CUDA run without Transformer Engine's layers loses."""
    warnings.warn(
        f"the trainer runs on CUDA without Transformer Engine's layers ({because}): attention is "
        "computed by torch in batches of samples, and norms, RoPE and experts are not fused; make "
        "venv-gpu installs it",
        stacklevel=3,
    )
