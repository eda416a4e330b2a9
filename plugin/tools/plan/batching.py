"""How one optimizer step is cut over data parallel ranks and microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plugin.config import JobConfig
from plugin.tools.plan.full_microbatches import full_microbatch
from plugin.tools.plan.sample_lengths import SampleLengths


@dataclass(frozen=True)
class Batching:
    """One optimizer step of all data parallel ranks.

    microbatches: per rank, padding ones among them; padding: of the rank that has most of these
    tokens: per data parallel rank, [dp]
    balance: tokens' work of the busiest rank over the mean
    largest: [samples] total lengths of the fullest microbatch
    attention_share: causal pairs of tokens within samples, of all pairs of a row
    """

    microbatches: int
    padding: int
    padding_share: float
    oversize: int
    samples: int
    tokens: list[int]
    balance: float
    largest: list[int]
    attention_share: float


def plan_batching(config: JobConfig, hf_config: Any, lengths: SampleLengths) -> Batching:
    """Cut a step's samples as the driver would."""
    from plugin.batch_types import RolloutBatch
    from plugin.megatron_backend.step.batch_share import plan_batch
    from plugin.megatron_backend.step.microbatching import sample_cost

    cp, pp = config.context_parallel_size, config.pipeline_model_parallel_size
    dp = config.world_size // (config.tensor_model_parallel_size * pp * cp)
    batch = RolloutBatch({"total_lengths": lengths.totals, "response_lengths": lengths.responses})
    plan = plan_batch(
        batch,
        config,
        dp_size=dp,
        cp_size=cp,
        round_size=pp if config.virtual_pipeline_model_parallel_size else 1,
        hidden_size=hf_config.hidden_size,
        longest=hf_config.max_position_embeddings,
    )
    totals = lengths.totals
    samples = [[i for cell in rank for i in cell] for rank in plan.ranks]
    work = [sum(sample_cost(int(totals[i]), hf_config.hidden_size) for i in s) for s in samples]
    largest = full_microbatch(config, lengths, hf_config.max_position_embeddings)
    return Batching(
        plan.num_microbatches,
        max(sum(not cell for cell in rank) for rank in plan.ranks),
        plan.padding_share(),
        len(plan.oversize),
        len(totals),
        [int(totals[s].sum()) for s in samples],
        max(work) / (sum(work) / len(work)),
        largest.tolist(),
        float((largest.astype(float) ** 2).sum() / largest.sum() ** 2 / 2),
    )
