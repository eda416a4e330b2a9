"""Flags of what surrounds the policy loss: regularizers, advantages, denominators."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal

from plugin.config.estimator_traits import ESTIMATOR_TRAITS
from plugin.config.flags import FlagGroup, Needs, alias, expect, flag, needs_flag
from plugin.config.method_needs import needs_estimator
from plugin.errors import ConfigError

LossReduction = Literal["token-mean", "sample-mean", "fixed-length", "prompt-mean", "group-mean"]
#: Those without one global token denominator.
_SAMPLE_REDUCTIONS = ("sample-mean", "fixed-length", "prompt-mean", "group-mean")
KlEstimatorName = Literal["k1", "abs", "k2", "k3"]
ReferenceKlName = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
_SAMPLING_MASK = Needs(
    "--use-rollout-sampling-mask with --rollout-top-p below 1 or --rollout-top-k",
    lambda config: config.replays_sampling_mask,
)


@dataclass(frozen=True)
class RegularizerFlags(FlagGroup):
    title: ClassVar[str] = "regularizers"

    use_rollout_kl_loss: bool = flag(False, "add a KL between the current and the rollout policy")
    rollout_kl_loss_coef: float = flag(0.0, "its coefficient; 0 = metric only", at_least=0)
    rollout_kl_estimator_type: KlEstimatorName = flag(
        "k2", "its estimator", needs=needs_flag("use_rollout_kl_loss")
    )
    rollout_kl_scope: Literal["all", "kept"] = flag(
        "all", "over every token, or those the loss keeps", needs=needs_flag("use_rollout_kl_loss")
    )
    use_kl_loss: bool = flag(False, "add a KL to the reference policy")
    kl_loss_coef: float = flag(0.0, "its coefficient; 0 = metric only", at_least=0)
    kl_loss_type: ReferenceKlName = flag(
        "k1", "its estimator (low_var_kl is k3, at most 10)", needs=needs_flag("use_kl_loss")
    )
    use_unbiased_kl: bool = flag(
        False, "weight the reference KL by exp(cur - train)", needs=needs_flag("use_kl_loss")
    )
    distill_topk: int | None = flag(
        None,
        "on-policy distillation: add the reverse KL from the teacher over this many of its "
        "likeliest ids and one bucket for the rest",
        at_least=1,
    )
    distill_coef: float = flag(
        1.0, "its coefficient; 0 = metric only", at_least=0, needs=needs_flag("distill_topk")
    )
    entropy_coef: float = flag(0.0, "entropy bonus", at_least=0)
    entropy_of: Literal["full", "kept"] = flag(
        "full",
        "entropy of the whole distribution, or of the ids that truncated sampling kept",
        needs=_SAMPLING_MASK,
    )

    def check(self) -> None:
        for switch, coefficient in (
            ("use_rollout_kl_loss", "rollout_kl_loss_coef"),
            ("use_kl_loss", "kl_loss_coef"),
        ):
            value = getattr(self, coefficient)
            if value and not getattr(self, switch):
                option = switch.replace("_", "-")
                raise ConfigError(
                    f"--{coefficient.replace('_', '-')} is {value} but --{option} is off, so it "
                    f"would do nothing; add --{option}"
                )


@dataclass(frozen=True)
class AdvantageFlags(FlagGroup):
    title: ClassVar[str] = "advantages"

    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages; none = they do not, a teacher alone says what is learned",
        names=ESTIMATOR_TRAITS,
    )
    grpo_std_normalization: bool = flag(
        True, "grpo: divide by the group's standard deviation", needs=needs_estimator("grpo")
    )
    rloo_std: Literal["none", "group", "others", "batch"] = flag(
        "none",
        "rloo: divide by the standard deviation of the group's rewards, of those of the others in "
        "it, or of the advantages of the whole batch",
        needs=needs_estimator("rloo"),
    )
    normalize_advantages: bool = flag(False, "whiten advantages over the whole batch")
    gamma: float = flag(
        1.0, "discount", at_least=0, needs=needs_estimator("reinforce_plus_plus", "gae")
    )
    lambd: float = flag(1.0, "GAE lambda, for estimators with a value model", at_least=0)

    def check(self) -> None:
        for name in ("gamma", "lambd"):
            expect(
                getattr(self, name) <= 1,
                f"--{name} is {getattr(self, name)}; it must lie in [0, 1]",
            )


@dataclass(frozen=True)
class NormalizationFlags(FlagGroup):
    title: ClassVar[str] = "loss normalization"

    loss_denominator: Literal["original", "kept"] = flag(
        "original", "whether rejected tokens stay in the denominator of the policy loss"
    )
    loss_reduction: LossReduction | None = flag(
        None,
        "how the losses of tokens become one: a mean over tokens; over samples of their token "
        "means; over samples of their sums by a fixed length (Dr. GRPO); over prompts of their "
        "token means; over groups of the means of their samples; none = token-mean for icepop, "
        "dppo_tv, dppo, ipo_kl, else sample-mean",
    )
    loss_fixed_length: int | None = flag(
        None,
        "tokens that fixed-length divides a sample by; none = --max-response-length",
        at_least=1,
        needs=Needs(
            "--loss-reduction fixed-length", lambda config: config.reduction == "fixed-length"
        ),
    )
    calculate_per_token_loss: InitVar[bool | None] = alias(
        "loss_reduction",
        {True: ("token-mean",), False: _SAMPLE_REDUCTIONS},
        "another spelling of --loss-reduction token-mean; with --no-, of sample-mean",
    )
    validate_batch: Literal["auto", "always", "never"] = flag(
        "auto", "check values inside the loss; auto = where reading them does not stall a GPU"
    )

    def validates_on(self, device: Any) -> bool:
        """Whether values on this device are read back to be checked."""
        on_cpu = device.type == "cpu"
        return self.validate_batch == "always" or (self.validate_batch == "auto" and on_cpu)
