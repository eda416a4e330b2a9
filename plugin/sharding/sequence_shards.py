"""Which response tokens of which sample this rank holds, and sums over whole sequences.

Token tensors are flat: the local response tokens of sample 0, then of sample 1, and so on. Without
context parallelism "local" means all; with it, `zigzag` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.ragged import Integers, Ragged, as_integers, ragged_range
from plugin.sharding.parallel_context import ParallelContext, current_parallel_context
from plugin.sharding.zigzag import padded_length, prediction_rows, response_spans, spans_of

__all__ = ["SequenceShards", "response_spans"]


@dataclass(frozen=True)
class SequenceShards:
    """The local share of every sample of a microbatch; made once and passed on.

    totals, responses: [N] tokens of prompt and response, and of the response alone
    spans: [N, chunks held, 2] the ranges of each response that are local, in order
    """

    totals: Integers
    responses: Integers
    spans: Integers
    device: torch.device
    context: ParallelContext

    @classmethod
    def of(
        cls,
        total_lengths: Sequence[int] | Integers | Tensor | None,
        response_lengths: Sequence[int] | Integers | Tensor,
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
        responses = as_integers(response_lengths)
        totals = responses if total_lengths is None else as_integers(total_lengths)
        if len(totals) != len(responses):
            raise BatchError(
                f"{len(totals)} total_lengths for {len(responses)} response_lengths; give one of "
                "each per sample"
            )
        spans = spans_of(totals, responses, context.cp_rank, context.cp_size)
        return cls(totals, responses, spans, device, context)

    @cached_property
    def total_lengths(self) -> list[int]:
        """Tokens of prompt and response of every sample."""
        return self.totals.tolist()

    @cached_property
    def response_lengths(self) -> list[int]:
        """Response tokens of every sample, on all context parallel ranks together."""
        return self.responses.tolist()

    @cached_property
    def held(self) -> Integers:
        """[N]: local response tokens of every sample."""
        return (self.spans[..., 1] - self.spans[..., 0]).sum(1)

    @cached_property
    def local_lengths(self) -> list[int]:
        """Local response tokens of every sample."""
        return self.held.tolist()

    @property
    def num_samples(self) -> int:
        return len(self.responses)

    @cached_property
    def sample_index(self) -> Tensor:
        """[T] int64: the sample of every local token."""
        index = np.repeat(np.arange(self.num_samples), self.held)
        return torch.from_numpy(index).to(self.device, non_blocking=True)

    @cached_property
    def _positions(self) -> Integers:
        return ragged_range(
            self.spans[..., 0].flatten(), (self.spans[..., 1] - self.spans[..., 0]).flatten()
        )

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: the index of every local token in its response."""
        return torch.from_numpy(self._positions).to(self.device, non_blocking=True)

    @cached_property
    def in_responses(self) -> Tensor | None:
        """[T] int64: each local token's place in all responses end to end; None = all are local."""
        if self.context.cp_size == 1:
            return None
        starts = np.cumsum(self.responses) - self.responses
        return torch.from_numpy(self._positions + np.repeat(starts, self.held))

    def rows(self, starts: Sequence[int] | Integers | None = None) -> Tensor:
        """[T] int64 on the CPU: the row of the model's flat output that predicts each local token.

        starts: the first row of every sample; by default samples are packed one after the other
        """
        rank, size = self.context.cp_rank, self.context.cp_size
        if starts is None:
            held = padded_length(self.totals, size) // size
            starts = np.cumsum(held) - held
        inside = prediction_rows(self.totals, self.responses, self.spans, rank, size)
        return torch.from_numpy(inside + np.repeat(starts, self.held))

    def response_tokens(self, tokens: Sequence[Tensor]) -> Tensor:
        """[T] int64: the ids of the local tokens, from those of every whole sample."""
        whole = Ragged.of(tokens)
        if len(whole) != self.num_samples:
            raise BatchError(f"unconcat_tokens of {len(whole)} samples for {self.num_samples}")
        short = np.flatnonzero(whole.lengths < self.responses)
        if len(short):
            i = short[0]
            raise BatchError(
                f"sample {i} has {whole.lengths[i]} tokens but a response of {self.responses[i]}; "
                "unconcat_tokens holds prompt and response"
            )
        first = whole.starts + whole.lengths - self.responses
        places = torch.from_numpy(self._positions + np.repeat(first, self.held))
        ids = whole.values[places.to(whole.values.device)]
        return ids.to(device=self.device, dtype=torch.int64, non_blocking=True)

    def flat(self, name: str, local: Sequence[Tensor] | None) -> Tensor | None:
        """[T] float32 without gradient from one local tensor per sample; None stays None."""
        if local is None:
            return None
        joined = Ragged.of(
            local if isinstance(local, Ragged) else [v.detach().reshape(-1) for v in local]
        )
        if joined.lengths.tolist() != self.local_lengths:
            raise BatchError(
                f"{name} has lengths {joined.lengths.tolist()} but the samples have "
                f"{self.local_lengths} local response tokens; give one tensor per sample, as long "
                "as its response"
            )
        return joined.values.detach().to(device=self.device, dtype=torch.float32)

    def local(self, full: Sequence[Tensor]) -> Tensor:
        """[T]: the local part of one full-response tensor per sample."""
        whole = self._whole(full)
        if self.in_responses is None:
            return whole.values
        return whole.values[self.in_responses.to(whole.values.device)]

    def local_rows(self, rows: Ragged) -> Ragged:
        """[T] entries: the local ones of one entry per response token, of all samples."""
        if len(rows) != int(self.responses.sum()):
            raise BatchError(
                f"{len(rows)} entries for {self.responses.sum()} response tokens; give one each"
            )
        return rows if self.in_responses is None else rows.select(self.in_responses.numpy())

    def local_mask(self, loss_masks: Sequence[Tensor]) -> Tensor:
        """[T] bool: the local part of the full-response loss masks."""
        return self.local(loss_masks).to(self.device) != 0

    def masks_and(self, loss_masks: Sequence[Tensor], keep: Tensor) -> Ragged:
        """New full-response masks, zeroed at the local positions where `keep` [T] is False."""
        whole = self._whole(loss_masks)
        values, dropped = whole.values.clone(), ~keep.to(whole.values.device)
        if self.in_responses is None:
            return whole.like(values.masked_fill_(dropped, 0))
        places = self.in_responses.to(values.device)
        values[places] = values[places].masked_fill(dropped, 0)
        return whole.like(values)

    def _whole(self, full: Sequence[Tensor]) -> Ragged:
        """One tensor per sample as long as its whole response, joined."""
        whole = Ragged.of(full)
        if whole.lengths.tolist() != self.response_lengths:
            raise BatchError(
                f"full-response tensors (loss masks, tokens) have lengths "
                f"{whole.lengths.tolist()} but the responses {self.response_lengths}; give one "
                "tensor per sample, as long as its whole response"
            )
        return whole

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

    def segment_sums(self, length: int, *values: Tensor) -> list[Tensor]:
        """[T] each: the sum of `values` [T] over a token's segment; one collective under CP.

        A segment is `length` response tokens, from the first of the response on. No gradient.
        """
        per_sample = -(-int(self.responses.max(initial=0)) // length)
        places = self.sample_index * per_sample + self.positions // length
        return self._sums_at(places, self.num_samples * per_sample, values)

    def turn_sums(self, loss_masks: Sequence[Tensor], *values: Tensor) -> list[Tensor]:
        """[T] each: the sum of `values` [T] over a token's turn; one collective under CP.

        A turn is a run of tokens with a loss mask of 1; where that is 0, somebody else spoke.
        Tokens between two turns count to the one before. No gradient.
        """
        whole = self._whole(loss_masks)
        spoken = whole.values.to(self.device) != 0
        numbers = torch.arange(len(spoken), device=self.device)
        begins = spoken.clone()
        begins[1:] &= ~spoken[:-1]
        begins[torch.from_numpy(whole.starts[whole.lengths > 0]).to(self.device)] = True
        # A turn is named after the place of its first token in all responses.
        turns = torch.where(begins, numbers, 0).cummax(0).values
        places = turns if self.in_responses is None else turns[self.in_responses.to(self.device)]
        return self._sums_at(places, len(spoken), values)

    def _sums_at(self, places: Tensor, count: int, values: Sequence[Tensor]) -> list[Tensor]:
        packed = torch.zeros(len(values), count, dtype=torch.float64, device=self.device)
        for row, value in zip(packed, values, strict=True):
            row.index_add_(0, places, value.detach().double())
        if self.context.cp_group is not None:
            dist.all_reduce(packed, group=self.context.cp_group)
        return [row[places].float() for row in packed]

    def prefix_min(self, values: Tensor, mask: Tensor) -> Tensor:
        """[T]: the smallest unmasked value before each token in its sequence; inf at the first.

        One collective under CP, of one number per chunk of every sample. No gradient.
        """
        lengths = (self.spans[..., 1] - self.spans[..., 0]).flatten()
        longest = int(lengths.max(initial=0))
        # Every held chunk is a row; a column in front, so that the minimum excludes the token.
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = ragged_range(np.zeros_like(lengths), lengths)
        places = torch.from_numpy(rows * (longest + 1) + columns + 1).to(self.device)
        smallest = values.new_full((len(lengths) * (longest + 1),), torch.inf, dtype=torch.float32)
        smallest[places] = torch.where(mask, values.detach().float(), torch.inf)
        smallest = smallest.view(len(lengths), longest + 1).cummin(1).values
        found = smallest.reshape(-1)[places - 1]
        size, rank = self.context.cp_size, self.context.cp_rank
        if self.context.cp_group is None:
            return found
        held = [rank, 2 * size - 1 - rank]
        chunks = found.new_full((self.num_samples, 2 * size), torch.inf)
        chunks[:, held] = smallest[:, -1].view(self.num_samples, 2)
        dist.all_reduce(chunks, op=dist.ReduceOp.MIN, group=self.context.cp_group)
        first = chunks.new_full((self.num_samples, 1), torch.inf)
        earlier = torch.cat([first, chunks.cummin(1).values[:, :-1]], 1)[:, held]
        return torch.minimum(found, earlier.reshape(-1)[torch.from_numpy(rows).to(self.device)])

    def per_token(self, per_sample: Tensor) -> Tensor:
        """[T]: every token gets the value [N] of its sample."""
        return per_sample[self.sample_index]
