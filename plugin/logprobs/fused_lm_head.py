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

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.lm_head_tiles import HeadSettings, Tiles
from plugin.logprobs.row_gradients import RowPlaces, RowSettings, join_rows
from plugin.logprobs.row_ids import EntropyOf
from plugin.logprobs.vocab_parallel import FLOAT_DTYPES, check_settings
from plugin.logprobs.vocab_shards import group_size
from plugin.ragged import Ragged, as_integers

DEFAULT_BUDGET_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}


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
    vocab_rows: int | None = None,
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
        vocab_rows: how many of this rank's rows of `weight` are tokens; those after them are
            padding, which is never computed with and gets a gradient of 0. None = all.

    Returns:
        `log_probs` `[T]` float32 and `entropy` `[T]` float32, or None without `with_entropy`.
    """
    log_probs, entropy, _ = _fused(
        *(hidden, weight, tokens, None, row_mask, kept),
        group=group,
        temperature=temperature,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        memory_budget_bytes=memory_budget_bytes,
        sequence_parallel=sequence_parallel,
        reduce_hidden_grad=reduce_hidden_grad,
        entropy_of=entropy_of,
        vocab_rows=vocab_rows,
    )
    return log_probs, entropy


def fused_log_probs_of_ids(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor | None,
    *,
    row_mask: torch.Tensor | None = None,
    kept: Ragged | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`log_probs_of_ids(hidden @ weight.T, tokens, ids)` in bounded memory.

    ids: `[T, k]`, or None; the options are those of `fused_log_probs_and_entropy`, and `ids_of`.
    """
    return _fused(hidden, weight, tokens, ids, row_mask, kept, **options)


def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor | None,
    row_mask: torch.Tensor | None,
    kept: Ragged | None,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    memory_budget_bytes: int | None = None,
    sequence_parallel: bool = False,
    reduce_hidden_grad: bool = True,
    entropy_of: EntropyOf = "full",
    ids_of: EntropyOf = "full",
    vocab_rows: int | None = None,
) -> Any:
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
    settings = HeadSettings(
        RowSettings(group, 1.0 / temperature, with_entropy, entropy_grad, entropy_of, ids_of),
        budget_bytes(memory_budget_bytes, hidden.device),
        weight.shape[0] if vocab_rows is None else vocab_rows,
        keep_tiles=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
        sequence_parallel=sequence_parallel,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    rows = None
    if row_mask is not None and not bool(row_mask.all()):
        chosen = row_mask.nonzero()[:, 0]
        rows = chosen.to(hidden.device, non_blocking=True)
        kept = None if kept is None else kept.select(as_integers(chosen))
    return _FusedLmHead.apply(hidden, weight, tokens, ids, rows, kept, settings)


def budget_bytes(given: int | None, device: torch.device) -> int:
    """Memory for logits at a time: as given, or the default of the device."""
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


class _FusedLmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        ids: torch.Tensor | None,
        rows: torch.Tensor | None,
        kept: Ragged | None,
        settings: HeadSettings,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        group = settings.rows.group
        if settings.sequence_parallel:
            mine = hidden.contiguous()
            hidden = mine.new_empty((mine.shape[0] * group_size(group), mine.shape[1]))
            dist.all_gather_into_tensor(hidden, mine, group=group)
        total = hidden.shape[0]
        if rows is not None:
            hidden, tokens = hidden[rows], tokens[rows]
            ids = None if ids is None else ids[rows]
        places = RowPlaces.of(tokens, kept, ids, weight.shape[0], group, settings.vocab_rows)
        tiles = Tiles(hidden, weight, settings)
        found = join_rows(places, *tiles.statistics(places), settings.rows)
        ctx.settings, ctx.kept_tiles, ctx.total_rows = settings, tiles.kept, total
        ctx.set_materialize_grads(False)
        ctx.state = found.state.for_backward(settings.rows.entropy_grad)
        ctx.save_for_backward(hidden, weight, rows)
        log_probs = spread_rows(found.log_probs, rows, total)
        entropy, id_log_probs = (
            None if values is None else spread_rows(values, rows, total)
            for values in (found.entropy, found.id_log_probs)
        )
        if entropy is not None and not settings.rows.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, id_log_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None, None]:
        settings: HeadSettings = ctx.settings
        hidden, weight, rows = ctx.saved_tensors
        grads = [
            grad if grad is None or rows is None else grad[rows]
            for grad in (grad_log_probs, grad_entropy, grad_ids)
        ]
        tiles = Tiles(hidden, weight, settings, ctx.kept_tiles)
        ctx.kept_tiles = {}  # turned into gradients below; a second backward pass computes them
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = tiles.gradients(
            ctx.state, *grads, want_hidden=want_hidden, want_weight=want_weight
        )
        if grad_hidden is not None:
            grad_hidden = spread_rows(grad_hidden, rows, ctx.total_rows)
            grad_hidden = _sum_over_shards(grad_hidden, settings)
        return grad_hidden, grad_weight, None, None, None, None, None


def spread_rows(values: torch.Tensor, rows: torch.Tensor | None, total: int) -> torch.Tensor:
    """`values` at `rows` of `total` rows, 0 elsewhere."""
    if rows is None:
        return values
    spread = values.new_zeros((total, *values.shape[1:]))
    return spread.index_copy_(0, rows, values)


def _sum_over_shards(grad_hidden: torch.Tensor, settings: HeadSettings) -> torch.Tensor:
    """Each rank's gradient covers only its columns; the hidden states need the sum."""
    group = settings.rows.group
    size = group_size(group)
    if settings.sequence_parallel:
        mine = grad_hidden.new_empty((grad_hidden.shape[0] // size, grad_hidden.shape[1]))
        dist.reduce_scatter_tensor(mine, grad_hidden, group=group)
        return mine
    if size > 1 and settings.reduce_hidden_grad:
        dist.all_reduce(grad_hidden, group=group)
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
