"""megatron-tis: RL post-training on Megatron-Core that stays correct off-policy."""

__version__ = "0.1.0"
