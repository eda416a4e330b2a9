"""Public path of `plugin.logprobs.fused_lm_head`."""

from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy

__all__ = ["fused_log_probs_and_entropy"]
