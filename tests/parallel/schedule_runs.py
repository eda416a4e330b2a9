"""Runs a model through Megatron's stock schedules, for tests of weights and layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend.hf_weights.loading import load_hf_weights
from plugin.megatron_backend.model.builder import build_model, build_optimizer, wrap_with_ddp
from plugin.megatron_backend.parallel_groups import ParallelGroups


def loaded_model(
    hf_config: Any,
    state: dict[str, Tensor],
    groups: ParallelGroups,
    settings: TrainerConfig | None = None,
    **overrides: Any,
) -> list[Any]:
    """Chunks with the given weights, not wrapped; `overrides` go to Megatron's `TransformerConfig`."""
    chunks = build_model(hf_config, settings or TrainerConfig(), groups, **overrides)
    load_hf_weights(chunks, state, groups)
    return chunks


def gathered_log_probs(logits: Tensor, tokens: Tensor, groups: ParallelGroups) -> Tensor:
    """[B, S-1] log-probs of next tokens from this TP rank's `logits` [B, S, V/tp]; no gradient."""
    shards = [torch.empty_like(logits) for _ in range(groups.tp_size)]
    torch.distributed.all_gather(shards, logits.contiguous(), group=groups.tp_group)
    whole = torch.log_softmax(torch.cat(shards, -1)[:, :-1].float(), -1)
    return whole.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def forward_log_probs(
    chunks: Sequence[Any],
    microbatches: Sequence[Tensor],
    groups: ParallelGroups,
    **forward_arguments: Any,
) -> list[Tensor] | None:
    """Log-probs of each microbatch [B, S] through the stock forward-only schedule; last stage only."""

    def forward_step(data: Iterator[Tensor], model: Any, *_: Any) -> Any:
        tokens = next(data)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = model(tokens, positions, None, **forward_arguments)
        collect = lambda out, non_loss_data: gathered_log_probs(out, tokens, groups)  # noqa: E731
        return output, collect

    with torch.no_grad():
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=microbatches[0].shape[1] // groups.cp_size,
            micro_batch_size=microbatches[0].shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
    return results if groups.is_last_stage else None


def train_one_step(
    chunks: Sequence[Any],
    microbatches: Sequence[Tensor],
    groups: ParallelGroups,
    settings: TrainerConfig,
) -> tuple[list[Any], float]:
    """One step of mean next-token cross-entropy with stock DDP, schedule and optimizer.

    Returns the wrapped chunks and the gradient norm.
    """
    wrapped = wrap_with_ddp(chunks, settings, groups)
    optimizer = build_optimizer(wrapped, settings)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads

    def forward_step(data: Iterator[Tensor], model: Any, *_: Any) -> Any:
        tokens = next(data)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        labels = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
        return model(tokens, positions, None, labels=labels), _mean_loss

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in wrapped],
        model=list(wrapped),
        num_microbatches=len(microbatches),
        seq_length=microbatches[0].shape[1],
        micro_batch_size=microbatches[0].shape[0],
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    return list(wrapped), float(grad_norm)


def _mean_loss(token_losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = token_losses[:, :-1].mean()
    return loss, {"loss": loss.detach()}
