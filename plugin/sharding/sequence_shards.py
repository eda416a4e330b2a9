"""Which response tokens of which sample this rank holds, and sums over whole sequences.

Token tensors are flat: the local response tokens of sample 0, then of sample 1, and so on. Without
context parallelism "local" means all; with it, `zigzag` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.sharding.parallel_context import ParallelContext, current_parallel_context
from plugin.sharding.zigzag import Span, padded_length, prediction_rows, response_spans


@dataclass(frozen=True)
class SequenceShards:
    """The local share of every sample of a microbatch; made once and passed on.

    total_lengths, response_lengths: per sample, tokens of prompt and response, and of the response
    spans: per sample, the ranges of its response that are local, in order
    """

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
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
        """Shards of samples with these lengths; only context parallelism needs `total_lengths`."""
        context = context or current_parallel_context()
        if total_lengths is None and context.cp_size > 1:
            raise BatchError(
                f"total_lengths are missing with {context.cp_size} context parallel ranks; which "
                "tokens a rank holds depends on the length of prompt and response together, so "
                "pass them"
            )
        responses = tuple(int(length) for length in response_lengths)
        totals = tuple(int(n) for n in total_lengths) if total_lengths is not None else responses
        if len(totals) != len(responses):
            raise BatchError(
                f"{len(totals)} total_lengths for {len(responses)} response_lengths; give one of "
                "each per sample"
            )
        spans = tuple(
            tuple(response_spans(total, response, context.cp_rank, context.cp_size))
            for total, response in zip(totals, responses, strict=True)
        )
        return cls(totals, responses, spans, device, context)

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

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: the index of every local token in its response."""
        spans = [torch.arange(*span) for sample in self.spans for span in sample]
        return (torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)).to(self.device)

    def rows(self, starts: Sequence[int] | None = None) -> Tensor:
        """[T] int64 on the CPU: the row of the model's flat output that predicts each local token.

        starts: the first row of every sample; by default samples are packed one after the other
        """
        rank, size = self.context.cp_rank, self.context.cp_size
        if starts is None:
            held = [padded_length(total, size) // size for total in self.total_lengths]
            starts = [0, *accumulate(held)][:-1]
        rows = [
            start + prediction_rows(total, response, rank, size)
            for start, total, response in zip(
                starts, self.total_lengths, self.response_lengths, strict=True
            )
        ]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)

    def response_tokens(self, tokens: Sequence[Tensor]) -> Tensor:
        """[T] int64: the ids of the local tokens, from those of every whole sample."""
        for i, (ids, length) in enumerate(zip(tokens, self.response_lengths, strict=True)):
            if len(ids) < length:
                raise BatchError(
                    f"sample {i} has {len(ids)} tokens but a response of {length}; unconcat_tokens "
                    "holds prompt and response"
                )
        responses = [
            ids[len(ids) - length :]
            for ids, length in zip(tokens, self.response_lengths, strict=True)
        ]
        return self.local(responses).to(device=self.device, dtype=torch.int64)

    def flat(self, name: str, local: Sequence[Tensor] | None) -> Tensor | None:
        """[T] float32 without gradient from one local tensor per sample; None stays None."""
        if local is None:
            return None
        lengths = [values.numel() for values in local]
        if lengths != self.local_lengths:
            raise BatchError(
                f"{name} has lengths {lengths} but the samples have {self.local_lengths} local "
                "response tokens; give one tensor per sample, as long as its response"
            )
        values = torch.cat([v.detach().reshape(-1) for v in local]) if local else torch.zeros(0)
        return values.to(device=self.device, dtype=torch.float32)

    def local(self, full: Sequence[Tensor]) -> Tensor:
        """[T]: the local part of one full-response tensor per sample."""
        lengths = [value.numel() for value in full]
        if lengths != list(self.response_lengths):
            raise BatchError(
                f"full-response tensors (loss masks, tokens) have lengths {lengths} but the "
                f"responses {list(self.response_lengths)}; give one tensor per sample, as long as "
                "its whole response"
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
        """Sums [N] of each `values` [T] over whole sequences; one collective under CP.

        The sums carry no gradient. Mask the values first.
        """
        packed = torch.zeros(len(values), self.num_samples, dtype=torch.float64, device=self.device)
        for row, value in zip(packed, values, strict=True):
            row.index_add_(0, self.sample_index, value.detach().double())
        if self.context.cp_group is not None:
            dist.all_reduce(packed, group=self.context.cp_group)
        return [row.float() for row in packed]

    def sequence_max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Per-sample largest unmasked value [N]; -inf for a sample without one."""
        result = torch.full((self.num_samples,), -torch.inf, device=self.device)
        candidates = torch.where(mask, values.detach().float(), -torch.inf)
        result.scatter_reduce_(0, self.sample_index, candidates, reduce="amax")
        if self.context.cp_group is not None:
            dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.context.cp_group)
        return result

    def per_token(self, per_sample: Tensor) -> Tensor:
        """[T]: every token gets the value [N] of its sample."""
        return per_sample[self.sample_index]
