"""What the configuration has to know of an advantage estimator, built in or by import path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatorTraits:
    """What an estimator needs.

    group: several responses per prompt, because its baseline is the group's
    values: the predictions of a value model
    rewards: whether it looks at them at all
    """

    group: bool = False
    values: bool = False
    rewards: bool = True


#: The built-in estimators; their functions are in `plugin.ppo_utils.advantages`.
ESTIMATOR_TRAITS: dict[str, EstimatorTraits] = {
    "grpo": EstimatorTraits(group=True),
    "dr_grpo": EstimatorTraits(group=True),
    "rloo": EstimatorTraits(group=True),
    "opo": EstimatorTraits(group=True),
    "reinforce_plus_plus": EstimatorTraits(),
    "reinforce_plus_plus_baseline": EstimatorTraits(group=True),
    "gae": EstimatorTraits(values=True),
    "none": EstimatorTraits(rewards=False),
}


def estimator_traits(name: str) -> EstimatorTraits:
    """The traits of a built-in estimator; those of an import path are the defaults."""
    return ESTIMATOR_TRAITS.get(name, EstimatorTraits())
