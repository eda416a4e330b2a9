"""Cuts a global batch into microbatches: balanced over ranks, equal in number, within a token budget.

Every data-parallel rank must run the same number of microbatches, or the others wait for ever in a collective.
Where the samples do not suffice, a rank gets *padding microbatches*, which contribute nothing. Planning
uses lengths only and is deterministic, so that every rank computes the same plan by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from plugin.batch_types import Microbatch, RolloutBatch
from plugin.errors import BatchError, ConfigError


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
    """`ranks[r][k]` lists the samples of microbatch k on DP rank r; an empty list is a padding microbatch.

    oversize: the samples that are longer than the budget; each has a microbatch of its own
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    oversize: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0])

    def padding_share(self) -> float:
        """Share of the microbatches, over all ranks, that are padding."""
        cells = [samples for rank in self.ranks for samples in rank]
        return sum(not samples for samples in cells) / len(cells)


def sample_cost(length: int, hidden_size: int = 4096) -> float:
    """Work of a sample in units of one token's linear layers: attention grows with the square of length."""
    return length * (1.0 + length / (6.0 * hidden_size))


def plan_microbatches(
    lengths: Sequence[int],
    limits: BatchingLimits,
    *,
    dp_size: int = 1,
    count_multiple: int = 1,
    hidden_size: int = 4096,
) -> MicrobatchPlan:
    """Spread samples of the given total lengths over DP ranks and microbatches.

    `count_multiple`: the number of microbatches per rank must be a multiple of it (virtual pipelining).
    """
    _check_lengths(lengths, limits)
    costs = [sample_cost(length, hidden_size) for length in lengths]
    budget = limits.max_tokens
    oversize = tuple(i for i, n in enumerate(lengths) if budget is not None and n > budget)
    bins = _fill_bins(lengths, costs, limits, oversize, dp_size * count_multiple)
    per_rank = len(bins) // dp_size
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    heap = [(0.0, rank) for rank in range(dp_size)]
    for samples in sorted(bins, key=lambda b: -sum(costs[i] for i in b)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(samples)
        if len(ranks[rank]) < per_rank:
            heapq.heappush(heap, (load + sum(costs[i] for i in samples), rank))
    # Largest first on every rank: the peak of memory comes at once, and where experts are shared between
    # ranks the microbatches that meet in a collective are of similar size.
    cells = tuple(tuple(tuple(sorted(b)) for b in rank) for rank in ranks)
    return MicrobatchPlan(cells, oversize)


def build_microbatches(batch: RolloutBatch, plan: MicrobatchPlan, dp_rank: int) -> list[Microbatch]:
    """The microbatches of one DP rank, in schedule order."""
    return [
        Microbatch(batch.select(samples)) if samples else Microbatch.padding_like(batch)
        for samples in plan.ranks[dp_rank]
    ]


def _check_lengths(lengths: Sequence[int], limits: BatchingLimits) -> None:
    if not lengths:
        raise BatchError("the batch has no samples; a step needs at least one")
    limit = limits.max_sample_tokens
    for i, length in enumerate(lengths):
        if limit is not None and length > limit:
            raise BatchError(
                f"sample {i} has {length} tokens, the model takes {limit}; shorten --max-response-length or the "
                "prompt, or use a model with a longer context"
            )


def _fill_bins(
    lengths: Sequence[int],
    costs: Sequence[float],
    limits: BatchingLimits,
    oversize: Sequence[int],
    multiple: int,
) -> list[list[int]]:
    """Bins within the limits, as evenly loaded as possible, their number a multiple of `multiple`."""
    budget = limits.max_tokens
    rest = sorted(set(range(len(lengths))) - set(oversize), key=lambda i: (-costs[i], i))
    if budget is not None:
        needed = -(-sum(lengths[i] for i in rest) // budget)
    else:
        needed = -(-len(rest) // limits.micro_batch_size)
    count = _round_up(max(1, needed + len(oversize)), multiple)
    while True:
        bins = _longest_first(rest, lengths, costs, limits, count - len(oversize))
        if bins is not None:
            return [[i] for i in oversize] + bins
        count += multiple


def _longest_first(
    order: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    limits: BatchingLimits,
    count: int,
) -> list[list[int]] | None:
    """Give each sample, longest first, to the least loaded bin that has room; None if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, b) for b in range(count)]
    tokens = [0] * count
    for i in order:
        skipped = []
        while heap:
            load, b = heapq.heappop(heap)
            if _has_room(len(bins[b]), tokens[b], lengths[i], limits):
                break
            skipped.append((load, b))
        else:
            return None
        bins[b].append(i)
        tokens[b] += lengths[i]
        heapq.heappush(heap, (load + costs[i], b))
        for item in skipped:
            heapq.heappush(heap, item)
    return bins


def _has_room(samples: int, tokens: int, length: int, limits: BatchingLimits) -> bool:
    if limits.max_tokens is None:
        return samples < limits.micro_batch_size
    return tokens + length <= limits.max_tokens


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
