"""Flags of the off-policy corrections, and the syntax of --tis-clip and --rejection-rules."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, absolute_code, alias, expect, expect_band, flag
from plugin.config.import_paths import function_name, load_function
from plugin.errors import ConfigError


def needs_hook(*names: str) -> Needs:
    """One of these corrections in use, or one of the user's own."""

    def are_met(config: Any) -> bool:
        return (config.use_tis or config.get_mismatch_metrics) and any(
            not is_built_in(path) or function_name(path) in names for path in config.hook_names()
        )

    shown = " or ".join(
        f"{name} (the default)" if name == "vanilla_tis_function" else f"plugin.ppo_utils.{name}"
        for name in names
    )
    return Needs(f"--use-tis with {shown}", are_met)


_PREFIX = "auto:ess="


def ess_target(tis_clip: float | str) -> float | None:
    """The effective sample size in `auto:ess=SHARE`, as a share of tokens; None for a number."""
    if not isinstance(tis_clip, str):
        return None
    try:
        if not tis_clip.startswith(_PREFIX):
            raise ValueError
        share = float(tis_clip.removeprefix(_PREFIX))
        if not 0 < share < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--tis-clip is {tis_clip!r}; expected a number, or auto:ess=SHARE with the effective "
            "sample size to keep as a share of the tokens, between 0 and 1: auto:ess=0.9"
        ) from None
    return share


LEVELS = ("token", "mean", "sum", "max", "segment")


STATISTICS = ("ratio", "k1", "k2", "k3", "error", "diff")


@dataclass(frozen=True)
class RejectionRule:
    """Keep where `low <= statistic <= high`; the level says over which tokens it is taken."""

    level: str
    statistic: str
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"{self.level}_{self.statistic}"


@lru_cache(maxsize=64)
def parse_rejection_rules(text: str) -> tuple[RejectionRule, ...]:
    """The rules of a comma-separated list, or a `ConfigError` that names the wrong one."""
    rules = tuple(_parse_rule(part.strip()) for part in text.split(",") if part.strip())
    if not rules:
        raise ConfigError("--rejection-rules is empty; give for example token_ratio=0.5:2.0")
    return rules


def _parse_rule(text: str) -> RejectionRule:
    fix = (
        f"--rejection-rules has {text!r}; write level_statistic=low:high with level one of "
        f"{', '.join(LEVELS)} and statistic one of {', '.join(STATISTICS)}"
    )
    name, _, band = text.partition("=")
    level, _, statistic = name.partition("_")
    low_text, colon, high_text = band.partition(":")
    if level not in LEVELS or statistic not in STATISTICS or not colon:
        raise ConfigError(fix)
    try:
        low = float(low_text) if low_text else -math.inf
        high = float(high_text) if high_text else math.inf
    except ValueError:
        raise ConfigError(fix) from None
    if not low < high:
        raise ConfigError(f"--rejection-rules {text!r}: low {low} must be below high {high}")
    if math.isinf(low) and math.isinf(high):
        raise ConfigError(f"--rejection-rules {text!r} keeps everything; give low, high or both")
    if statistic == "ratio" and high <= 0:
        raise ConfigError(f"--rejection-rules {text!r}: a ratio is positive, high must be too")
    return RejectionRule(level, statistic, low, high)


RatioAgainst = Literal["recompute", "approximate", "rollout"]


VANILLA_TIS = "plugin.ppo_utils.vanilla_tis_function"


#: Built-in corrections that drop tokens or sequences and weight none.
MASKS = (
    *("dppo_tv_mask_function", "geometric_mask_function", "opsm_function"),
    *("rejection_function", "veto_function"),
)


def only_drops(path: str) -> bool:
    """Whether a correction is a mask: it multiplies by no ratio, so it fits every loss.

    A user's own declares it with `plugin.ppo_utils.mask_only`.
    """
    if is_built_in(path):
        return function_name(path) in MASKS
    return bool(getattr(load_function(path), "mask_only", False))


#: Built-in corrections that compare the old policy of each token with the one that sampled it.
_OF_OLD_POLICY = (
    *("vanilla_tis_function", "icepop_function", "m2po_function", "kpop_function"),
    "ess_tis_function",
)


def weighs_current(path: str) -> bool:
    """Whether the weight of a token by itself, if there is one, is of the current policy."""
    return is_built_in(path) and function_name(path) not in _OF_OLD_POLICY


def is_built_in(path: str) -> bool:
    return path.replace(":", ".").startswith("plugin.ppo_utils.")


_sequence_flag = partial(flag, needs=needs_hook("sequence_tis_function", "segment_tis_function"))


def _of_hook(hook: str, default: Any, help: str, **bounds: Any) -> Any:
    """A flag that one built-in correction reads."""
    return flag(default, help, needs=needs_hook(hook), **bounds)


_UNCORRECTED_ASYNC = Needs(
    "--async-rollouts without a correction",
    lambda config: config.staleness_limit > 0 and not config.corrects_mismatch,
)


_UNREPLAYED_TRUNCATION = Needs(
    "truncated sampling without --use-rollout-sampling-mask",
    lambda config: config.truncates_sampling and not config.replays_sampling_mask,
)


@dataclass(frozen=True)
class CorrectionFlags(FlagGroup):
    title: ClassVar[str] = "off-policy correction"

    use_tis: bool = flag(False, "weight the policy loss by a correction", common_in="train")
    tis_clip: float | str = flag(
        2.0,
        "upper bound of the correction weight; auto:ess=0.9 = the largest bound, at least 1, that "
        "keeps an effective sample size of 0.9 of the batch's tokens (vanilla TIS)",
        above=0,
        needs=needs_hook("vanilla_tis_function", "icepop_function"),
    )
    tis_clip_low: float = flag(
        0.0,
        "lower bound of the correction weight",
        at_least=0,
        needs=needs_hook("vanilla_tis_function", "icepop_function"),
    )
    tis_batch_normalize: bool = _of_hook(
        "vanilla_tis_function",
        False,
        "divide the weights by their mean over the whole batch, so that their mean is 1",
    )
    custom_tis_function_path: str | None = flag(
        None,
        "correction to use: pkg.mod.fn, pkg.mod:fn or file.py:fn, comma-separated; none = vanilla "
        "TIS",
        path=absolute_code,
        common_in="train",
    )
    allow_biased_correction: bool = flag(
        False,
        "accept a biased gradient: off_policy_is_function on a loss that already carries a "
        "ratio, --async-rollouts with a loss that never compares with the rollout policy, or "
        "truncated sampling whose kept ids are not replayed",
        needs=needs_hook("off_policy_is_function") | _UNCORRECTED_ASYNC | _UNREPLAYED_TRUNCATION,
    )
    sequence_tis_clip: float = _sequence_flag(
        2.0, "upper bound of the sequence or segment weight", above=0
    )
    sequence_tis_clip_low: float = _sequence_flag(
        0.0, "lower bound of the sequence or segment weight", at_least=0
    )
    sequence_tis_level: Literal["sequence", "geometric"] = _sequence_flag(
        "sequence",
        "sequence_tis_function, segment_tis_function: product or geometric mean of the ratios",
    )
    segment_tis_length: int | Literal["turn"] = flag(
        64,
        "response tokens of a segment; turn = the tokens between two answers of the environment",
        at_least=1,
        needs=needs_hook("segment_tis_function", "rejection_function"),
    )
    m2po_threshold: float = _of_hook(
        "m2po_function",
        0.04,
        "m2po_function: largest second moment of the log-ratios of the whole batch",
        above=0,
    )
    kpop_threshold: float = _of_hook(
        "kpop_function",
        0.1,
        "kpop_function keeps tokens whose binary KLs are both at most this",
        above=0,
    )
    geometric_mask_low: float = _of_hook(
        "geometric_mask_function",
        0.99,
        "geometric_mask_function: smallest geometric mean of ratios that is kept",
        at_least=0,
    )
    geometric_mask_high: float = _of_hook(
        "geometric_mask_function", 1.01, "geometric_mask_function: the largest", above=0
    )
    rejection_rules: str = _of_hook(
        "rejection_function",
        "token_ratio=0.5:2.0",
        "rejection_function: level_statistic=low:high, comma-separated",
    )
    veto_threshold: float = _of_hook(
        "veto_function",
        1e-4,
        "veto_function drops a sequence with any ratio below this",
        above=0,
        below=1,
    )
    opsm_delta: float = _of_hook(
        "opsm_function",
        1e-4,
        "opsm_function drops A < 0 with mean(train - cur) above this",
        at_least=0,
    )
    opsm_level: Literal["sequence", "token"] = _of_hook(
        "opsm_function",
        "sequence",
        "opsm_function drops whole sequences by their mean advantage, or their tokens with A < 0",
    )
    train_log_probs: RatioAgainst = flag(
        "recompute",
        "the log-probs that a clipped ratio is taken against: the trainer's own, of a pass before "
        "the first of several updates; interpolated between the engine's and the current ones by "
        "weight version (A-3PO, no pass); or the engine's. Mismatch metrics compare the trainer's",
    )
    use_rollout_logprobs: InitVar[bool | None] = alias(
        "train_log_probs",
        {True: ("rollout",), False: ("recompute", "approximate")},
        "another spelling of --train-log-probs rollout",
        off=False,
    )
    score_centering_topk: int = flag(
        0,
        "score centering: subtract the mean of the weighted score under the sampling policy, taken "
        "over this many of its most likely ids, which engines then report; 0 = off",
        at_least=0,
    )
    get_mismatch_metrics: bool = flag(False, "report train/rollout mismatch without correcting it")
    rollout_temperature: float = flag(1.0, "sampling temperature of the rollouts", above=0)

    def check(self) -> None:
        self._check_clip()
        low, high = self.sequence_tis_clip_low, self.sequence_tis_clip
        expect_band("sequence-tis-clip", low, high, upper="sequence-tis-clip")
        expect_band("geometric-mask", self.geometric_mask_low, self.geometric_mask_high)
        parse_rejection_rules(self.rejection_rules)
        expect(
            self.custom_tis_function_path is None or self.use_tis or self.get_mismatch_metrics,
            f"--custom-tis-function-path {self.custom_tis_function_path} would never run; "
            "add --use-tis (or --get-mismatch-metrics for its metrics alone)",
        )
        expect(
            not (self.use_tis and self.train_log_probs == "rollout") or self.hooks_only_drop,
            "--use-tis with --use-rollout-logprobs (--train-log-probs rollout): the old policy is "
            "then the rollout policy and every weight is 1; drop one of the two, or use masks "
            f"alone ({', '.join(MASKS)}), which then compare the current policy with it",
        )

    def _check_clip(self) -> None:
        clip, low = self.tis_clip, self.tis_clip_low
        if ess_target(clip) is None:
            assert not isinstance(clip, str)
            expect_band("tis-clip", low, clip, upper="tis-clip")
            return
        expect(
            low < 1,
            f"--tis-clip {clip} chooses a bound of at least 1 and --tis-clip-low is {low}; choose "
            "one below 1",
        )
        expect(
            not any(name.endswith("icepop_function") for name in self.hook_names()),
            f"--tis-clip {clip} with icepop_function, which drops what is outside: the bound is "
            "computed for clipped weights; give a number, or use ess_tis_function or m2po_function",
        )

    @property
    def hooks_only_drop(self) -> bool:
        """Whether every correction is a mask."""
        return all(only_drops(path) for path in self.hook_names())

    def hook_names(self) -> list[str]:
        """Import paths of the corrections, in order; the vanilla one when none is named."""
        path = self.custom_tis_function_path or VANILLA_TIS
        return [part.strip() for part in path.split(",") if part.strip()]
