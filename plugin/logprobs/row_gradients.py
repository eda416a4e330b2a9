"""What a block of logits is reduced to, and how it becomes its own gradient again."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from plugin.logprobs.given_ids import GivenIds, IdGradients
from plugin.logprobs.kept_ids import (
    EntropyOf,
    KeptColumns,
    KeptLogits,
    dense_gradients,
    join_shards,
    locate_kept,
    needs_dense,
)
from plugin.logprobs.kernels import RowNormalizer, row_kernels_for
from plugin.logprobs.vocab_shards import locate_targets
from plugin.ragged import Ragged


class RowSettings(NamedTuple):
    group: dist.ProcessGroup | None
    scale: float
    with_entropy: bool
    entropy_grad: bool
    entropy_of: EntropyOf
    inplace_grad: bool = False
    with_ids: bool = False


class RowState(NamedTuple):
    """What the gradient of a block of logits `[T, V/tp]` needs besides the logits themselves.

    targets: [T] int64, the token's column or -1; dense, kept_rows: normalizers over all columns and
        over the kept ids; None where not needed
    ids: further ids whose log-probs are wanted, or None
    """

    targets: torch.Tensor
    dense: RowNormalizer | None
    kept: KeptLogits | None
    kept_rows: RowNormalizer | None
    ids: GivenIds | None = None

    @property
    def kept_columns(self) -> KeptColumns | None:
        return None if self.kept is None else self.kept.at

    def for_backward(self, entropy_grad: bool) -> RowState:
        """The state that a graph may hold: a node that held its own output would never die."""

        def without_outputs(rows: RowNormalizer | None) -> RowNormalizer | None:
            if rows is None or rows.entropy is None:
                return rows
            return rows._replace(entropy=rows.entropy.detach() if entropy_grad else None)

        dense, kept_rows = without_outputs(self.dense), without_outputs(self.kept_rows)
        return self._replace(dense=dense, kept_rows=kept_rows)


def summarize_rows(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    kept: Ragged | None,
    settings: RowSettings,
    keep_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, RowState]:
    """Log-probs `[T]`, entropy `[T]` or None, and what `write_gradient` needs."""
    columns, group = logits.shape[1], settings.group
    targets, absent = locate_targets(tokens, columns, group=group, keep_mask=keep_mask)
    at = None if kept is None else locate_kept(kept, tokens, columns, group=group)
    dense = None
    if settings.with_ids or needs_dense(at, settings.with_entropy, settings.entropy_of):
        dense = row_kernels_for(logits).forward_blocks(
            logits,
            targets,
            scale=settings.scale,
            with_entropy=settings.with_entropy,
            keep_mask=keep_mask,
        )
    few = None if at is None else KeptLogits.of(logits, at)
    joined = join_shards(
        dense,
        few,
        targets,
        absent,
        columns=columns,
        scale=settings.scale,
        with_entropy=settings.with_entropy,
        entropy_of=settings.entropy_of,
        group=group,
    )
    return joined.log_probs, joined.entropy, RowState(targets, joined.dense, few, joined.kept)


def write_gradient(
    logits: torch.Tensor,
    state: RowState,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    settings: RowSettings,
    *,
    grad_ids: torch.Tensor | None = None,
    keep_mask: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """Write the gradient of the logits `[T, V/tp]` into `out`, which may be the logits.

    grad_ids: [T, k] of the log-probs of further ids, where there are any
    """
    if state.dense is None:
        out.zero_()
    else:
        whole = slice(None)
        dense = DenseGradients.of(
            *(state, grad_log_probs, grad_entropy, grad_ids),
            entropy_of=settings.entropy_of,
            scale=settings.scale,
        )
        few = dense.read_ids(logits, whole, 0)
        row_kernels_for(logits).backward_blocks(
            logits,
            dense.targets,
            state.dense,
            dense.log_probs,
            dense.entropy,
            scale=settings.scale,
            keep_mask=keep_mask,
            out=out,
        )
        dense.write_ids(out, few, whole, state.dense)
    if state.kept is not None and state.kept_rows is not None:
        on_kept = grad_entropy if settings.entropy_of == "kept" else None
        gradient = state.kept.gradient(state.kept_rows, grad_log_probs, on_kept, settings.scale)
        places = (state.kept.at.rows, state.kept.at.columns)
        out.index_put_(places, gradient.to(out.dtype), accumulate=True)


class ReadIds(NamedTuple):
    """The logits [n, 1 + k] of token and ids in a block, and where in it; see `GivenIds.inside`."""

    logits: torch.Tensor
    held: torch.Tensor
    columns: torch.Tensor


class DenseGradients(NamedTuple):
    """The incoming gradients of the part that all columns of a row take part in.

    targets: [T] the columns that a row kernel gives more than `-p G`, -1 where it gives none
    log_probs, entropy: [T] or None; ids: of further ids, None without
    """

    targets: torch.Tensor
    log_probs: torch.Tensor | None
    entropy: torch.Tensor | None
    ids: IdGradients | None
    scale: float

    @classmethod
    def of(
        cls,
        state: RowState,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_ids: torch.Tensor | None,
        *,
        entropy_of: EntropyOf,
        scale: float,
    ) -> DenseGradients:
        """Join the gradients of log-probs [T], entropy [T] and further ids [T, k]."""
        log_probs, entropy = dense_gradients(
            state.kept_columns, grad_log_probs, grad_entropy, entropy_of
        )
        if grad_ids is None or state.ids is None:
            return cls(state.targets, log_probs, entropy, None, scale)
        ids = IdGradients.of(state.ids, log_probs, grad_ids, entropy)
        nowhere = torch.full_like(state.targets, -1)
        return cls(nowhere, ids.total, entropy, ids, scale)

    def read_ids(self, logits: torch.Tensor, span: slice, column: int) -> ReadIds | None:
        """What `write_ids` needs of a block of logits, whose memory it may write to.

        span: the rows of the block; column: its first one
        """
        if self.ids is None:
            return None
        held, columns = self.ids.at.inside(span, column, column + logits.shape[1])
        return ReadIds(logits.gather(1, columns).float(), held, columns)

    def write_ids(
        self, out: torch.Tensor, few: ReadIds | None, span: slice, rows: RowNormalizer
    ) -> None:
        """Write the columns of token and ids of a block; `rows`: of the block's rows."""
        if self.ids is not None and few is not None:
            entropy = None if self.entropy is None else self.entropy[span]
            self.ids.write(
                *(out, few.logits, few.held, few.columns, span, rows, entropy, self.scale)
            )
