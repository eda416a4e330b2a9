"""Flags of the loss: which policy loss, which correction, which regularizers, which denominator."""

from __future__ import annotations

import warnings
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from plugin.config.clip_rules import ess_target
from plugin.config.estimator_traits import ESTIMATOR_TRAITS
from plugin.config.flags import FlagGroup, Needs, expect, flag, needs_flag
from plugin.config.policy_loss_traits import (
    POLICY_LOSS_TRAITS,
    PolicyLossTraits,
    traits_of,
)
from plugin.config.rejection_rules import parse_rejection_rules
from plugin.errors import ConfigError

LossReduction = Literal["token-mean", "sample-mean", "fixed-length", "prompt-mean", "group-mean"]
OldLogProbs = Literal["recompute", "approximate", "rollout"]
KlEstimatorName = Literal["k1", "abs", "k2", "k3"]
ReferenceKlName = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
VANILLA_TIS = "plugin.ppo_utils.vanilla_tis_function"


def _losses(*names: str) -> Needs:
    """One of these policy losses, or the user's own, which may read any flag."""
    return Needs(
        f"--policy-loss {' or '.join(names)}",
        lambda config: config.policy_loss in names or config.policy_loss not in POLICY_LOSS_TRAITS,
    )


def _estimators(*names: str) -> Needs:
    """One of these estimators, or the user's own."""
    return Needs(
        f"--advantage-estimator {' or '.join(names)}",
        lambda config: (
            config.advantage_estimator in names
            or config.advantage_estimator not in ESTIMATOR_TRAITS
        ),
    )


def _hooks(*names: str) -> Needs:
    """One of these corrections in use, or one of the user's own."""
    built_in = "plugin.ppo_utils."

    def are_met(config: CorrectionFlags) -> bool:
        paths = [path.replace(":", ".") for path in config.hook_names()]
        return (config.use_tis or config.get_mismatch_metrics) and any(
            not path.startswith(built_in) or path.rsplit(".", 1)[-1] in names for path in paths
        )

    shown = " or ".join(
        f"{name} (the default)" if name == "vanilla_tis_function" else f"{built_in}{name}"
        for name in names
    )
    return Needs(f"--use-tis with {shown}", are_met)


_SAMPLING_MASK = Needs(
    "--use-rollout-sampling-mask with --rollout-top-p below 1 or --rollout-top-k",
    lambda config: config.replays_sampling_mask,
)
_UNREPLAYED_TRUNCATION = Needs(
    "truncated sampling without --use-rollout-sampling-mask",
    lambda config: config.truncates_sampling and not config.replays_sampling_mask,
)
_CLIP = _losses("ppo", "gspo", "cispo", "minpro") | _hooks("off_policy_is_function")
_SEQUENCE_HOOKS = _hooks("sequence_tis_function", "segment_tis_function")
_UNCORRECTED_ASYNC = Needs(
    "--async-rollouts without a correction",
    lambda config: getattr(config, "staleness_limit", 0) > 0 and not config.corrects_mismatch,
)


@dataclass(frozen=True)
class PolicyLossFlags(FlagGroup):
    title: ClassVar[str] = "policy loss"

    policy_loss: str = flag("ppo", "the per-token policy loss", names=POLICY_LOSS_TRAITS)
    eps_clip: float = flag(
        0.2, "lower clip: ratio >= 1 - eps; 1.0 removes the bound", above=0, needs=_CLIP
    )
    eps_clip_high: float | None = flag(
        None, "upper clip: ratio <= 1 + eps; none = eps-clip", above=0, needs=_CLIP
    )
    eps_clip_c: float | None = flag(
        None, "dual-clip bound for negative advantages", above=1, needs=_losses("ppo", "gspo")
    )
    icepop_ratio_low: float = flag(
        0.2, "icepop keeps ratios from here ...", at_least=0, needs=_losses("icepop")
    )
    icepop_ratio_high: float = flag(5.0, "... to here", above=0, needs=_losses("icepop"))
    dppo_diff_low: float = flag(
        0.2,
        "dppo_tv keeps pi_cur - pi_rollout >= -this",
        at_least=0,
        needs=_losses("dppo_tv") | _hooks("dppo_tv_mask_function"),
    )
    dppo_diff_high: float = flag(
        0.2,
        "dppo_tv keeps pi_cur - pi_rollout <= this",
        at_least=0,
        needs=_losses("dppo_tv") | _hooks("dppo_tv_mask_function"),
    )
    dppo_ratio_cap: float | None = flag(
        None,
        "dppo_tv, dppo_kl: cap on the ratio of a kept token",
        above=1,
        needs=_losses("dppo_tv", "dppo_kl"),
    )
    dppo_kl_threshold: float = flag(
        0.05,
        "dppo_kl drops tokens whose binary KL exceeds this",
        above=0,
        needs=_losses("dppo_kl"),
    )
    dppo_mask_low: float = flag(
        0.2, "dppo drops A <= 0 below -this", at_least=0, needs=_losses("dppo")
    )
    dppo_mask_high: float = flag(
        0.2, "dppo drops A > 0 above this", at_least=0, needs=_losses("dppo")
    )
    ipo_ratio_low: float = flag(
        0.2, "ipo_kl keeps ratios from here ...", at_least=0, needs=_losses("ipo_kl")
    )
    ipo_ratio_high: float = flag(5.0, "... to here", above=0, needs=_losses("ipo_kl"))
    kl_tau: float = flag(
        1e-3,
        "squared log-ratio penalty of dppo and ipo_kl",
        at_least=0,
        needs=_losses("dppo", "ipo_kl"),
    )
    adv_tau: float = flag(
        1.0,
        "scale of the advantage that the rewards give; 0 = they do not matter",
        at_least=0,
    )
    teacher_tau: float = flag(
        0.0,
        "on-policy distillation: add this times the teacher's log-prob less the policy's to the "
        "advantage of every token, whichever the policy loss",
        at_least=0,
    )
    sapo_tau_pos: float = flag(
        1.0, "sapo gate temperature where A > 0", above=0, needs=_losses("sapo")
    )
    sapo_tau_neg: float = flag(
        1.05, "sapo gate temperature elsewhere", above=0, needs=_losses("sapo")
    )

    vespo_k_pos: float = flag(
        2.0, "vespo: exponent of the sequence ratio where A >= 0", above=0, needs=_losses("vespo")
    )
    vespo_lambda_pos: float = flag(
        3.0, "vespo: decay with the sequence ratio where A >= 0", above=0, needs=_losses("vespo")
    )
    vespo_k_neg: float = flag(3.0, "the exponent where A < 0", above=0, needs=_losses("vespo"))
    vespo_lambda_neg: float = flag(2.0, "the decay where A < 0", above=0, needs=_losses("vespo"))
    dro_beta: float = flag(
        1.0, "dro: pull back to the rollout policy", at_least=0, needs=_losses("dro")
    )

    def check(self) -> None:
        _check_band("icepop-ratio", self.icepop_ratio_low, self.icepop_ratio_high)
        _check_band("ipo-ratio", self.ipo_ratio_low, self.ipo_ratio_high)
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


@dataclass(frozen=True)
class CorrectionFlags(FlagGroup):
    title: ClassVar[str] = "off-policy correction"

    use_tis: bool = flag(False, "weight the policy loss by a correction")
    tis_clip: float | str = flag(
        2.0,
        "upper bound of the correction weight; auto:ess=0.9 = the largest, from 1 on, that keeps "
        "this share of the whole batch's effective sample size (vanilla TIS)",
        above=0,
        needs=_hooks("vanilla_tis_function", "icepop_function"),
    )
    tis_clip_low: float = flag(
        0.0,
        "lower bound of the correction weight",
        at_least=0,
        needs=_hooks("vanilla_tis_function", "icepop_function"),
    )
    custom_tis_function_path: str | None = flag(
        None,
        "correction to use: pkg.mod.fn, pkg.mod:fn or file.py:fn, comma-separated; none = vanilla "
        "TIS",
    )
    allow_biased_correction: bool = flag(
        False,
        "allow what biases the gradient: off_policy_is_function on a loss that already carries a "
        "ratio, --async-rollouts with a loss that never compares with the rollout policy, or "
        "truncated sampling whose kept ids are not replayed",
        needs=_hooks("off_policy_is_function") | _UNCORRECTED_ASYNC | _UNREPLAYED_TRUNCATION,
    )
    sequence_tis_clip: float = flag(
        2.0, "upper bound of the sequence or segment weight", above=0, needs=_SEQUENCE_HOOKS
    )
    sequence_tis_clip_low: float = flag(
        0.0, "lower bound of the sequence or segment weight", at_least=0, needs=_SEQUENCE_HOOKS
    )
    sequence_tis_level: Literal["sequence", "geometric"] = flag(
        "sequence",
        "sequence_tis_function, segment_tis_function: product or geometric mean of the ratios",
        needs=_SEQUENCE_HOOKS,
    )
    segment_tis_length: int = flag(
        64,
        "segment_tis_function: tokens of a segment",
        at_least=1,
        needs=_hooks("segment_tis_function"),
    )
    m2po_threshold: float = flag(
        0.04,
        "m2po_function: largest second moment of the log-ratios of the whole batch",
        above=0,
        needs=_hooks("m2po_function"),
    )
    kpop_threshold: float = flag(
        0.1,
        "kpop_function keeps tokens whose binary KLs are both at most this",
        above=0,
        needs=_hooks("kpop_function"),
    )
    geometric_mask_low: float = flag(
        0.99,
        "geometric_mask_function keeps sequences from here ...",
        at_least=0,
        needs=_hooks("geometric_mask_function"),
    )
    geometric_mask_high: float = flag(
        1.01, "... to here", above=0, needs=_hooks("geometric_mask_function")
    )
    rejection_rules: str = flag(
        "token_ratio=0.5:2.0",
        "rejection_function: level_statistic=low:high, comma-separated",
        needs=_hooks("rejection_function"),
    )
    veto_threshold: float = flag(
        1e-4,
        "veto_function drops a sequence with any ratio below this",
        above=0,
        needs=_hooks("veto_function"),
    )
    opsm_delta: float = flag(
        1e-4,
        "opsm_function drops A < 0 with mean(train - cur) above this",
        at_least=0,
        needs=_hooks("opsm_function"),
    )
    opsm_level: Literal["sequence", "token"] = flag(
        "sequence",
        "opsm_function drops whole sequences by their mean advantage, or their tokens with A < 0",
        needs=_hooks("opsm_function"),
    )
    train_log_probs: OldLogProbs = flag(
        "recompute",
        "the old log-probs of later updates on a rollout: from a pass of the trainer before the "
        "first, interpolated between the engine's and the current ones by weight version (A-3PO, "
        "no pass), or the engine's",
    )
    use_rollout_logprobs: bool = flag(
        False,
        "as --train-log-probs rollout: use the engine's log-probs in place of the trainer's; "
        "mismatch metrics still compare both",
    )
    get_mismatch_metrics: bool = flag(False, "report train/rollout mismatch without correcting it")
    rollout_temperature: float = flag(1.0, "temperature the rollouts were sampled at", above=0)

    def check(self) -> None:
        self._check_clip()
        _check_band(
            "sequence-tis-clip",
            self.sequence_tis_clip_low,
            self.sequence_tis_clip,
            upper="sequence-tis-clip",
            lower="sequence-tis-clip-low",
        )
        _check_band("geometric-mask", self.geometric_mask_low, self.geometric_mask_high)
        expect(
            self.veto_threshold < 1,
            f"--veto-threshold is {self.veto_threshold}; it must be below 1",
        )
        parse_rejection_rules(self.rejection_rules)
        expect(
            self.custom_tis_function_path is None or self.use_tis or self.get_mismatch_metrics,
            f"--custom-tis-function-path {self.custom_tis_function_path} would never run; "
            "add --use-tis (or --get-mismatch-metrics for its metrics alone)",
        )
        expect(
            not self.use_rollout_logprobs or self.train_log_probs != "approximate",
            "--use-rollout-logprobs with --train-log-probs approximate: the old log-probs are the "
            "engine's or an approximation; drop one of the two",
        )
        expect(
            not (self.use_tis and self.old_log_probs == "rollout")
            or self._only_compares_with_cur(),
            "--use-tis with --use-rollout-logprobs (--train-log-probs rollout): the old policy is "
            "then the rollout policy and every weight is 1; drop one of the two",
        )

    def _check_clip(self) -> None:
        clip, low = self.tis_clip, self.tis_clip_low
        if ess_target(clip) is None:
            assert not isinstance(clip, str)
            _check_band("tis-clip", low, clip, upper="tis-clip", lower="tis-clip-low")
            return
        expect(
            low < 1,
            f"--tis-clip {clip} chooses a bound from 1 on and --tis-clip-low is {low}; take one "
            "below 1",
        )
        expect(
            not any(name.endswith("icepop_function") for name in self.hook_names()),
            f"--tis-clip {clip} with icepop_function, which drops what is outside: the bound is "
            "found for clipped weights; give a number, or use ess_tis_function or m2po_function",
        )

    @property
    def old_log_probs(self) -> OldLogProbs:
        """Where the old log-probs come from, by either flag."""
        return "rollout" if self.use_rollout_logprobs else self.train_log_probs

    def _only_compares_with_cur(self) -> bool:
        """Whether the corrections look at the old and the current policy alone."""
        return all(name.endswith("opsm_function") for name in self.hook_names())

    def hook_names(self) -> list[str]:
        """Import paths of the corrections, in order; the vanilla one when none is named."""
        path = self.custom_tis_function_path or VANILLA_TIS
        return [part.strip() for part in path.split(",") if part.strip()]


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
        True, "grpo: divide by the group's standard deviation", needs=_estimators("grpo")
    )
    rloo_std: Literal["none", "group", "others", "batch"] = flag(
        "none",
        "rloo: divide by the standard deviation of the group's rewards, of those of the others in "
        "it, or of the advantages of the whole batch",
        needs=_estimators("rloo"),
    )
    normalize_advantages: bool = flag(False, "whiten advantages over the whole batch")
    gamma: float = flag(
        1.0, "discount", at_least=0, needs=_estimators("reinforce_plus_plus", "gae")
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
        "token means; over groups of the means of their samples; none = token-mean or "
        "sample-mean by --calculate-per-token-loss",
    )
    loss_fixed_length: int | None = flag(
        None,
        "tokens that fixed-length divides a sample by; none = --max-response-length",
        at_least=1,
        needs=Needs(
            "--loss-reduction fixed-length", lambda config: config.reduction == "fixed-length"
        ),
    )
    calculate_per_token_loss: bool | None = flag(
        None,
        "one global token denominator, as --loss-reduction token-mean; none = on for icepop, "
        "dppo_tv, dppo, ipo_kl, else off",
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
        self._check_reduction()
        self._check_kept_denominator()

    @property
    def reduction(self) -> LossReduction:
        """How the losses of tokens become one, by either flag."""
        if self.loss_reduction is not None:
            return self.loss_reduction
        per_token = self.calculate_per_token_loss
        if per_token is None:
            per_token = self.loss_traits.per_token
        return "token-mean" if per_token else "sample-mean"

    @property
    def per_token(self) -> bool:
        """Whether the loss has one global token denominator."""
        return self.reduction == "token-mean"

    @property
    def fixed_length(self) -> int | None:
        """The tokens that a sample is divided by, where that is a constant."""
        return self.loss_fixed_length or getattr(self, "max_response_length", None)

    @property
    def distills(self) -> bool:
        """Whether a teacher says, alone or with the rewards, what is learned."""
        return self.teacher_tau > 0 or (self.distill_topk is not None and self.distill_coef > 0)

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss accounts for tokens that another policy sampled.

        It does if it compares with the rollout policy: by itself, by a correction, or because the
        engine's log-probs stand for the old ones that it compares with.
        """
        compares_with = self.loss_traits.compares_with
        compares_with_old = compares_with == "train" or self.use_tis
        return (
            compares_with == "rollout"
            or (self.use_tis and not self._only_compares_with_cur())
            or (self.old_log_probs == "rollout" and compares_with_old)
        )

    def needs_rollout_log_probs(self) -> list[str]:
        """The features in use that cannot work without the engine's log-probs."""
        wanted = {
            f"--policy-loss {self.policy_loss}": self.loss_traits.compares_with == "rollout",
            "--use-tis": self.use_tis,
            "--use-rollout-kl-loss": self.use_rollout_kl_loss,
            "--use-rollout-logprobs": self.use_rollout_logprobs,
            f"--train-log-probs {self.train_log_probs}": self.train_log_probs != "recompute",
            "--get-mismatch-metrics": self.get_mismatch_metrics,
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

    def _check_correction_fits_loss(self) -> None:
        if not self.use_tis:
            return
        expect(
            self.loss_traits.compares_with != "rollout",
            f"--use-tis with --policy-loss {self.policy_loss}: that loss already compares the "
            "current policy with the rollout policy, so the mismatch would be counted twice; drop "
            "--use-tis",
        )
        doubled = [
            name
            for name in self.hook_names()
            if name.replace(":", ".").rsplit(".", 1)[-1] == "off_policy_is_function"
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

    def _check_reduction(self) -> None:
        per_token, reduction = self.calculate_per_token_loss, self.loss_reduction
        given = f"--{'' if per_token else 'no-'}calculate-per-token-loss"
        expect(
            None in (per_token, reduction) or per_token == (reduction == "token-mean"),
            f"{given} with --loss-reduction {reduction}: two different denominators; drop one of "
            "the two",
        )
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
        }
        active = [name for name, value in regularized.items() if value]
        expect(
            not (self.loss_denominator == "kept" and self.per_token and active),
            f"--loss-denominator kept with a global token denominator and {', '.join(active)}: the "
            "two terms would need two denominators; use --no-calculate-per-token-loss or the "
            "original one",
        )


def _check_band(
    name: str, low: float, high: float, *, lower: str | None = None, upper: str | None = None
) -> None:
    lower, upper = lower or f"{name}-low", upper or f"{name}-high"
    expect(
        low < high, f"--{lower} is {low} and --{upper} is {high}; the lower must be below the upper"
    )
