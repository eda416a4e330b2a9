"""Policy losses: what the configuration needs to know about each, and their flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

from plugin.config.flags import FlagGroup, Needs, absolute_code, expect, expect_band, flag
from plugin.config.import_paths import load_function
from plugin.config.loss.corrections import needs_hook

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class PolicyLossTraits:
    """How a policy loss relates to corrections and denominators.

    compares_with: the policy whose ratio with the current one its gradient carries: exp(cur -
        train), exp(cur - rollout), or None where it carries no ratio
    per_token: whether one global token count is its default denominator
    not_centered: why --score-centering-topk cannot center its score, where it cannot
    """

    compares_with: Literal["train", "rollout"] | None = "train"
    per_token: bool = False
    not_centered: str | None = None


_OF_SEQUENCES = "weights a token by its whole sequence"
#: Losses that choose tokens by covariances of log-probs and advantages over the batch.
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
_OF_BATCH = "selects tokens by their covariance over the batch"

#: The built-in losses; their functions are in `plugin.loss.policy_losses`.
POLICY_LOSS_TRAITS: dict[str, PolicyLossTraits] = {
    "ppo": PolicyLossTraits("train"),
    "reinforce": PolicyLossTraits(None),
    "cispo": PolicyLossTraits("train"),
    "gspo": PolicyLossTraits("train", not_centered=_OF_SEQUENCES),
    "icepop": PolicyLossTraits("rollout", per_token=True),
    "dppo_tv": PolicyLossTraits("rollout", per_token=True),
    "dppo": PolicyLossTraits("rollout", per_token=True),
    "ipo_kl": PolicyLossTraits(
        "rollout", per_token=True, not_centered="mixes a penalty into the loss that A multiplies"
    ),
    "sapo": PolicyLossTraits("train"),
    "dppo_kl": PolicyLossTraits("rollout", per_token=True),
    "vespo": PolicyLossTraits("rollout", per_token=True, not_centered=_OF_SEQUENCES),
    "topr": PolicyLossTraits("rollout", per_token=True, not_centered=_OF_SEQUENCES),
    "dro": PolicyLossTraits("rollout", per_token=True),
    "minpro": PolicyLossTraits("rollout", per_token=True, not_centered=_OF_SEQUENCES),
    "gmpo": PolicyLossTraits("train", not_centered=_OF_SEQUENCES),
    "ipo_tv": PolicyLossTraits("rollout", per_token=True),
    "clip_cov": PolicyLossTraits("train", not_centered=_OF_BATCH),
    "kl_cov": PolicyLossTraits("train", not_centered=_OF_BATCH),
}


#: Losses that compare the current policy with the rollout policy themselves.
ROLLOUT_LOSSES = tuple(n for n, t in POLICY_LOSS_TRAITS.items() if t.compares_with == "rollout")


#: Losses whose gradient already carries exp(cur - proximal).
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


def needs_loss(*names: str) -> Needs:
    """One of these policy losses, or the user's own, which may read any flag."""
    return Needs(
        f"--policy-loss {' or '.join(names)}",
        lambda config: config.policy_loss in names or config.policy_loss not in POLICY_LOSS_TRAITS,
    )


_CLIP = needs_loss("ppo", "gspo", "cispo", "gmpo", "minpro", "clip_cov") | needs_hook(
    "off_policy_is_function"
)


def _of_loss(loss: str, default: Any, help: str, **bounds: Any) -> Any:
    """A flag that one built-in policy loss reads."""
    return flag(default, help, needs=needs_loss(loss), **bounds)


@dataclass(frozen=True)
class PolicyLossFlags(FlagGroup):
    title: ClassVar[str] = "policy loss"

    policy_loss: str = flag(
        "ppo",
        "the per-token policy loss",
        names=POLICY_LOSS_TRAITS,
        path=absolute_code,
        common_in="train",
    )
    eps_clip: float = flag(
        0.2, "lower clip: ratio >= 1 - eps; 1.0 removes the bound", above=0, needs=_CLIP
    )
    eps_clip_high: float | None = flag(
        None, "upper clip: ratio <= 1 + eps; none = eps-clip", above=0, needs=_CLIP
    )
    eps_clip_c: float | None = flag(
        None,
        "dual-clip bound for negative advantages",
        above=1,
        needs=needs_loss("ppo", "gspo", "clip_cov"),
    )
    clip_cov_ratio: float = _of_loss(
        "clip_cov", 2e-4, "clip_cov drops this share of the batch's tokens", above=0, at_most=1
    )
    clip_cov_low: float = _of_loss(
        "clip_cov", 1.0, "clip_cov: among those whose covariance is above this"
    )
    clip_cov_high: float = _of_loss("clip_cov", 5.0, "clip_cov: and below this")
    kl_cov_ratio: float = _of_loss(
        "kl_cov",
        2e-4,
        "kl_cov pulls this share of the batch's tokens to the old policy",
        above=0,
        at_most=1,
    )
    kl_cov_coef: float = _of_loss("kl_cov", 1.0, "kl_cov: how strongly", at_least=0)
    icepop_ratio_low: float = _of_loss(
        "icepop", 0.2, "icepop: smallest ratio that is kept", at_least=0
    )
    icepop_ratio_high: float = _of_loss(
        "icepop", 5.0, "icepop: largest ratio that is kept", above=0
    )
    dppo_diff_low: float = flag(
        0.2,
        "dppo_tv keeps pi_cur - pi_rollout >= -this",
        at_least=0,
        needs=needs_loss("dppo_tv") | needs_hook("dppo_tv_mask_function"),
    )
    dppo_diff_high: float = flag(
        0.2,
        "dppo_tv keeps pi_cur - pi_rollout <= this",
        at_least=0,
        needs=needs_loss("dppo_tv") | needs_hook("dppo_tv_mask_function"),
    )
    dppo_ratio_cap: float | None = flag(
        None,
        "dppo_tv, dppo_kl: cap on the ratio of a kept token",
        above=1,
        needs=needs_loss("dppo_tv", "dppo_kl"),
    )
    dppo_kl_threshold: float = _of_loss(
        "dppo_kl", 0.05, "dppo_kl drops tokens whose binary KL exceeds this", above=0
    )
    dppo_kl_threshold_low: float | None = _of_loss(
        "dppo_kl", None, "dppo_kl: the same for A <= 0; none = dppo-kl-threshold", above=0
    )
    dppo_mask_low: float = _of_loss("dppo", 0.2, "dppo drops A <= 0 below -this", at_least=0)
    dppo_mask_high: float = _of_loss("dppo", 0.2, "dppo drops A > 0 above this", at_least=0)
    ipo_ratio_low: float = _of_loss(
        "ipo_kl", 0.2, "ipo_kl: smallest ratio that is kept", at_least=0
    )
    ipo_ratio_high: float = _of_loss("ipo_kl", 5.0, "ipo_kl: largest ratio that is kept", above=0)
    ipo_threshold: float = _of_loss(
        "ipo_tv", 0.1, "ipo_tv keeps |pi_cur - pi_rollout| <= this", above=0, at_most=1
    )
    kl_tau: float = flag(
        1e-3,
        "squared log-ratio penalty of dppo, ipo_kl and ipo_tv",
        at_least=0,
        needs=needs_loss("dppo", "ipo_kl", "ipo_tv"),
    )
    adv_tau: float = flag(1.0, "scale of the advantages; 0 = rewards have no effect", at_least=0)
    teacher_tau: float = flag(
        0.0,
        "on-policy distillation, with any policy loss but clip_cov and kl_cov: add this times "
        "(teacher log-prob - policy log-prob) to the advantage of every token",
        at_least=0,
    )
    sapo_tau_pos: float = _of_loss("sapo", 1.0, "sapo gate temperature where A > 0", above=0)
    sapo_tau_neg: float = _of_loss("sapo", 1.05, "sapo gate temperature elsewhere", above=0)

    vespo_k_pos: float = _of_loss(
        "vespo", 2.0, "vespo: exponent of the sequence ratio where A >= 0", above=0
    )
    vespo_lambda_pos: float = _of_loss(
        "vespo", 3.0, "vespo: decay with the sequence ratio where A >= 0", above=0
    )
    vespo_k_neg: float = _of_loss(
        "vespo", 3.0, "vespo: exponent of the sequence ratio where A < 0", above=0
    )
    vespo_lambda_neg: float = _of_loss(
        "vespo", 2.0, "vespo: decay with the sequence ratio where A < 0", above=0
    )
    dro_beta: float = _of_loss(
        "dro", 1.0, "dro: strength of the pull towards the rollout policy", at_least=0
    )

    def check(self) -> None:
        expect_band("icepop-ratio", self.icepop_ratio_low, self.icepop_ratio_high)
        expect_band("ipo-ratio", self.ipo_ratio_low, self.ipo_ratio_high)
        expect_band("clip-cov", self.clip_cov_low, self.clip_cov_high)
        for name in ("dppo_diff", "dppo_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            option = f"--{name.replace('_', '-')}"
            expect(
                0 < low <= 1 and 0 < high <= 1,
                f"{option}-low is {low} and {option}-high is {high}; both bound a difference of "
                "probabilities and must lie in (0, 1]; the default is 0.2",
            )

    @property
    def loss_traits(self) -> PolicyLossTraits:
        """What the policy loss compares with and its default denominator."""
        return traits_of(self.policy_loss)

    @property
    def clip_high(self) -> float:
        """The upper clip that is in force."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
