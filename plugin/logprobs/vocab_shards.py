"""A row over vocabulary shards: where its token is, and how the shards' sums become one.

Shards are equally wide and in the order of the ranks of their group; a group of None means that the
vocabulary is not sharded.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from plugin.errors import ConfigError
from plugin.logprobs.kernels import RowNormalizer, ShardStatistics

#: The width that all shards of a group were last found to have.
_even_widths: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def locate_targets(
    tokens: torch.Tensor,
    columns: int,
    *,
    group: dist.ProcessGroup | None,
    tokens_held: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens `[T]` are among this rank's columns.

    tokens_held: how many of its columns are tokens, the rest being padding; None = all

    Returns two `[T]` tensors: the column, or -1 where this rank holds none (int64); and whether the
    token is known here to have probability 0, because it is outside the vocabulary (bool).
    """
    size = group_size(group)
    first = columns * dist.get_rank(group) if size > 1 else 0
    held = (tokens >= first) & (tokens < first + columns)
    absent = (tokens < 0) | (tokens >= columns * size)
    if tokens_held is not None and tokens_held < columns:
        padding = held & (tokens >= first + tokens_held)
        held, absent = held & ~padding, absent | padding
    return torch.where(held, tokens - first, -1), absent


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


def _maximum_of_even_shards(
    maximum: torch.Tensor, columns: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the maximum `[T]` over all shards, which must be equally wide.

    The widths are reduced together with the maximum. On an accelerator a width is checked only
    once, because reading it waits for the device; on `meta` there is nothing to read.
    """
    packed = maximum.new_empty(maximum.numel() + 2)
    packed[:-2] = maximum
    packed[-2].fill_(columns)
    packed[-1].fill_(-columns)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    device = packed.device.type
    if device == "cpu" or (device != "meta" and _even_widths.get(group) != columns):
        widest, narrowest = int(packed[-2]), -int(packed[-1])
        if widest != narrowest:
            raise ConfigError(
                f"vocabulary shards have {narrowest} to {widest} columns, this rank's {columns}; "
                "token ids are found by equal shards. Pad the vocabulary to a multiple of the "
                f"{group_size(group)} ranks"
            )
        _even_widths[group] = columns
    return packed[:-2]


def _shift_sums(
    statistics: ShardStatistics, maximum: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a shard's sums in float64, relative to the maximum of all shards."""
    shift = (statistics.maximum.double() - maximum) * scale
    # A shard of nothing but -inf has maximum -inf and sums of 0; any finite shift leaves them 0.
    shift = shift.masked_fill(statistics.maximum == -torch.inf, 0.0)
    factor = shift.exp()
    sum_exp = statistics.sum_exp * factor
    if statistics.weighted_sum is None:
        return sum_exp, None
    return sum_exp, (statistics.weighted_sum + shift * statistics.sum_exp) * factor
