"""Public path of `plugin.logprobs.vocab_parallel`."""

from plugin.logprobs.vocab_parallel import log_probs_and_entropy

__all__ = ["log_probs_and_entropy"]
