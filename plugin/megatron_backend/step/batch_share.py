"""What one data-parallel rank gets of a global batch: its samples, and sums over all of them.

The driver of a job cuts a batch with this, so that no rank ever holds the samples of another; a
trainer that is given a whole batch cuts its own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plugin.batch_types import Microbatch, RolloutBatch
from plugin.config import TrainerConfig
from plugin.megatron_backend.step.microbatching import (
    BatchingLimits,
    MicrobatchPlan,
    plan_microbatches,
)
from plugin.ragged import Integers, Ragged, as_integers

#: Tokens of the first samples of a batch whose live routes are compared with the engine's.
WATCHED_TOKENS = 4096


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of a step.

    batch: its samples, microbatch after microbatch; routes are those of its stage's MoE layers
    counts: [microbatches] samples of each; 0 is a padding microbatch
    samples: [n] the number of each sample in the global batch
    watched: [k] total lengths of the first samples of the global batch, `WATCHED_TOKENS` together
    total_weight: sum of the loss weights over the global batch
    padding_share: of all microbatches on all ranks; oversize: samples beyond the token budget
    """

    batch: RolloutBatch
    counts: Integers
    samples: Integers
    watched: Integers
    total_weight: float
    padding_share: float
    oversize: int

    def microbatches(self) -> list[Microbatch]:
        """In schedule order; views of the share."""
        ends = np.cumsum(self.counts)
        return [
            Microbatch(self.batch.select(np.arange(end - count, end)))
            if count
            else Microbatch.padding_like(self.batch)
            for count, end in zip(self.counts.tolist(), ends.tolist(), strict=True)
        ]

    def numbers(self) -> list[Integers]:
        """Per microbatch, the numbers of its samples in the global batch."""
        return np.split(self.samples, np.cumsum(self.counts)[:-1])


def cut_share(
    batch: RolloutBatch, plan: MicrobatchPlan, dp_rank: int, *, weight: float
) -> BatchShare:
    """The share of rank `dp_rank`; `weight`: `total_weight` of the whole batch."""
    rank, samples = plan.ranks[dp_rank], plan.order(dp_rank)
    lengths = batch.columns["total_lengths"].numpy()
    watched = max(1, int(np.searchsorted(np.cumsum(lengths), WATCHED_TOKENS, side="right")))
    return BatchShare(
        batch.select(samples),
        np.array([len(microbatch) for microbatch in rank], np.int64),
        samples,
        lengths[:watched],
        weight,
        plan.padding_share(),
        len(plan.oversize),
    )


def with_stage_routes(batch: RolloutBatch, layers: Sequence[int]) -> RolloutBatch:
    """The batch with the routes of MoE layers `layers` only, or as it is where it has none here."""
    for name in ("rollout_routed_experts", "rollout_routed_weights"):
        routes = batch.columns.get(name)
        if isinstance(routes, Ragged) and list(layers) != list(range(routes.values.shape[1])):
            batch = batch.with_column(
                name, routes.like(routes.values[:, list(layers)].contiguous())
            )
    return batch


def plan_batch(
    batch: RolloutBatch,
    config: TrainerConfig,
    *,
    dp_size: int,
    cp_size: int,
    round_size: int,
    hidden_size: int,
    longest: int,
    fewest: int = 1,
) -> MicrobatchPlan:
    """Plan the microbatches of all ranks.

    round_size: their number is a multiple of it: the interleaved schedule runs whole rounds
    longest: the most tokens that a sample of this model may have
    fewest: a token budget is lowered for about so many microbatches, if samples are short enough:
        pipeline stages wait for each other at both ends of a step
    """
    budget = config.max_tokens_per_gpu
    assert budget != "auto", "chosen when the model was built"
    if budget is not None:
        budget *= cp_size
    if budget is not None and fewest > 1:
        lengths = as_integers(batch.columns["total_lengths"])
        share = -(-int(lengths.sum()) // (dp_size * fewest))
        budget = min(budget, max(share, int(lengths.max())))
    limits = BatchingLimits(
        max_tokens=budget,
        micro_batch_size=config.micro_batch_size,
        max_sample_tokens=longest,
    )
    return plan_microbatches(
        batch.columns["total_lengths"],
        limits,
        dp_size=dp_size,
        count_multiple=round_size,
        hidden_size=hidden_size,
    )
