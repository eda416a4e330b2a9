"""What one token is worth: ratios, KL, advantages and corrections, in pure torch."""

from plugin.ppo_utils import corrections
from plugin.ppo_utils.advantages import (
    gae_advantages,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    rloo_advantages,
    spread_over_tokens,
    whiten,
)
from plugin.ppo_utils.batch_statistics import batch_statistics, microbatch_statistics
from plugin.ppo_utils.correction_interface import mask_only, token_separable
from plugin.ppo_utils.corrections import *  # noqa: F403
from plugin.ppo_utils.importance_ratio import (
    KL_ESTIMATORS,
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    kl_estimate,
    log_ratio,
    probability_difference,
    safe_exp,
    sequence_log_ratio,
)
from plugin.ppo_utils.masked_ops import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    neutralised,
    zero_masked,
)
from plugin.sharding.parallel_context import ParallelContext, use_parallel_context
from plugin.sharding.sequence_shards import SequenceShards, response_spans

__all__ = [
    *corrections.__all__,
    "KL_ESTIMATORS",
    "ParallelContext",
    "SequenceShards",
    "batch_statistics",
    "clipped_ratio",
    "gae_advantages",
    "geometric_log_ratio",
    "grpo_advantages",
    "inside_band",
    "kl_estimate",
    "log_ratio",
    "mask_only",
    "masked_max",
    "masked_mean",
    "masked_min",
    "masked_sum",
    "microbatch_statistics",
    "neutralised",
    "probability_difference",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_plus_plus_returns",
    "response_spans",
    "rloo_advantages",
    "safe_exp",
    "sequence_log_ratio",
    "spread_over_tokens",
    "token_separable",
    "use_parallel_context",
    "whiten",
    "zero_masked",
]
