"""policy_loss_function: from logits and a batch to one scalar and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.foreign_namespace import loss_config_of
from plugin.errors import BatchError, ConfigError
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.loss.hook_calling import apply_hooks
from plugin.loss.interfaces import LossInputs, LossOutputs, TokenMetric
from plugin.loss.normalization import Reducer, kept_token_scale
from plugin.loss.policy_losses import POLICY_LOSSES
from plugin.loss.regularizers import regularizer_terms, token_entropy
from plugin.loss.value_checks import check_log_ratio, check_values, raise_on_all_shards
from plugin.ppo_utils.importance_ratio import log_ratio, safe_exp
from plugin.ppo_utils.kl_estimators import k3
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.parallel_context import current_parallel_context
from plugin.sharding.sequence_shards import SequenceShards

_OPTIONAL_LOG_PROBS = ("rollout_log_probs", "ref_log_probs", "teacher_log_probs")


def policy_loss_function(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one microbatch and its metrics, with the signature slime calls.

    args: any namespace with our flag names; missing flags take their defaults
    batch: unconcat_tokens, total_lengths, response_lengths, loss_masks, advantages, and as needed
        rollout_log_probs, log_probs (the trainer's), ref_log_probs, teacher_log_probs
    logits: [1, T, V/tp] or [T, V/tp], samples packed one after the other
    sum_of_sample_mean: reduces per-token values [R] (already 0 where masked) to a scalar
    """
    config = loss_config_of(args)
    config.require_rollout_log_probs(batch.get("rollout_log_probs") is not None)
    cur, entropy = log_probs_of_responses(config, batch, logits)
    inputs = loss_inputs(config, batch, cur, entropy)
    outputs = compute_loss(args, config, inputs)
    loss, metrics = reduce_loss(config, inputs, outputs, sum_of_sample_mean)
    return _attached(loss, logits), metrics


def log_probs_of_responses(
    config: LossConfig, batch: Mapping[str, Any], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [R] of the local response tokens at the rollout temperature."""
    rows_logits = logits.squeeze(0) if logits.dim() == 3 else logits
    if rows_logits.dim() != 2:
        raise BatchError(f"logits have shape {tuple(logits.shape)}; expected [1, T, V] or [T, V]")
    shards = _shards(batch, logits.device)
    _check_token_lengths(batch)
    rows = shards.rows()
    last_row = int(rows.numpy().max(initial=-1))  # rows are on the host: no device is waited for
    if last_row >= rows_logits.shape[0]:
        raise BatchError(
            f"logits have {rows_logits.shape[0]} rows but the samples need row {last_row} (total lengths "
            f"{list(batch['total_lengths'])}); pack the samples in the order of total_lengths"
        )
    rows = rows.to(logits.device)
    targets = torch.zeros(rows_logits.shape[0], dtype=torch.int64, device=logits.device)
    targets[rows] = shards.response_tokens(batch["unconcat_tokens"])
    log_probs, entropy = log_probs_and_entropy(
        rows_logits,
        targets,
        group=shards.context.tp_group,
        temperature=config.rollout_temperature,
        entropy_grad=config.entropy_coef != 0,
    )
    assert entropy is not None
    return log_probs[rows], entropy[rows]


def loss_inputs(
    config: LossConfig,
    batch: Mapping[str, Any],
    cur_log_probs: Tensor,
    entropy: Tensor | None = None,
) -> LossInputs:
    """Flatten, check and zero masked positions of the per-token fields of a batch around `cur_log_probs` [R]."""
    config.require_rollout_log_probs(batch.get("rollout_log_probs") is not None)
    _require(batch, "loss_masks", "advantages")
    shards = _shards(batch, cur_log_probs.device)
    mask = shards.local_mask(_checked_masks(batch["loss_masks"], shards))
    if mask.numel() != cur_log_probs.numel():
        raise BatchError(
            f"cur_log_probs has {cur_log_probs.numel()} tokens but the samples have {mask.numel()} local ones"
        )
    raw: dict[str, Tensor | None] = {"cur_log_probs": cur_log_probs}
    raw |= _known(config, batch, shards)
    if raw["train_log_probs"] is None:
        raw["train_log_probs"] = cur_log_probs.detach()
    if config.validate_batch == "always" or (
        config.validate_batch == "auto" and cur_log_probs.device.type == "cpu"
    ):
        _check_numbers(raw, mask, shards)
    if config.teacher_tau and raw["teacher_log_probs"] is None:
        raise ConfigError(
            f"--teacher-tau is {config.teacher_tau} but the batch has no teacher_log_probs; give a teacher"
        )
    clean = {
        name: None if value is None else zero_masked(value, mask) for name, value in raw.items()
    }
    return LossInputs(
        mask=mask,
        shards=shards,
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        entropy=None if entropy is None else token_entropy(entropy, mask, config),
        **clean,  # type: ignore[arg-type]
    )


def known_fields(
    config: LossConfig, batch: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Tensor | None], Tensor, SequenceShards]:
    """What is known of the local tokens before the forward pass: fields [T] as in `LossInputs`, the mask, the shards.

    Masked positions may hold anything; `train_log_probs` is None where the update's own log-probs stand for them.
    """
    _require(batch, "loss_masks", "advantages")
    shards = _shards(batch, device)
    mask = shards.local_mask(_checked_masks(batch["loss_masks"], shards))
    return _known(config, batch, shards), mask, shards


def _known(
    config: LossConfig, batch: Mapping[str, Any], shards: SequenceShards
) -> dict[str, Tensor | None]:
    known = {"advantages": _flat("advantages", batch["advantages"], shards)}
    for name in _OPTIONAL_LOG_PROBS:
        known[name] = _flat(name, batch.get(name), shards)
    train = known["rollout_log_probs"] if config.use_rollout_logprobs else None
    known["train_log_probs"] = (
        train if train is not None else _flat("log_probs", batch.get("log_probs"), shards)
    )
    return known


def compute_loss(args: Any, config: LossConfig, inputs: LossInputs) -> LossOutputs:
    """Policy loss, corrections and regularizers per token; `args` is what hooks receive."""
    term = POLICY_LOSSES[config.policy_loss](inputs, config)
    if config.use_tis:
        term = apply_hooks(args, config.hook_names(), term, inputs)
    elif config.get_mismatch_metrics:
        with torch.no_grad():
            observed = apply_hooks(args, config.hook_names(), term, inputs)
        term.metrics.update(
            {key: observed.metrics[key] for key in observed.metrics.keys() - term.metrics}
        )
    metrics = {
        name: TokenMetric(value.detach(), inputs.mask) for name, value in term.metrics.items()
    }
    metrics.update(_comparison_metrics(config, inputs, term.kept))
    return LossOutputs(term, regularizer_terms(inputs, config, term.kept), metrics)


def reduce_loss(
    config: LossConfig, inputs: LossInputs, outputs: LossOutputs, reduce: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reduce every term with the caller's reducer, over the original masks."""
    policy = outputs.policy.loss
    if config.loss_denominator == "kept":
        if config.per_token:
            raise ConfigError(
                "--loss-denominator kept with a global token denominator: only the backend's own step can "
                "count the kept tokens of all microbatches; use --no-calculate-per-token-loss here"
            )
        policy = policy * kept_token_scale(outputs.policy.kept, inputs.mask, inputs.shards)
    pg_loss = reduce(policy)
    loss, metrics = pg_loss, {}
    for term in outputs.regularizers:
        reduced = reduce(term.values)
        if term.coefficient:
            loss = loss + term.coefficient * reduced
        metrics[term.name] = _detached(reduced, policy)
    for name, metric in outputs.metrics.items():
        metrics[name] = _detached(reduce(torch.where(metric.over, metric.values, 0.0)), policy)
    metrics["pg_loss"] = _detached(pg_loss, policy)
    metrics["loss"] = _detached(loss, policy)
    return loss, metrics


def _comparison_metrics(
    config: LossConfig, inputs: LossInputs, kept: Tensor
) -> dict[str, TokenMetric]:
    """How far the three policies are from each other."""
    mask, cur = inputs.mask, inputs.cur_log_probs.detach()
    cur_over_train = log_ratio(cur, inputs.train_log_probs, mask)
    metrics = {
        "ppo_kl": TokenMetric(-cur_over_train, mask),
        "ois": TokenMetric(safe_exp(cur_over_train), mask),
    }
    if inputs.teacher_log_probs is not None:
        metrics["teacher_kl"] = TokenMetric(log_ratio(cur, inputs.teacher_log_probs, mask), mask)
    if inputs.rollout_log_probs is None:
        return metrics
    train_over_rollout = log_ratio(inputs.train_log_probs, inputs.rollout_log_probs, mask)
    mismatch = k3(log_ratio(inputs.rollout_log_probs, cur, mask))
    metrics |= {
        "train_rollout_logprob_abs_diff": TokenMetric(train_over_rollout.abs(), mask),
        "mismatch_kl": TokenMetric(mismatch, mask),
        "masked_mismatch_kl": TokenMetric(mismatch, mask & ~kept),
        "unmasked_mismatch_kl": TokenMetric(mismatch, kept),
    }
    return metrics


def _require(batch: Mapping[str, Any], *names: str) -> None:
    missing = [name for name in names if batch.get(name) is None]
    if missing:
        raise BatchError(
            f"the batch has no {', '.join(missing)}; policy_loss_function needs unconcat_tokens, total_lengths, "
            "response_lengths, loss_masks and advantages"
        )


def _check_token_lengths(batch: Mapping[str, Any]) -> None:
    _require(batch, "unconcat_tokens")
    lengths = [len(ids) for ids in batch["unconcat_tokens"]]
    expected = [int(length) for length in batch["total_lengths"]]
    if lengths != expected:
        raise BatchError(
            f"unconcat_tokens have lengths {lengths} but total_lengths are {expected}; give one tensor of prompt "
            "and response per sample"
        )


def _shards(batch: Mapping[str, Any], device: torch.device) -> SequenceShards:
    _require(batch, "total_lengths", "response_lengths")
    return SequenceShards.of(
        batch["total_lengths"], batch["response_lengths"], device, current_parallel_context()
    )


def _checked_masks(loss_masks: Sequence[Tensor], shards: SequenceShards) -> Sequence[Tensor]:
    lengths = [mask.numel() for mask in loss_masks]
    if lengths != list(shards.response_lengths):
        raise BatchError(
            f"loss_masks have lengths {lengths} but the responses {list(shards.response_lengths)}; give one mask "
            "per sample, as long as its whole response"
        )
    return loss_masks


def _flat(name: str, values: Sequence[Tensor] | None, shards: SequenceShards) -> Tensor | None:
    if values is None:
        return None
    lengths = [value.numel() for value in values]
    if lengths != shards.local_lengths:
        raise BatchError(
            f"{name} has lengths {lengths} but the local responses {shards.local_lengths}; give one tensor per "
            "sample with one value per response token"
        )
    flat = torch.cat([value.reshape(-1) for value in values]) if values else torch.zeros(0)
    return flat.detach().to(device=shards.device, dtype=torch.float32)


def _check_numbers(raw: Mapping[str, Tensor | None], mask: Tensor, shards: SequenceShards) -> None:
    """All ranks that share these samples raise, or none: sequence-level losses wait for each other below."""
    error: BatchError | None = None
    try:
        _check_local_numbers(raw, mask, shards)
    except BatchError as found:
        error = found
    raise_on_all_shards(error, shards)


def _check_local_numbers(
    raw: Mapping[str, Tensor | None], mask: Tensor, shards: SequenceShards
) -> None:
    # Named as the batch names it: the trainer's log-probs arrive as `log_probs`.
    shown = {"log_probs" if n == "train_log_probs" else n: value for n, value in raw.items()}
    check_values(shown, mask, shards)
    cur, rollout, train = (
        raw[name] for name in ("cur_log_probs", "rollout_log_probs", "train_log_probs")
    )
    assert cur is not None and train is not None
    check_log_ratio("cur_log_probs", "log_probs", cur.detach() - train, mask, shards)
    if rollout is not None:
        check_log_ratio("cur_log_probs", "rollout_log_probs", cur.detach() - rollout, mask, shards)


def _detached(value: Tensor, like: Tensor) -> Tensor:
    """A metric without graph; reducers of other frameworks answer 0 (an int) for an empty batch."""
    return value.detach().clone() if isinstance(value, Tensor) else like.new_zeros(())


def _attached(loss: Tensor, logits: Tensor) -> Tensor:
    """`loss`, connected to `logits` even when no token contributed.

    Every rank must run backward through the model: a loss without a graph would make this rank skip the
    collectives that the others wait in. An empty slice has the value 0 and a zero gradient whatever the logits hold.
    """
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    return loss + logits.reshape(-1)[:0].sum().float()
