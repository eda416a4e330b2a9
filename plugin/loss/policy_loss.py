"""policy_loss_function: from logits and a batch to a scalar and metrics, as slime calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.other_frameworks import loss_config_of, pg_loss_type
from plugin.errors import BatchError, ConfigError
from plugin.logprobs.vocab_parallel import at_rows, log_probs_of_ids
from plugin.logprobs.vocab_shards import group_size
from plugin.loss.distillation import TeacherSupport, topk_reverse_kl
from plugin.loss.inputs import batch_shards, loss_inputs, require_columns
from plugin.loss.interfaces import LossOutputs
from plugin.loss.normalization import Reducer
from plugin.loss.objective import compute_loss
from plugin.loss.score_centering import RolloutHead
from plugin.ragged import Ragged, as_integers
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards
from plugin.vocabulary_ids import check_rows, kept_rows, top_p_rows


def policy_loss_function(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one microbatch and its metrics.

    args: any namespace with our flag names; missing flags take their defaults
    batch: unconcat_tokens, total_lengths, response_lengths, loss_masks, advantages, and as needed
        rollout_log_probs, log_probs (the trainer's), ref_log_probs, teacher_log_probs,
        teacher_topk_ids and teacher_topk_log_probs, rollout_topk_token_ids and
        rollout_topk_log_probs ([response, k] per sample),
        rollout_kept_ids and rollout_kept_counts, or slime's rollout_top_p_token_ids and
        rollout_top_p_token_offsets where rollout_top_p is below 1: log-probs are then of the kept
        ids
    logits: [1, T, V/tp] or [T, V/tp], samples packed one after the other
    sum_of_sample_mean: reduces per-token values [R] (already 0 where masked) to a scalar
    """
    config = loss_config_of(args)
    config.require_rollout_log_probs(batch.get("rollout_log_probs") is not None)
    if pg_loss_type(args) == "reinforce" and getattr(args, "use_tis", False):
        # As in slime: where no ratio to the old policy is left, TIS weights the current policy.
        batch = {**batch, "log_probs": None}
    shards = batch_shards(batch, logits.device)
    kept = _local_kept_rows(config, args, batch, logits, shards)
    support = None
    head = RolloutHead.of(config, batch, shards)
    if config.distill_topk is not None:
        config.require_teacher({name for name, values in batch.items() if values is not None})
        support = TeacherSupport.of(batch, shards)
    cur, entropy, of_ids = _response_log_probs(config, batch, logits, shards, kept, support or head)
    further: dict[str, Any] = {}
    if of_ids is not None:
        require_columns(batch, "loss_masks")
        mask = shards.local_mask(batch["loss_masks"])
        for likeliest in (support, head):
            if likeliest is not None and config.validates_on(logits.device):
                likeliest.check(mask, shards)
        if support is not None:
            further["distill_kl"] = topk_reverse_kl(of_ids, support.log_probs, mask)
        if head is not None:
            further["head"] = head.at_policy(of_ids, mask)
    inputs = loss_inputs(config, batch, cur, entropy, shards=shards, **further)
    outputs = compute_loss(config, inputs, args=args)
    loss, metrics = reduce_loss(config, outputs, sum_of_sample_mean)
    if not (isinstance(loss, Tensor) and loss.requires_grad):
        # Every rank must run backward through the model: a loss without a graph would make this
        # rank skip the collectives that the others wait in. An empty slice adds 0 with a zero
        # gradient, whatever the logits hold.
        loss = loss + logits.reshape(-1)[:0].sum().float()
    return loss, metrics


def _local_kept_rows(
    config: LossConfig,
    args: Any,
    batch: Mapping[str, Any],
    logits: Tensor,
    shards: SequenceShards,
) -> Ragged | None:
    """[R] entries: the ids that sampling kept for the local response tokens; None = all of them.

    From our fields, or from slime's where its `rollout_top_p` is not 1; its own loss looks at them
    under the same condition.
    """
    rows, ours = kept_rows(batch), True
    if rows is None:
        if getattr(args, "rollout_top_p", None) in (None, 1):
            return None
        rows, ours = top_p_rows(batch, shards.response_lengths), False
    if config.validates_on(logits.device):
        # Whole responses: every rank that holds a part of a sample raises, or none.
        whole = SequenceShards.of(shards.totals, shards.responses, shards.device, SINGLE_PROCESS)
        check_rows(
            rows,
            shards.responses,
            as_integers(whole.response_tokens(batch["unconcat_tokens"])),
            as_integers(Ragged.of(batch["loss_masks"]).values) != 0,
            vocabulary=logits.shape[-1] * group_size(shards.context.tp_group),
            # slime's ids come in the engine's order; an empty row would be an empty nucleus.
            ordered=ours,
            complete=not ours,
        )
    return shards.local_rows(rows)


def _response_log_probs(
    config: LossConfig,
    batch: Mapping[str, Any],
    logits: Tensor,
    shards: SequenceShards,
    kept: Ragged | None,
    likeliest: TeacherSupport | RolloutHead | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-prob and entropy [R] of the local response tokens at the rollout temperature.

    And the log-probs [R, k] of the `likeliest` ids of teacher or sampler, where they are wanted.
    """
    rows_logits = logits.squeeze(0) if logits.dim() == 3 else logits
    if rows_logits.dim() != 2:
        raise BatchError(f"logits have shape {tuple(logits.shape)}; expected [1, T, V] or [T, V]")
    require_columns(batch, "unconcat_tokens")
    lengths = [len(ids) for ids in batch["unconcat_tokens"]]
    if lengths != [int(length) for length in batch["total_lengths"]]:
        raise BatchError(
            f"unconcat_tokens have lengths {lengths} but total_lengths are "
            f"{list(batch['total_lengths'])}; give one tensor of prompt and response per sample"
        )
    rows = shards.rows()
    last_row = int(rows.numpy().max(initial=-1))  # rows are on the host: no device is waited for
    if last_row >= rows_logits.shape[0]:
        raise BatchError(
            f"logits have {rows_logits.shape[0]} rows but the samples need row {last_row} (total "
            f"lengths {list(batch['total_lengths'])}); pack the samples in the order of "
            "total_lengths"
        )
    if kept is not None:
        kept = kept.spread(rows, rows_logits.shape[0])
    rows = rows.to(logits.device)
    targets = torch.zeros(rows_logits.shape[0], dtype=torch.int64, device=logits.device)
    targets[rows] = shards.response_tokens(batch["unconcat_tokens"])
    log_probs, entropy, of_ids = log_probs_of_ids(
        rows_logits,
        targets,
        None if likeliest is None else at_rows(likeliest.ids, rows, rows_logits.shape[0]),
        group=shards.context.tp_group,
        temperature=config.rollout_temperature,
        entropy_grad=config.entropy_coef != 0,
        kept=kept,
        entropy_of=config.entropy_of,
        ids_of=config.ids_of,
    )
    assert entropy is not None
    return log_probs[rows], entropy[rows], None if of_ids is None else of_ids[rows]


def reduce_loss(
    config: LossConfig, outputs: LossOutputs, reduce: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reduce loss, terms and metrics with the caller's reducer, over the original masks."""
    if config.reduction not in ("token-mean", "sample-mean"):
        raise ConfigError(
            f"--loss-reduction {config.reduction}: only the backend's own step knows the prompts "
            "of all microbatches, and here the caller supplies the reducer; use token-mean or "
            "sample-mean"
        )
    if config.loss_denominator == "kept" and config.per_token:
        raise ConfigError(
            "--loss-denominator kept with a global token denominator: only the backend's own step "
            "can count the kept tokens of all microbatches; use --no-calculate-per-token-loss "
            "here"
        )
    loss = reduce(outputs.total)
    values = {term.name: term.values for term in outputs.regularizers}
    values |= {
        name: torch.where(metric.over, metric.values, 0.0)
        for name, metric in outputs.metrics.items()
    }
    values["pg_loss"] = outputs.policy_loss
    metrics = {name: reduce(value.detach()) for name, value in values.items()} | {"loss": loss}
    zero = outputs.total.new_zeros(())  # some reducers return 0 (an int) for an empty batch
    return loss, {
        name: value.detach().clone() if isinstance(value, Tensor) else zero
        for name, value in metrics.items()
    }
