"""Cut a global batch into microbatches: balanced, equally many per rank, within a token budget.

Every data-parallel rank must run the same number of microbatches, or the others hang in a
collective. A rank with too few samples gets *padding microbatches*, which contribute nothing.
Planning uses lengths only and is deterministic: every rank computes the same plan by itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from plugin.errors import BatchError, ConfigError
from plugin.ragged import Integers, as_integers

#: Beyond so many samples they are placed in rounds instead of one by one.
_MOST_ONE_BY_ONE = 10_000

Number = TypeVar("Number", float, NDArray[Any])
#: The samples of every microbatch.
Bins = list[list[int]]


@dataclass(frozen=True)
class BatchingLimits:
    """How large a microbatch may be.

    max_tokens: token budget of a microbatch (already times the CP size); None = by sample count
    micro_batch_size: samples per microbatch without a budget
    max_sample_tokens: longest sample the model can take
    """

    max_tokens: int | None = None
    micro_batch_size: int = 1
    max_sample_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens-per-gpu is {self.max_tokens}; it must be at least 1")
        if self.micro_batch_size < 1:
            raise ConfigError(
                f"--micro-batch-size is {self.micro_batch_size}; it must be at least 1"
            )


@dataclass(frozen=True)
class MicrobatchPlan:
    """`ranks[r][k]` lists the samples of microbatch k on DP rank r; an empty list is padding.

    oversize: the samples that are longer than the budget; each has a microbatch of its own
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    oversize: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0])

    def order(self, dp_rank: int) -> Integers:
        """[n] the samples of a rank, microbatch after microbatch."""
        samples = [i for microbatch in self.ranks[dp_rank] for i in microbatch]
        return np.array(samples, np.int64)

    def orders(self) -> list[Integers]:
        """`order` of every rank."""
        return [self.order(rank) for rank in range(len(self.ranks))]

    def padding_share(self) -> float:
        """Share of the microbatches, over all ranks, that are padding."""
        cells = [samples for rank in self.ranks for samples in rank]
        return sum(not samples for samples in cells) / len(cells)


def sample_cost(length: Number, hidden_size: int = 4096) -> Number:
    """Work of a sample in units of one token's linear layers; attention is quadratic."""
    return length * (1.0 + length / (6.0 * hidden_size))


def plan_microbatches(
    total_lengths: Sequence[int] | Integers | Tensor,
    limits: BatchingLimits,
    *,
    dp_size: int = 1,
    count_multiple: int = 1,
    hidden_size: int = 4096,
) -> MicrobatchPlan:
    """Spread samples of the given total lengths over DP ranks and microbatches.

    count_multiple: the number of microbatches per rank is a multiple of it (virtual pipelining)
    """
    lengths = as_integers(total_lengths)
    if not len(lengths):
        raise BatchError("the batch has no samples; a step needs at least one")
    longest = limits.max_sample_tokens
    for i in () if longest is None else np.flatnonzero(lengths > longest)[:1]:
        raise BatchError(
            f"sample {i} has {lengths[i]} tokens, the model takes {longest}; shorten "
            "--max-response-length or the prompt, or use a model with a longer context"
        )
    samples = _Samples(lengths, sample_cost(lengths, hidden_size), limits)
    shares = samples.spread(dp_size)
    tightest = [samples.packed_tightly(share) for share in shares]
    fewest = max(len(bins) for bins in tightest)
    count = -(-fewest // count_multiple) * count_multiple
    ranks = []
    for share, tight in zip(shares, tightest, strict=True):
        bins: Bins | None = tight if len(tight) == count else None
        # More bins than the fewest can, rarely, be harder to fill longest first.
        while bins is None and (bins := samples.packed(share, count)) is None:
            count += count_multiple
        ranks.append(bins)
    oversize = tuple(np.flatnonzero(samples.oversize).tolist())
    return MicrobatchPlan(tuple(samples.largest_first(bins, count) for bins in ranks), oversize)


class _Samples:
    """Lengths and costs [N] of all samples, and the limits of a microbatch.

    oversize: [N] whether a sample is longer than the token budget; it gets a microbatch of its own
    """

    def __init__(
        self, lengths: Integers, costs: NDArray[np.float64], limits: BatchingLimits
    ) -> None:
        self.lengths, self.costs, self.limits = lengths, costs, limits
        budget = limits.max_tokens
        self.oversize = np.zeros(len(lengths), bool) if budget is None else lengths > budget

    def spread(self, dp_size: int) -> list[Integers]:
        """Samples to ranks, costliest first, each to the rank with the least work so far.

        Without a token budget the ranks get equal numbers of samples, because a microbatch is a
        number of samples.
        """
        order = np.argsort(-self.costs, kind="stable")
        if len(order) > _MOST_ONE_BY_ONE:
            parts = _split(order, _dealt(self.costs[order], dp_size), dp_size)
            return [np.array(part, np.int64) for part in parts]
        per_microbatch = self.limits.micro_batch_size
        microbatches = -(-len(order) // (per_microbatch * dp_size))
        room = len(order) if self.limits.max_tokens else microbatches * per_microbatch
        shares: list[list[int]] = [[] for _ in range(dp_size)]
        heap = [(0.0, rank) for rank in range(dp_size)]
        for i, cost in zip(order.tolist(), self.costs[order].tolist(), strict=True):
            load, rank = heapq.heappop(heap)
            shares[rank].append(i)
            if len(shares[rank]) < room:
                heapq.heappush(heap, (load + cost, rank))
        return [np.array(share, np.int64) for share in shares]

    def packed_tightly(self, share: Integers) -> Bins:
        """A rank's samples (costliest first) in as few microbatches as hold them."""
        count = self.fewest_bins(share)
        while (bins := self.packed(share, count)) is None:
            count += 1 if len(share) <= _MOST_ONE_BY_ONE else 1 + count // 100
        return bins

    def fewest_bins(self, share: Integers) -> int:
        """A number of microbatches below which a rank's samples cannot fit.

        With a budget, for every length l up to half of it: each sample longer than budget - l has a
        microbatch without any of at least l, each other one above half of it has its own, and
        tokens of the lengths between l and budget - l need room.
        """
        budget = self.limits.max_tokens
        if budget is None:
            return max(1, -(-len(share) // self.limits.micro_batch_size))
        lengths = np.sort(self.lengths[share])
        rest = lengths[lengths <= budget]
        before = np.append(0, np.cumsum(rest))
        small = np.unique(np.append(0, rest[rest <= budget // 2]))
        above_half = len(rest) - np.searchsorted(rest, budget // 2, "right")
        large = np.searchsorted(rest, budget - small, "right")
        tokens = before[large] - before[np.searchsorted(rest, small, "left")]
        alone = len(rest) - large
        bins = alone + np.maximum(above_half - alone, -(-tokens // budget))
        return max(1, len(lengths) - len(rest) + int(bins.max()))

    def packed(self, share: Integers, count: int) -> Bins | None:
        """Put each sample into the least loaded of `count` bins with room; None if none has."""
        if len(share) > _MOST_ONE_BY_ONE:
            return self._dealt_out(share, count)
        bins: list[list[int]] = [[] for _ in range(count)]
        heap = [(0.0, b) for b in range(count)]
        # Samples only get shorter: a bin without room is set aside until one comes that fits.
        aside: list[tuple[int, float, int]] = []
        budget = self.limits.max_tokens
        sizes = np.ones(len(share), np.int64) if budget is None else self.lengths[share]
        # In tokens, or in samples where there is no budget.
        room = [self.limits.micro_batch_size if budget is None else budget] * count
        costs = self.costs[share].tolist()
        for i, size, cost in zip(share.tolist(), sizes.tolist(), costs, strict=True):
            while aside and -aside[0][0] >= size:
                heapq.heappush(heap, heapq.heappop(aside)[1:])
            while heap and room[heap[0][1]] < size and bins[heap[0][1]]:
                load, b = heapq.heappop(heap)
                heapq.heappush(aside, (-room[b], load, b))
            if not heap:
                return None
            load, b = heap[0]
            bins[b].append(i)
            room[b] -= size
            heapq.heapreplace(heap, (load + cost, b))
        return bins

    def _dealt_out(self, share: Integers, count: int) -> Bins | None:
        """As `packed`, in rounds: an oversize sample alone, then one of the others to each bin."""
        alone, rest = share[self.oversize[share]], share[~self.oversize[share]]
        if count < len(alone) + bool(len(rest)):
            return None
        free = count - len(alone)
        owners = _dealt(self.costs[rest], free)
        budget, most = self.limits.max_tokens, self.limits.micro_batch_size
        sizes = None if budget is None else self.lengths[rest]
        if len(rest) and np.bincount(owners, sizes).max() > (most if budget is None else budget):
            return None
        return [[i] for i in alone.tolist()] + _split(rest, owners, free)

    def largest_first(self, bins: Bins, count: int) -> tuple[tuple[int, ...], ...]:
        """`count` microbatches in schedule order, empty ones last.

        The peak of memory comes at once, and where experts are shared between ranks the
        microbatches that meet in a collective are of similar size.
        """
        bins = bins + [[] for _ in range(count - len(bins))]
        costs = self.costs.tolist()
        ordered = sorted(bins, key=lambda b: -sum([costs[i] for i in b]))
        return tuple([tuple(sorted(b)) for b in ordered])


def _dealt(costs: NDArray[np.float64], count: int) -> Integers:
    """[n] the bin of each sample, of `count`; costs [n] descend.

    In rounds of one sample per bin, the costliest to the bin with the least work so far: with many
    samples per bin as even as one by one, and a sort per round instead of a heap per sample.
    """
    owners, loads = np.zeros(len(costs), np.int64), np.zeros(count)
    for start in range(0, len(costs), count):
        part = costs[start : start + count]
        chosen = np.argsort(loads, kind="stable")[: len(part)]
        owners[start : start + count] = chosen
        loads[chosen] += part
    return owners


def _split(samples: Integers, owners: Integers, count: int) -> Bins:
    """The samples of every bin, in their order."""
    ordered = samples[np.argsort(owners, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(owners, minlength=count)).tolist()
    return [ordered[start:end] for start, end in itertools.pairwise([0, *ends])]
