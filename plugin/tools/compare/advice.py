"""Which loss and correction fit a dump or a run, with the reason and what to expect.

The recommendation is what learned best in the experiments of docs/evidence.md. With a dump, it and
the other methods measured there are replayed on its tokens, which gives kept share, ESS and bias
bound. A run without a dump is judged by its metrics, without predictions.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plugin.config import JobConfig
from plugin.errors import BatchError
from plugin.observe.console import text_table
from plugin.observe.run_record import RunRecord, read_run
from plugin.ppo_utils.importance_ratio import effective_sample_size, k3
from plugin.tools.compare.dump_columns import DumpBlock
from plugin.tools.compare.dump_reading import open_dump
from plugin.tools.compare.replay import Method, MethodStatistics, replay_block

#: KL (k3) per token below which engine and trainer are one policy, as the finding `uncorrected`.
NEGLIGIBLE_KL = 1e-4
#: A product over a sequence is usable while length x KL is below this.
SEQUENCE_BUDGET = 0.05
_HOOK = "plugin.ppo_utils."


@dataclass(frozen=True)
class Situation:
    """What the tokens show; means are over tokens with loss.

    mismatch, drift: KL (k3) of the trainer's log-probs from the engine's, of the current ones from
        the trainer's
    ess_share: (sum r)^2 / (N sum r^2) of exp(cur - rollout)
    tail, rare_tail: share of tokens whose ratio to the engine is beyond 2 or 1/2, and of these the
        share that the engine gave less than 1 %
    staleness: mean weight versions behind, None where unknown
    """

    tokens: int
    mismatch: float
    drift: float
    ess_share: float
    tail: float
    rare_tail: float
    length: float
    staleness: float | None


@dataclass(frozen=True)
class Advice:
    """Flags to paste, why, and what they would have done; `expected` is empty without a dump."""

    flags: list[str]
    reasons: list[str]
    expected: dict[str, float]
    others: list[dict[str, Any]]
    situation: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "command": " ".join(map(shlex.quote, self.flags))}


#: Policy loss, correction and settings.
MethodFlags = tuple[str, str | None, dict[str, Any]]
#: In the top third of all methods wherever the engine was 1 to 16 versions behind.
TIS_WITH_KL: MethodFlags = (
    "ppo",
    "vanilla_tis",
    {"use_rollout_kl_loss": True, "rollout_kl_loss_coef": 0.1},
)
TIS: MethodFlags = ("ppo", "vanilla_tis", {})
UNCORRECTED: MethodFlags = ("ppo", None, {})
#: The KL penalty is towards a policy as old as the tokens: it helped up to this age and harmed at
#: 64.
OLDEST_KL = 16
#: KL (k3) per token below which a penalty on it has nothing to reduce, with equal weights.
SMALL_KL = 1e-3


def _choice(mismatch: float, staleness: float | None) -> tuple[MethodFlags, str]:
    """Loss, correction and settings for tokens of this distance and age, and why.

    Stale tokens are always corrected: their distance grows with every update.
    """
    if staleness is not None and staleness > OLDEST_KL:
        return TIS, (
            f"truncated weights; a KL penalty towards a policy more than {OLDEST_KL} versions old "
            "would hold training back (docs/evidence.md)"
        )
    if not staleness and mismatch < NEGLIGIBLE_KL:
        return UNCORRECTED, (
            f"engine and trainer agree to {NEGLIGIBLE_KL:g}: there is nothing to correct between "
            "them, and PPO's own ratio covers several updates on a rollout"
        )
    if not staleness and mismatch < SMALL_KL:
        return TIS, (
            f"truncated weights; engine and trainer have the same weights and differ by less than "
            f"{SMALL_KL:g}, so a KL penalty has nothing to reduce"
        )
    return TIS_WITH_KL, (
        "a KL penalty towards the engine's policy keeps the two close, and truncated weights "
        "correct the rest: the most reliable method in the experiments of docs/evidence.md"
    )


def candidates(situation: Situation) -> list[tuple[Method, list[str]]]:
    """What is recommended, then the other methods whose learning was measured, with flags."""
    chosen, _ = _choice(situation.mismatch, situation.staleness)
    measured: list[MethodFlags] = [
        chosen,
        *(each for each in (TIS_WITH_KL, TIS) if each is not chosen),
        *(("ppo", "vanilla_tis", {"tis_clip": clip}) for clip in (5.0, "auto:ess=0.9")),
        ("reinforce", "off_policy_is", {"eps_clip": 1.0, "eps_clip_high": 4.0}),
        *(("ppo", hook, {}) for hook in ("icepop", "m2po", "kpop")),
        *((loss, None, {}) for loss in ("icepop", "dppo_tv", "dppo", "dppo_kl", "topr")),
    ]
    if situation.length * (situation.mismatch + situation.drift) < SEQUENCE_BUDGET:
        measured += [("vespo", None, {}), ("ppo", "sequence_tis", {})]
    return [
        (Method.of(loss, hook, **settings), _flags(loss, hook, settings))
        for loss, hook, settings in measured
    ]


def advise_dump(paths: Sequence[str | Path], *, target_ess: float = 0.9) -> Advice:
    """Say whether there is anything to correct; replay the recommendation and its alternatives.

    target_ess: alternatives that keep this ESS come first, the least biased first
    """
    dump = open_dump(paths)
    situation = situation_of(block for block, _ in dump.blocks())
    chosen, _ = _choice(situation.mismatch, situation.staleness)
    if chosen is UNCORRECTED and situation.drift < NEGLIGIBLE_KL:
        return Advice(
            ["--policy-loss", "ppo", "--get-mismatch-metrics"],
            [
                f"KL of trainer from engine {situation.mismatch:.1e}, of the current policy from "
                f"the trainer {situation.drift:.1e}: both below {NEGLIGIBLE_KL:g}, there is "
                "nothing to correct; keep watching"
            ],
            {},
            [],
            vars(situation),
        )
    tried = [(MethodStatistics(method), flags) for method, flags in candidates(situation)]
    for block, _ in dump.blocks():
        replay_block(block, [statistics for statistics, _ in tried])
    rows: list[dict[str, Any]] = [
        {"flags": flags, "method": statistics.method.name, **statistics.summary()}
        for statistics, flags in tried
    ]
    best, *others = rows
    others.sort(
        key=lambda row: (
            (False, row["bias_bound"])
            if row["ess_share"] >= target_ess
            else (True, -row["ess_share"])
        )
    )
    return Advice(
        best["flags"],
        _reasons(situation),
        {key: best[key] for key in ("kept_share", "ess_share", "bias_bound", "clipped_share")},
        others[:5],
        vars(situation),
    )


def situation_of(blocks: Iterable[DumpBlock]) -> Situation:
    """Sums over all tokens with loss."""
    sums, samples, known_versions = np.zeros(9), 0, False
    for block in blocks:
        mask = block.mask
        columns = (block.rollout, block.train, block.cur)
        rollout, train, cur = (column[mask].astype(np.float64) for column in columns)
        mismatch, drift = (
            float(k3(torch.from_numpy(difference)).sum())
            for difference in (rollout - train, train - cur)
        )
        ratio = np.exp(np.clip(cur - rollout, -20, 20))
        outside = np.abs(cur - rollout) > math.log(2)
        behind, version = np.zeros(0), np.repeat(block.trainer_version, block.lengths)[mask]
        if len(version) and (block.weight_versions[mask] >= 0).all() and (version >= 0).all():
            behind, known_versions = np.maximum(version - block.weight_versions[mask], 0), True
        sums += (
            *(mask.sum(), mismatch, drift),
            *(ratio.sum(), np.square(ratio).sum(), outside.sum()),
            *((outside & (rollout < math.log(0.01))).sum(), behind.sum(), len(behind)),
        )
        samples += len(block.lengths)
    if not sums[0]:
        raise BatchError("no readable token in these dumps; nothing to advise on")
    tokens = sums[0]
    return Situation(
        int(tokens),
        float(sums[1] / tokens),
        float(sums[2] / tokens),
        effective_sample_size(float(sums[3]), float(sums[4])) / float(tokens),
        float(sums[5] / tokens),
        float(sums[6] / max(sums[5], 1.0)),
        float(tokens / max(samples, 1)),
        float(sums[7] / max(sums[8], 1.0)) if known_versions else None,
    )


def _reasons(situation: Situation) -> list[str]:
    """The evidence for the choice."""
    cause = "mismatch and the engine's older weights" if situation.staleness else "mismatch"
    if situation.mismatch < situation.drift:
        cause = "staleness within the rollout"
    reasons = [
        f"KL of trainer from engine {situation.mismatch:.1e}, of the current policy from the "
        f"trainer {situation.drift:.1e}: mostly {cause}",
        _choice(situation.mismatch, situation.staleness)[1],
    ]
    if situation.staleness:
        reasons.append(f"tokens are {situation.staleness:.1f} weight versions old on average")
    if situation.tail > 0.001:
        reasons.append(
            f"{situation.tail:.1%} of the tokens have a ratio beyond 2 or 1/2, "
            f"{situation.rare_tail:.0%} of them rare ones (below 1 % in the engine)"
        )
    budget = situation.length * (situation.mismatch + situation.drift)
    if budget >= SEQUENCE_BUDGET:
        reasons.append(
            f"length x KL is {budget:.2f}: products of ratios over whole sequences would be far "
            "from 1, so they are not among the alternatives"
        )
    return reasons


def advise_run(run_dir: str | Path, *, target_ess: float = 0.9) -> Advice:
    """From a run: by its dump if it has one, else by the metrics it recorded."""
    record = read_run(run_dir)
    config = record.job_config()
    advice: Advice
    if config is not None and config.dump_log_probs and Path(config.dump_log_probs).is_dir():
        advice = advise_dump([config.dump_log_probs], target_ess=target_ess)
    else:
        advice = _by_rule(record)
    return _with_settings(advice, config)


def _by_rule(record: RunRecord) -> Advice:
    """The rules of docs/which_correction.md on the last steps' metrics."""
    if not record.steps:
        raise BatchError(f"{record.path} has no step yet; nothing to advise on")

    def mean(name: str) -> float | None:
        values = [s[name] for s in record.steps[-20:] if isinstance(s.get(name), (int, float))]
        return sum(values) / len(values) if values else None

    kl, staleness = mean("mismatch_kl"), mean("staleness") or 0.0
    if kl is None:
        raise BatchError(f"{record.path} recorded no mismatch_kl; run with --get-mismatch-metrics")
    reasons = [f"mismatch_kl {kl:.1e}, staleness {staleness:.1f}: means of the last steps"]
    chosen, why = _choice(kl, staleness)
    flags = _flags(*chosen)
    if chosen is UNCORRECTED:
        flags.append("--get-mismatch-metrics")
    reasons.append(why)
    reasons.append("by rule: without a dump (--dump-log-probs) nothing can be predicted")
    return Advice(flags, reasons, {}, [], {"mismatch_kl": kl, "staleness": staleness})


def _with_settings(advice: Advice, config: JobConfig | None) -> Advice:
    """Add what a run's settings leave uncorrected, whatever the loss."""
    if config is None:
        return advice
    flags, reasons = list(advice.flags), list(advice.reasons)
    if config.truncates_sampling and not config.replays_sampling_mask:
        flags += ["--use-rollout-sampling-mask", "on"]
        reasons.append(
            "sampling is truncated (top-p or top-k) and the kept ids are not replayed: the ratio "
            "is of two different distributions"
        )
    if "moe" in str(config.embedded_model) and not config.replays_routes:
        flags += ["--use-rollout-routing-replay"]
        reasons.append(
            "a MoE model without replayed routes: different experts compute a different function"
        )
    return Advice(flags, reasons, advice.expected, advice.others, advice.situation)


def _flags(loss: str, hook: str | None, settings: dict[str, Any]) -> list[str]:
    flags = ["--policy-loss", loss]
    if hook is not None:
        flags += ["--use-tis"]
        if hook != "vanilla_tis":
            flags += ["--custom-tis-function-path", f"{_HOOK}{hook}_function"]
    for name, value in settings.items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(value if isinstance(value, str) else f"{value:g}")
    return flags


def advice_text(advice: Advice) -> str:
    """The flags, why, what to expect, and the alternatives, as text."""
    lines = [" ".join(map(shlex.quote, advice.flags)), ""]
    lines += [f"- {reason}" for reason in advice.reasons]
    if advice.expected:
        found = advice.expected
        lines.append(
            f"- on these tokens: keeps {found['kept_share']:.1%}, clips "
            f"{found['clipped_share']:.1%}, ESS/N {found['ess_share']:.3f}, bias bound "
            f"{found['bias_bound']:.3f}"
        )
    if advice.others:
        table = [["others, by bias", "kept", "ESS/N", "bias bound"]]
        for row in advice.others:
            numbers = (row["kept_share"], row["ess_share"], row["bias_bound"])
            table.append([" ".join(row["flags"]), *(f"{value:.3f}" for value in numbers)])
        lines += ["", *text_table(table)]
    return "\n".join(lines)
