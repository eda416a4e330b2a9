"""prime-rl: a custom loss, named in the trainer's configuration.

    [trainer.loss]
    type = "custom"
    import_path = "plugin.adapters.prime_rl.policy_loss"
    kwargs = { policy_loss = "icepop", icepop_ratio_high = 4.0 }

prime-rl calls the function once per sample and divides the sum of all of them by a global token
count.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from plugin.adapters.padded_loss import PaddedBatch, padded_loss
from plugin.config import LossConfig
from plugin.errors import ConfigError


def policy_loss(inputs: Any, **settings: Any) -> Any:
    """The loss of one sample: prime-rl's `LossInputs` in, its `LossOutputs` out.

    inputs: trainer_logprobs (with gradient), inference_logprobs, advantages, loss_mask: [S];
        ref_logprobs (or teacher_logprobs in older versions) and loss_weights: [S] or None
    settings: flags of the loss, by their field names
    """
    config = _config(tuple(sorted(settings.items())))
    mask = inputs.loss_mask
    weights = getattr(inputs, "loss_weights", None)
    other = getattr(inputs, "ref_logprobs", getattr(inputs, "teacher_logprobs", None))
    other = None if other is None else other[None]
    batch = PaddedBatch(
        inputs.trainer_logprobs[None],
        mask[None],
        inputs.advantages[None],
        rollout_log_probs=inputs.inference_logprobs[None],
        ref_log_probs=other if config.use_kl_loss else None,
        teacher_log_probs=other if config.teacher_tau else None,
    )

    def reduce(values: Tensor) -> Tensor:
        if weights is None:
            return values.sum()
        return (values[0] * torch.where(mask, weights.float(), 0.0)).sum()

    loss, metrics = padded_loss(config, batch, reduce)
    # prime-rl defines it beside the class of the inputs, so nothing has to be imported.
    outputs_class = sys.modules[type(inputs).__module__].LossOutputs
    return outputs_class(loss=loss, metrics=metrics)


@lru_cache(maxsize=32)
def _config(settings: tuple[tuple[str, Any], ...]) -> LossConfig:
    config = LossConfig.from_sources(dict(settings))
    if config.loss_traits.compares_with == "train" and config.train_log_probs != "rollout":
        raise ConfigError(
            f"policy_loss {config.policy_loss} compares with the trainer's own log-probs, and "
            "prime-rl has none: its ratio would always be 1; add use_rollout_logprobs = true, or "
            "choose a loss that compares with rollout"
        )
    return config
