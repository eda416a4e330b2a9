"""Log-probs of the response tokens: through logits, or fused with the LM head.

Fused, the model's output layer is skipped and its weight is multiplied with the hidden states in
`plugin.logprobs.fused_lm_head`, only for the rows that carry loss; no [T, V] logits exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.logprobs.fused_lm_head import fused_lm_head_pays, fused_log_probs_of_ids
from plugin.logprobs.row_ids import fused_top_ids, top_ids
from plugin.logprobs.vocab_parallel import at_rows, log_probs_of_ids
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.megatron_backend.step.sequence_packing import ModelInputs
from plugin.ragged import Ragged

#: Logits beyond this size are never materialized when the fused head may be used.
LOGITS_LIMIT_BYTES = 2 << 30


def use_fused_head(
    config: TrainerConfig,
    model: Any,
    inputs: ModelInputs,
    rows: Tensor,
    *,
    training: bool,
    separable: bool = False,
) -> bool:
    """Return whether to fuse this chunk's output layer: --fused-lm-head on, off or auto.

    rows: bool [B * S_local] on the CPU, the rows whose log-probs are needed
    separable: the loss will be evaluated block by block inside the head
    """
    model, choice = unwrap(model), config.fused_lm_head
    if choice == "off" or not model.post_process:
        return False
    obstacle: str | None = None
    if model.config.sequence_parallel and inputs.tokens.shape[0] > 1:
        obstacle = (
            "sequence parallelism with the padded layout interleaves rows of different samples"
        )
    if choice == "on":
        if obstacle:
            raise ConfigError(f"--fused-lm-head on: {obstacle}; use auto or off")
        return True
    layer = model.output_layer
    weight = layer.weight if layer.weight is not None else model.shared_embedding_or_output_weight()
    return obstacle is None and fused_lm_head_pays(
        rows.numel(),
        int(rows.sum()),
        weight.shape[0],
        element_size=weight.element_size(),
        logits_limit_bytes=LOGITS_LIMIT_BYTES,
        training=training,
        separable=separable,
    )


@contextmanager
def skip_output_layer(model: Any) -> Iterator[list[Tensor]]:
    """Make the model return hidden states; the list receives the output layer's weight."""
    layer = unwrap(model).output_layer
    weights: list[Tensor] = []

    def keep_hidden(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        weights.append(layer.weight if weight is None else weight)
        return hidden, None

    layer.forward = keep_hidden
    try:
        yield weights
    finally:
        del layer.forward


def response_log_probs(
    config: TrainerConfig,
    output: Tensor,
    head_weight: Tensor | None,
    inputs: ModelInputs,
    groups: ParallelGroups,
    row_mask: Tensor,
    *,
    with_entropy: bool = True,
    kept: Ragged | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log-prob and entropy [R] of the local response tokens, and log-probs [R, k] of `ids`.

    output: logits [B, S_local, V/tp], or with `head_weight` [V/tp, H] hidden states [B, S_local, H]
    row_mask: bool [B * S_local] on the CPU, the rows that matter; used by the fused head
    kept: [B * S_local] entries of ids that each row's distribution is renormalized over, or None
    ids: [R, k] further ids of every token, or None
    """
    targets = torch.zeros(inputs.tokens.numel(), dtype=torch.int64, device=output.device)
    targets[inputs.rows] = inputs.targets
    flat = output.reshape(-1, output.shape[-1])
    options: dict[str, Any] = {
        "group": loss_context(groups).tp_group,
        "temperature": config.rollout_temperature,
        "with_entropy": with_entropy,
        "entropy_grad": with_entropy and config.entropy_coef != 0,
        "kept": kept,
        "entropy_of": config.entropy_of,
        "ids_of": config.ids_of,
    }
    if head_weight is None:
        options["inplace_grad"] = config.inplace_logits_grad
    else:
        options |= {
            "row_mask": row_mask,
            "sequence_parallel": config.sequence_parallel,
            "vocab_rows": getattr(head_weight, "vocab_rows", None),
        }
    given = None if ids is None else at_rows(ids, inputs.rows, targets.numel())
    if head_weight is None:
        found = log_probs_of_ids(flat, targets, given, **options)
    else:
        found = fused_log_probs_of_ids(flat, head_weight, targets, given, **options)
    log_probs, entropy, of_ids = (
        None if values is None else values[inputs.rows] for values in found
    )
    assert log_probs is not None
    return log_probs, entropy, of_ids


def response_top_ids(
    config: TrainerConfig,
    output: Tensor,
    head_weight: Tensor | None,
    inputs: ModelInputs,
    groups: ParallelGroups,
    k: int,
    vocab_size: int,
) -> Tensor:
    """Return the k most likely ids [R, k] at the position of every local response token.

    output, head_weight: as for `response_log_probs`
    vocab_size: ids from this one on (padding, for example) are left out; at least k
    """
    group = loss_context(groups).tp_group
    flat = output.reshape(-1, output.shape[-1])
    share = flat.shape[1] if head_weight is None else head_weight.shape[0]
    held = max(0, min(share, vocab_size - groups.tp_rank * share))
    if head_weight is None:
        return top_ids(flat[inputs.rows], k, group=group, tokens_held=held)
    if config.sequence_parallel and groups.tp_size > 1:
        whole = flat.new_empty(flat.shape[0] * groups.tp_size, flat.shape[1])
        dist.all_gather_into_tensor(whole, flat.contiguous(), group=group)
        flat = whole
    return fused_top_ids(flat[inputs.rows], head_weight, k, group=group, tokens_held=held)
