"""Which response tokens of which sample this rank holds, and sums over whole sequences.

Token tensors are flat: the local response tokens of sample 0, then of sample 1, and so on. Without context
parallelism "local" means all. With it, a sample of `total` tokens is cut into 2 * cp chunks and rank r holds
chunks r and 2 * cp - 1 - r, which balances causal attention; the token at position p is predicted by the
logits at position p - 1, so ownership follows p - 1.

Example, cp = 2, total 8, response 5 (positions 3..7, predicted at 2..6): chunks of 2 are
[0,1][2,3][4,5][6,7]; rank 0 holds chunks 0 and 3, thus predicts position 7; rank 1 predicts 3, 4, 5, 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.sharding.parallel_context import ParallelContext, current_parallel_context

Span = tuple[int, int]


def response_spans(total: int, response: int, cp_rank: int = 0, cp_size: int = 1) -> list[Span]:
    """Half-open ranges of response positions (0 = first response token) that this CP rank predicts."""
    if cp_size == 1:
        return [(0, response)]
    chunk = -(-total // (2 * cp_size))
    first_prediction = total - response - 1
    spans = []
    for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start = max(index * chunk - first_prediction, 0)
        end = min((index + 1) * chunk - first_prediction, response)
        spans.append((start, max(start, end)))
    return spans


@dataclass(frozen=True)
class SequenceShards:
    """The local share of every sample of a microbatch.

    spans: per sample, the ranges of its response that are local, in order
    response_lengths: per sample, the length of the whole response
    """

    spans: tuple[tuple[Span, ...], ...]
    response_lengths: tuple[int, ...]
    device: torch.device
    context: ParallelContext

    @classmethod
    def of(
        cls,
        total_lengths: Sequence[int] | None,
        response_lengths: Sequence[int],
        device: torch.device,
        context: ParallelContext | None = None,
    ) -> SequenceShards:
        """Shards of samples with these lengths; `total_lengths` matters only under context parallelism."""
        context = context or current_parallel_context()
        responses = tuple(int(length) for length in response_lengths)
        if total_lengths is None and context.cp_size > 1:
            raise BatchError(
                f"total_lengths are missing with {context.cp_size} context parallel ranks; which tokens a rank "
                "holds depends on the length of prompt and response together, so pass them"
            )
        totals = (
            responses if total_lengths is None else tuple(int(length) for length in total_lengths)
        )
        if len(totals) != len(responses):
            raise BatchError(
                f"{len(totals)} total_lengths for {len(responses)} response_lengths; give one of each per sample"
            )
        spans = tuple(
            tuple(response_spans(total, response, context.cp_rank, context.cp_size))
            for total, response in zip(totals, responses, strict=True)
        )
        return cls(spans, responses, device, context)

    @cached_property
    def local_lengths(self) -> list[int]:
        """Local response tokens of every sample."""
        return [sum(end - start for start, end in spans) for spans in self.spans]

    @property
    def num_samples(self) -> int:
        return len(self.spans)

    @cached_property
    def sample_index(self) -> Tensor:
        """[T] int64: the sample of every local token."""
        lengths = torch.tensor(self.local_lengths, dtype=torch.int64, device=self.device)
        samples = torch.arange(self.num_samples, device=self.device)
        return torch.repeat_interleave(samples, lengths, output_size=sum(self.local_lengths))

    def local(self, full: Sequence[Tensor]) -> Tensor:
        """[T]: the local part of one full-response tensor per sample."""
        lengths = [value.numel() for value in full]
        if lengths != list(self.response_lengths):
            raise BatchError(
                f"full-response tensors (loss masks, tokens) have lengths {lengths} but the responses "
                f"{list(self.response_lengths)}; give one tensor per sample, as long as its whole response"
            )
        parts = [
            value[start:end]
            for value, spans in zip(full, self.spans, strict=True)
            for start, end in spans
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.device)

    def local_mask(self, loss_masks: Sequence[Tensor]) -> Tensor:
        """[T] bool: the local part of the full-response loss masks."""
        return self.local(loss_masks).to(self.device) != 0

    def masks_and(self, loss_masks: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
        """New full-response masks, zeroed at the local positions where `keep` [T] is False."""
        masks, offset = [], 0
        for mask, spans in zip(loss_masks, self.spans, strict=True):
            mask = mask.clone()
            for start, end in spans:
                dropped = ~keep[offset : offset + end - start]
                mask[start:end] = mask[start:end].masked_fill(dropped.to(mask.device), 0)
                offset += end - start
            masks.append(mask)
        return masks

    def sequence_sums(self, *values: Tensor) -> list[Tensor]:
        """Per-sample sums [N] of each `values` [T], over the whole sequence; one collective under CP.

        The sums carry no gradient. Mask the values first.
        """
        packed = torch.zeros(len(values), self.num_samples, dtype=torch.float64, device=self.device)
        for row, value in zip(packed, values, strict=True):
            row.index_add_(0, self.sample_index, value.detach().double())
        if self.context.cp_group is not None and self.context.cp_size > 1:
            dist.all_reduce(packed, group=self.context.cp_group)
        return [row.float() for row in packed]

    def sequence_max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Per-sample largest unmasked value [N]; -inf for a sample without one."""
        result = torch.full((self.num_samples,), -torch.inf, device=self.device)
        candidates = torch.where(mask, values.detach().float(), -torch.inf)
        result.scatter_reduce_(0, self.sample_index, candidates, reduce="amax")
        if self.context.cp_group is not None and self.context.cp_size > 1:
            dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.context.cp_group)
        return result

    def per_token(self, per_sample: Tensor) -> Tensor:
        """[T]: every token gets the value [N] of its sample."""
        return per_sample[self.sample_index]
