"""Reverse KL from a teacher over its most likely ids.

S are the teacher's k most likely ids at the position of a token, p and q the probabilities that
policy and teacher give them, and p_rest = 1 - sum of p over S what is left for all other ids:

    KL = sum over S of p log(p / q) + p_rest log(p_rest / q_rest)

This is the KL of the two distributions after all other ids were joined into one bucket, so it is
never larger than the KL of the whole distributions, and equal to it where S is the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plugin.errors import BatchError
from plugin.loss.inputs import token_place, topk_columns
from plugin.sharding.sequence_shards import SequenceShards
from plugin.vocabulary_ids import TOPK_IDS, TOPK_LOG_PROBS

#: Lower bound of p_rest and q_rest: float32 log-probs are not more precise.
LEAST_REST = 1e-6


class TeacherSupport(NamedTuple):
    """The teacher's most likely ids [T, k] int64 of the local tokens, and their log-probs."""

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any], shards: SequenceShards) -> TeacherSupport:
        """Join the columns of a batch, one local [response, k] tensor per sample."""
        ids, log_probs = topk_columns(batch, (TOPK_IDS, TOPK_LOG_PROBS), shards)
        return cls(ids.long(), log_probs.float())

    def check(self, mask: Tensor, shards: SequenceShards) -> None:
        """Raise a `BatchError` for the first unmasked token with a value that is not a log-prob."""
        bad = mask & ~((self.log_probs > -1e4) & (self.log_probs < 0.1)).all(1)
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            sample, position = token_place(token, shards)
            raise BatchError(
                f"{TOPK_LOG_PROBS} are {self.log_probs[token].tolist()} at sample {sample}, "
                f"position {position}, where the loss mask is 1; they must be log-probabilities. "
                "Mask the token or repair the teacher"
            )


def topk_reverse_kl(cur: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """KL [T] from the teacher, with gradient through `cur`; 0 where masked.

    cur, teacher: [T, k] log-probs of the same ids in the whole distributions
    mask: [T] bool; masked tokens may hold anything
    Where both are equal to the bit, the KL and its gradient are exactly 0.
    """
    rows = mask[:, None]
    cur, teacher = torch.where(rows, cur, -1.0), torch.where(rows, teacher, -1.0)
    return torch.where(mask, _CoarseKl.apply(cur, teacher), 0.0)


class _CoarseKl(torch.autograd.Function):
    """Autograd's own gradient, p (log(p/q) + 1), cancels only in sum; this one is 0 at p = q."""

    @staticmethod
    def forward(ctx: Any, cur: Tensor, teacher: Tensor) -> Tensor:
        # A few numbers per token: in float64 the sums are exact to float32.
        gap = cur.double() - teacher.double()
        probability, rest = cur.double().exp(), _log_rest(cur)
        rest_gap = rest - _log_rest(teacher)
        ctx.save_for_backward(probability, gap - rest_gap[:, None])
        return ((probability * gap).sum(1) + rest.exp() * rest_gap).to(cur.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None]:
        # p_rest falls by what p_i gains: d KL / d log p_i = p_i (log(p_i/q_i) - log(p_rest/q_rest))
        probability, gap = ctx.saved_tensors
        return (probability * gap * arriving.double()[:, None]).to(arriving.dtype), None


def _log_rest(log_probs: Tensor) -> Tensor:
    """Log [T] float64 of what k ids [T, k] leave of the probability."""
    return (1.0 - log_probs.double().exp().sum(1)).clamp(min=LEAST_REST).log()
