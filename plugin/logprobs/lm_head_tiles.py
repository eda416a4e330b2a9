"""The logits of an LM head, a tile at a time: their statistics, and the gradients behind them.

A tile is a range of rows and columns. Its logits are a product that is reduced to row statistics at
once; the backward pass computes the product again, unless the tile was kept, turns it into its
gradient in place and multiplies it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from plugin.logprobs.kernels import ShardStatistics, row_kernels_for
from plugin.logprobs.row_gradients import (
    BlockGradients,
    RowPlaces,
    RowSettings,
    RowState,
    targets_inside,
)
from plugin.logprobs.row_ids import KeptLogits
from plugin.logprobs.vocab_shards import merge_column_ranges

# One tile: on the CPU it should stay in the last-level cache between the product and the pass over
# it; on an accelerator it should be large enough to keep the device busy.
TILE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_LEAST_TILE_COLUMNS = 1024


class Tile(NamedTuple):
    """Rows `[row, row_end)` and columns `[column, column_end)` of the logits."""

    row: int
    row_end: int
    column: int
    column_end: int


def plan_tiles(rows: int, columns: int, element_size: int, tile_bytes: int) -> list[Tile]:
    """Cut `[rows, columns]` into tiles of at most `tile_bytes`, in column-major order.

    Few, wide row ranges make each slice of the weight's gradient complete after one product.
    """
    elements = max(1, tile_bytes // element_size)
    width = max(1, min(columns, max(elements // max(1, rows), min(_LEAST_TILE_COLUMNS, elements))))
    height = max(1, min(rows, elements // width))
    return [
        Tile(row, min(row + height, rows), column, min(column + width, columns))
        for column in range(0, columns, width)
        for row in range(0, rows, height)
    ]


class HeadSettings(NamedTuple):
    """See `fused_log_probs_and_entropy`; keep_tiles: whether tiles that fit `budget` are kept."""

    rows: RowSettings
    budget: int
    vocab_rows: int
    keep_tiles: bool
    sequence_parallel: bool = False
    reduce_hidden_grad: bool = True


class Tiles:
    """The logits `[n, V/tp]`, one tile at a time in one buffer, some of them kept.

    Of the weight's rows only the first `vocab_rows` of the settings are tokens and have logits.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        settings: HeadSettings,
        kept: dict[Tile, torch.Tensor] | None = None,
    ) -> None:
        budget, self.columns = settings.budget, settings.vocab_rows
        self.hidden, self.weight, self.settings = hidden, weight, settings
        self.kept: dict[Tile, torch.Tensor] = {} if kept is None else kept
        size = hidden.element_size()
        tile_bytes = min(budget, TILE_BYTES.get(hidden.device.type, TILE_BYTES["cuda"]))
        self.plan = plan_tiles(hidden.shape[0], self.columns, size, tile_bytes)
        largest = max(
            ((t.row_end - t.row) * (t.column_end - t.column) for t in self.plan), default=0
        )
        self.largest, self.room_to_keep = largest, budget - largest * size

    @cached_property
    def buffer(self) -> torch.Tensor:
        """Room for the largest tile."""
        return self.hidden.new_empty(self.largest)

    def logits(self, keep: bool) -> Iterator[tuple[Tile, torch.Tensor]]:
        """Every tile with its logits; a tile that is not kept is overwritten by the next one."""
        for tile in self.plan:
            if tile in self.kept:
                yield tile, self.kept[tile]
                continue
            shape = (tile.row_end - tile.row, tile.column_end - tile.column)
            elements = shape[0] * shape[1]
            if keep and elements * self.hidden.element_size() <= self.room_to_keep:
                out = self.kept[tile] = self.hidden.new_empty(shape)
                self.room_to_keep -= elements * out.element_size()
            else:
                out = self.buffer[:elements].view(shape)
            weight = self.weight[tile.column : tile.column_end]
            yield tile, torch.mm(self.hidden[tile.row : tile.row_end], weight.t(), out=out)

    def statistics(
        self, places: RowPlaces
    ) -> tuple[ShardStatistics | None, KeptLogits | None, torch.Tensor | None]:
        """Row statistics over all columns of this rank, logits of kept ids and of further ones.

        From one tile after the other; what no row needs is None.
        """
        settings, at, ids = self.settings.rows, places.kept, places.ids
        wide = places.need_all_columns(settings)
        if at is not None and not wide and not self.settings.keep_tiles:
            return None, KeptLogits.of_products(self.hidden, self.weight, at), None
        kernels = row_kernels_for(self.buffer)
        ranges: dict[int, ShardStatistics] = {}
        few = given = None
        if at is not None:
            few = self.hidden.new_full((at.rows.numel(),), -torch.inf, dtype=torch.float32)
        if ids is not None:
            given = torch.zeros_like(ids.columns, dtype=torch.float32)
        for tile, logits in self.logits(self.settings.keep_tiles):
            (row, column), (height, width) = (tile.row, tile.column), logits.shape
            span = slice(row, tile.row_end)
            if ids is not None and given is not None:
                held, columns = ids.inside(span, column, tile.column_end)
                given[span] = torch.where(held, logits.gather(1, columns).float(), given[span])
            if at is not None and few is not None:
                inside, where = at.inside(row, column, height, width)
                few = torch.where(inside, logits[where].float(), few)
            if wide:
                part = kernels.forward_blocks(
                    logits,
                    targets_inside(places.targets[span], column, width),
                    scale=settings.scale,
                    with_entropy=settings.with_entropy,
                )
                if row in ranges:
                    part = merge_column_ranges(ranges[row], part, settings.scale)
                ranges[row] = part
        kept = None if at is None or few is None else KeptLogits(few, at)
        if not wide:
            return None, kept, given
        if ranges:
            return ShardStatistics.concatenated(list(ranges.values())), kept, given
        # No row, or a rank whose share of the vocabulary is all padding.
        none = self.hidden.new_zeros(self.hidden.shape[0], dtype=torch.float32)
        weighted = none if settings.with_entropy else None
        return ShardStatistics(none - torch.inf, none, weighted, none), kept, given

    def gradients(
        self,
        state: RowState,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_ids: torch.Tensor | None,
        *,
        want_hidden: bool,
        want_weight: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of hidden states `[n, H]`, over this rank's columns only, and weight."""
        of_ids = None if grad_ids is None else (grad_ids != 0).any(1)
        hidden = _without_idle_rows(self.hidden, grad_log_probs, grad_entropy, of_ids)
        # Many tiles add to the same rows, so those sums are float32 whatever the dtype of the
        # model.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if want_hidden else None
        grad_weight = torch.empty_like(self.weight) if want_weight else None
        if grad_weight is not None:
            grad_weight[self.columns if self.plan else 0 :].zero_()
        rows = self.settings.rows
        block = BlockGradients.of(state, grad_log_probs, grad_entropy, grad_ids, rows)
        for tile, logits in self.logits(keep=False):
            span, columns = slice(tile.row, tile.row_end), slice(tile.column, tile.column_end)
            block.write(logits, logits, tile.row, tile.column)
            if grad_hidden is not None:
                add_product(grad_hidden[span], logits, self.weight[columns])
            if grad_weight is not None and tile.row == 0:
                torch.mm(logits.t(), hidden[span], out=grad_weight[columns])
            elif grad_weight is not None:
                grad_weight[columns].addmm_(logits.t(), hidden[span])
            self.kept.pop(tile, None)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


def _without_idle_rows(hidden: torch.Tensor, *grads: torch.Tensor | None) -> torch.Tensor:
    """Zero the rows without gradient: 0 * NaN there would spoil the gradient of the weight."""
    idle = torch.ones(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    for grad in grads:
        if grad is not None:
            idle &= grad == 0
    # On another device the question would wait for it.
    if idle.device.type == "cpu" and not idle.any():
        return hidden
    return hidden.masked_fill(idle[:, None], 0.0)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right`; `total` may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
