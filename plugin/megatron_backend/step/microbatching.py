"""Cut a global batch into microbatches: balanced, equally many per rank, within a token budget.

Every data-parallel rank must run the same number of microbatches, or the others hang in a
collective. A rank with too few samples gets *padding microbatches*, which contribute nothing.
Planning uses lengths only and is deterministic: every rank computes the same plan by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plugin.errors import BatchError, ConfigError
from plugin.ragged import Integers, as_integers


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

    def padding_share(self) -> float:
        """Share of the microbatches, over all ranks, that are padding."""
        cells = [samples for rank in self.ranks for samples in rank]
        return sum(not samples for samples in cells) / len(cells)


def sample_cost(length: int, hidden_size: int = 4096) -> float:
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
    lengths = as_integers(total_lengths).tolist()
    if not lengths:
        raise BatchError("the batch has no samples; a step needs at least one")
    longest = limits.max_sample_tokens
    for i, length in enumerate(lengths):
        if longest is not None and length > longest:
            raise BatchError(
                f"sample {i} has {length} tokens, the model takes {longest}; shorten "
                "--max-response-length or the prompt, or use a model with a longer context"
            )
    samples = _Samples(lengths, [sample_cost(length, hidden_size) for length in lengths], limits)
    shares = samples.spread(dp_size)
    tightest = [samples.packed_tightly(share) for share in shares]
    fewest = max(len(bins) for bins in tightest)
    count = -(-fewest // count_multiple) * count_multiple
    ranks = []
    for share, tight in zip(shares, tightest, strict=True):
        bins: list[list[int]] | None = tight if len(tight) == count else None
        # More bins than the fewest can, rarely, be harder to fill longest first.
        while bins is None and (bins := samples.packed(share, count)) is None:
            count += count_multiple
        ranks.append(bins)
    oversize = tuple(i for i in range(len(lengths)) if samples.is_oversize(i))
    return MicrobatchPlan(tuple(samples.largest_first(bins, count) for bins in ranks), oversize)


@dataclass(frozen=True)
class _Samples:
    """Lengths and costs of all samples, and the limits of a microbatch."""

    lengths: Sequence[int]
    costs: Sequence[float]
    limits: BatchingLimits

    def is_oversize(self, i: int) -> bool:
        """Whether a sample is longer than the token budget; it gets a microbatch of its own."""
        return self.limits.max_tokens is not None and self.lengths[i] > self.limits.max_tokens

    def spread(self, dp_size: int) -> list[list[int]]:
        """Samples to ranks, costliest first, each to the rank with the least work so far.

        Without a token budget the ranks get equal numbers of samples, because a microbatch is a
        number of samples.
        """
        per_microbatch = self.limits.micro_batch_size
        microbatches = -(-len(self.lengths) // (per_microbatch * dp_size))
        room = len(self.lengths) if self.limits.max_tokens else microbatches * per_microbatch
        shares: list[list[int]] = [[] for _ in range(dp_size)]
        heap = [(0.0, rank) for rank in range(dp_size)]
        for i in sorted(range(len(self.lengths)), key=lambda i: (-self.costs[i], i)):
            load, rank = heapq.heappop(heap)
            shares[rank].append(i)
            if len(shares[rank]) < room:
                heapq.heappush(heap, (load + self.costs[i], rank))
        return shares

    def packed_tightly(self, share: Sequence[int]) -> list[list[int]]:
        """A rank's samples (costliest first) in as few microbatches as hold them."""
        rest = [i for i in share if not self.is_oversize(i)]
        budget = self.limits.max_tokens
        if budget is None:
            needed = -(-len(rest) // self.limits.micro_batch_size)
        else:
            needed = -(-sum(self.lengths[i] for i in rest) // budget)
        count = max(1, needed + len(share) - len(rest))
        while (bins := self.packed(share, count)) is None:
            count += 1
        return bins

    def packed(self, share: Sequence[int], count: int) -> list[list[int]] | None:
        """Put each sample into the least loaded of `count` bins with room; None if none has."""
        bins: list[list[int]] = [[] for _ in range(count)]
        tokens, heap = [0] * count, [(0.0, b) for b in range(count)]
        budget, most = self.limits.max_tokens, self.limits.micro_batch_size
        for i in share:
            length, skipped = self.lengths[i], []
            while heap:
                load, b = heap[0]
                held = tokens[b]
                if len(bins[b]) < most if budget is None else not held or held + length <= budget:
                    break
                skipped.append(heapq.heappop(heap))
            else:
                return None
            bins[b].append(i)
            tokens[b] += length
            heapq.heapreplace(heap, (load + self.costs[i], b))
            for item in skipped:
                heapq.heappush(heap, item)
        return bins

    def largest_first(self, bins: list[list[int]], count: int) -> tuple[tuple[int, ...], ...]:
        """`count` microbatches in schedule order, empty ones last.

        The peak of memory comes at once, and where experts are shared between ranks the
        microbatches that meet in a collective are of similar size.
        """
        bins = bins + [[] for _ in range(count - len(bins))]
        ordered = sorted(bins, key=lambda b: -sum(self.costs[i] for i in b))
        return tuple(tuple(sorted(b)) for b in ordered)
