"""One pass over a dump: replays, sweeps and detectors together, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plugin.observe.text_table import aligned
from plugin.tools.compare.dump_reading import Dump
from plugin.tools.compare.offline_detection import OfflineDetection, RepeatedFinding
from plugin.tools.compare.replay import Method, MethodStatistics, replay_block
from plugin.tools.compare.sweeps import Sweep

#: (key of a summary, heading of the table)
COLUMNS = (
    ("kept_share", "kept"),
    ("clipped_share", "clipped"),
    ("weight_mean", "weight mean"),
    ("weight_max", "weight max"),
    ("ess_share", "ESS/N"),
    ("weight_variance", "weight var"),
    ("relative_bias", "bias"),
    ("relative_bias_error", "± 95 %"),
    ("bias_bound", "bias bound"),
    ("positive_removed", "A>0 removed"),
    ("negative_removed", "A<0 removed"),
)


@dataclass
class Comparison:
    """What `megatron-tis compare` prints, draws and writes as JSON."""

    samples: int
    tokens: int
    methods: list[MethodStatistics]
    sweeps: list[Sweep]
    findings: list[RepeatedFinding]
    problems: list[str]
    target_ess: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "methods": [{"name": entry.method.name, **entry.summary()} for entry in self.methods],
            "sweeps": [
                {
                    "flag": sweep.flag,
                    "method": sweep.method,
                    "points": sweep.points(),
                    "recommendation": sweep.recommendation(self.target_ess),
                }
                for sweep in self.sweeps
            ],
            "target_ess": self.target_ess,
            "findings": [finding.as_dict() for finding in self.findings],
            "problems": self.problems,
        }


def compare(
    dump: Dump,
    methods: Sequence[Method],
    sweeps: Sequence[Sweep] = (),
    *,
    target_ess: float = 0.9,
    custom_detector_path: str | None = None,
    progress: Callable[[int], Any] = lambda size: None,
) -> Comparison:
    """Read the dump once; `progress` is called with the input bytes of every block."""
    statistics = [MethodStatistics(method) for method in methods]
    everything = statistics + [entry for sweep in sweeps for entry in sweep.statistics]
    detection = OfflineDetection(custom_detector_path)
    samples = tokens = 0
    for block, size in dump.blocks():
        replay_block(block, everything)
        detection.add(block)
        samples, tokens = samples + len(block.lengths), tokens + int(block.mask.sum())
        progress(size)
    return Comparison(
        samples,
        tokens,
        statistics,
        list(sweeps),
        sorted(detection.findings.values(), key=lambda found: not found.finding.unmistakable),
        dump.problems,
        target_ess,
    )


def text_table(comparison: Comparison) -> str:
    """The comparison as aligned columns."""
    rows = [["method", *(heading for _, heading in COLUMNS)]]
    for entry in comparison.methods:
        summary = entry.summary()
        rows.append([entry.method.name, *(_number(summary[key]) for key, _ in COLUMNS)])
    lines = aligned(rows)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def recommendation_text(recommendation: dict[str, Any], target: float) -> str:
    """One sentence per sweep, and one line per length bin for sequence-level thresholds."""
    option = "--" + recommendation["flag"].replace("_", "-")
    lines = [f"{option} on {recommendation['method']}: {_advice(recommendation, option, target)}"]
    for length, best in recommendation.get("by_length", {}).items():
        lines.append(f"  responses of {length} tokens: {_advice(best, option, target)}")
    return "\n".join(lines)


def _advice(best: dict[str, Any], option: str, target: float) -> str:
    found = f"ESS/N {best['ess_share']:.3f}, bias bound {best['bias_bound']:.3f}"
    if best["reached"]:
        return f"take {option} {best['value']:g} ({found})"
    return f"no value reaches ESS/N {target:g}; the closest is {option} {best['value']:g} ({found})"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-4 <= abs(value) < 1e4 else f"{value:.1e}"
