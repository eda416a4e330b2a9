"""The kept ids of truncated sampling in a framework's batch, checked and cut to this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from plugin.config import LossConfig
from plugin.logprobs.vocab_shards import group_size
from plugin.ragged import Ragged, as_integers
from plugin.sampling_mask import check_rows, kept_rows, top_p_rows
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards


def local_kept_rows(
    config: LossConfig,
    args: Any,
    batch: Mapping[str, Any],
    logits: Tensor,
    shards: SequenceShards,
) -> Ragged | None:
    """[R] entries: the ids that sampling kept for the local response tokens; None = all of them.

    From our fields, or from slime's where its `rollout_top_p` is not 1; its own loss looks at them
    under the same condition.
    """
    rows, ours = kept_rows(batch), True
    if rows is None:
        if getattr(args, "rollout_top_p", None) in (None, 1):
            return None
        rows, ours = top_p_rows(batch, shards.response_lengths), False
    if config.validates_on(logits.device):
        _check(rows, batch, shards, logits.shape[-1], ours)
    return shards.local_rows(rows)


def _check(
    rows: Ragged, batch: Mapping[str, Any], shards: SequenceShards, columns: int, ours: bool
) -> None:
    """Look at whole responses: every rank that holds a part of a sample raises, or none."""
    whole = SequenceShards.of(shards.totals, shards.responses, shards.device, SINGLE_PROCESS)
    check_rows(
        rows,
        shards.responses,
        as_integers(whole.response_tokens(batch["unconcat_tokens"])),
        as_integers(Ragged.of(batch["loss_masks"]).values) != 0,
        vocabulary=columns * group_size(shards.context.tp_group),
        # slime's ids come in the engine's order; a row of none would be a nucleus without tokens.
        ordered=ours,
        complete=not ours,
    )
