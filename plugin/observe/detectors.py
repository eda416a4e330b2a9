"""Detectors: is the mismatch of this step noise, or a bug?

A detector knows the trace that one fault leaves in the log-probs that engine and trainer give to
the same tokens. `DETECTORS` is the list of them: to add one, write its function and its row here.
The user's own are given by import path. All of them together cost a few milliseconds per step
(numpy, at most 131,072 tokens) and are always on: at every step of a job, and inside `compare`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.config import JobConfig
from plugin.config.import_paths import load_called_with
from plugin.errors import HookLoadError
from plugin.observe.findings import Finding, Step, StepTokens, bisect_command, join_tokens
from plugin.observe.routing_agreement import routing_finding

#: Detectors that need log-probs are run on at least this many tokens.
MIN_TOKENS = 256
#: Faults that no healthy job has need fewer.
FEW_TOKENS = 32
#: A KL per token, and a mean |log-prob difference|, that no rounding, kernel or routing explains.
#: The second keeps one outlier, whose ratio may be e^20, from dominating the mean.
UNMISTAKABLE_K3, UNMISTAKABLE_DIFFERENCE = 0.5, 0.25
#: Systematic errors are small against noise, so recent steps are pooled: from this many tokens to
#: four times as many.
MIN_WEIGHT_TOKENS = 8192
#: A KL per token above which a correction is advised: a rule of thumb.
UNCORRECTED_K3 = 1e-3
#: A detector's own list, empty at the first step and kept for the run.
Memory = list[Any]
FindFunction = Callable[[Step, Memory], Finding | None]


@dataclass(frozen=True)
class Detector:
    """One row of the table; a function's name and the first line of its docstring describe it.

    needs: columns (of `RolloutBatch`) without which it is not run
    unless: detectors further up that explain what this one would find; it is not run after them
    min_tokens: on which it is run, where it needs log-probs
    """

    find: FindFunction
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    path: str = ""
    min_tokens: int = MIN_TOKENS

    @property
    def name(self) -> str:
        return self.path or self.find.__name__

    @property
    def looks_for(self) -> str:
        return (inspect.getdoc(self.find) or "").partition("\n")[0]

    def can_run(self, step: Step) -> bool:
        if not all(name in step.columns for name in self.needs):
            return False
        return "rollout_log_probs" not in self.needs or len(step.tokens) >= self.min_tokens


def zero_filled(step: Step, memory: Memory) -> Finding | None:
    """Log-prob exactly 0, or one constant per sample, on tokens the trainer finds unlikely."""
    tokens = step.tokens
    unlikely = tokens.train < -1.0
    zero_share = (unlikely & (tokens.rollout == 0)).sum() / max(unlikely.sum(), 1)
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    lengths = np.diff(np.append(starts, len(tokens)))
    highest, lowest = np.maximum.reduceat, np.minimum.reduceat
    flat = highest(tokens.rollout, starts) == lowest(tokens.rollout, starts)
    varied = highest(tokens.train, starts) - lowest(tokens.train, starts) > 0.5
    constant = int((flat & varied & (lengths >= 8)).sum())
    if zero_share < 0.01 and constant == 0:
        return None
    return Finding(
        "rollout log-probs are zero-filled or constant",
        "error",
        f"{zero_share:.1%} of the tokens with a trainer probability below 0.37 have a rollout "
        f"log-prob of exactly 0; {constant} of {len(starts)} samples have one constant value",
        "the engine returned no log-probs for these tokens and a default was filled in",
        (
            "check the engine's responses"
            if step.config
            else "turn log-probs on in the sampling parameters"
        )
        + "; mask tokens that have none (tool output, padding)",
        {"zero_share": float(zero_share), "constant_samples": float(constant)},
    )


def one_token_shift(step: Step, memory: Memory) -> Finding | None:
    """Better correlation with the trainer one position away."""
    rollout, train = step.tokens.rollout, step.tokens.train
    here = _correlation(rollout, train)
    adjacent = (np.diff(step.tokens.sample) == 0) & (np.diff(step.tokens.position) == 1)
    shifted = {
        -1: _correlation(rollout[1:][adjacent], train[:-1][adjacent]),
        1: _correlation(rollout[:-1][adjacent], train[1:][adjacent]),
    }
    best = max(shifted, key=lambda k: shifted[k])
    if not (shifted[best] > 0.5 and shifted[best] > here + 0.2):
        return None
    return Finding(
        "rollout log-probs are shifted by one token",
        "error",
        f"correlation with the trainer is {here:.2f} in place and {shifted[best]:.2f} one position "
        f"away: a rollout log-prob stands one token {'before' if best == 1 else 'behind'} the one "
        "it belongs to",
        "log-probs taken from the logits of the token itself, or a leading/trailing entry not cut "
        "off",
        "compare lengths of tokens and log-probs where the engine returns them; the first response "
        "token is predicted by the last prompt token",
        {"correlation": here, "shifted_correlation": shifted[best], "shift": float(best)},
    )


def temperature(step: Step, memory: Memory) -> Finding | None:
    """One log-prob is a multiple of the other, and that explains their difference.

    The scale is that of the reduced major axis. A policy that has learned since is sharper, just
    as one at a lower temperature: only tokens sampled with the trainer's own weights count.
    """
    tokens = step.tokens.fresh()
    if len(tokens) < MIN_TOKENS:
        return None
    spread = float(tokens.train.std())
    correlation = _correlation(tokens.rollout, tokens.train)
    if spread < 1e-3 or correlation < 0.9:
        return None
    scale = float(tokens.rollout.std()) / spread
    unexplained = math.sqrt(max(1 - correlation * correlation, 1e-12))
    if abs(math.log(scale)) < 0.04 or abs(math.log(scale)) / unexplained < 0.6:
        return None
    lower, below, less = ("lower", "below", "less") if scale > 1 else ("higher", "above", "more")
    return Finding(
        "engine and trainer use different temperatures",
        "error",
        f"rollout log-probs are {scale:.3f} times as spread out as the trainer's at a correlation "
        f"of {correlation:.4f}; equal temperatures give 1.000",
        f"the engine's log-probs are at a {lower} temperature than the trainer's ({below} the "
        f"trainer's by a factor of about {1 / scale:.2f} or {less})",
        f"the engine was given --rollout-temperature {step.config.rollout_temperature:g}: make "
        "it return log-probs after temperature"
        if step.config
        else "set --rollout-temperature to the sampling temperature, and make the engine return "
        "log-probs after temperature",
        {"scale": scale, "correlation": correlation},
    )


def another_model(step: Step, memory: Memory) -> Finding | None:
    """A KL above 0.5, or responses that the trainer finds impossible, without old weights.

    Truncated sampling is left to its own detector: it only raises log-probs.
    """
    tokens, config = step.tokens.fresh(), step.config
    if len(tokens) < FEW_TOKENS:
        return None
    k3, ratio = tokens.k3(), tokens.log_ratio
    if k3 < UNMISTAKABLE_K3 or np.abs(ratio).mean() < UNMISTAKABLE_DIFFERENCE:
        return None
    truncates = config is None or (config.truncates_sampling and not config.replays_sampling_mask)
    if truncates and (ratio > 0.003).mean() < 0.01:
        return None
    return Finding(
        "the engine runs a different model than the trainer",
        "error",
        f"the mismatch KL (k3) is {k3:.2g} per token on {len(tokens)} tokens without staleness, "
        f"where rounding gives 1e-3 and no healthy job {UNMISTAKABLE_K3:g}; the engine gives its "
        f"tokens a log-prob of {tokens.rollout.mean():.2f} on average and the trainer "
        f"{tokens.train.mean():.2f}",
        "weights that did not reach the engine (a tied LM head, a missing or misplaced tensor), a "
        "wrong RoPE, or log-probs of different tokens or a different distribution",
        f"{bisect_command(config)} names the layer"
        + ("; --on-finding warn trains on regardless" if config else ""),
        {"k3": k3, "mean_difference": float(np.abs(ratio).mean()), "tokens": float(len(tokens))},
        unmistakable=True,
    )


def truncation(step: Step, memory: Memory) -> Finding | None:
    """Mean of pi_train / pi_rollout below 1, one-sided: top-p or top-k renormalization.

    The expectation is 1 for honest log-probs and the kept mass for truncated ones.
    """
    tokens = step.tokens
    ratio = np.exp(tokens.log_ratio)
    mean = float(ratio.mean())
    error = float(ratio.std()) / math.sqrt(len(tokens))
    raised = float((tokens.log_ratio < -0.003).mean())
    lowered = float((tokens.log_ratio > 0.003).mean())
    one_sided = (raised - lowered) / max(raised + lowered, 1e-9)
    if mean > 0.995 or (1 - mean) < 6 * error or one_sided < 0.5:
        return None
    exact = float((tokens.rollout == 0).mean())
    cause = "top-p, top-k or min-p sampling"
    remedy = "replay the kept ids (--use-rollout-sampling-mask), or sample without truncation"
    config = step.config
    if config and not config.truncates_sampling:
        cause = "top-p, top-k or min-p that the engine applies by default; the job requests none"
        remedy = "check the server's sampling defaults and the model's generation_config.json"
    return Finding(
        "rollout log-probs are of a truncated distribution",
        "warning",
        f"mean of pi_train/pi_rollout is {mean:.4f} (standard error {error:.4f}) where honest "
        f"log-probs give 1; the rollout log-prob is higher on {raised:.0%} of the tokens and lower "
        f"on {lowered:.0%}; exactly 0 on {exact:.1%}",
        f"{cause}: the engine renormalizes over the kept tokens, about {mean:.2f} of the mass",
        f"{remedy}, or make the engine return log-probs of the full distribution",
        {"mean_ratio": mean, "standard_error": error, "one_sided": one_sided},
    )


def staleness(step: Step, memory: Memory) -> Finding | None:
    """Weight versions behind the trainer and a KL to match, or more than the user allows."""
    if step.staleness is None or step.staleness <= 0:
        return None
    k3, config = step.tokens.k3(), step.config
    corrected = config is not None and config.corrects_mismatch
    over = step.max_staleness is not None and step.staleness > step.max_staleness
    if not over and (corrected or step.staleness < 2 or k3 < 1e-3):
        return None
    remedies = ["lower --max-weight-staleness"]
    if config is None:
        remedies.append("sync more often")
    if not corrected:
        remedies.append(f"correct for it ({_ways_to_correct(config)})")
    return Finding(
        "rollouts come from old weights",
        "warning",
        f"tokens are {step.staleness:.1f} weight versions behind the trainer on average and the "
        f"mismatch k3 is {k3:.1e}",
        "the engine generates while the trainer trains, or weight sync is slower than the steps",
        ", or ".join(remedies),
        {"staleness": step.staleness, "k3": k3},
    )


def different_weights(step: Step, memory: Memory) -> Finding | None:
    """The same token id is off in the same direction every time; rounding noise is not.

    memory: the tokens of recent steps that the trainer's own weights sampled, by their versions
    """
    fresh = step.tokens.fresh()
    if not len(fresh):
        return None
    memory.append(fresh)
    total = sum(map(len, memory))
    while total - len(memory[0]) >= 4 * MIN_WEIGHT_TOKENS:
        total -= len(memory.pop(0))
    tokens = join_tokens(memory)
    if tokens.ids is None or len(tokens) < MIN_WEIGHT_TOKENS:
        return None
    systematic, error = _systematic_variance(tokens, tokens.ids)
    # A bfloat16 copy of float32 weights reaches 0.0014; the bound must hold with confidence.
    if systematic - 2.5 * error < 0.0018**2:
        return None
    size, config = math.sqrt(systematic), step.config
    rounded = config.rounds_rollout_weights if config else None
    corrected = config is not None and config.corrects_mismatch
    remedies = [] if corrected else [f"correct it ({_ways_to_correct(config)})"]
    if rounded is None:
        remedies.append("check that a weight sync reached the engine")
    return Finding(
        "the engine's weights differ from the trainer's",
        "warning" if remedies else "info",
        f"the same token id is off in the same direction every time, by {size:.4f} in log-prob "
        f"({systematic / error:.0f} standard errors); rounding noise of equal weights changes "
        f"sign. k3 is {tokens.k3():.1e}",
        f"{rounded} rounds the engine's weights"
        if rounded
        else "quantized (int8, fp8) or otherwise rounded weights in the engine, or weights from "
        "another step",
        "expect a larger mismatch: " + ("; ".join(remedies) or "watch ESS; the loss corrects it"),
        {"systematic_error": size, "k3": tokens.k3()},
    )


def frozen_weights(step: Step, memory: Memory) -> Finding | None:
    """The version has not moved while the trainer's has, for longer than old weights are allowed.

    memory: (newest version of a token, version of the trainer) of the last steps, at least four
    """
    if step.version is None or step.trainer_version is None:
        return None
    # Engines that run ahead stamp one version on as many rollouts as they are allowed to.
    too_many = max(3, int(step.max_staleness or 0) + 1)
    memory.append((step.version, step.trainer_version))
    del memory[: -too_many - 1]
    moved = step.trainer_version - memory[0][1]
    if len(memory) < 4 or moved < too_many or any(version != step.version for version, _ in memory):
        return None
    return Finding(
        "the engine's weights never change",
        "error",
        f"the newest weight version has been {step.version} for {len(memory)} steps while the "
        f"trainer went on to {step.trainer_version}",
        "weight sync does not reach the engine, or the version is not stamped on new samples",
        "check the log of the weight sync and the engine's version after a sync",
        {"version": float(step.version), "trainer_version": float(step.trainer_version)},
    )


def growing_mismatch(step: Step, memory: Memory) -> Finding | None:
    """The KL rises over the last steps (Mann-Kendall).

    memory: k3 of the last 30 steps
    """
    memory.append(step.tokens.k3())
    del memory[:-30]
    if len(memory) < 12:
        return None
    third = len(memory) // 3
    early, late = float(np.median(memory[:third])), float(np.median(memory[-third:]))
    if late < 1e-4 or late < 2 * early or _mann_kendall(np.array(memory)) < 3.5:
        return None
    config = step.config
    remedies = "tighten the correction, lower the learning rate, or sync weights more often"
    if config is not None:
        first = "tighten the correction"
        if not config.corrects_mismatch:
            first = f"correct it ({_ways_to_correct(config)})"
        last = ", or lower --max-weight-staleness" if config.staleness_limit else ""
        remedies = f"{first}, lower the learning rate{last}"
    return Finding(
        "the mismatch grows",
        "warning",
        f"k3 rose from {early:.1e} to {late:.1e} over the last {len(memory)} steps",
        "the engine falls behind, or training moves to tokens on which engine and trainer disagree",
        f"watch ESS; {remedies}",
        {"early": early, "late": late, "steps": float(len(memory))},
    )


def uncorrected(step: Step, memory: Memory) -> Finding | None:
    """A mismatch worth correcting, in a job that does not; found once.

    memory: (sum of k3, tokens) of recent steps, then only "found"
    """
    config, tokens = step.config, step.tokens
    if config is None or config.corrects_mismatch or "found" in memory:
        return None
    memory.append((tokens.k3() * len(tokens), len(tokens)))
    total, count = map(sum, zip(*memory, strict=True))
    if count < MIN_WEIGHT_TOKENS:
        return None
    del memory[:]
    if total / count < UNCORRECTED_K3:
        return None
    memory.append("found")
    return Finding(
        "the mismatch is large enough to correct",
        "warning",
        f"k3 is {total / count:.1e} per token over the last {count:,} tokens, above "
        f"{UNCORRECTED_K3:.0e}, and the loss treats them as tokens of the current policy",
        "engine and trainer compute different probabilities, and the loss does not compare them",
        _ways_to_correct(config),
        {"k3": total / count, "tokens": float(count)},
    )


def _ways_to_correct(config: JobConfig | None) -> str:
    """Flags that make the loss compare with the rollout policy, without those already on."""
    if config is not None and config.train_log_probs == "rollout":
        return "--policy-loss ppo or icepop"  # the loss has no ratio to correct
    if config is not None and config.use_tis:
        return "plugin.ppo_utils.vanilla_tis_function in --custom-tis-function-path"
    return "--use-tis, or --policy-loss icepop"


def routing(step: Step, memory: Memory) -> Finding | None:
    """Engine and trainer choose different experts; swapped layers and shifted tokens are named."""
    columns = step.columns
    found = routing_finding(columns["rollout_routed_experts"], columns["train_routed_experts"])
    if found is None or step.config is None or not step.config.use_rollout_routing_replay:
        return found
    return replace(found, what_to_try="fix the order of the routes; keep the router in float32")


_LOG_PROBS = ("rollout_log_probs", "log_probs")
_FAULTS = ("zero_filled", "one_token_shift", "temperature", "another_model", "truncation")

#: Run in this order.
DETECTORS: tuple[Detector, ...] = (
    Detector(zero_filled, _LOG_PROBS),
    Detector(one_token_shift, _LOG_PROBS, unless=_FAULTS),
    Detector(temperature, _LOG_PROBS, unless=_FAULTS),
    # Those above name a cause of the same effect; those below would only describe it.
    Detector(another_model, _LOG_PROBS, unless=_FAULTS, min_tokens=FEW_TOKENS),
    Detector(truncation, _LOG_PROBS, unless=_FAULTS),
    Detector(staleness, (*_LOG_PROBS, "weight_versions")),
    Detector(different_weights, (*_LOG_PROBS, "unconcat_tokens"), unless=(*_FAULTS, "staleness")),
    Detector(frozen_weights, ("weight_versions",)),
    Detector(growing_mismatch, _LOG_PROBS, unless=("another_model",)),
    Detector(
        uncorrected,
        _LOG_PROBS,
        unless=(*_FAULTS, "staleness", "different_weights", "growing_mismatch"),
    ),
    Detector(
        routing, ("rollout_routed_experts", "train_routed_experts"), unless=("another_model",)
    ),
)


class MismatchDetectors:
    """Runs all detectors on the steps of one run, in order, and keeps their memories.

    max_staleness: the staleness that the user allows
    custom_path: import paths of the user's own detectors, see `load_detectors`
    config: the job's settings, from which both follow; advice then leaves out what is already on
    repeat_every: steps before a finding that stays is news again
    """

    def __init__(
        self,
        *,
        max_staleness: float | None = None,
        custom_path: str | None = None,
        config: JobConfig | None = None,
        repeat_every: int = 20,
    ) -> None:
        if config is not None:
            max_staleness, custom_path = config.staleness_limit, config.custom_detector_path
        self.max_staleness, self.config, self.repeat_every = max_staleness, config, repeat_every
        self.detectors = (*DETECTORS, *load_detectors(custom_path))
        self._memories: dict[str, Memory] = {detector.name: [] for detector in self.detectors}
        self._last_reported: dict[str, int] = {}

    def check(
        self,
        columns: Mapping[str, Sequence[Any]],
        *,
        step: int,
        trainer_version: int | Sequence[int] | None = None,
    ) -> list[Finding]:
        """Findings of one step; the arguments are those of `Step`."""
        seen = Step.of(step, columns, trainer_version, self.max_staleness, self.config)
        found: dict[str, Finding] = {}
        for detector in self.detectors:
            if found.keys().isdisjoint(detector.unless) and detector.can_run(seen):
                finding = detector.find(seen, self._memories[detector.name])
                if finding is not None:
                    found[detector.name] = replace(finding, detector=detector.name)
        return sorted(found.values(), key=lambda finding: not finding.unmistakable)

    def news(self, findings: Sequence[Finding], step: int) -> list[Finding]:
        """The findings worth reporting: new ones, and old ones every `repeat_every` steps."""
        never = -self.repeat_every
        fresh = [
            finding
            for finding in findings
            if step - self._last_reported.get(finding.detector, never) >= self.repeat_every
        ]
        self._last_reported |= {finding.detector: step for finding in fresh}
        return fresh


def load_detectors(paths: str | None) -> list[Detector]:
    """The user's own detectors from comma-separated import paths (`--custom-detector-path`)."""
    return [_load_detector(path.strip()) for path in (paths or "").split(",") if path.strip()]


def _load_detector(path: str) -> Detector:
    """A detector from a function `(step: Step, memory: list) -> Finding | None`.

    It is run at every step that has log-probs of both sides, and tried here on a step of equal
    log-probs.
    """
    function = load_called_with("--custom-detector-path", path, "step", "memory")
    rows = [np.full(16, -1.0)] * (MIN_TOKENS // 16)
    example: dict[str, Sequence[Any]] = {
        **dict.fromkeys(_LOG_PROBS, rows),
        "loss_masks": [np.ones(16)] * len(rows),
        "unconcat_tokens": [np.arange(20)] * len(rows),
        "weight_versions": [np.zeros(16, np.int64)] * len(rows),
    }
    try:
        found = function(Step.of(0, example, 0), [])
    except Exception as error:
        raise HookLoadError(
            f"{path!r} failed on an example step: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Finding | None):
        raise HookLoadError(
            f"{path!r} returned a {type(found).__name__}; a detector returns a Finding or None"
        )
    return Detector(function, _LOG_PROBS, path=path)


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if first.size < 3 or first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _systematic_variance(tokens: StepTokens, token_ids: NDArray[np.int64]) -> tuple[float, float]:
    """Variance of rollout - train that belongs to the token id, and its standard error without any.

    Samples are split in halves. For an id with means a, b over n, m tokens of the halves, E[a b] is
    the square of its systematic part and the noise of a b is variance / sqrt(n m).
    """
    difference = tokens.rollout - tokens.train
    ids, index = np.unique(token_ids, return_inverse=True)
    key = index * 2 + tokens.sample % 2
    count = np.bincount(key, minlength=2 * len(ids)).reshape(-1, 2)
    total = np.bincount(key, difference, minlength=2 * len(ids)).reshape(-1, 2)
    square = np.bincount(index, difference**2, minlength=len(ids))
    used = (count >= 4).all(1)
    if used.sum() < 5:
        return 0.0, math.inf
    count, total, square = count[used], total[used], square[used]
    weight = count.sum(1)
    mean = total / count
    variance = np.maximum(square / weight - (total.sum(1) / weight) ** 2, 0)
    systematic = float((weight * mean[:, 0] * mean[:, 1]).sum() / weight.sum())
    error = float(np.sqrt((weight**2 * variance**2 / count.prod(1)).sum()) / weight.sum())
    return systematic, max(error, 1e-12)


def _mann_kendall(values: NDArray[np.float64]) -> float:
    """Normal score of the count of rising minus falling pairs: a trend whatever its shape."""
    count = len(values)
    rising = np.sign(values[None, :] - values[:, None])[np.triu_indices(count, 1)].sum()
    variance = count * (count - 1) * (2 * count + 5) / 18
    return float((rising - np.sign(rising)) / math.sqrt(variance))
