"""Does a run learn at all? Judged by its metrics alone, so it also works on a finished run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from plugin.config import JobConfig
from plugin.config.loss.loss_config import estimator_traits
from plugin.observe.findings import Finding
from plugin.observe.run_record import RunRecord, group_findings

Reason = Literal["skipped", "masked", "rejected", "equal rewards", "no gradient"]
#: A gradient below this is rounding of a zero.
_NO_GRADIENT = 1e-9
#: Below this share of idle steps there is no finding.
_MANY = 0.5


def was_skipped(step: Mapping[str, Any]) -> bool:
    """Whether the weights were left alone because the gradient was not finite or too large."""
    norm = _number(step, "grad_norm")
    return _number(step, "skipped") == 1 or (norm is not None and not math.isfinite(norm))


def any_step_applied(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the weights can have changed at all."""
    return any(not was_skipped(step) and not _without_gradient(step) for step in steps)


def learning_findings(
    steps: Sequence[Mapping[str, Any]], config: JobConfig | None = None
) -> list[Finding]:
    """Why most steps learned nothing; empty if they did.

    steps: the metrics of a run; config: its settings, where known
    """
    reasons = [_reason(step, config) for step in steps]
    counts = Counter(reason for reason in reasons if reason is not None)
    idle = sum(counts.values())
    if not steps or idle < _MANY * len(steps):
        return []
    [(main, _)] = counts.most_common(1)
    _, title, cause, remedy = _REASONS[main]
    if main == "equal rewards":
        idle_steps = [step for step, reason in zip(steps, reasons, strict=True) if reason]
        rewards = {value for step in idle_steps if (value := _number(step, "reward")) is not None}
        truncated = sum(_number(step, "truncated_share") or 0.0 for step in idle_steps) / idle
        if len(rewards) < 2:
            cause += f"; the reward is always {min(rewards, default=0.0):g}"
        if truncated > _MANY:
            remedy += f"; {truncated:.0%} of the responses are cut off: raise --max-response-length"
    everywhere = idle == len(steps)
    by_reason = ", ".join(f"{n} {_REASONS[reason][0]}" for reason, n in counts.most_common())
    return [
        Finding(
            f"nothing is learned: {title}" if everywhere else f"many steps learn nothing: {title}",
            "error" if everywhere else "warning",
            f"of {len(steps)} steps: {by_reason}",
            cause,
            remedy,
            {"steps": float(len(steps)), "idle": float(idle)},
            detector="learning",
        )
    ]


def run_findings(run: RunRecord) -> list[dict[str, Any]]:
    """Findings of the detectors during the run and of its metrics, one entry per kind."""
    last = run.steps[-1]["step"] if run.steps else None
    judged = learning_findings(run.steps, run.job_config())
    return group_findings([*run.findings, *({"step": last, **f.as_dict()} for f in judged)])


#: Reason -> what happened in such a step; title, likely cause and what to try.
_REASONS: dict[Reason, tuple[str, str, str, str]] = {
    "skipped": (
        "were skipped",
        "steps are skipped",
        "a gradient that is not finite, or above --skip-on-grad-norm",
        "fix the cause named in the finding about skipped steps",
    ),
    "masked": (
        "had no token with a loss mask of 1",
        "every token is masked",
        "the task or environment sets the loss mask of every token to 0",
        "check the loss masks of a few samples; sampled tokens have 1",
    ),
    "rejected": (
        "had every token rejected",
        "the loss or a correction rejects every token",
        "the mismatch is larger than the band, or the band is too narrow",
        "check the ratio percentiles; widen the band, or fix the cause of the mismatch",
    ),
    "equal rewards": (
        "had equal rewards in every group",
        "all rewards are equal",
        "all responses to a prompt get the same reward, so every advantage is 0",
        "read some responses; use prompts that are solved sometimes but not always",
    ),
    "no gradient": (
        "had a gradient of 0",
        "the gradient is 0",
        "advantages of 0, or every token clipped",
        "check the rewards and pg_clipfrac",
    ),
}


def _number(step: Mapping[str, Any], name: str) -> float | None:
    value = step.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _without_gradient(step: Mapping[str, Any]) -> bool:
    norm = _number(step, "grad_norm")
    return norm is not None and norm <= _NO_GRADIENT


def _reason(step: Mapping[str, Any], config: JobConfig | None) -> Reason | None:
    """Why a step learned nothing; None if it did."""
    if was_skipped(step):
        return "skipped"
    if _number(step, "num_tokens") == 0:
        return "masked"
    if _number(step, "mismatch/kept_share") == 0 or _number(step, "is_masked") == 1:
        return "rejected"
    by_group = config is None or estimator_traits(config.advantage_estimator).group
    equal = _number(step, "reward_std") == 0
    equal |= by_group and _number(step, "uniform_group_share") == 1
    if equal and not (config is not None and config.distills):
        return "equal rewards"
    return "no gradient" if _without_gradient(step) else None
