"""Replays losses and corrections over dumped log-probs and measures what each would have done.

The gradient of any of the losses is sum_t g_t * grad log pi_theta(token t). `g_t` is found by
differentiating the loss itself, so a replay is what training would do, not a model of it. It is
compared with the untruncated estimator g*_t = A_t exp(cur - rollout), the one without the bias of
clipping, masking or forgetting a ratio; for a sequence-level weight it is the same method without
its bounds.

    weight       w_t = g_t / A_t on tokens with A_t != 0
    bias         mean over tokens of g_t - g*_t, with a 95 % interval from the spread between
                 sequences
    bias bound   mean of |g_t - g*_t| over mean of |g*_t|: errors of opposite sign do not cancel, so
                 no direction of the gradient is off by more than this (for scores of equal size)
    ESS          (sum w)^2 / sum w^2, as a share of the tokens

Penalties inside a loss (--kl-tau) are left out: they do not estimate the policy gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss.hook_chain import statistics_of
from plugin.loss.interfaces import LossInputs
from plugin.loss.objective import compute_loss
from plugin.loss.policy_losses import POLICY_LOSSES
from plugin.ppo_utils.importance_ratio import (
    MAX_LOG_RATIO,
    effective_sample_size,
    log_ratio,
    safe_exp,
)
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards
from plugin.tools.compare.correction_catalog import correction_functions
from plugin.tools.compare.dump_columns import DumpBlock

#: Settings that a replay leaves out: penalties, and checks that reading has already made.
NEUTRAL = {
    "kl_tau": 0.0,
    "adv_tau": 1.0,
    "teacher_tau": 0.0,
    "distill_topk": None,
    "score_centering_topk": 0,
    "validate_batch": "never",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "use_rollout_kl_loss": False,
    "rollout_kl_loss_coef": 0.0,
}
#: First response length of every bin in which sequence-level weights are judged separately.
LENGTH_STARTS = (0, 64, 256, 1024, 4096, 16384)
_CLIP_METRICS = ("pg_clipfrac", "tis_clipfrac")
_SUMS = (
    *("tokens", "active", "kept", "clipped", "weight", "weight_squared"),
    *("difference", "difference_squared", "difference_times_length", "length_squared"),
    *("difference_size", "untruncated_size"),
    *("positive", "positive_removed", "negative", "negative_removed"),
)


@dataclass(frozen=True)
class Method:
    """A policy loss with or without a correction, ready to replay."""

    name: str
    config: LossConfig

    @classmethod
    def of(cls, loss: str, hook: str | None = None, **settings: Any) -> Method:
        """The loss `loss`, corrected by `<hook>_function` of plugin.ppo_utils.

        settings: values of flags
        """
        values = {**settings, "policy_loss": loss, "use_tis": hook is not None}
        values["custom_tis_function_path"] = hook and f"plugin.ppo_utils.{hook}_function"
        return cls.of_config(loss if hook is None else f"{loss} + {hook}", LossConfig(**values))

    @classmethod
    def of_config(cls, name: str, config: LossConfig) -> Method:
        """A method from a complete configuration."""
        return cls(name, dataclasses.replace(config, **NEUTRAL))  # type: ignore[arg-type]


def method_pairs(*, every_pair: bool = False) -> list[tuple[str, str | None]]:
    """Every loss alone, and every correction on the first loss that takes it, or on each."""

    def accepted(loss: str, hook: str) -> bool:
        with contextlib.suppress(ConfigError):
            return bool(Method.of(loss, hook))
        return False

    pairs: list[tuple[str, str | None]] = [(loss, None) for loss in POLICY_LOSSES]
    for hook in (name.removesuffix("_function") for name in correction_functions()):
        losses = [loss for loss in POLICY_LOSSES if accepted(loss, hook)]
        pairs += [(loss, hook) for loss in (losses if every_pair else losses[:1])]
    return pairs


def all_methods(*, every_pair: bool = False, **settings: Any) -> list[Method]:
    """The methods that a comparison shows."""
    return [Method.of(loss, hook, **settings) for loss, hook in method_pairs(every_pair=every_pair)]


def replay_inputs(block: DumpBlock) -> LossInputs:
    """The loss inputs of a block; `cur_log_probs` is a leaf with gradient."""
    lengths = block.lengths.tolist()
    shards = SequenceShards.of(lengths, lengths, torch.device("cpu"), SINGLE_PROCESS)
    mask = torch.from_numpy(block.mask)
    return LossInputs(
        mask=mask,
        shards=shards,
        cur_log_probs=torch.from_numpy(block.cur.copy()).requires_grad_(),
        train_log_probs=torch.from_numpy(block.train),
        advantages=torch.from_numpy(block.advantages),
        loss_masks=list(mask.split(lengths)),
        rollout_log_probs=torch.from_numpy(block.rollout),
    )


@dataclass(frozen=True)
class TokenGradients:
    """g: [T] coefficient of grad log pi per token; kept, clipped: [T] bool."""

    g: Tensor
    kept: Tensor
    clipped: Tensor


def token_gradients(method: Method, inputs: LossInputs) -> TokenGradients:
    """What `method` does with every token."""
    # Thresholds over a batch are those of a block: a step, unless it is too large for one.
    inputs = dataclasses.replace(inputs, statistics=statistics_of(method.config, inputs))
    term = compute_loss(method.config, inputs, with_metrics=False).policy
    (gradient,) = torch.autograd.grad(term.loss.sum(), inputs.cur_log_probs)
    clipped = torch.zeros_like(inputs.mask)
    for name in _CLIP_METRICS:
        if name in term.metrics:
            clipped |= term.metrics[name] > 0
    return TokenGradients(-gradient, term.kept, clipped & term.kept)


@dataclass
class MethodStatistics:
    """Sums over blocks of what one method did; `summary` divides them at the end."""

    method: Method
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    weight_max: float = 0.0
    lengths: Tensor = field(default_factory=lambda: torch.zeros(len(LENGTH_STARTS), 5).double())

    def add(self, inputs: LossInputs, tokens: TokenGradients, untruncated: Tensor) -> None:
        """Add what the method does with a block; `untruncated` is g* [T]."""
        mask, advantages = inputs.mask, inputs.advantages
        active = mask & (advantages != 0)
        weight = torch.where(active, tokens.g / torch.where(active, advantages, 1.0), 0.0)
        removed = active & (tokens.g == 0)
        difference = torch.where(mask, tokens.g - untruncated, 0.0)
        per_sequence, length, weight_sum, off, whole = inputs.shards.sequence_sums(
            difference, mask, weight, difference.abs(), untruncated.abs()
        )
        positive, negative = advantages.clamp(min=0), (-advantages).clamp(min=0)
        values = (
            *(mask, active, tokens.kept & mask, tokens.clipped & mask, weight, weight.square()),
            *(difference, per_sequence.square(), per_sequence * length, length.square()),
            *(difference.abs(), untruncated.abs(), positive, torch.where(removed, positive, 0.0)),
            *(negative, torch.where(removed, negative, 0.0)),
        )
        totals = torch.stack([value.sum(dtype=torch.float64) for value in values]).tolist()
        for name, total in zip(_SUMS, totals, strict=True):
            self.sums[name] += total
        if weight.numel():
            self.weight_max = max(self.weight_max, float(weight.max()))
        # Per length bin: sequences, mean weights and their squares, sizes of g - g* and of g*.
        edges = torch.tensor(LENGTH_STARTS[1:], dtype=torch.float32)
        rows = torch.bucketize(length, edges, right=True)
        mean = weight_sum / length.clamp(min=1)
        used = (length > 0).float()
        cells = torch.stack((used, mean, mean.square(), off, whole), 1)
        self.lengths.index_add_(0, rows, cells.double())

    def summary(self) -> dict[str, float]:
        """The row of the comparison table."""
        sums = self.sums
        tokens, active = max(sums["tokens"], 1.0), max(sums["active"], 1.0)
        mean = sums["weight"] / active
        bias = sums["difference"] / tokens
        error = _standard_error(sums, bias, tokens)
        scale = sums["untruncated_size"] / tokens
        return {
            "kept_share": sums["kept"] / tokens,
            "clipped_share": sums["clipped"] / tokens,
            "weight_mean": mean,
            "weight_max": self.weight_max,
            "ess_share": effective_sample_size(sums["weight"], sums["weight_squared"]) / active,
            "weight_variance": max(sums["weight_squared"] / active - mean * mean, 0.0),
            "bias": bias,
            "bias_low": bias - 1.96 * error,
            "bias_high": bias + 1.96 * error,
            "relative_bias": bias / scale if scale else 0.0,
            "relative_bias_error": 1.96 * error / scale if scale else 0.0,
            "bias_bound": sums["difference_size"] / tokens / scale if scale else 0.0,
            "positive_removed": _share(sums["positive_removed"], sums["positive"]),
            "negative_removed": _share(sums["negative_removed"], sums["negative"]),
        }

    def by_length(self) -> list[dict[str, Any]]:
        """ESS over the sequences of every length bin that has any."""
        rows = []
        for index, start in enumerate(LENGTH_STARTS):
            count, total, squares, off, whole = self.lengths[index].tolist()
            if count:
                end = LENGTH_STARTS[index + 1] - 1 if index + 1 < len(LENGTH_STARTS) else None
                rows.append(
                    {
                        "length": f"{start}-{end}" if end else f"{start}+",
                        "sequences": int(count),
                        "ess_share": effective_sample_size(total, squares) / count,
                        "bias_bound": _share(off, whole),
                    }
                )
        return rows


def untruncated_gradients(inputs: LossInputs) -> Tensor:
    """g* = A exp(cur - rollout) [T], 0 where masked."""
    with torch.no_grad():
        ratio = safe_exp(log_ratio(inputs.cur_log_probs, inputs.require_rollout(), inputs.mask))
        return torch.where(inputs.mask, inputs.advantages * ratio, 0.0)


def replay_block(block: DumpBlock, statistics: Sequence[MethodStatistics]) -> None:
    """Add one block to the statistics of every method."""
    if not block.tokens:
        return
    inputs = replay_inputs(block)
    references: dict[LossConfig | None, Tensor] = {None: untruncated_gradients(inputs)}
    for entry in statistics:
        unbounded = _without_sequence_bounds(entry.method.config)
        if unbounded not in references:
            method = Method("unbounded", unbounded)  # type: ignore[arg-type]
            references[unbounded] = token_gradients(method, inputs).g
        tokens = token_gradients(entry.method, inputs)
        entry.add(inputs, tokens, references[unbounded])


def _without_sequence_bounds(config: LossConfig) -> LossConfig | None:
    """The configuration whose sequence weights are unbounded; None for token-level methods."""
    per_sequence = ("sequence_tis_function", "segment_tis_function")
    if not config.use_tis or not any(name.endswith(per_sequence) for name in config.hook_names()):
        return None
    return dataclasses.replace(
        config, sequence_tis_clip=math.exp(MAX_LOG_RATIO), sequence_tis_clip_low=0.0
    )


def _standard_error(sums: dict[str, float], bias: float, tokens: float) -> float:
    """Of the token mean, from sequence totals: tokens of one sequence are not independent."""
    spread = (
        sums["difference_squared"]
        - 2 * bias * sums["difference_times_length"]
        + bias * bias * sums["length_squared"]
    )
    return math.sqrt(max(spread, 0.0)) / tokens


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
