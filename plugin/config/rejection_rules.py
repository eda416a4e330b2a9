"""The small language of `--rejection-rules`: `token_ratio=0.5:2.0,mean_k1=-0.01:0.01`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from plugin.errors import ConfigError

LEVELS = ("token", "mean", "sum", "max")
STATISTICS = ("ratio", "k1", "k2", "k3")


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
