"""What every correction hook does first: flatten its lists, apply the masks, check the lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.ppo_utils.importance_ratio import log_ratio
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.sequence_shards import SequenceShards

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(LossConfig)}


def setting(args: Any, name: str) -> Any:
    """The flag `name` of any namespace; one that is missing or None there takes its documented default."""
    value = getattr(args, name, None)
    return _DEFAULTS[name] if value is None else value


@dataclass(frozen=True)
class HookTokens:
    """The local response tokens of a microbatch, flat; `mask` is the original loss mask.

    mask: [T] bool; train, rollout, cur, advantages: [T] float32 without gradient, or None
    """

    mask: Tensor
    shards: SequenceShards
    train: Tensor | None
    rollout: Tensor | None
    cur: Tensor | None
    advantages: Tensor | None

    def train_over_rollout(self) -> Tensor:
        """log(pi_old / pi_rollout) [T]: the mismatch alone."""
        if self.train is None or self.rollout is None:
            raise ConfigError(
                "this correction compares train_log_probs with rollout_log_probs; pass both"
            )
        return log_ratio(self.train, self.rollout, self.mask)

    def cur_over_rollout(self) -> Tensor:
        """log(pi_theta / pi_rollout) [T]: mismatch and staleness."""
        assert self.cur is not None and self.rollout is not None
        return log_ratio(self.cur, self.rollout, self.mask)

    def require_cur(self, hook: str) -> None:
        if self.cur is None or self.rollout is None:
            raise ConfigError(
                f"{hook} compares the current policy with the rollout policy and was called without "
                f"{'cur_log_probs' if self.cur is None else 'rollout_log_probs'}; call it through "
                "plugin.loss.policy_loss_function (--loss-type custom_loss --custom-loss-function-path "
                "plugin.loss.policy_loss_function), which passes them"
            )

    def weighted(self, pg_loss: Tensor, weight: Tensor) -> Tensor:
        """pg_loss times a detached weight, exactly 0 where masked."""
        zero = pg_loss.new_zeros(())
        return torch.where(self.mask, pg_loss, zero) * weight.detach().to(pg_loss.dtype)

    def kept(self, pg_loss: Tensor, keep: Tensor) -> Tensor:
        """pg_loss where it is kept, exactly 0 elsewhere."""
        return torch.where(self.mask & keep, pg_loss, pg_loss.new_zeros(()))

    def metric(self, values: Tensor) -> Tensor:
        """A per-token metric [T]: float32, detached, 0 where masked."""
        return zero_masked(values.detach(), self.mask)


def hook_tokens(
    pg_loss: Tensor,
    loss_masks: Sequence[Tensor],
    train_log_probs: Sequence[Tensor] | None,
    rollout_log_probs: Sequence[Tensor] | None,
    *,
    cur_log_probs: Sequence[Tensor] | None = None,
    advantages: Sequence[Tensor] | None = None,
    total_lengths: Sequence[int] | None = None,
    response_lengths: Sequence[int] | None = None,
    **_: Any,
) -> HookTokens:
    """Flatten the arguments of a hook; lengths that do not fit each other are a `BatchError`."""
    lengths = (
        [mask.numel() for mask in loss_masks] if response_lengths is None else response_lengths
    )
    shards = SequenceShards.of(total_lengths, lengths, pg_loss.device)
    mask = shards.local_mask(loss_masks)
    if mask.numel() != pg_loss.numel():
        raise BatchError(
            f"pg_loss has {pg_loss.numel()} tokens but the loss masks select {mask.numel()} local response "
            "tokens; both must cover the same responses"
        )
    return HookTokens(
        mask,
        shards,
        _flat("train_log_probs", train_log_probs, shards),
        _flat("rollout_log_probs", rollout_log_probs, shards),
        _flat("cur_log_probs", cur_log_probs, shards),
        _flat("advantages", advantages, shards),
    )


def _flat(name: str, values: Sequence[Tensor] | None, shards: SequenceShards) -> Tensor | None:
    if values is None:
        return None
    lengths = [value.numel() for value in values]
    if lengths != shards.local_lengths:
        raise BatchError(
            f"{name} has lengths {lengths} but the samples have {shards.local_lengths} local response "
            "tokens; give one tensor per sample, as long as its response"
        )
    if not values:
        return torch.zeros(0, device=shards.device)
    return torch.cat([value.detach().reshape(-1) for value in values]).float().to(shards.device)
