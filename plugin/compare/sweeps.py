"""Threshold sweeps: the same loss replayed at many values of one flag, and which value to take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugin.compare.replay import Method, MethodStatistics
from plugin.errors import ConfigError

#: Which (loss, correction) a flag acts on.
SWEPT_METHODS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "tis_clip": (("ppo", "vanilla_tis"), ("ppo", "icepop")),
    "tis_clip_low": (("ppo", "vanilla_tis"), ("ppo", "icepop")),
    "eps_clip": (("ppo", None), ("reinforce", "off_policy_is")),
    "eps_clip_high": (("ppo", None), ("reinforce", "off_policy_is")),
    "icepop_ratio_low": (("icepop", None),),
    "icepop_ratio_high": (("icepop", None),),
    "ipo_ratio_low": (("ipo_kl", None),),
    "ipo_ratio_high": (("ipo_kl", None),),
    "dppo_diff_low": (("dppo_tv", None),),
    "dppo_diff_high": (("dppo_tv", None),),
    "dppo_ratio_cap": (("dppo_tv", None),),
    "dppo_mask_low": (("dppo", None),),
    "dppo_mask_high": (("dppo", None),),
    "sequence_tis_clip": (("ppo", "sequence_tis"),),
    "sequence_tis_clip_low": (("ppo", "sequence_tis"),),
    "geometric_mask_low": (("ppo", "geometric_mask"),),
    "geometric_mask_high": (("ppo", "geometric_mask"),),
    "veto_threshold": (("ppo", "veto"),),
    "opsm_delta": (("ppo", "opsm"),),
}
#: Flags whose weight is one per sequence: the same threshold means something else at another length.
SEQUENCE_FLAGS = (
    "sequence_tis_clip",
    "sequence_tis_clip_low",
    "geometric_mask_low",
    "geometric_mask_high",
    "veto_threshold",
)
DEFAULT_POINTS = 12


@dataclass
class Sweep:
    """One flag over its values, on one method."""

    flag: str
    method: str
    values: list[float]
    statistics: list[MethodStatistics]

    def points(self) -> list[dict[str, Any]]:
        """Value, ESS and bias of every point, and for sequence-level flags the ESS by length."""
        rows = []
        for value, entry in zip(self.values, self.statistics, strict=True):
            row: dict[str, Any] = {"value": value, **entry.summary()}
            if self.flag in SEQUENCE_FLAGS:
                row["by_length"] = entry.by_length()
            rows.append(row)
        return rows

    def recommendation(self, target_ess: float) -> dict[str, Any]:
        """The value with the smallest bias bound among those that reach the target; also per length bin."""
        points = self.points()
        chosen = _best([(p["value"], p["ess_share"], p["bias_bound"]) for p in points], target_ess)
        result: dict[str, Any] = {"flag": self.flag, "method": self.method, **chosen}
        if self.flag in SEQUENCE_FLAGS and points:
            bins: dict[str, list[tuple[float, float, float]]] = {}
            for point in points:
                for row in point["by_length"]:
                    bins.setdefault(row["length"], []).append(
                        (point["value"], row["ess_share"], row["bias_bound"])
                    )
            result["by_length"] = {
                length: _best(candidates, target_ess) for length, candidates in bins.items()
            }
        return result


def parse_sweeps(texts: list[str], settings: Mapping[str, Any]) -> list[Sweep]:
    """`flag=low:high`, `flag=low:high:points` (spaced geometrically) or `flag=a,b,c`."""
    return [sweep for text in texts for sweep in _sweeps_of(text, settings)]


def _sweeps_of(text: str, settings: Mapping[str, Any]) -> list[Sweep]:
    name, found, span = text.partition("=")
    flag = name.strip().lstrip("-").replace("-", "_")
    if not found or flag not in SWEPT_METHODS:
        known = ", ".join(key.replace("_", "-") for key in SWEPT_METHODS)
        raise ConfigError(
            f"--sweep {text}: expected FLAG=LOW:HIGH with FLAG one of {known}; e.g. --sweep tis-clip=1.5:10"
        )
    values = _values(text, span)
    sweeps = []
    for loss, hook in SWEPT_METHODS[flag]:
        methods = [Method.of(loss, hook, **{**settings, flag: value}) for value in values]
        statistics = [MethodStatistics(method) for method in methods]
        sweeps.append(Sweep(flag, methods[0].name, values, statistics))
    return sweeps


def _values(text: str, span: str) -> list[float]:
    wanted = (
        f"--sweep {text}: expected LOW:HIGH, LOW:HIGH:POINTS or a comma-separated list of numbers"
    )
    try:
        if ":" not in span:
            values = [float(part) for part in span.split(",")]
        else:
            low, high, *rest = span.split(":")
            values = _spaced(float(low), float(high), int(rest[0]) if rest else DEFAULT_POINTS)
    except (ValueError, IndexError):
        raise ConfigError(wanted) from None
    if not values or not all(math.isfinite(value) for value in values):
        raise ConfigError(wanted)
    return values


def _spaced(low: float, high: float, points: int) -> list[float]:
    if not (high > low and points >= 2):
        raise ValueError
    if low <= 0:
        step = (high - low) / (points - 1)
        return [low + step * i for i in range(points)]
    factor = (high / low) ** (1 / (points - 1))
    return [float(f"{low * factor**i:.4g}") for i in range(points)]


def _best(candidates: list[tuple[float, float, float]], target: float) -> dict[str, Any]:
    """candidates: (value, ESS share, bias bound)."""
    reaching = [item for item in candidates if item[1] >= target]
    if reaching:
        value, ess, bias = min(reaching, key=lambda item: item[2])
        return {"value": value, "ess_share": ess, "bias_bound": bias, "reached": True}
    value, ess, bias = max(candidates, key=lambda item: item[1])
    return {"value": value, "ess_share": ess, "bias_bound": bias, "reached": False}
