"""What one token is worth: ratios, KL estimators, advantages and correction hooks, in pure torch."""

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
from plugin.ppo_utils.corrections import (
    icepop_function,
    off_policy_is_function,
    sequence_tis_function,
    vanilla_tis_function,
)
from plugin.ppo_utils.importance_ratio import (
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    log_ratio,
    probability_difference,
    safe_exp,
    sequence_log_ratio,
)
from plugin.ppo_utils.kl_estimators import KL_ESTIMATORS, kl_estimate
from plugin.ppo_utils.masked_ops import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    neutralised,
    zero_masked,
)
from plugin.ppo_utils.rejections import (
    dppo_tv_mask_function,
    geometric_mask_function,
    opsm_function,
    rejection_function,
    veto_function,
)
from plugin.ppo_utils.separability import token_separable
from plugin.sharding.parallel_context import ParallelContext, use_parallel_context
from plugin.sharding.sequence_shards import SequenceShards, response_spans

__all__ = [
    "KL_ESTIMATORS",
    "ParallelContext",
    "SequenceShards",
    "clipped_ratio",
    "dppo_tv_mask_function",
    "gae_advantages",
    "geometric_log_ratio",
    "geometric_mask_function",
    "grpo_advantages",
    "icepop_function",
    "inside_band",
    "kl_estimate",
    "log_ratio",
    "masked_max",
    "masked_mean",
    "masked_min",
    "masked_sum",
    "neutralised",
    "off_policy_is_function",
    "opsm_function",
    "probability_difference",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_plus_plus_returns",
    "rejection_function",
    "response_spans",
    "rloo_advantages",
    "safe_exp",
    "sequence_log_ratio",
    "sequence_tis_function",
    "spread_over_tokens",
    "token_separable",
    "use_parallel_context",
    "vanilla_tis_function",
    "veto_function",
    "whiten",
    "zero_masked",
]
