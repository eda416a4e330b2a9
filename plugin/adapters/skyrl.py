"""SkyRL: policy losses for its registry.

Before the training entry point starts its workers:

    from plugin.adapters import skyrl as adapter
    from plugin.config import LossConfig

    adapter.register("tis_icepop", LossConfig(policy_loss="icepop"))

and `trainer.algorithm.policy_loss_type=tis_icepop`. SkyRL scales the advantages beforehand so that
a plain sum over tokens is the reduction that was asked for. That is right only for terms that are
proportional to the advantage, so a penalty beside them is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plugin.adapters.padded_loss import PaddedBatch, padded_loss
from plugin.config import LossConfig
from plugin.errors import ConfigError

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]


def register(name: str, config: LossConfig) -> PolicyLoss:
    """Register the loss that `config` describes as `name` among SkyRL's policy losses."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss

    return register_policy_loss(name)(policy_loss(config))


def policy_loss(config: LossConfig) -> PolicyLoss:
    """Build a SkyRL policy loss: [B, R] tensors in, a sum over the loss mask out."""
    penalties = {
        "--kl-tau": config.kl_tau if config.policy_loss in ("dppo", "ipo_kl", "ipo_tv") else 0,
        "--dro-beta": config.dro_beta if config.policy_loss == "dro" else 0,
        "--kl-cov-coef": config.kl_cov_coef if config.policy_loss == "kl_cov" else 0,
        "--positive-nll-coef": config.positive_nll_coef,
        "--teacher-tau": config.teacher_tau,
        "--rollout-kl-loss-coef": config.rollout_kl_loss_coef,
        "--kl-loss-coef": config.kl_loss_coef,
        "--entropy-coef": config.entropy_coef,
    }
    active = [f"{name} is {value}" for name, value in penalties.items() if value]
    if active:
        raise ConfigError(
            f"{', '.join(active)}: SkyRL puts the denominator into the advantages, so a term "
            "without advantage would be a sum over tokens; set it to 0 and use SkyRL's own KL and "
            "entropy terms"
        )
    if config.policy_loss == "clip_cov":
        raise ConfigError(
            "--policy-loss clip_cov: SkyRL puts the denominator into the advantages, so their "
            "covariances would be too small for the band; use SkyRL's own clip_cov"
        )
    # `config` is also the name of an argument that SkyRL passes.
    loss_config = config

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any = None,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        batch = PaddedBatch(
            log_probs,
            mask,
            advantages,
            train_log_probs=old_log_probs,
            rollout_log_probs=rollout_logprobs,
        )
        value, metrics = padded_loss(loss_config, batch, lambda values: (values * mask).sum())
        return value, {name: metric.item() for name, metric in metrics.items()}

    return loss
