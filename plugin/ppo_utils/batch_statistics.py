"""What a correction may know of the whole batch before it sees a token.

A threshold that depends on the batch (its second moment, its effective sample size) must not depend
on how the batch was cut. A correction therefore declares it, with `@batch_statistics(fn)`:

    fn(log_ratios, config, known) -> Tensor | None

log_ratios: [n] float32, train - rollout of the tokens with loss that this rank holds, of all its
    microbatches
known: what the earlier rounds found, each summed over all ranks, on the CPU; empty at first
returns: what to sum over all ranks in this round, of one shape on every rank; None: enough is known

Whether it returns None may depend on `config` and `known` alone, which all ranks share. The sums
then arrive at the correction as `batch_statistics`. A declaration marked `@of_advantages` gets
[2, n] instead: log-probs of the old policy, and advantages.

The built-in declarations follow: thresholds that depend on all tokens of a batch, found in rounds
of sums over ranks. No token is gathered and nothing is sorted over ranks: a round adds up a small
table, which narrows the threshold down for the next. Sums that decide about a token are sums of
integers, so that every order of addition, and with it every layout, gives the same set.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config.loss.corrections import ess_target
from plugin.ppo_utils.importance_ratio import (
    MAX_LOG_RATIO,
    clipped_ratio,
    effective_sample_size,
    log_bound,
)

Statistics = tuple[Tensor, ...]
Declaration = Callable[[Tensor, Any, Sequence[Tensor]], Tensor | None]
Function = TypeVar("Function", bound=Callable[..., Any])

#: Bits of a nonnegative float32 below those that each round distinguishes: 11, 10 and 10 of 31.
_SHIFTS = (20, 10, 0)
#: A squared log-ratio is at most 400: sums of 10^9 of them fit into 64 bits.
_FIXED_POINT = 2**24
#: Bounds that a round tries at once, and rounds: 20 / 63^4 is a millionth.
_CANDIDATES, _CANDIDATE_ROUNDS = 64, 4


def batch_statistics(declaration: Declaration) -> Callable[[Function], Function]:
    """Declare what a correction needs to know of the whole batch."""

    def declare(function: Function) -> Function:
        function.batch_statistics = declaration  # type: ignore[attr-defined]
        return function

    return declare


def of_advantages(declaration: Declaration) -> Declaration:
    """Mark a declaration that looks at log-probs and advantages [2, n] instead of log-ratios."""
    declaration.of_advantages = True  # type: ignore[attr-defined]
    return declaration


def wants_advantages(declaration: Declaration) -> bool:
    """Whether a declaration is marked `@of_advantages`."""
    return getattr(declaration, "of_advantages", False)


def declared_statistics(function: Callable[..., Any], config: Any) -> Declaration | None:
    """What `function` declares, if it needs anything with these flags."""
    declaration: Declaration | None = getattr(function, "batch_statistics", None)
    if declaration is None:
        return None
    nothing = torch.zeros((2, 0) if wants_advantages(declaration) else 0)
    return None if declaration(nothing, config, ()) is None else declaration


def collect_statistics(
    declaration: Declaration,
    log_ratios: Tensor,
    config: Any,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Statistics:
    """Run the rounds of a declaration; `reduce` sums a tensor over ranks, None = only this one."""
    known: list[Tensor] = []
    while (part := declaration(log_ratios, config, known)) is not None:
        known.append((part if reduce is None else reduce(part)).cpu())
    return tuple(known)


def microbatch_statistics(
    declaration: Declaration,
    log_ratios: Tensor,
    config: Any,
    cp_group: dist.ProcessGroup | None = None,
) -> Statistics:
    """The statistics of one microbatch, over its context parallel ranks; warns once.

    For callers that cannot look at the whole batch first, such as another framework's loss.
    """
    _warn_of_microbatches()

    def over_context(part: Tensor) -> Tensor:
        if cp_group is not None:
            dist.all_reduce(part, group=cp_group)
        return part

    return collect_statistics(declaration, log_ratios, config, over_context)


@functools.cache
def _warn_of_microbatches() -> None:
    warnings.warn(
        "a loss or correction with a threshold over the whole batch is called microbatch by "
        "microbatch: "
        "the threshold is each microbatch's own and depends on the cut. Train with megatron-tis or "
        "MegatronTrainer for the whole batch's.",
        stacklevel=4,
    )


def squared_log_ratios(log_r: Tensor) -> Tensor:
    """log(r)^2 [n] in float32, from log-ratios bounded to +-20; one that is not a number is 400."""
    return _bounded(log_r.float()).square()


def second_moment_rounds(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """[2, bins] int64: tokens and fixed-point sums of log(r)^2, by the next bits of that number."""
    rounds = len(known)
    prefix = _first_beyond(known, config.m2po_threshold)
    if rounds == len(_SHIFTS) or (rounds and prefix is None):
        return None
    squares = squared_log_ratios(log_ratios)
    bits = squares.view(torch.int32).long()
    if rounds:
        inside = (bits >> _SHIFTS[rounds - 1]) == prefix
        squares, bits = squares[inside], bits[inside]
    width = 1 << ((31 if rounds == 0 else _SHIFTS[rounds - 1]) - _SHIFTS[rounds])
    bins = (bits >> _SHIFTS[rounds]) & (width - 1)
    table = torch.zeros(2, width, dtype=torch.int64, device=log_ratios.device)
    table[0].index_add_(0, bins, torch.ones_like(bins))
    table[1].index_add_(0, bins, (squares.double() * _FIXED_POINT).round().long())
    return table


def within_second_moment(log_r: Tensor, known: Sequence[Tensor], threshold: float) -> Tensor:
    """bool [T]: the tokens that stay when the mean of log(r)^2 over those that do is bounded.

    Equal values stay or go together.
    """
    first = _first_beyond(known, threshold)
    squares = squared_log_ratios(log_r)
    if first is None:
        return torch.ones_like(squares, dtype=torch.bool)
    return squares.view(torch.int32) < first


def _first_beyond(known: Sequence[Tensor], threshold: float) -> int | None:
    """Leading bits of the smallest value that lifts the mean of all up to it over the threshold.

    None if the mean of all values does not exceed it. The mean of the smallest k values grows with
    k, so one bin after the other can be looked at.
    """
    prefix, count, total = 0, 0, 0
    for rounds, table in enumerate(known):
        counts, sums = table.numpy()
        below, sum_below = count + np.cumsum(counts), total + np.cumsum(sums)
        beyond = (counts > 0) & (sum_below > threshold * _FIXED_POINT * below)
        if not beyond.any():
            return None
        first = int(np.argmax(beyond))
        prefix = (prefix << (0 if rounds == 0 else 10)) | first
        count, total = int(below[first] - counts[first]), int(sum_below[first] - sums[first])
    return prefix if known else None


def moment_round(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """[3] float64: tokens, sum of r and sum of r^2."""
    if known:
        return None
    ratio = _bounded(log_ratios).double().exp()
    return torch.stack([torch.ones_like(ratio).sum(), ratio.sum(), ratio.square().sum()])


def effective_share(known: Sequence[Tensor]) -> float:
    """ESS / N over the batch; 1 for an empty one."""
    count, total, squares = known[0].tolist()
    return effective_sample_size(total, squares) / count if squares > 0 else 1.0


def ess_clip_rounds(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """[1 + 2 * candidates] float64: tokens, sums of clip(r) and of its square for every bound.

    None at once where --tis-clip is a number.
    """
    if ess_target(config.tis_clip) is None or len(known) == _CANDIDATE_ROUNDS:
        return None
    low, high, decided = _clip_interval(known, config)
    if decided:
        return None
    log_r = _bounded(log_ratios).double().clamp(min=log_bound(config.tis_clip_low)).sort().values
    ratio = log_r.exp()
    zero = ratio.new_zeros(1)
    sums = torch.cat([zero, ratio.cumsum(0)]), torch.cat([zero, ratio.square().cumsum(0)])
    bounds = torch.tensor(_candidates(low, high), dtype=torch.float64, device=log_ratios.device)
    inside = torch.searchsorted(log_r, bounds, right=True)
    outside, caps = len(log_r) - inside, bounds.exp()
    count = torch.full_like(zero, len(log_r))
    total, squares = sums[0][inside] + outside * caps, sums[1][inside] + outside * caps.square()
    return torch.cat([count, total, squares])


def tis_rounds(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """Rounds of an automatic clip; then [2] float64, tokens and sum of the clipped ratios.

    The last round only with --tis-batch-normalize.
    """
    clip_rounds = _of_clip(known)
    if len(clip_rounds) < len(known):
        return None
    if (part := ess_clip_rounds(log_ratios, config, clip_rounds)) is not None:
        return part
    if not config.tis_batch_normalize:
        return None
    weights = clipped_ratio(_bounded(log_ratios), config.tis_clip_low, tis_bound(known, config))
    return torch.stack([torch.ones_like(weights).double().sum(), weights.double().sum()])


def tis_bound(known: Sequence[Tensor], config: Any) -> float:
    """--tis-clip, or the bound that was found for it."""
    if ess_target(config.tis_clip) is None:
        return float(config.tis_clip)
    return ess_clip(_of_clip(known), config)


def mean_weight(known: Sequence[Tensor]) -> float:
    """The mean clipped ratio over the batch; 1 for an empty one."""
    count, total = known[-1].tolist()
    return total / count if total > 0 else 1.0


def _of_clip(known: Sequence[Tensor]) -> Sequence[Tensor]:
    return [table for table in known if table.numel() > 2]


def ess_clip(known: Sequence[Tensor], config: Any) -> float:
    """The largest bound of at least 1 whose clipped ratios keep the wanted ESS / N; else 1."""
    return math.exp(_clip_interval(known, config)[0])


def _clip_interval(known: Sequence[Tensor], config: Any) -> tuple[float, float, bool]:
    """The logarithms that the bound lies between, and whether it is the first of them."""
    target = ess_target(config.tis_clip)
    assert target is not None
    low, high = 0.0, MAX_LOG_RATIO
    for table in known:
        count, sums = float(table[0]), table[1:].view(2, -1)
        # The ESS falls as the bound rises: the clipped ratios differ more and more.
        enough = sums[0].square() >= target * count * sums[1]
        bounds, last = _candidates(low, high), int(enough.int().cumprod(0).sum()) - 1
        if last < 0:
            return low, low, True
        if last == _CANDIDATES - 1:
            return high, high, True
        low, high = bounds[last], bounds[last + 1]
    return low, high, False


def _candidates(low: float, high: float) -> list[float]:
    step = (high - low) / (_CANDIDATES - 1)
    return [*(low + step * i for i in range(_CANDIDATES - 1)), high]


def _bounded(log_ratios: Tensor) -> Tensor:
    return log_ratios.nan_to_num(nan=MAX_LOG_RATIO).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
