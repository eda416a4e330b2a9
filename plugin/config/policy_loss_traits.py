"""What the configuration has to know of a policy loss, built in or given by import path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from plugin.config.import_paths import load_function

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class PolicyLossTraits:
    """How a policy loss relates to corrections and denominators.

    compares_with: the policy whose ratio with the current one its gradient carries: exp(cur -
        train), exp(cur - rollout), or None where it carries no ratio
    per_token: whether one global token count is its default denominator
    """

    compares_with: Literal["train", "rollout"] | None = "train"
    per_token: bool = False


#: The built-in losses; their functions are in `plugin.loss.policy_losses`.
POLICY_LOSS_TRAITS: dict[str, PolicyLossTraits] = {
    "ppo": PolicyLossTraits("train"),
    "reinforce": PolicyLossTraits(None),
    "cispo": PolicyLossTraits("train"),
    "gspo": PolicyLossTraits("train"),
    "icepop": PolicyLossTraits("rollout", per_token=True),
    "dppo_tv": PolicyLossTraits("rollout", per_token=True),
    "dppo": PolicyLossTraits("rollout", per_token=True),
    "ipo_kl": PolicyLossTraits("rollout", per_token=True),
    "sapo": PolicyLossTraits("train"),
    "dppo_kl": PolicyLossTraits("rollout", per_token=True),
    "vespo": PolicyLossTraits("rollout", per_token=True),
    "topr": PolicyLossTraits("rollout", per_token=True),
    "dro": PolicyLossTraits("rollout", per_token=True),
    "minpro": PolicyLossTraits("rollout", per_token=True),
}
#: Losses that compare the current policy with the rollout policy themselves.
ROLLOUT_LOSSES = tuple(n for n, t in POLICY_LOSS_TRAITS.items() if t.compares_with == "rollout")
#: Losses whose gradient already carries exp(cur - train).
RATIO_LOSSES = tuple(n for n, t in POLICY_LOSS_TRAITS.items() if t.compares_with == "train")


def loss_traits(
    *, compares_with: Literal["train", "rollout"] | None, per_token: bool = False
) -> Callable[[Function], Function]:
    """Declare the traits of a policy loss that is given by import path; see `PolicyLossTraits`."""

    def declare(function: Function) -> Function:
        function.traits = PolicyLossTraits(compares_with, per_token)  # type: ignore[attr-defined]
        return function

    return declare


@lru_cache(maxsize=256)
def traits_of(name: str) -> PolicyLossTraits:
    """Return the traits of a built-in loss, or those declared at an import path."""
    if name in POLICY_LOSS_TRAITS:
        return POLICY_LOSS_TRAITS[name]
    return getattr(load_function(name), "traits", PolicyLossTraits())
