"""Detectors: is the mismatch of this step noise, or a bug?

Each detector looks at the log-probs that engine and trainer give to the same tokens and knows the trace one
fault leaves in them. They cost a few milliseconds per step (numpy, at most 131,072 tokens) and are always on.

| detector | trace |
|---|---|
| zero_filled | log-prob exactly 0, or constant, where the trainer finds the token unlikely |
| one_token_shift | log-probs correlate better with the trainer's at a neighboring position |
| temperature | one log-prob is a multiple of the other, and that explains the difference |
| truncation | mean of pi_train / pi_rollout below 1 and one-sided: the engine renormalized over fewer tokens |
| different_weights | the same token id is off in the same direction every time: rounding noise is not |
| staleness | weight versions behind the trainer and a KL to match |
| frozen_weights | the version never changes while the trainer's does |
| growing_mismatch | the KL rises step after step |
| routing | engine and trainer send tokens to different experts |

`MismatchDetectors` keeps the history of a run. `check` takes a step's columns, on the driver or from a dump.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.observe.findings import Finding, StepTokens, joined_tokens, tokens_of_columns
from plugin.observe.routing_agreement import routing_finding

MIN_TOKENS = 256
#: Systematic errors are small against noise: recent steps are pooled, from this many tokens to four times as many.
MIN_WEIGHT_TOKENS = 8192


def zero_filled(tokens: StepTokens) -> Finding | None:
    """Exact zeros on unlikely tokens, or samples whose log-probs are all one number."""
    unlikely = tokens.train < -1.0
    zeros = unlikely & (tokens.rollout == 0)
    zero_share = zeros.sum() / max(unlikely.sum(), 1)
    constant = _constant_samples(tokens)
    if zero_share < 0.01 and constant == 0:
        return None
    samples = len(np.unique(tokens.sample))
    return Finding(
        "zero_filled",
        "rollout log-probs are zero-filled or constant",
        "error",
        f"{zero_share:.1%} of the tokens with a trainer probability below 0.37 have a rollout log-prob of exactly 0; "
        f"{constant} of {samples} samples have one constant value",
        "the engine did not return log-probs for these tokens and something filled the gap",
        "turn log-probs on in the sampling parameters; mask tokens that have none (tool output, padding)",
        {"zero_share": float(zero_share), "constant_samples": float(constant)},
    )


def one_token_shift(tokens: StepTokens) -> Finding | None:
    """Correlation of rollout[i] with train[i + k] for k = -1, 0, 1."""
    here = _correlation(tokens.rollout, tokens.train)
    shifted = {k: _shifted_correlation(tokens, k) for k in (-1, 1)}
    best = max(shifted, key=lambda k: shifted[k])
    if not (shifted[best] > 0.5 and shifted[best] > here + 0.2):
        return None
    direction = "before" if best == 1 else "behind"
    return Finding(
        "one_token_shift",
        "rollout log-probs are shifted by one token",
        "error",
        f"correlation with the trainer is {here:.2f} in place and {shifted[best]:.2f} one position away: a rollout "
        f"log-prob stands one token {direction} the one it belongs to",
        "log-probs taken from the logits of the token itself, or a leading/trailing entry not cut off",
        "compare lengths of tokens and log-probs at the engine's border; the first response token is predicted by the "
        "last prompt token",
        {"correlation": here, "shifted_correlation": shifted[best], "shift": float(best)},
    )


def temperature(tokens: StepTokens) -> Finding | None:
    """Scale between the two log-probs (reduced major axis), if it explains their difference."""
    spread = float(tokens.train.std())
    correlation = _correlation(tokens.rollout, tokens.train)
    if spread < 1e-3 or correlation < 0.9:
        return None
    scale = float(tokens.rollout.std()) / spread
    unexplained = math.sqrt(max(1 - correlation * correlation, 1e-12))
    if abs(math.log(scale)) < 0.04 or abs(math.log(scale)) / unexplained < 0.6:
        return None
    sharper = scale > 1
    return Finding(
        "temperature",
        "engine and trainer use different temperatures",
        "error",
        f"rollout log-probs are {scale:.3f} times as spread out as the trainer's at a correlation of {correlation:.4f}; "
        "equal temperatures give 1.000",
        f"the engine's log-probs are at a {'lower' if sharper else 'higher'} temperature than the trainer's "
        f"({'below' if sharper else 'above'} the trainer's by a factor of about {1 / scale:.2f} or "
        f"{'less' if sharper else 'more'})",
        "set --rollout-temperature to the sampling temperature, and make the engine return log-probs after temperature",
        {"scale": scale, "correlation": correlation},
    )


def truncation(tokens: StepTokens) -> Finding | None:
    """E[pi_train / pi_rollout] is 1 for honest log-probs and the kept mass for truncated ones."""
    ratio = np.exp(tokens.log_ratio)
    mean = float(ratio.mean())
    error = float(ratio.std()) / math.sqrt(len(tokens))
    raised = float((tokens.log_ratio < -0.003).mean())
    lowered = float((tokens.log_ratio > 0.003).mean())
    one_sided = (raised - lowered) / max(raised + lowered, 1e-9)
    if mean > 0.995 or (1 - mean) < 6 * error or one_sided < 0.5:
        return None
    exact = float((tokens.rollout == 0).mean())
    return Finding(
        "truncation",
        "rollout log-probs are of a truncated distribution",
        "warning",
        f"mean of pi_train/pi_rollout is {mean:.4f} (standard error {error:.4f}) where honest log-probs give 1; the rollout "
        f"log-prob is higher on {raised:.0%} of the tokens and lower on {lowered:.0%}; exactly 0 on {exact:.1%}",
        f"top-p or top-k sampling: the engine renormalizes over the kept tokens, about {mean:.2f} of the mass",
        "sample with top_p 1 and top_k off, or make the engine return log-probs of the full distribution",
        {"mean_ratio": mean, "standard_error": error, "one_sided": one_sided},
    )


def different_weights(tokens: StepTokens) -> Finding | None:
    """Mean difference per token id, in one half of the samples times the other: noise averages out, weights do not."""
    if tokens.ids is None or len(tokens) < MIN_WEIGHT_TOKENS:
        return None
    systematic, error = _systematic_variance(tokens.rollout - tokens.train, tokens)
    # A bfloat16 copy of float32 weights reaches 0.0014; the bound must hold with confidence.
    if systematic - 2.5 * error < 0.0018**2:
        return None
    size = math.sqrt(systematic)
    return Finding(
        "different_weights",
        "the engine's weights differ from the trainer's",
        "warning",
        f"the same token id is off in the same direction every time, by {size:.4f} in log-prob "
        f"({systematic / error:.0f} standard errors); rounding noise of equal weights changes sign. k3 is {tokens.k3():.1e}",
        "quantized (int8, fp8) or otherwise rounded weights in the engine, or weights of another step",
        "expect a larger mismatch: use --use-tis or a masking loss; check that a weight sync reached the engine",
        {"systematic_error": size, "k3": tokens.k3()},
    )


_TOKEN_DETECTORS: tuple[Callable[[StepTokens], Finding | None], ...] = (
    zero_filled,
    one_token_shift,
    temperature,
    truncation,
)


class MismatchDetectors:
    """All detectors and the history that some of them need."""

    def __init__(
        self, *, max_staleness: float | None = None, window: int = 30, repeat_every: int = 20
    ) -> None:
        self.max_staleness, self.window, self.repeat_every = max_staleness, window, repeat_every
        self._k3: list[float] = []
        self._versions: list[tuple[float, float]] = []
        self._last_said: dict[str, int] = {}
        self._pool: list[StepTokens] = []

    def check(
        self,
        columns: Mapping[str, Sequence[Any]],
        *,
        step: int,
        trainer_version: int | None = None,
    ) -> list[Finding]:
        """Findings of one step; columns as in `RolloutBatch`.

        `train_routed_experts` holds the trainer's own choices for the first samples, if they are known.
        """
        tokens = tokens_of_columns(columns)
        staleness, version = _staleness(columns.get("weight_versions"), trainer_version)
        findings = self.check_tokens(tokens, staleness, version, trainer_version)
        routes = routing_finding(
            columns.get("rollout_routed_experts"), columns.get("train_routed_experts")
        )
        return findings + ([routes] if routes else [])

    def check_tokens(
        self,
        tokens: StepTokens | None,
        staleness: float | None,
        version: float | None,
        trainer_version: float | None,
    ) -> list[Finding]:
        """The same from flat tokens; a finding that explains the others silences them."""
        findings: list[Finding] = []
        if tokens is not None and len(tokens) >= MIN_TOKENS:
            findings = self._token_findings(tokens, staleness)
            self._k3.append(tokens.k3())
            growing = self._growing()
            if growing:
                findings.append(growing)
        frozen = self._frozen(version, trainer_version)
        return findings + ([frozen] if frozen else [])

    def news(self, findings: Sequence[Finding], step: int) -> list[Finding]:
        """The findings worth saying again: new ones, and old ones every `repeat_every` steps."""
        fresh = [
            finding
            for finding in findings
            if step - self._last_said.get(finding.detector, -self.repeat_every) >= self.repeat_every
        ]
        self._last_said |= {finding.detector: step for finding in fresh}
        return fresh

    def _token_findings(self, tokens: StepTokens, staleness: float | None) -> list[Finding]:
        stale = self._stale(tokens, staleness)
        for detector in _TOKEN_DETECTORS:
            finding = detector(tokens)
            if finding:
                return [finding, *([stale] if stale else [])]
        if stale:  # old weights are different weights; saying both would name one cause twice
            return [stale]
        weights = self._different_weights(tokens)
        return [weights] if weights else []

    def _different_weights(self, tokens: StepTokens) -> Finding | None:
        if tokens.ids is None:
            return None
        self._pool.append(tokens)
        total = sum(map(len, self._pool))
        while total - len(self._pool[0]) >= 4 * MIN_WEIGHT_TOKENS:
            total -= len(self._pool.pop(0))
        return different_weights(joined_tokens(self._pool)) if total >= MIN_WEIGHT_TOKENS else None

    def _stale(self, tokens: StepTokens, staleness: float | None) -> Finding | None:
        if staleness is None or staleness <= 0:
            return None
        k3 = tokens.k3()
        over = self.max_staleness is not None and staleness > self.max_staleness
        if not over and (staleness < 2 or k3 < 1e-3):
            return None
        return Finding(
            "staleness",
            "rollouts come from old weights",
            "warning",
            f"samples are {staleness:.1f} weight versions behind the trainer on average and the mismatch k3 is {k3:.1e}",
            "the engine generates while the trainer trains, or weight sync is slower than the steps",
            "lower --max-weight-staleness, sync more often, or correct for it (--use-tis, off_policy_is on reinforce)",
            {"staleness": staleness, "k3": k3},
        )

    def _frozen(self, version: float | None, trainer_version: float | None) -> Finding | None:
        if version is None or trainer_version is None:
            return None
        self._versions.append((version, trainer_version))
        recent = self._versions[-4:]
        moved = recent[-1][1] - recent[0][1]
        if len(recent) < 4 or moved < 3 or len({item[0] for item in recent}) > 1:
            return None
        return Finding(
            "frozen_weights",
            "the engine's weights never change",
            "error",
            f"the newest weight version has been {version:.0f} for {len(recent)} steps while the trainer went on to "
            f"{trainer_version:.0f}",
            "weight sync does not reach the engine, or the version is not stamped on new samples",
            "check the sync's log; ask the engine for its version after a sync",
            {"version": version, "trainer_version": trainer_version},
        )

    def _growing(self) -> Finding | None:
        values = np.array(self._k3[-self.window :])
        if len(values) < 12:
            return None
        third = len(values) // 3
        early, late = float(np.median(values[:third])), float(np.median(values[-third:]))
        if late < 1e-4 or late < 2 * early or _mann_kendall(values) < 3.5:
            return None
        return Finding(
            "growing_mismatch",
            "the mismatch grows",
            "warning",
            f"k3 rose from {early:.1e} to {late:.1e} over the last {len(values)} steps",
            "the engine falls behind, or training moves to tokens on which engine and trainer disagree",
            "watch ESS; tighten the correction, lower the learning rate, or sync weights more often",
            {"early": early, "late": late, "steps": float(len(values))},
        )


def _staleness(
    versions: Sequence[Any] | None, trainer_version: int | None
) -> tuple[float | None, float | None]:
    """Mean staleness and the newest version of the samples, as far as they are known."""
    known = [int(version) for version in versions or () if int(version) >= 0]
    if not known:
        return None, None
    newest = float(max(known))
    return (
        None if trainer_version is None else trainer_version - sum(known) / len(known),
        newest,
    )


def _constant_samples(tokens: StepTokens) -> int:
    """Samples of at least 8 tokens with one rollout value and a trainer that sees differences."""
    if not len(tokens):
        return 0
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    lengths = np.diff(np.append(starts, len(tokens)))
    flat = np.maximum.reduceat(tokens.rollout, starts) == np.minimum.reduceat(
        tokens.rollout, starts
    )
    varied = (
        np.maximum.reduceat(tokens.train, starts) - np.minimum.reduceat(tokens.train, starts) > 0.5
    )
    return int((flat & varied & (lengths >= 8)).sum())


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if first.size < 3 or first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _shifted_correlation(tokens: StepTokens, shift: int) -> float:
    """Correlation of the rollout log-prob at a position with the trainer's `shift` positions later."""
    rollout, train = (
        (tokens.rollout[:-1], tokens.train[1:])
        if shift == 1
        else (tokens.rollout[1:], tokens.train[:-1])
    )
    neighbors = (tokens.sample[1:] == tokens.sample[:-1]) & (np.diff(tokens.position) == 1)
    return _correlation(rollout[neighbors], train[neighbors])


def _systematic_variance(
    difference: NDArray[np.float64], tokens: StepTokens
) -> tuple[float, float]:
    """Variance of the difference that belongs to the token id, and its standard error if there were none.

    Samples are split in halves. For an id with means a, b over n, m tokens of the halves, E[a b] is the square of
    its systematic part and the noise of a b is variance / sqrt(n m).
    """
    assert tokens.ids is not None
    ids, index = np.unique(tokens.ids, return_inverse=True)
    half = tokens.sample % 2
    key = index * 2 + half
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
