"""`--max-tokens-per-gpu auto`: how many tokens a microbatch may have on this hardware.

Estimated from the total memory and not from what is free at the moment, so that a resumed job cuts
the same microbatches. `megatron-tis plan` computes a job's real peak.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plugin.config import TrainerConfig

if TYPE_CHECKING:
    from plugin.megatron_backend.parallel_groups import ParallelGroups

SATURATING_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens beyond which a larger microbatch multiplies no faster, by device type."""

_MEMORY_SHARE = 0.5
"""Of what weights and optimizer leave: the rest is for other models, buffers and fragmentation."""


def token_budget(fitting: int, device_type: str, longest: int = 0) -> int:
    """Tokens of a microbatch, of which `fitting` fit into memory.

    longest: tokens of the longest sample; one that fits shares its microbatch with shorter ones
    """
    return min(fitting, max(SATURATING_TOKENS[device_type], longest))


def fitting_tokens(
    chunks: list[Any],
    hf_config: Any,
    config: TrainerConfig,
    groups: ParallelGroups,
    device: torch.device,
) -> int:
    """Tokens of a microbatch that fit into memory on every rank; a collective."""
    room = _rank_memory(device) - static_bytes(chunks, config, groups)
    least = torch.tensor(tokens_in(room, hf_config, config), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def tokens_in(room: int, hf_config: Any, config: TrainerConfig) -> int:
    """Tokens whose activations fit into `room` bytes: a power of two, at least 256."""
    tokens = int(_MEMORY_SHARE * max(0, room) / activation_bytes_per_token(hf_config, config))
    return 1 << max(8, tokens.bit_length() - 1)


def activation_bytes_per_token(hf_config: Any, config: TrainerConfig) -> int:
    """What a rank keeps of a token between forward and backward.

    The first pipeline stage holds as many microbatches as there are stages, so the layers of all
    stages count. The LM head works in chunks of fixed size.
    """
    from plugin.megatron_backend.model.families import family_of

    model = family_of(hf_config).transformer_arguments(hf_config)
    tp = config.tensor_model_parallel_size
    hidden = model["hidden_size"] / (tp if config.sequence_parallel else 1)
    heads = model["num_attention_heads"]
    head = model.get("kv_channels") or model["hidden_size"] // heads
    queries, keys = heads * head / tp, (model.get("num_query_groups") or heads) * head / tp
    ffn = model["ffn_hidden_size"] / tp
    if model.get("num_moe_experts"):
        shared = model.get("moe_shared_expert_intermediate_size") or 0
        ffn = (model["moe_ffn_hidden_size"] * model["moe_router_topk"] + shared) / tp
    # Norms and residuals; q, k, v before and after RoPE and by sample, the context; gate, up,
    # activation and product.
    layer = 10 * hidden + 3 * (queries + 2 * keys) + 2 * queries + 4 * ffn
    kept = model["num_layers"] * layer
    if config.recompute_granularity == "full":
        kept = model["num_layers"] * hidden + layer
    return int(kept * (4 if config.train_dtype == "float32" else 2))


def static_bytes(chunks: list[Any], config: TrainerConfig, groups: ParallelGroups) -> int:
    """Weights, float32 gradients and optimizer state of this rank after the first step."""
    total = 0.0
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        size: float = parameter.element_size()
        if parameter.requires_grad:
            cut = groups.dp_size if config.use_distributed_optimizer else 1
            size += 4 + config.state_bytes(half=size < 4) / cut
        total += parameter.numel() * size
    return int(total)


def _rank_memory(device: torch.device) -> int:
    """Bytes of this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
