"""Log-probability of the sampled tokens and entropy of the policy, from vocabulary-parallel logits.

The logits are read once in the forward pass, and read and written once in the backward pass;
between the two only a few numbers per row are kept. Sharded over `n` ranks this takes two
collectives of `[T]` and `[2 or 3, T]` numbers forward, and none backward.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.kernels import (
    RowKernels,
    RowNormalizer,
    ShardStatistics,
    row_kernels_for,
)

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The width that all shards of a group were last found to have.
_even_widths: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    inplace_grad: bool = False,
    keep_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each row's token and entropy of each row of `softmax(logits / temperature)`.

    Args:
        logits: `[T, V/tp]` float32, bfloat16 or float16; this rank's columns of the vocabulary.
            Never changed by the forward pass.
        tokens: `[T]` int64 ids in the whole vocabulary. Any other id (padding) has log-probability
            -inf; it is never an index error.
        group: ranks over which the vocabulary is sharded, in order of the columns and in equal
            parts; None if it is not.
        temperature: divides the logits.
        with_entropy: also return the entropy; it carries a gradient only with `entropy_grad`.
        inplace_grad: the backward pass overwrites the logits with their gradient and so allocates
            nothing. Only for a caller that owns the logits and does not need them any more; a
            second backward pass raises.
        keep_mask: bool `[T, V/tp]`; the distribution is renormalized over the columns that are True
            (top-k, top-p). A token that is not kept is a `BatchError` on every rank: it cannot have
            been sampled. Give rows that were not sampled the id -1.

    Returns:
        `log_probs` `[T]` float32 and `entropy` `[T]` float32, or None without `with_entropy`.

    All arithmetic is float32. A row whose incoming gradient is exactly 0 gets a gradient of exactly
    0, also when its logits hold NaN or inf. A row that holds only -inf has no distribution: its
    log-prob and its entropy are NaN.
    """
    _check_tensors(logits, tokens, keep_mask)
    check_settings(temperature, with_entropy, entropy_grad)
    # Kernels write whole rows: strided rows, or rows that share memory, are copied.
    overlapping = logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]
    if logits.stride(-1) != 1 or overlapping:
        logits = logits.contiguous()
    settings = _Settings(group, 1.0 / temperature, with_entropy, entropy_grad, inplace_grad)
    return _LogProbsAndEntropy.apply(logits, tokens, keep_mask, settings)


def locate_targets(
    tokens: torch.Tensor,
    columns: int,
    *,
    group: dist.ProcessGroup | None,
    keep_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens `[T]` are among this rank's columns.

    Returns two `[T]` tensors: the column, or -1 where this rank holds none (int64); and whether the
    token is known here to have probability 0, because it is outside the vocabulary or not kept
    (bool).
    """
    size = group_size(group)
    first = columns * dist.get_rank(group) if size > 1 else 0
    held = (tokens >= first) & (tokens < first + columns)
    absent = (tokens < 0) | (tokens >= columns * size)
    targets = torch.where(held, tokens - first, -1)
    if keep_mask is not None:
        dropped = held & ~keep_mask.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        targets, absent = targets.masked_fill(dropped, -1), absent | dropped
    return targets, absent


def combine_shards(
    statistics: ShardStatistics,
    targets: torch.Tensor,
    absent: torch.Tensor,
    *,
    columns: int,
    scale: float,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, RowNormalizer]:
    """Join the statistics of all vocabulary shards: log-probs `[T]` and the normalizer.

    `targets` and `absent` come from `locate_targets` for this rank's `columns`. With `group` None
    or of one rank nothing is communicated; otherwise one max, and one sum of everything else.
    """
    maximum = statistics.maximum
    sharded = group_size(group) > 1 and targets.numel() > 0
    if sharded:
        assert group is not None
        maximum = _maximum_of_even_shards(maximum, columns, group)
    # A few numbers per row: in float64 the results are the exact ones, rounded once.
    target_exponent = (statistics.target_logit.double() - maximum) * scale
    target_exponent = target_exponent.masked_fill(targets < 0, 0.0).masked_fill(absent, -torch.inf)
    sum_exp, weighted_sum = _shift_sums(statistics, maximum, scale)
    if sharded:
        parts = [target_exponent, sum_exp]
        packed = torch.stack(parts if weighted_sum is None else [*parts, weighted_sum])
        dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=group)
        target_exponent, sum_exp = packed[0], packed[1]
        weighted_sum = None if weighted_sum is None else packed[2]
    log_sum = sum_exp.log()
    entropy = None if weighted_sum is None else (log_sum - weighted_sum / sum_exp).float()
    rows = RowNormalizer(maximum, sum_exp.float(), entropy)
    return (target_exponent - log_sum).float(), rows


def _maximum_of_even_shards(
    maximum: torch.Tensor, columns: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the maximum `[T]` over all shards, which must be equally wide.

    The widths travel with the maximum. An accelerator is asked only once for a width, because the
    answer waits for it.
    """
    packed = maximum.new_empty(maximum.numel() + 2)
    packed[:-2] = maximum
    packed[-2].fill_(columns)
    packed[-1].fill_(-columns)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    if packed.device.type == "cpu" or _even_widths.get(group) != columns:
        widest, narrowest = int(packed[-2]), -int(packed[-1])
        if widest != narrowest:
            raise ConfigError(
                f"vocabulary shards have {narrowest} to {widest} columns, this rank's {columns}; "
                "token ids are found by equal shards. Pad the vocabulary to a multiple of the "
                f"{group_size(group)} ranks"
            )
        _even_widths[group] = columns
    return packed[:-2]


def merge_column_ranges(
    first: ShardStatistics, second: ShardStatistics, scale: float
) -> ShardStatistics:
    """Join the statistics of the same rows over two ranges of one shard's columns."""
    maximum = torch.maximum(first.maximum, second.maximum)
    sum_exp, weighted_sum = _shift_sums(first, maximum, scale)
    more, more_weighted = _shift_sums(second, maximum, scale)
    if weighted_sum is not None and more_weighted is not None:
        weighted_sum = (weighted_sum + more_weighted).float()
    target_logit = first.target_logit + second.target_logit
    return ShardStatistics(maximum, (sum_exp + more).float(), weighted_sum, target_logit)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group; 1 for None, which means "not sharded"."""
    return 1 if group is None else dist.get_world_size(group)


class _Settings(NamedTuple):
    group: dist.ProcessGroup | None
    scale: float
    with_entropy: bool
    entropy_grad: bool
    inplace_grad: bool


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        keep_mask: torch.Tensor | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kernels = row_kernels_for(logits)
        targets, absent = locate_targets(
            tokens, logits.shape[1], group=settings.group, keep_mask=keep_mask
        )
        statistics = kernels.forward_blocks(
            logits,
            targets,
            scale=settings.scale,
            with_entropy=settings.with_entropy,
            keep_mask=keep_mask,
        )
        columns = logits.shape[1]
        log_probs, rows = combine_shards(
            statistics,
            targets,
            absent,
            columns=columns,
            scale=settings.scale,
            group=settings.group,
        )
        if keep_mask is not None:
            _require_kept(log_probs, tokens, columns * group_size(settings.group))
        ctx.settings, ctx.kernels, ctx.consumed = settings, kernels, False
        ctx.set_materialize_grads(False)
        saved_entropy = rows.entropy if settings.entropy_grad else None
        ctx.save_for_backward(logits, targets, rows.maximum, rows.sum_exp, saved_entropy, keep_mask)
        if rows.entropy is not None and not settings.entropy_grad:
            ctx.mark_non_differentiable(rows.entropy)
        return log_probs, rows.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        if ctx.consumed:
            raise ConfigError(
                "second backward pass through log_probs_and_entropy(inplace_grad=True): the first "
                "one replaced the logits by their gradient. Call it with inplace_grad=False to "
                "use the graph twice."
            )
        logits, targets, maximum, sum_exp, entropy, keep_mask = ctx.saved_tensors
        kernels: RowKernels = ctx.kernels
        settings: _Settings = ctx.settings
        out = logits.detach() if settings.inplace_grad else torch.empty_like(logits)
        kernels.backward_blocks(
            logits,
            targets,
            RowNormalizer(maximum, sum_exp, entropy),
            grad_log_probs,
            grad_entropy,
            scale=settings.scale,
            keep_mask=keep_mask,
            out=out,
        )
        if settings.inplace_grad:
            ctx.consumed = True
            # A kernel may write through a raw pointer, which autograd does not see; any other
            # operation that saved these logits must fail its version check rather than read a
            # gradient.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None


def _shift_sums(
    statistics: ShardStatistics, maximum: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a shard's sums in float64, relative to the maximum of all shards."""
    shift = (statistics.maximum.double() - maximum) * scale
    # A shard that keeps no column has maximum -inf and sums of 0; any finite shift leaves them 0.
    shift = shift.masked_fill(statistics.maximum == -torch.inf, 0.0)
    factor = shift.exp()
    sum_exp = statistics.sum_exp * factor
    if statistics.weighted_sum is None:
        return sum_exp, None
    return sum_exp, (statistics.weighted_sum + shift * statistics.sum_exp) * factor


def _check_tensors(
    logits: torch.Tensor, tokens: torch.Tensor, keep_mask: torch.Tensor | None
) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in FLOAT_DTYPES:
        raise BatchError(
            f"logits are {logits.dtype} {list(logits.shape)}; they must be [T, V/tp] with V/tp > 0 "
            "and float32, bfloat16 or float16. Flatten batch and sequence dimensions first."
        )
    if tokens.shape != logits.shape[:1] or tokens.dtype != torch.int64:
        raise BatchError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}; they must be int64 "
            f"[{logits.shape[0]}], one per row of the logits. Drop the first token and the last "
            "row of logits of every sample."
        )
    if keep_mask is not None and (keep_mask.shape != logits.shape or keep_mask.dtype != torch.bool):
        raise BatchError(
            f"keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}; it must be bool "
            f"{list(logits.shape)}, like the logits. Slice it to this rank's columns of the "
            "vocabulary."
        )


def _require_kept(log_probs: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> None:
    """Raise on every rank of the group, which all know the joined log-probs `[T]`."""
    dropped = (log_probs == -torch.inf) & (tokens >= 0) & (tokens < vocabulary)
    if bool(dropped.any()):
        row = int(dropped.nonzero()[0])
        raise BatchError(
            f"token {int(tokens[row])} of row {row} has probability 0 under keep_mask; a sampled "
            "token is always kept. Keep it in the mask, or give a row that was not sampled the id "
            "-1"
        )


def check_settings(temperature: float, with_entropy: bool, entropy_grad: bool) -> None:
    """Refuse a temperature that is not positive, or a gradient of an entropy nobody wants."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature is {temperature}; it must be positive and finite. Log-probs of greedily "
            "sampled tokens are those of temperature 1."
        )
    if entropy_grad and not with_entropy:
        raise ConfigError(
            "entropy_grad=True with with_entropy=False: there is no entropy to differentiate. "
            "Pass with_entropy=True."
        )
