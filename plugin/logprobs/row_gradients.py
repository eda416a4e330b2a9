"""What rows of logits are reduced to, and how a block of logits becomes its own gradient again."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.logprobs.kernels import RowNormalizer, ShardStatistics, row_kernels_for
from plugin.logprobs.row_ids import (
    EntropyOf,
    GivenIds,
    IdGradients,
    KeptColumns,
    KeptLogits,
    locate_kept,
)
from plugin.logprobs.vocab_shards import combine_shards, locate_targets
from plugin.ragged import Ragged


class RowSettings(NamedTuple):
    """`scale` is 1 / temperature; see `log_probs_and_entropy` for the others."""

    group: dist.ProcessGroup | None
    scale: float
    with_entropy: bool
    entropy_grad: bool
    entropy_of: EntropyOf
    ids_of: EntropyOf = "full"


class RowPlaces(NamedTuple):
    """Where the tokens of T rows, their kept ids and further ids are among this rank's columns.

    targets: [T] int64, the token's column or -1; absent: [T] bool; both of `locate_targets`
    """

    columns: int
    targets: Tensor
    absent: Tensor
    kept: KeptColumns | None
    ids: GivenIds | None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        kept: Ragged | None,
        ids: Tensor | None,
        columns: int,
        group: dist.ProcessGroup | None,
        tokens_held: int | None = None,
    ) -> RowPlaces:
        """tokens: [T]; kept: one entry of ids per row; ids: [T, k]; tokens_held: of the columns."""
        return cls(
            columns,
            *locate_targets(tokens, columns, group=group, tokens_held=tokens_held),
            None if kept is None else locate_kept(kept, tokens, columns, group=group),
            None if ids is None else GivenIds.located(ids, tokens, columns, group=group),
        )

    def need_all_columns(self, settings: RowSettings) -> bool:
        """Whether any row needs all columns: without kept ids, for further ids or full entropy."""
        full_entropy = settings.with_entropy and settings.entropy_of == "full"
        return self.kept is None or not self.kept.everywhere or self.ids is not None or full_entropy


class RowState(NamedTuple):
    """What the gradient of logits `[T, V/tp]` needs besides the logits themselves.

    dense, kept_rows: normalizers over all columns and over the kept ids; None where not needed
    """

    places: RowPlaces
    dense: RowNormalizer | None
    kept: KeptLogits | None
    kept_rows: RowNormalizer | None

    def for_backward(self, entropy_grad: bool) -> RowState:
        """The state that a graph may hold: a node that held its own output would never die."""

        def without_outputs(rows: RowNormalizer | None) -> RowNormalizer | None:
            if rows is None or rows.entropy is None:
                return rows
            return rows._replace(entropy=rows.entropy.detach() if entropy_grad else None)

        dense, kept_rows = without_outputs(self.dense), without_outputs(self.kept_rows)
        return self._replace(dense=dense, kept_rows=kept_rows)


class RowResults(NamedTuple):
    """Log-probs [T], entropy [T] and log-probs [T, k] of further ids, None where not wanted."""

    log_probs: Tensor
    entropy: Tensor | None
    id_log_probs: Tensor | None
    state: RowState


def summarize_rows(
    logits: Tensor,
    tokens: Tensor,
    kept: Ragged | None,
    ids: Tensor | None,
    settings: RowSettings,
) -> RowResults:
    """Reduce logits `[T, V/tp]` to the results of their rows; see `RowPlaces.of`."""
    places = RowPlaces.of(tokens, kept, ids, logits.shape[1], settings.group)
    dense = id_logits = None
    if places.need_all_columns(settings):
        dense = row_kernels_for(logits).forward_blocks(
            logits, places.targets, scale=settings.scale, with_entropy=settings.with_entropy
        )
    few = None if places.kept is None else KeptLogits.of(logits, places.kept)
    if places.ids is not None:
        _, columns = places.ids.inside(slice(None), 0, logits.shape[1])
        id_logits = logits.gather(1, columns)
    return join_rows(places, dense, few, id_logits, settings)


def join_rows(
    places: RowPlaces,
    dense: ShardStatistics | None,
    kept: KeptLogits | None,
    id_logits: Tensor | None,
    settings: RowSettings,
) -> RowResults:
    """Join the statistics of all shards; a row with kept ids has the log-prob over these.

    dense: over all columns, or None if no row needs them; id_logits: [T, 1 + k], of `places.ids`
    Both kinds of statistics travel together: two collectives, as for one.
    """
    parts, targets, absent = [], [], []
    if kept is not None:
        parts.append(kept.statistics(settings.scale, settings.with_entropy))
        targets.append(torch.where(kept.at.absent, -1, places.targets))
        absent.append(kept.at.absent)
    if dense is not None:
        parts.append(dense)
        targets.append(places.targets)
        absent.append(places.absent)
    log_probs, rows = combine_shards(
        ShardStatistics.concatenated(parts),
        torch.cat(targets),
        torch.cat(absent),
        columns=places.columns,
        scale=settings.scale,
        group=settings.group,
    )
    count = places.targets.numel()
    narrow = None if kept is None else rows.select(slice(count))
    wide = None if dense is None else rows.select(slice(0 if kept is None else count, None))
    entropy = rows.entropy
    if kept is not None and narrow is not None and wide is not None:
        log_probs = torch.where(kept.at.truncated, log_probs[:count], log_probs[count:])
        entropy = wide.entropy
        if settings.entropy_of == "kept" and narrow.entropy is not None and entropy is not None:
            entropy = torch.where(kept.at.truncated, narrow.entropy, entropy)
    id_log_probs = None
    if places.ids is not None and id_logits is not None:
        assert wide is not None
        of_ids = wide
        if settings.ids_of == "kept" and kept is not None and narrow is not None:
            of_ids = wide.where(~kept.at.truncated, narrow)
        id_log_probs = places.ids.log_probs(id_logits, of_ids, settings.scale, settings.group)
    return RowResults(log_probs, entropy, id_log_probs, RowState(places, wide, kept, narrow))


def targets_inside(targets: Tensor, column: int, width: int) -> Tensor:
    """Columns [n] counted from `column` on, -1 where they are not among the next `width`."""
    inside = (targets >= column) & (targets < column + width)
    return torch.where(inside, targets - column, -1)


class BlockGradients(NamedTuple):
    """The gradients that arrive at rows, and how blocks of their logits become gradients by them.

    targets: [T] the columns that a row kernel gives more than `-p G`, -1 where it gives none
    log_probs, entropy: [T] of the part that all columns of a row take part in, or None
    ids: of further ids; few: [K] of the kept logits; None without
    """

    state: RowState
    targets: Tensor
    log_probs: Tensor | None
    entropy: Tensor | None
    ids: IdGradients | None
    few: Tensor | None
    scale: float

    @classmethod
    def of(
        cls,
        state: RowState,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_ids: Tensor | None,
        settings: RowSettings,
    ) -> BlockGradients:
        """Join the gradients of log-probs [T], entropy [T] and the log-probs [T, k] of ids."""
        log_probs, entropy, few = grad_log_probs, grad_entropy, None
        if state.kept is not None and state.kept_rows is not None:
            truncated = state.kept.at.truncated
            of_kept = grad_entropy if settings.entropy_of == "kept" else None
            of_ids = None
            if settings.ids_of == "kept" and grad_ids is not None and state.places.ids is not None:
                at = state.kept.at
                arriving = at.arriving(state.places.ids, grad_ids, state.places.columns)
                of_ids = arriving, grad_ids.float().sum(1)
                grad_ids = grad_ids.masked_fill(truncated[:, None], 0.0)
            few = state.kept.gradient(
                state.kept_rows, grad_log_probs, of_kept, settings.scale, of_ids
            )
            if log_probs is not None:
                log_probs = log_probs.masked_fill(truncated, 0.0)
            if of_kept is not None:
                entropy = of_kept.masked_fill(truncated, 0.0)
        targets, ids = state.places.targets, None
        if grad_ids is not None and state.places.ids is not None:
            ids = IdGradients.of(state.places.ids, log_probs, grad_ids, entropy)
            targets, log_probs = torch.full_like(targets, -1), ids.total
        return cls(state, targets, log_probs, entropy, ids, few, settings.scale)

    def write(self, logits: Tensor, out: Tensor, row: int = 0, column: int = 0) -> None:
        """Write the gradient of a block of logits [n, width] into `out`, which may be the logits.

        row, column: the first ones of the block
        """
        height, width = logits.shape
        span = slice(row, row + height)
        if self.state.dense is None:
            out.zero_()
        else:
            rows = self.state.dense.select(span)
            log_probs, entropy = (
                None if grad is None else grad[span] for grad in (self.log_probs, self.entropy)
            )
            if self.ids is not None:
                held, places = self.ids.at.inside(span, column, column + width)
                id_logits = logits.gather(1, places).float()  # before `out` is written
            row_kernels_for(logits).backward_blocks(
                logits,
                targets_inside(self.targets[span], column, width),
                rows,
                log_probs,
                entropy,
                scale=self.scale,
                out=out,
            )
            if self.ids is not None:
                self.ids.write(out, id_logits, held, places, span, rows, entropy, self.scale)
        if self.few is not None and self.state.kept is not None:
            inside, at = self.state.kept.at.inside(row, column, height, width)
            few = torch.where(inside, self.few, 0.0).to(out.dtype)
            out.index_put_(at, few, accumulate=True)
