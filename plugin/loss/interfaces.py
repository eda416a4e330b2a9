"""What goes into a loss and what comes out of it.

Everything is flat over the local response tokens of a microbatch (T of them). Two samples with
responses of 3 and 2 tokens, the second token of the first one masked:

    mask           [True, False, True, True, True]
    cur_log_probs  [c00,  0.0,   c02,  c10,  c11]     masked positions are 0
    shards         local_lengths [3, 2], sample_index [0, 0, 0, 1, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from plugin.ppo_utils.batch_statistics import Declaration, Statistics, wants_advantages
from plugin.ppo_utils.importance_ratio import log_ratio
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards


class Head(NamedTuple):
    """Log-probs of the sampler's likeliest ids, of both policies; 0 where there is none or masked.

    cur: [T, k] with gradient; rollout: [T, k] without; found: [T, k] bool, where there is an id
    """

    cur: Tensor
    rollout: Tensor
    found: Tensor


@dataclass(frozen=True)
class LossInputs:
    """All per-token inputs of a loss, float32, 0 where masked.

    mask: [T] bool, the original loss mask
    cur_log_probs: [T] with gradient; advantages: [T] without, scaled by --adv-tau and joined by the
        teacher (see `inputs.guided_advantages`)
    train_log_probs: [T] the trainer's own at the start of the step, whatever a flag says; mismatch
        is measured on these
    rollout_log_probs, ref_log_probs, teacher_log_probs: [T] without gradient, or None
    proximal_log_probs: [T] of the policy that a clipped ratio is taken against (pi_old): the
        trainer's own, the engine's, or interpolated between the engine's and the current ones, by
        --train-log-probs; default: `train_log_probs`
    entropy: [T] or None; carries a gradient only if its coefficient is not 0
    distill_kl: [T] reverse KL from the teacher over its most likely ids, with gradient, or None
    head: of the distributions that the tokens were drawn from (--score-centering-topk), or None
    loss_masks: the full-response masks, one per sample, as hooks receive them
    statistics: the batch statistics that policy loss and hooks declared, by name or path; None
        where only this microbatch is known
    """

    mask: Tensor
    shards: SequenceShards
    cur_log_probs: Tensor
    train_log_probs: Tensor
    advantages: Tensor
    loss_masks: Sequence[Tensor]
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    distill_kl: Tensor | None = None
    head: Head | None = None
    proximal_log_probs: Tensor = None  # type: ignore[assignment]
    statistics: Mapping[str, Statistics] | None = None

    def __post_init__(self) -> None:
        if self.proximal_log_probs is None:
            object.__setattr__(self, "proximal_log_probs", self.train_log_probs)

    def require_rollout(self) -> Tensor:
        """Return rollout_log_probs [T]; set-up has checked that they are there."""
        assert self.rollout_log_probs is not None
        return self.rollout_log_probs

    def per_sample(self, values: Tensor) -> list[Tensor]:
        """Split a flat tensor [T] into one tensor per sample."""
        return list(values.split(self.shards.local_lengths))


def declared_values(declaration: Declaration, inputs: LossInputs) -> Tensor:
    """What a declaration looks at: [n] log-ratios of the unmasked tokens, or [2, n] see there."""
    mask, proximal = inputs.mask, inputs.proximal_log_probs
    if wants_advantages(declaration):
        return torch.stack([proximal, inputs.advantages])[:, mask]
    return log_ratio(proximal, inputs.require_rollout(), mask)[mask]


@dataclass(frozen=True)
class TokenMetric:
    """A per-token quantity [T] and the tokens it is a mean over (bool [T])."""

    values: Tensor
    over: Tensor


@dataclass(frozen=True)
class PolicyTerm:
    """A policy loss per token [T], the tokens it keeps (bool [T]), metrics over the mask.

    ratio, weight: [T] importance ratio before bounding and weight after, 0 where dropped; None
        where the loss is not weighted or they were not requested
    penalty: [T] a part of the loss that corrections leave alone, such as a pull on every token
    extremes: name -> [T], of which `name_max` and `name_min` over the mask are reported
    """

    loss: Tensor
    kept: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    ratio: Tensor | None = None
    weight: Tensor | None = None
    penalty: Tensor | None = None
    extremes: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RegularizerTerm:
    """A regularizer per token [T]; it enters the loss as coefficient * value."""

    name: str
    coefficient: float
    values: Tensor


@dataclass(frozen=True)
class LossOutputs:
    """The objective per token.

    policy: the policy loss after corrections; regularizers: the terms beside it
    policy_loss: [T] policy.loss, scaled where each sample is divided by its kept tokens
    total: [T] policy_loss + sum of coefficient * regularizer: what is summed, with a weight per
        token
    denominator: bool [T] the tokens that one global token count counts
    """

    policy: PolicyTerm
    regularizers: tuple[RegularizerTerm, ...]
    policy_loss: Tensor
    total: Tensor
    denominator: Tensor
    metrics: dict[str, TokenMetric] = field(default_factory=dict)


def example_inputs() -> LossInputs:
    """Example tokens to try a loss or correction on: responses of 2 and 3 tokens, one masked.

    `cur_log_probs` is a leaf with gradient.
    """
    generator = torch.Generator().manual_seed(0)
    lengths, totals = [2, 3], [3, 5]
    loss_masks = [torch.tensor([1, 1]), torch.tensor([1, 0, 1])]
    mask = torch.cat(loss_masks) != 0

    def log_probs() -> torch.Tensor:
        return zero_masked(-1 - torch.rand(5, generator=generator), mask)

    return LossInputs(
        mask=mask,
        shards=SequenceShards.of(totals, lengths, torch.device("cpu"), SINGLE_PROCESS),
        cur_log_probs=log_probs().requires_grad_(),
        train_log_probs=log_probs(),
        advantages=zero_masked(torch.tensor([1.0, -0.5, 0.75, 0.0, -1.25]), mask),
        loss_masks=loss_masks,
        rollout_log_probs=log_probs(),
        ref_log_probs=log_probs(),
        teacher_log_probs=log_probs(),
        entropy=zero_masked(torch.rand(5, generator=generator), mask),
    )


class CorrectionHook(Protocol):
    """A loadable correction; `plugin.ppo_utils.corrections` explains the arguments."""

    def __call__(
        self,
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor],
        proximal_log_probs: Sequence[Tensor],
        rollout_log_probs: Sequence[Tensor],
        loss_masks: Sequence[Tensor],
        cur_log_probs: Sequence[Tensor],
        advantages: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        **kwargs: Any,
    ) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]: ...
