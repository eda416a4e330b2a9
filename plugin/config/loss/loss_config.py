"""`LossConfig`: everything `policy_loss_function` reads.

Regularizers, advantages and denominators, and the checks across the groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, absolute_code, alias, expect, flag, needs_flag
from plugin.config.import_paths import function_name, load_function
from plugin.config.loss.corrections import (
    MASKS,
    CorrectionFlags,
    is_built_in,
    weighs_current,
)
from plugin.config.loss.policy_loss import (
    COVARIANCE_LOSSES,
    POLICY_LOSS_TRAITS,
    RATIO_LOSSES,
    PolicyLossFlags,
)
from plugin.errors import ConfigError


@dataclass(frozen=True)
class EstimatorTraits:
    """What an estimator needs.

    group: several responses per prompt, because its baseline is the group's
    values: the predictions of a value model
    rewards: whether it uses any
    parts: every reward of a response by itself, not only their sum
    """

    group: bool = False
    values: bool = False
    rewards: bool = True
    parts: bool = False


#: The built-in estimators; their functions are in `plugin.ppo_utils.advantages`.
ESTIMATOR_TRAITS: dict[str, EstimatorTraits] = {
    "grpo": EstimatorTraits(group=True),
    "dr_grpo": EstimatorTraits(group=True),
    "rloo": EstimatorTraits(group=True),
    "opo": EstimatorTraits(group=True),
    "reinforce_plus_plus": EstimatorTraits(),
    "reinforce_plus_plus_baseline": EstimatorTraits(group=True),
    "maxrl": EstimatorTraits(group=True),
    "best_of_group": EstimatorTraits(group=True),
    "gdpo": EstimatorTraits(group=True, parts=True),
    "gae": EstimatorTraits(values=True),
    "none": EstimatorTraits(rewards=False),
}


#: Estimators of other frameworks: what they would need here, and what to use.
_NOT_OFFERED = {
    "remax": "its baseline is the reward of a greedy response to every prompt, which is generated, "
    "scored and not trained on; engines here sample all responses of a prompt alike. Use rloo, "
    "whose baseline is the other responses",
    "rae": "its baseline is a moving average of the rewards of each role in a game, and "
    "environments here have one role. Use rloo or reinforce_plus_plus_baseline",
    "optimal_token_baseline": "its baseline weighs responses by the sum of squared probabilities "
    "over the vocabulary at every token, which no pass reports. Use opo, its form for gradients of "
    "equal size",
}


def estimator_traits(name: str) -> EstimatorTraits:
    """The traits of a built-in estimator; those of an import path are the defaults."""
    return ESTIMATOR_TRAITS.get(name, EstimatorTraits())


def needs_estimator(*names: str) -> Needs:
    """One of these estimators, or the user's own."""
    return Needs(
        f"--advantage-estimator {' or '.join(names)}",
        lambda config: (
            config.advantage_estimator in names
            or config.advantage_estimator not in ESTIMATOR_TRAITS
        ),
    )


LossReduction = Literal["token-mean", "sample-mean", "fixed-length", "prompt-mean", "group-mean"]
#: Those without one global token denominator.
_SAMPLE_REDUCTIONS = ("sample-mean", "fixed-length", "prompt-mean", "group-mean")
KlEstimatorName = Literal["k1", "abs", "k2", "k3"]
ReferenceKlName = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
_SAMPLING_MASK = Needs(
    "--use-rollout-sampling-mask with --rollout-top-p below 1, --rollout-top-k or --rollout-min-p",
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
        False, "weight the reference KL by exp(cur - proximal)", needs=needs_flag("use_kl_loss")
    )
    unbiased_kl_against: Literal["proximal", "rollout"] = flag(
        "proximal",
        "the policy that this weight divides by; rollout also corrects the mismatch",
        needs=needs_flag("use_unbiased_kl"),
    )
    positive_nll_coef: float = flag(
        0.0, "add this times the negative log-likelihood of the tokens with A > 0", at_least=0
    )
    distill_topk: int | None = flag(
        None,
        "on-policy distillation: add the reverse KL from the teacher over this many of its "
        "most likely ids and one bucket for the rest",
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
        "how rewards become advantages; none = learn from a teacher only",
        names=ESTIMATOR_TRAITS,
        not_offered=_NOT_OFFERED,
        path=absolute_code,
    )
    grpo_std_normalization: bool = flag(
        True,
        "grpo, best_of_group, gdpo: divide by the group's standard deviation",
        needs=needs_estimator("grpo", "best_of_group", "gdpo"),
    )
    rloo_std: Literal["none", "group", "others", "batch"] = flag(
        "none",
        "rloo: divide by the standard deviation of the group's rewards, of the other samples' "
        "rewards, or of the whole batch's advantages",
        needs=needs_estimator("rloo"),
    )
    normalize_advantages: bool = flag(False, "whiten advantages over the whole batch")
    gamma: float = flag(
        1.0, "discount", at_least=0, at_most=1, needs=needs_estimator("reinforce_plus_plus", "gae")
    )
    lambd: float = flag(1.0, "GAE lambda, for estimators with a value model", at_least=0, at_most=1)


@dataclass(frozen=True)
class NormalizationFlags(FlagGroup):
    title: ClassVar[str] = "loss normalization"

    loss_denominator: Literal["original", "kept"] = flag(
        "original", "whether rejected tokens stay in the denominator of the policy loss"
    )
    loss_reduction: LossReduction | None = flag(
        None,
        "how token losses are reduced: mean over tokens; over samples of their token "
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


@dataclass(frozen=True)
class LossConfig(
    PolicyLossFlags, CorrectionFlags, RegularizerFlags, AdvantageFlags, NormalizationFlags
):
    """Everything `policy_loss_function` reads."""

    def check(self) -> None:
        self._check_correction_fits_loss()
        self._check_engine_version()
        self._check_score_centering()
        self._check_teacher()
        self._check_reduction()
        self._check_kept_denominator()

    @property
    def reduction(self) -> LossReduction:
        """How the losses of tokens become one: as asked for, or as the policy loss is defined."""
        if self.loss_reduction is not None:
            return self.loss_reduction
        return "token-mean" if self.loss_traits.per_token else "sample-mean"

    @property
    def per_token(self) -> bool:
        """Whether the loss has one global token denominator."""
        return self.reduction == "token-mean"

    @property
    def fixed_length(self) -> int | None:
        """The tokens that a sample is divided by, where that is a constant."""
        return self.loss_fixed_length

    @property
    def distills(self) -> bool:
        """Whether the policy learns from a teacher, alone or besides rewards."""
        return self.teacher_tau > 0 or (self.distill_topk is not None and self.distill_coef > 0)

    @property
    def ids_of(self) -> Literal["full", "kept"]:
        """The distribution that the log-probs of further ids are of.

        The sampler's likeliest ids were drawn from those that truncated sampling kept; a teacher
        speaks of all.
        """
        return "kept" if self.score_centering_topk else "full"

    @property
    def centers_first_update_only(self) -> list[str]:
        """What weights tokens by the old policy, whose log-probs of other ids are not known.

        They are the current ones on the first update on a rollout.
        """
        if not self.score_centering_topk or self.train_log_probs == "rollout":
            return []
        found = []
        if self.loss_traits.compares_with == "train":
            found.append(f"--policy-loss {self.policy_loss}")
        if self.use_tis:
            found += [path for path in self.hook_names() if not weighs_current(path)]
        return found

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss accounts for tokens that another policy sampled.

        It does if it compares with the rollout policy: by itself, by a correction, by score
        centering, or because the engine's log-probs stand for the old ones that it compares with.
        """
        compares_with = self.loss_traits.compares_with
        compares_with_old = compares_with == "train" or self.use_tis
        hooks = [function_name(path) for path in self.hook_names()]
        compares_with_cur_alone = all(name == "opsm_function" for name in hooks)
        if self.train_log_probs == "engine-version":
            # Corrections weight by the mismatch alone; what the updates since changed is left to
            # the loss's own ratio, or to a correction by the current policy.
            return compares_with is not None or (self.use_tis and "off_policy_is_function" in hooks)
        return (
            compares_with == "rollout"
            or self.score_centering_topk > 0
            or (self.use_tis and not compares_with_cur_alone)
            or (self.train_log_probs == "rollout" and compares_with_old)
        )

    def needs_rollout_log_probs(self) -> list[str]:
        """The features in use that cannot work without the engine's log-probs."""
        old = self.train_log_probs
        wanted = {
            f"--policy-loss {self.policy_loss}": self.loss_traits.compares_with == "rollout",
            "--use-tis": self.use_tis,
            "--use-rollout-kl-loss": self.use_rollout_kl_loss,
            "--train-log-probs rollout or --use-rollout-logprobs": old == "rollout",
            "--train-log-probs approximate": old == "approximate",
            "--unbiased-kl-against rollout": self.unbiased_kl_against == "rollout",
            "--get-mismatch-metrics": self.get_mismatch_metrics,
            "--score-centering-topk": self.score_centering_topk > 0,
        }
        return [name for name, needed in wanted.items() if needed]

    def require_rollout_log_probs(self, available: bool) -> None:
        """Fail at once where a feature would otherwise be silently inert."""
        needing = self.needs_rollout_log_probs()
        if needing and not available:
            raise ConfigError(
                f"{', '.join(needing)} needs rollout_log_probs and the batch has none; make the "
                "engine return the log-prob of every sampled token, or turn the feature off"
            )

    def require_head(self, columns: Container[str]) -> None:
        """Fail at once where a batch lacks the likeliest ids that score centering needs."""
        names = ("rollout_topk_token_ids", "rollout_topk_log_probs")
        expect(
            not self.score_centering_topk or all(name in columns for name in names),
            f"--score-centering-topk is {self.score_centering_topk} and the batch lacks "
            f"{' or '.join(names)}; make the engine report its likeliest ids, or set it to 0",
        )

    def require_teacher(self, columns: Container[str]) -> None:
        """Fail at once where a batch lacks what distillation needs of the teacher."""
        expect(
            not self.teacher_tau or "teacher_log_probs" in columns,
            f"--teacher-tau is {self.teacher_tau} but the batch has no teacher_log_probs; give a "
            "teacher",
        )
        names = ("teacher_topk_ids", "teacher_topk_log_probs")
        expect(
            not self.distill_topk or all(name in columns for name in names),
            f"--distill-topk is {self.distill_topk} but the batch lacks {' or '.join(names)}; give "
            "a teacher",
        )

    def _check_teacher(self) -> None:
        expect(
            not self.teacher_tau or self.policy_loss not in COVARIANCE_LOSSES,
            f"--teacher-tau {self.teacher_tau} with --policy-loss {self.policy_loss}: tokens are "
            "chosen by the advantages of the batch, before the teacher's part is added; use "
            "--distill-topk, or a different loss",
        )

    def _check_correction_fits_loss(self) -> None:
        if not self.use_tis:
            return
        expect(
            self.loss_traits.compares_with != "rollout" or self.hooks_only_drop,
            f"--use-tis with --policy-loss {self.policy_loss}: that loss already compares the "
            "current policy with the rollout policy, so the mismatch would be counted twice; drop "
            f"--use-tis, or use masks, which multiply by no ratio ({', '.join(MASKS)})",
        )
        doubled = [
            path for path in self.hook_names() if function_name(path) == "off_policy_is_function"
        ]
        if doubled and self.loss_traits.compares_with == "train":
            message = (
                f"{doubled[0]} on --policy-loss {self.policy_loss} counts pi_theta/pi_old twice "
                "and is right only for the first update on a rollout"
            )
            if not self.allow_biased_correction:
                raise ConfigError(
                    f"{message}; use --policy-loss reinforce, or insist with "
                    "--allow-biased-correction"
                )
            warnings.warn(message, stacklevel=2)

    def _check_engine_version(self) -> None:
        """Refuse passes that nothing would read."""
        reads = (
            self.loss_traits.compares_with == "train"
            or self.use_tis
            or self.get_mismatch_metrics
            or (self.use_unbiased_kl and self.unbiased_kl_against == "proximal")
        )
        expect(
            self.train_log_probs != "engine-version" or reads,
            f"--train-log-probs engine-version with --policy-loss {self.policy_loss} and no "
            "correction: nothing compares with these log-probs; choose --policy-loss "
            f"{' or '.join(RATIO_LOSSES)}, add --use-tis or --get-mismatch-metrics, or drop it",
        )

    def _check_score_centering(self) -> None:
        topk, loss = self.score_centering_topk, self.policy_loss
        if not topk:
            return
        option, reason = f"--score-centering-topk {topk}", self.loss_traits.not_centered
        if reason is None and loss not in POLICY_LOSS_TRAITS:
            separable = getattr(load_function(loss), "token_separable", False)
            reason = None if separable else "is not declared @token_separable"
        expect(
            reason is None,
            f"{option} with --policy-loss {loss}, which {reason}: the weight of a token that was "
            "not sampled is not known; use reinforce, ppo, icepop or dppo_tv, for example",
        )
        expect(
            self.distill_topk is None,
            f"{option} with --distill-topk {self.distill_topk}: log-probs are computed of one set "
            "of ids per token, the sampler's or the teacher's; drop one of the two",
        )
        old = self.train_log_probs
        expect(
            old not in ("approximate", "engine-version"),
            f"{option} with --train-log-probs {old}: the log-probs of that policy are not known "
            "for tokens that were not sampled; use recompute or rollout",
        )
        if not self.use_tis:
            return
        foreign = [
            path
            for path in self.hook_names()
            if not is_built_in(path) and not hasattr(load_function(path), "weigh")
        ]
        expect(
            not foreign,
            f"{option} with the correction {', '.join(foreign)}, which cannot be asked for the "
            "weight of a token that was not sampled; write it as a function of tokens "
            "(@correction, docs/hooks.md), or use built-in ones",
        )

    def _check_reduction(self) -> None:
        expect(
            self.reduction != "fixed-length" or self.fixed_length is not None,
            "--loss-reduction fixed-length needs --loss-fixed-length, the tokens that every sample "
            "is divided by; give the longest response",
        )
        expect(
            self.loss_denominator == "original"
            or self.reduction not in ("fixed-length", "prompt-mean"),
            f"--loss-denominator kept with --loss-reduction {self.reduction}: kept tokens are "
            "counted over a sample or over all; use token-mean, sample-mean or group-mean, or the "
            "original denominator",
        )

    def _check_kept_denominator(self) -> None:
        regularized = {
            "--kl-loss-coef": self.kl_loss_coef,
            "--rollout-kl-loss-coef": self.rollout_kl_loss_coef,
            "--entropy-coef": self.entropy_coef,
            "--distill-coef": self.distill_coef if self.distill_topk else 0,
            "--positive-nll-coef": self.positive_nll_coef,
        }
        active = [name for name, value in regularized.items() if value]
        expect(
            not (self.loss_denominator == "kept" and self.per_token and active),
            f"--loss-denominator kept with a global token denominator and {', '.join(active)}: the "
            "two terms would need two denominators; use --no-calculate-per-token-loss or the "
            "original one",
        )
