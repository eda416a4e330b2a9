"""What DAPO does to long responses: masks those cut off, penalizes those close to the limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from plugin.config import JobConfig
from plugin.environments.trajectory import Rollouts
from plugin.ragged import Ragged


def with_overlong_rules(config: JobConfig, rollouts: Rollouts) -> Rollouts:
    """The rollouts as they are trained on: penalized rewards, and masks of 0 where cut off."""
    penalty = overlong_penalty(config, rollouts)
    if penalty is not None:
        rollouts = replace(rollouts, rewards=rollouts.rewards + penalty)
    if config.overlong_filtering and bool(rollouts.truncated.any()):
        masks: Ragged = rollouts.batch.columns["loss_masks"]
        cut = torch.from_numpy(np.repeat(rollouts.truncated, rollouts.samples)[masks.sample_index])
        masks = masks.like(torch.where(cut, 0, masks.values))
        rollouts = replace(rollouts, batch=rollouts.batch.with_column("loss_masks", masks))
    return rollouts


def overlong_penalty(config: JobConfig, rollouts: Rollouts) -> NDArray[np.float64] | None:
    """[M] what each response's reward loses for its length, at most 0; None without the penalty.

    0 up to `max_response_length - overlong_buffer_length` tokens, then linear down to
    `-overlong_penalty_factor` at `max_response_length`. For responses of one turn, which are one
    sample each.
    """
    buffer = config.overlong_buffer_length
    if buffer is None:
        return None
    lengths = rollouts.batch.columns["response_lengths"].double().numpy()
    beyond = lengths - (config.max_response_length - buffer)
    return -config.overlong_penalty_factor * np.clip(beyond / buffer, 0.0, 1.0)
