"""How far the policies are apart: sufficient statistics of a microbatch, exact metrics of a step.

`record_mismatch` adds a microbatch to a table of sums and maxima. It never waits for the device: no
value is read back, tokens are sorted into fixed bins with `index_add`. `summarize` turns the
reduced table into numbers; what it gives does not depend on how the batch was cut.

The ratio is pi_train / pi_rollout unless the caller passes the one its correction works on. All KL
estimates are of KL(rollout || train), because the tokens were sampled from the rollout policy: d =
rollout - train.

Every metric exists for all tokens (`mismatch/k3`) and per slice (`mismatch/by_position/64-127/k3`).
Slices without a token are left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plugin.ppo_utils.importance_ratio import (
    MAX_LOG_RATIO,
    effective_sample_size,
    k1,
    k2,
    k3,
    log_ratio,
    safe_exp,
)
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.ppo_utils.sufficient_statistics import StatisticsTable

#: First response position of every bin: 0, 1, 2-3, 4-7, ..., 65536+.
POSITION_STARTS = (0, *(2**power for power in range(17)))
#: First staleness (trainer version - weight version of the token) of every bin.
STALENESS_STARTS = (0, 1, 2, 3, 5, 9)
#: Lower edge of the rollout probability of every bin.
PROBABILITY_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99)
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

_HISTOGRAM_HALF = 128
_HISTOGRAM_UNIT = 1e-4
_HISTOGRAM_LIMIT = 20.0
HISTOGRAM_BINS = 2 * _HISTOGRAM_HALF + 1

#: Means that are reported of all tokens, not of every slice.
_WHOLE_BATCH = ("multiplicative_error", "reverse_k3", "js")
_SUMS = (
    *("count", "masked_low", "masked_high", "clipped_low", "clipped_high"),
    *("ratio", "ratio_squared", "weight", "weight_squared"),
    *("k1", "k2", "k3", "abs_log_ratio", "train_log_prob", "rollout_log_prob"),
    *_WHOLE_BATCH,
    *("positive_advantage", "positive_removed", "negative_advantage", "negative_removed"),
)
_EXTREMES = ("log_ratio", "-log_ratio", "weight", "-weight")
_CUR_SUMS = ("count", "ratio", "ratio_squared", "k1", "k2", "k3")
#: A weight is called clipped where it is further than this from its ratio (float32 rounding stays
#: inside).
_CLIP_TOLERANCE = 1e-5


def _integer_labels(starts: tuple[int, ...]) -> tuple[str, ...]:
    ends = [start - 1 for start in starts[1:]]
    closed = [f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=False)]
    return (*closed, f"{starts[-1]}+")


_PROBABILITY_LABELS = tuple(
    f"{low:g}-{high:g}"
    for low, high in zip(PROBABILITY_EDGES, (*PROBABILITY_EDGES[1:], 1.0), strict=True)
)
#: The rows of every cell, in order: all tokens, then the bins of each dimension.
SLICES: tuple[str, ...] = (
    "",
    *(f"by_position/{label}/" for label in _integer_labels(POSITION_STARTS)),
    *(f"by_staleness/{label}/" for label in _integer_labels(STALENESS_STARTS)),
    *(f"by_rollout_prob/{label}/" for label in _PROBABILITY_LABELS),
)
_FIRST_STALENESS = 1 + len(POSITION_STARTS)
_FIRST_PROBABILITY = _FIRST_STALENESS + len(STALENESS_STARTS)


def record_mismatch(
    table: StatisticsTable,
    *,
    mask: Tensor,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    position: Tensor,
    cur_log_probs: Tensor | None = None,
    staleness: Tensor | None = None,
    advantages: Tensor | None = None,
    kept: Tensor | None = None,
    weights: Tensor | None = None,
    correction_ratio: Tensor | None = None,
) -> None:
    """Add the tokens of one microbatch to `table`; nothing is read where `mask` is False.

    mask: [T] bool, the original loss mask; log-probs and advantages: [T]
    position: [T] int64, 0 = first response token; staleness: [T] int64, weight versions behind, or
        None
    kept: [T] bool, the tokens the correction keeps (None = all)
    weights: [T], the correction's weight on each token (None = its ratio on kept tokens, 0 on
        dropped)
    correction_ratio: [T], what the weight was before bounding (None = exp(train - rollout))
    """
    with torch.no_grad():
        log_r = log_ratio(train_log_probs, rollout_log_probs, mask).double()
        log_before = log_r
        if correction_ratio is not None:
            log_before = zero_masked(correction_ratio, mask, 1.0).double().clamp(min=1e-30).log()
        before = safe_exp(log_before)
        kept = mask if kept is None else mask & kept
        after = before if weights is None else zero_masked(weights, mask).double()
        after = torch.where(kept, after, 0.0)
        rollout = zero_masked(rollout_log_probs, mask).double()
        removed = mask & ~kept
        sums = {
            "count": mask.double(),
            "masked_low": (removed & (before < 1)).double(),
            "masked_high": (removed & (before >= 1)).double(),
            "clipped_low": (kept & (after > before * (1 + _CLIP_TOLERANCE))).double(),
            "clipped_high": (kept & (after < before * (1 - _CLIP_TOLERANCE))).double(),
            "ratio": before,
            "ratio_squared": before.square(),
            "weight": after,
            "weight_squared": after.square(),
            "k1": k1(-log_r),
            "k2": k2(-log_r),
            "k3": k3(-log_r),
            "abs_log_ratio": log_r.abs(),
            "train_log_prob": zero_masked(train_log_probs, mask).double(),
            "rollout_log_prob": rollout,
            "multiplicative_error": safe_exp(log_r.abs()),
            **_divergences(log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
            **_advantage_sums(advantages, mask, removed),
        }
        values = torch.where(mask[:, None], torch.stack(tuple(sums.values()), 1), 0.0)
        ends = torch.stack((log_before, -log_before, after, -after), 1)
        ends = torch.where(mask[:, None], ends, -torch.inf)
        bins, ones = histogram_bin(log_before), mask.double()
        size = len(SLICES) + 1  # the last row takes what has no slice
        total, histogram = values.new_zeros(size, len(_SUMS)), ones.new_zeros(size * HISTOGRAM_BINS)
        largest = ends.new_full((size, len(_EXTREMES)), -torch.inf)
        for row in _slice_rows(position, staleness, rollout):
            total.index_add_(0, row, values)
            largest.scatter_reduce_(0, row[:, None].expand_as(ends), ends, reduce="amax")
            histogram.index_add_(0, row * HISTOGRAM_BINS + bins, ones)
        table.add("mismatch:sums", total[:-1])
        table.maximum("mismatch:extremes", largest[:-1])
        table.add("mismatch:histogram", histogram.view(-1, HISTOGRAM_BINS)[:-1])
        if cur_log_probs is not None:
            _record_cur(table, mask, cur_log_probs, rollout_log_probs)


def summarize(table: StatisticsTable) -> dict[str, float]:
    """Flat metrics of a table: `mismatch/...`, and `mismatch/cur/...` for cur against rollout."""
    if "mismatch:sums" not in table.sums:
        return {}
    sums, histogram = (table.sums[f"mismatch:{kind}"].cpu() for kind in ("sums", "histogram"))
    extremes = table.maxima["mismatch:extremes"].cpu()
    metrics: dict[str, float] = {}
    for row, label in enumerate(SLICES):
        cells = dict(zip(_SUMS, sums[row].tolist(), strict=True))
        if cells["count"] == 0:
            continue
        extreme = dict(zip(_EXTREMES, extremes[row].tolist(), strict=True))
        values = _row_metrics(cells, extreme)
        if not label:
            values |= {name: cells[name] / cells["count"] for name in _WHOLE_BATCH}
        for percent in PERCENTILES:
            log_r = histogram_percentile(histogram[row], percent)
            values[f"ratio_p{percent:02d}"] = math.exp(log_r)
        metrics |= {f"mismatch/{label}{name}": value for name, value in values.items()}
    return metrics | _cur_metrics(table)


def histogram_bin(log_r: Tensor) -> Tensor:
    """int64: the bin of each log-ratio; fine around 0, 5 to 10 % wide elsewhere, up to +-20."""
    scale = _HISTOGRAM_HALF / math.log1p(_HISTOGRAM_LIMIT / _HISTOGRAM_UNIT)
    bounded = log_r.clamp(-_HISTOGRAM_LIMIT, _HISTOGRAM_LIMIT)
    steps = torch.sign(bounded) * torch.log1p(bounded.abs() / _HISTOGRAM_UNIT) * scale
    return steps.round().long() + _HISTOGRAM_HALF


def histogram_edge(step: float) -> float:
    """The log-ratio at a (fractional) bin number counted from the center bin."""
    scale = _HISTOGRAM_HALF / math.log1p(_HISTOGRAM_LIMIT / _HISTOGRAM_UNIT)
    return math.copysign(_HISTOGRAM_UNIT * math.expm1(abs(step) / scale), step)


def histogram_percentile(counts: Tensor, percent: float) -> float:
    """The log-ratio below which `percent` of the counts lie, interpolated in its bin."""
    total = float(counts.sum())
    below, target = 0.0, total * percent / 100
    for index, count in enumerate(counts.tolist()):
        if count and below + count >= target:
            inside = min(max((target - below) / count, 0.0), 1.0)
            return histogram_edge(index - _HISTOGRAM_HALF - 0.5 + inside)
        below += count
    return 0.0


def _advantage_sums(advantages: Tensor | None, mask: Tensor, removed: Tensor) -> dict[str, Tensor]:
    values = torch.zeros_like(mask, dtype=torch.float64)
    if advantages is not None:
        values = zero_masked(advantages, mask).double()
    positive, negative = values.clamp(min=0), (-values).clamp(min=0)
    return {
        "positive_advantage": positive,
        "positive_removed": torch.where(removed, positive, 0.0),
        "negative_advantage": negative,
        "negative_removed": torch.where(removed, negative, 0.0),
    }


def _divergences(log_r: Tensor) -> dict[str, Tensor]:
    """Unbiased estimates from a token of the rollout policy, never negative; r = exp(log_r).

    KL(train || rollout): r log r - r + 1; Jensen-Shannon: half of log(2 / (1 + r)) + r log(2 r /
    (1 + r))
    """
    ratio, log_mixture = log_r.exp(), torch.nn.functional.softplus(log_r) - math.log(2)
    return {
        "reverse_k3": ratio * log_r - torch.expm1(log_r),
        "js": (ratio * (log_r - log_mixture) - log_mixture) / 2,
    }


def _slice_rows(position: Tensor, staleness: Tensor | None, rollout: Tensor) -> Tensor:
    """[4, T] int64: the rows of a token; unknown staleness goes to a row past the end."""
    unused = len(SLICES)
    rows = [
        torch.zeros_like(position),
        1 + _bin(position, POSITION_STARTS),
        torch.full_like(position, unused),
        _FIRST_PROBABILITY + _bin(rollout.exp(), PROBABILITY_EDGES),
    ]
    if staleness is not None:
        known = _FIRST_STALENESS + _bin(staleness, STALENESS_STARTS)
        rows[2] = torch.where(staleness >= 0, known, unused)
    return torch.stack(rows)


def _bin(values: Tensor, starts: tuple[float, ...]) -> Tensor:
    """int64 [T]: the last bin whose start is not above the value."""
    edges = torch.tensor(starts[1:], dtype=torch.float64).to(values.device, non_blocking=True)
    return torch.bucketize(values.double(), edges, right=True)


def _record_cur(table: StatisticsTable, mask: Tensor, cur: Tensor, rollout: Tensor) -> None:
    log_r = log_ratio(cur, rollout, mask).double()
    ratio = safe_exp(log_r)
    sums = (mask.double(), ratio, ratio.square(), k1(-log_r), k2(-log_r), k3(-log_r))
    values = torch.where(mask[:, None], torch.stack(sums, 1), 0.0)
    table.add("mismatch_cur:sums", values.sum(0))
    ends = torch.where(mask[:, None], torch.stack((log_r, -log_r), 1), -torch.inf)
    empty = ends.new_full((1, 2), -torch.inf)
    table.maximum("mismatch_cur:extremes", torch.cat((ends, empty)).amax(0))


def _ratio_metrics(cells: dict[str, float], highest: float, lowest: float) -> dict[str, float]:
    """How far a ratio is from 1; highest, lowest: its logarithm's extremes."""
    count = cells["count"]
    return {
        "ratio_mean": cells["ratio"] / count,
        "ratio_max": math.exp(min(highest, 700.0)),
        "ratio_min": math.exp(min(lowest, 700.0)),
        "ess_share": effective_sample_size(cells["ratio"], cells["ratio_squared"]) / count,
        "chi2": cells["ratio_squared"] / count - 1,
        **{name: cells[name] / count for name in ("k1", "k2", "k3")},
    }


def _row_metrics(cells: dict[str, float], extreme: dict[str, float]) -> dict[str, float]:
    count = cells["count"]
    mean = {name: value / count for name, value in cells.items()}
    train_ppl, rollout_ppl = (
        math.exp(min(-mean[f"{which}_log_prob"], 80.0)) for which in ("train", "rollout")
    )
    weight_ess = effective_sample_size(cells["weight"], cells["weight_squared"])
    return {
        "tokens": count,
        **_ratio_metrics(cells, extreme["log_ratio"], -extreme["-log_ratio"]),
        "weight_mean": mean["weight"],
        "weight_max": extreme["weight"],
        "weight_min": -extreme["-weight"],
        "ess": effective_sample_size(cells["ratio"], cells["ratio_squared"]),
        "weight_ess": weight_ess,
        "weight_ess_share": weight_ess / count,
        "abs_log_ratio": mean["abs_log_ratio"],
        "train_perplexity": train_ppl,
        "rollout_perplexity": rollout_ppl,
        "perplexity_gap": train_ppl - rollout_ppl,
        "kept_share": (count - cells["masked_low"] - cells["masked_high"]) / count,
        **{
            f"{kind}_{side}_share": mean[f"{kind}_{side}"]
            for kind in ("masked", "clipped")
            for side in ("low", "high")
        },
        **{
            f"{sign}_advantage_removed": _share(
                cells[f"{sign}_removed"], cells[f"{sign}_advantage"]
            )
            for sign in ("positive", "negative")
        },
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _cur_metrics(table: StatisticsTable) -> dict[str, float]:
    if "mismatch_cur:sums" not in table.sums:
        return {}
    cells = dict(zip(_CUR_SUMS, table.sums["mismatch_cur:sums"].tolist(), strict=True))
    if cells["count"] == 0:
        return {}
    high, negative_low = table.maxima["mismatch_cur:extremes"].tolist()
    metrics = _ratio_metrics(cells, high, -negative_low)
    return {f"mismatch/cur/{name}": value for name, value in metrics.items()}
