"""Flags of the value model of `--advantage-estimator gae`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugin.config.flags import FlagGroup, Needs, flag

_GAE = Needs("--advantage-estimator gae", lambda config: config.advantage_estimator == "gae")


@dataclass(frozen=True)
class CriticFlags(FlagGroup):
    title: ClassVar[str] = "critic"

    critic_hf_checkpoint: str | None = flag(
        None, "model that the critic starts from; none = that of the policy", needs=_GAE
    )
    critic_lr: float | None = flag(
        None, "the critic's learning rate; none = --lr", above=0, needs=_GAE
    )
    critic_lr_warmup_steps: int = flag(
        0, "optimizer steps of linear warm-up of the critic", at_least=0, needs=_GAE
    )
    num_critic_only_rollouts: int = flag(
        0,
        "first rollouts on which only the critic learns: the policy's learning rate is 0",
        at_least=0,
        needs=_GAE,
    )
    value_clip: float | None = flag(
        0.2,
        "how far a value may go from what it was before the rollout's updates and still be "
        "pushed on; none = no clipping",
        above=0,
        needs=_GAE,
    )

    @property
    def trains_critic(self) -> bool:
        """Whether the job has a value model."""
        return getattr(self, "advantage_estimator", None) == "gae"

    def critic_learning_rate(self, update: int) -> float:
        """Warm-up, then constant; `update` counts from 0."""
        rate = float(self.critic_lr or self.lr)  # type: ignore[attr-defined]
        return rate * min(1.0, (update + 1) / max(1, self.critic_lr_warmup_steps))
