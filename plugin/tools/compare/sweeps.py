"""Threshold sweeps: a loss replayed at many values of one flag, and which value to take."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from plugin.config import LossConfig
from plugin.config.flags import field_type
from plugin.errors import ConfigError
from plugin.tools.compare.correction_catalog import catalog
from plugin.tools.compare.replay import NEUTRAL, Method, MethodStatistics, method_pairs

#: Flags whose weight is one per sequence: thresholds depend on the length.
_PER_SEQUENCE = ("sequence_", "geometric_", "veto_")
DEFAULT_POINTS = 12


def swept_methods() -> dict[str, list[tuple[str, str | None]]]:
    """Every threshold that a loss or correction documents -> the (loss, correction) it acts on."""
    documented = {entry.name: re.findall(r"--([a-z0-9-]+)", entry.flags) for entry in catalog()}
    found: dict[str, list[tuple[str, str | None]]] = {}
    for loss, hook in method_pairs():
        for option in documented[loss if hook is None else f"{hook}_function"]:
            flag = option.replace("-", "_")
            if field_type(LossConfig, flag)[0] is float and flag not in NEUTRAL:
                found.setdefault(flag, []).append((loss, hook))
    return found


@dataclasses.dataclass
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
            if self.flag.startswith(_PER_SEQUENCE):
                row["by_length"] = entry.by_length()
            rows.append(row)
        return rows

    def recommendation(self, target_ess: float) -> dict[str, Any]:
        """The least biased value among those that reach the target; also per length bin."""
        points = self.points()
        chosen = _best([(p["value"], p["ess_share"], p["bias_bound"]) for p in points], target_ess)
        result: dict[str, Any] = {"flag": self.flag, "method": self.method, **chosen}
        if "by_length" in points[0]:
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
    known = swept_methods() if texts else {}
    sweeps = []
    for text in texts:
        name, found, span = text.partition("=")
        flag = name.strip().lstrip("-").replace("-", "_")
        if not found or flag not in known:
            raise ConfigError(
                f"--sweep {text}: expected FLAG=LOW:HIGH with FLAG one of "
                f"{', '.join(key.replace('_', '-') for key in known)}; e.g. --sweep tis-clip=1.5:10"
            )
        values = _values(text, span)
        for loss, hook in known[flag]:
            methods = [Method.of(loss, hook, **{**settings, flag: value}) for value in values]
            statistics = [MethodStatistics(method) for method in methods]
            sweeps.append(Sweep(flag, methods[0].name, values, statistics))
    return sweeps


def _values(text: str, span: str) -> list[float]:
    try:
        if ":" not in span:
            values = [float(part) for part in span.split(",")]
        else:
            low, high = map(float, span.split(":")[:2])
            points = int(span.split(":")[2]) if span.count(":") > 1 else DEFAULT_POINTS
            if not (high > low and points >= 2):
                raise ValueError
            if low <= 0:
                values = [low + (high - low) / (points - 1) * i for i in range(points)]
            else:
                factor = (high / low) ** (1 / (points - 1))
                values = [float(f"{low * factor**i:.4g}") for i in range(points)]
        if not all(map(math.isfinite, values)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--sweep {text}: expected LOW:HIGH, LOW:HIGH:POINTS or a comma-separated list of "
            "numbers"
        ) from None
    return values


def _best(candidates: list[tuple[float, float, float]], target: float) -> dict[str, Any]:
    """candidates: (value, ESS share, bias bound)."""
    reaching = [item for item in candidates if item[1] >= target]
    value, ess, bias = (
        min(reaching, key=lambda item: item[2])
        if reaching
        else max(candidates, key=lambda item: item[1])
    )
    return {"value": value, "ess_share": ess, "bias_bound": bias, "reached": bool(reaching)}
