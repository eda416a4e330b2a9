"""Shape-only versions of modules and kernels that need data, or that only a GPU runs.

They replace single methods of one built model and its optimizer; no class is patched. Shapes and
bytes stay those of a real rank: routes are even, messages of other ranks look like this rank's own,
attention keeps what a flash kernel keeps. `use_gpu_kernels` also lets norms and activations keep
what fused kernels keep: formulas, not measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.tools.plan.meta_mode import MetaMode


class _FlashAttention(torch.autograd.Function):
    """Keeps query, key, value, output and one number per row, as every flash kernel does.

    ring: ranks whose keys and values the queries meet one after the other
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: int = 1) -> Tensor:
        # [B, n, S, d]; kernels write [B, S, n, d]
        output = query.new_empty(
            (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        ).transpose(1, 2)
        rows = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        ctx.ring = ring
        # Scores; weighted values.
        _count_attention(query, key, ring, query.shape[3] + value.shape[3])
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, _, _ = ctx.saved_tensors
        # Scores again, gradients of queries and keys; of weights and values.
        _count_attention(query, key, ctx.ring, 3 * query.shape[3] + 2 * value.shape[3])
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _count_attention(query: Tensor, key: Tensor, ring: int, width: int) -> None:
    """Count products over all pairs of a row; `StageRun` knows which share of the pairs exists."""
    mode = MetaMode.active
    if mode is not None:
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * ring
        mode.attention_flops += 2 * pairs * width


class _FusedNorm(torch.autograd.Function):
    """Keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@functools.cache
def even_routes(tokens: int, experts: int, topk: int) -> Tensor:
    """[tokens, topk] distinct experts of each token; all experts get the same number of tokens."""
    first = torch.arange(tokens) * topk % experts
    return (first[:, None] + torch.arange(topk)) % experts


@functools.cache
def _even_map(tokens: int, experts: int, topk: int) -> Tensor:
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    return chosen.scatter_(1, even_routes(tokens, experts, topk), True)


def use_meta_kernels(chunks: Sequence[Any], optimizer: Any) -> None:
    """Make routers, attention and optimizer of a built rank work without data."""
    from megatron.core.transformer.moe.router import TopKRouter

    from plugin.megatron_backend.model.local_layers import LocalCoreAttention

    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter):
            module.routing = _even_routing(module)
        elif isinstance(module, LocalCoreAttention):
            module.__dict__["forward"] = _row_attention(module)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "_unscale_main_grads_and_check_for_nan"):
            part._unscale_main_grads_and_check_for_nan = partial(_agree_all_finite, part)
        if hasattr(part, "has_grad_norm_group"):
            part.has_grad_norm_group = partial(_no_grad_norm_group, part.has_grad_norm_group)


def _even_routing(router: Any) -> Any:
    route = router.routing

    def evenly(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = route(logits, *args, **kwargs)
        return weights, _even_map(chosen.shape[0], chosen.shape[1], router.topk)

    return evenly


def _agree_all_finite(optimizer: Any) -> bool:
    # As in Megatron: ranks agree on one number.
    group = optimizer.get_grad_stats_parallel_group()
    dist.all_reduce(optimizer.found_inf, op=dist.ReduceOp.MAX, group=group)
    return False


def _no_grad_norm_group(ask: Any, grad_norm_group: str) -> bool:
    """Megatron-Core 0.19 asks all ranks once whether a parameter has a gradient norm of its own."""
    ask(grad_norm_group)
    return False


def use_gpu_kernels(chunks: Sequence[Any]) -> None:
    """Make layers save what GPU kernels save: flash attention, fused norm and SwiGLU."""
    from plugin.megatron_backend.model.local_layers import (
        LocalCoreAttention,
        SequenceParallelRMSNorm,
    )

    for chunk in chunks:
        chunk.config.bias_activation_fusion = (
            chunk.config.activation_func is torch.nn.functional.silu
        )
        for module in chunk.modules():
            if isinstance(module, LocalCoreAttention):
                module.__dict__["forward"] = _ring_attention(module)
            elif isinstance(module, SequenceParallelRMSNorm):
                module.__dict__["forward"] = _norm_of(module)


def _norm_of(module: Any) -> Any:
    return lambda x: _FusedNorm.apply(x, module.weight)


def _row_attention(module: Any) -> Any:
    """Attention over all pairs of a row, after keys and values of its other parts are gathered."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if module.cp_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(x, group=module.cp_group) for x in (key, value)
            )
        return _flash_attention(query, key, value, 1)

    return forward


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, ring: int) -> Tensor:
    """[S, B, n, d] -> [S, B, n * d]; latent attention drops B = 1."""
    if query.dim() == 3:
        query, key, value = (x[:, None] for x in (query, key, value))
    parts = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return _FlashAttention.apply(*parts, ring).permute(2, 0, 1, 3).flatten(2)


def _ring_attention(module: Any) -> Any:
    group = module.cp_group

    class Ring(torch.autograd.Function):
        """Keys and values pass every rank of the ring, and in the backward pass their gradients."""

        @staticmethod
        def forward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            _pass_around((key, value), 1)
            return key.view_as(key), value.view_as(value)

        @staticmethod
        def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            _pass_around((key, value), 2)
            return key, value

    def _pass_around(tensors: tuple[Tensor, Tensor], times: int) -> None:
        for _ in range(times * (group.size() - 1)):
            group.send([torch.cat([t.reshape(-1) for t in tensors])], 0)

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if group.size() > 1:
            key, value = Ring.apply(key, value)
        return _flash_attention(query, key, value, group.size())

    return forward
