"""Log-probs and entropy from hidden states and the LM head's weight, without logits `[T, V]`.

The product of hidden states and weight is computed tile by tile, a range of the vocabulary at a
time for all rows: each tile is reduced to row statistics at once. The backward pass computes the
tile again, turns it into its gradient in place and multiplies it back, so that each slice of the
weight's gradient is written only once. Tiles that fit into the memory budget are kept and not
computed twice; with a budget for all of them the cost is that of the ordinary output layer, with
none it is four matrix products instead of three.

Only rows that carry loss take part. A pass without gradient and entropy over kept ids needs no
tile at all: the products of the kept ids are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.kept_ids import (
    EntropyOf,
    KeptColumns,
    KeptLogits,
    dense_gradients,
    join_shards,
    locate_kept,
    needs_dense,
)
from plugin.logprobs.kernels import RowNormalizer, ShardStatistics, row_kernels_for
from plugin.logprobs.vocab_parallel import FLOAT_DTYPES, RowState, check_settings
from plugin.logprobs.vocab_shards import group_size, locate_targets, merge_column_ranges
from plugin.ragged import Ragged, as_integers

# One tile: on the CPU it should stay in the last-level cache between the product and the pass over
# it; on an accelerator it should be large enough to keep the device busy.
TILE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
DEFAULT_BUDGET_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_LEAST_TILE_COLUMNS = 1024


def fused_log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    row_mask: torch.Tensor | None = None,
    memory_budget_bytes: int | None = None,
    sequence_parallel: bool = False,
    reduce_hidden_grad: bool = True,
    kept: Ragged | None = None,
    entropy_of: EntropyOf = "full",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`log_probs_and_entropy(hidden @ weight.T, tokens)` in bounded memory.

    Args:
        hidden: `[T, H]`, the same on all ranks of `group`; with `sequence_parallel` this rank's
            `[T/tp, H]` rows, which are gathered first.
        weight: `[V/tp, H]`, this rank's rows of the output layer, of the same dtype as `hidden`.
        tokens: `[T]` int64 ids in the whole vocabulary; an id outside of it has log-probability
            -inf.
        group: ranks over which the vocabulary is sharded; None if it is not.
        temperature: divides the logits.
        with_entropy: also return the entropy; it carries a gradient only with `entropy_grad`.
        row_mask: bool `[T]`, the same on all ranks of `group`: the rows to compute. The others have
            results 0 and no gradient, whatever their hidden states hold. Keep it on the CPU:
            reading a mask on the device waits for the device.
        memory_budget_bytes: room for tiles of logits, at least one of which exists at a time; by
            default `DEFAULT_BUDGET_BYTES` of the device.
        sequence_parallel: see `hidden`; its gradient is then reduce-scattered instead of
            all-reduced.
        reduce_hidden_grad: False leaves the gradient of `hidden` as this rank's partial sum, for a
            caller whose graph already sums it over `group`, such as one behind Megatron's copy to
            the tensor parallel region.
        kept: one entry of token ids per row, which the distribution is renormalized over; an empty
            entry keeps all (see `log_probs_and_entropy`).
        entropy_of: with `kept`, the distribution whose entropy is returned: full or kept.

    Returns:
        `log_probs` `[T]` float32 and `entropy` `[T]` float32, or None without `with_entropy`.
    """
    size = group_size(group)
    sequence_parallel = sequence_parallel and size > 1
    check_arguments(
        hidden, weight, tokens, row_mask, hidden.shape[0] * (size if sequence_parallel else 1)
    )
    check_settings(temperature, with_entropy, entropy_grad)
    if sequence_parallel and not reduce_hidden_grad:
        raise ConfigError(
            "reduce_hidden_grad=False with sequence_parallel=True: the rows gathered here must be "
            "reduce-scattered here. Gather them yourself and pass sequence_parallel=False, or "
            "leave reduce_hidden_grad=True."
        )
    budget = budget_bytes(memory_budget_bytes, hidden.device)
    trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    settings = _Settings(
        group,
        1.0 / temperature,
        with_entropy,
        entropy_grad,
        sequence_parallel,
        reduce_hidden_grad,
        budget,
        keep_tiles=trained,
        entropy_of=entropy_of,
    )
    rows = None
    if row_mask is not None and not bool(row_mask.all()):
        chosen = row_mask.nonzero()[:, 0]
        rows = chosen.to(hidden.device, non_blocking=True)
        kept = None if kept is None else kept.select(as_integers(chosen))
    return _FusedLmHead.apply(hidden, weight, tokens, rows, kept, settings)


def budget_bytes(given: int | None, device: torch.device) -> int:
    """Room for logits at a time: as given, or the default of the device."""
    if given is not None:
        return given
    return DEFAULT_BUDGET_BYTES.get(device.type, DEFAULT_BUDGET_BYTES["cuda"])


def fused_lm_head_pays(
    rows: int,
    loss_rows: int,
    columns: int,
    *,
    element_size: int,
    logits_limit_bytes: int,
    training: bool,
    separable: bool = False,
) -> bool:
    """Whether to compute log-probs from hidden states rather than from `[rows, columns]` logits.

    In training the fused head may need four products over the rows with loss instead of three over
    all rows, and three with a separable loss; in a pass without gradient it needs one either way.
    It also pays when the logits would exceed a limit.
    """
    if rows * columns * element_size > logits_limit_bytes or separable:
        return True
    return 4 * loss_rows <= 3 * rows if training else True


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


class _Settings(NamedTuple):
    group: dist.ProcessGroup | None
    scale: float
    with_entropy: bool
    entropy_grad: bool
    sequence_parallel: bool
    reduce_hidden_grad: bool
    budget: int
    keep_tiles: bool
    entropy_of: EntropyOf


class _FusedLmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor | None,
        kept: Ragged | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if settings.sequence_parallel:
            mine = hidden.contiguous()
            hidden = mine.new_empty((mine.shape[0] * group_size(settings.group), mine.shape[1]))
            dist.all_gather_into_tensor(hidden, mine, group=settings.group)
        used, used_tokens = (hidden, tokens) if rows is None else (hidden[rows], tokens[rows])
        columns, group = weight.shape[0], settings.group
        targets, absent = locate_targets(used_tokens, columns, group=group)
        at = None if kept is None else locate_kept(kept, used_tokens, columns, group=group)
        tiles = _Tiles(used, weight, settings.budget)
        dense, few = tiles.statistics(targets, at, settings)
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
        ctx.settings, ctx.kept_tiles, ctx.total_rows = settings, tiles.kept, hidden.shape[0]
        ctx.set_materialize_grads(False)
        ctx.state = RowState(targets, joined.dense, few, joined.kept).for_backward(
            settings.entropy_grad
        )
        ctx.save_for_backward(used, weight, rows)
        log_probs = spread_rows(joined.log_probs, rows, ctx.total_rows)
        entropy = joined.entropy
        if entropy is not None:
            entropy = spread_rows(entropy, rows, ctx.total_rows)
            if not settings.entropy_grad:
                ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        settings: _Settings = ctx.settings
        used, weight, rows = ctx.saved_tensors
        grads = [
            grad if grad is None or rows is None else grad[rows]
            for grad in (grad_log_probs, grad_entropy)
        ]
        tiles = _Tiles(used, weight, settings.budget, ctx.kept_tiles)
        ctx.kept_tiles = {}  # turned into gradients below; a second backward pass computes them
        grad_hidden, grad_weight = tiles.gradients(
            ctx.state,
            grads[0],
            grads[1],
            settings,
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[1],
        )
        if grad_hidden is not None:
            grad_hidden = spread_rows(grad_hidden, rows, ctx.total_rows)
            grad_hidden = _sum_over_shards(grad_hidden, settings)
        return grad_hidden, grad_weight, None, None, None, None


class _Tiles:
    """The logits `[n, V/tp]`, one tile at a time in one buffer, some of them kept."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        budget: int,
        kept: dict[Tile, torch.Tensor] | None = None,
    ) -> None:
        self.hidden, self.weight = hidden, weight
        self.kept: dict[Tile, torch.Tensor] = {} if kept is None else kept
        size = hidden.element_size()
        tile_bytes = min(budget, TILE_BYTES.get(hidden.device.type, TILE_BYTES["cuda"]))
        self.plan = plan_tiles(hidden.shape[0], weight.shape[0], size, tile_bytes)
        largest = max(
            ((t.row_end - t.row) * (t.column_end - t.column) for t in self.plan), default=0
        )
        self.buffer = hidden.new_empty(largest)
        self.room_to_keep = budget - largest * size

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
        self, targets: torch.Tensor, at: KeptColumns | None, settings: _Settings
    ) -> tuple[ShardStatistics | None, KeptLogits | None]:
        """Row statistics over all columns of this rank, and the logits of the kept ids.

        From one tile after the other; what no row needs is None.
        """
        kernels = row_kernels_for(self.buffer)
        wide = needs_dense(at, settings.with_entropy, settings.entropy_of)
        if at is not None and not wide and not settings.keep_tiles:
            return None, KeptLogits.of_products(self.hidden, self.weight, at)
        ranges: dict[int, ShardStatistics] = {}
        few = None
        if at is not None:
            few = self.hidden.new_full((at.rows.numel(),), -torch.inf, dtype=torch.float32)
        for tile, logits in self.logits(settings.keep_tiles):
            if at is not None and few is not None:
                inside, places = _kept_of(tile, at)
                few = torch.where(inside, logits[places].float(), few)
            if not wide:
                continue
            part = kernels.forward_blocks(
                logits,
                _targets_of(tile, targets),
                scale=settings.scale,
                with_entropy=settings.with_entropy,
            )
            earlier = ranges.get(tile.row)
            ranges[tile.row] = (
                part if earlier is None else merge_column_ranges(earlier, part, settings.scale)
            )
        kept = None if at is None or few is None else KeptLogits(few, at)
        return self._joined(ranges, settings) if wide else None, kept

    def _joined(self, ranges: dict[int, ShardStatistics], settings: _Settings) -> ShardStatistics:
        if not ranges:
            empty = self.hidden.new_empty(0, dtype=torch.float32)
            return ShardStatistics(empty, empty, empty if settings.with_entropy else None, empty)
        maximum, sum_exp, weighted_sum, target_logit = zip(*ranges.values(), strict=True)
        joined = None if weighted_sum[0] is None else torch.cat(weighted_sum)
        return ShardStatistics(
            torch.cat(maximum), torch.cat(sum_exp), joined, torch.cat(target_logit)
        )

    def gradients(
        self,
        state: RowState,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        settings: _Settings,
        want_hidden: bool,
        want_weight: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of hidden states `[n, H]`, over this rank's columns only, and weight."""
        hidden = _without_idle_rows(self.hidden, grad_log_probs, grad_entropy)
        # Many tiles add to the same rows, so those sums are float32 whatever the dtype of the
        # model.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if want_hidden else None
        grad_weight = torch.empty_like(self.weight) if want_weight else None
        if grad_weight is not None and not self.plan:
            grad_weight.zero_()
        to_gradient = _TileGradient.of(state, grad_log_probs, grad_entropy, settings)
        for tile, logits in self.logits(keep=False):
            span, columns = slice(tile.row, tile.row_end), slice(tile.column, tile.column_end)
            to_gradient.write(tile, logits)
            if grad_hidden is not None:
                add_product(grad_hidden[span], logits, self.weight[columns])
            if grad_weight is not None and tile.row == 0:
                torch.mm(logits.t(), hidden[span], out=grad_weight[columns])
            elif grad_weight is not None:
                grad_weight[columns].addmm_(logits.t(), hidden[span])
            self.kept.pop(tile, None)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


class _TileGradient(NamedTuple):
    """Turns the logits of a tile into their gradient, in place.

    dense: the gradients [n] that all columns of a row take part in; few: [K] of the kept logits
    """

    state: RowState
    dense: tuple[torch.Tensor | None, torch.Tensor | None]
    few: torch.Tensor | None
    scale: float

    @classmethod
    def of(
        cls,
        state: RowState,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        settings: _Settings,
    ) -> _TileGradient:
        few, entropy_of = None, settings.entropy_of
        if state.kept is not None and state.kept_rows is not None:
            on_kept = grad_entropy if entropy_of == "kept" else None
            few = state.kept.gradient(state.kept_rows, grad_log_probs, on_kept, settings.scale)
        dense = dense_gradients(state.kept_columns, grad_log_probs, grad_entropy, entropy_of)
        return cls(state, dense, few, settings.scale)

    def write(self, tile: Tile, logits: torch.Tensor) -> None:
        span, rows = slice(tile.row, tile.row_end), self.state.dense
        if rows is None:
            logits.zero_()
        else:
            row_kernels_for(logits).backward_blocks(
                logits,
                _targets_of(tile, self.state.targets),
                RowNormalizer(*(None if v is None else v[span] for v in rows)),  # type: ignore[arg-type]
                *(None if grad is None else grad[span] for grad in self.dense),
                scale=self.scale,
                out=logits,
            )
        if self.few is not None and self.state.kept is not None:
            inside, places = _kept_of(tile, self.state.kept.at)
            gradient = torch.where(inside, self.few, 0.0).to(logits.dtype)
            logits.index_put_(places, gradient, accumulate=True)


def _kept_of(tile: Tile, at: KeptColumns) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """[K] bool: which kept ids are in the tile; and where, or somewhere in it if they are not."""
    rows, columns = at.rows - tile.row, at.columns - tile.column
    height, width = tile.row_end - tile.row, tile.column_end - tile.column
    inside = at.held & (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return inside, (torch.where(inside, rows, 0), torch.where(inside, columns, 0))


def _targets_of(tile: Tile, targets: torch.Tensor) -> torch.Tensor:
    targets = targets[tile.row : tile.row_end]
    inside = (targets >= tile.column) & (targets < tile.column_end)
    return torch.where(inside, targets - tile.column, -1)


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


def spread_rows(values: torch.Tensor, rows: torch.Tensor | None, total: int) -> torch.Tensor:
    """`values` at `rows` of `total` rows, 0 elsewhere."""
    if rows is None:
        return values
    spread = values.new_zeros((total, *values.shape[1:]))
    return spread.index_copy_(0, rows, values)


def _sum_over_shards(grad_hidden: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """Each rank's gradient covers only its columns; the hidden states need the sum."""
    size = group_size(settings.group)
    if settings.sequence_parallel:
        mine = grad_hidden.new_empty((grad_hidden.shape[0] // size, grad_hidden.shape[1]))
        dist.reduce_scatter_tensor(mine, grad_hidden, group=settings.group)
        return mine
    if size > 1 and settings.reduce_hidden_grad:
        dist.all_reduce(grad_hidden, group=settings.group)
    return grad_hidden


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    row_mask: torch.Tensor | None,
    rows: int,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise BatchError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H] and "
            "[V/tp, H] with the same H. Flatten batch and sequence dimensions of the hidden "
            "states first."
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in FLOAT_DTYPES:
        raise BatchError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; both must be float32, "
            "bfloat16 or float16, and the same. Cast one of them."
        )
    if tokens.shape != (rows,) or tokens.dtype != torch.int64:
        raise BatchError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}; they must be int64 [{rows}], one per "
            "row of the hidden states (of all ranks together under sequence parallelism)."
        )
    if row_mask is not None and (row_mask.shape != (rows,) or row_mask.dtype != torch.bool):
        raise BatchError(
            f"row_mask is {row_mask.dtype} {list(row_mask.shape)}; it must be bool [{rows}], one "
            "per token."
        )
