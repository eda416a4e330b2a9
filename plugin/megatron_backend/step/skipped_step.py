"""Why a step was skipped: looked for once it was, so that a sound step pays nothing for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.loss.inputs import KnownTokens
from plugin.loss.non_finite import first_non_finite
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.ragged import Integers
from plugin.sharding.parallel_context import use_parallel_context

_TERMS = ("pg_loss", "entropy_loss", "kl_loss", "rollout_kl", "distill_kl", "loss")


def cause_of_skip(
    config: TrainerConfig,
    groups: ParallelGroups,
    microbatches: Sequence[PreparedMicrobatch],
    samples: Sequence[Integers],
    log_probs: Sequence[Tensor | None],
    metrics: Mapping[str, float],
) -> str | None:
    """Name the field, loss or hook that was not finite first, on any rank; a collective.

    samples: global sample of each, per microbatch; log_probs: on the last stage [R] per
        microbatch, None where padding; metrics: of the step
    None: everything that the loss computes is finite, the fault is in the model's backward pass.
    """
    mine: str | None = None
    if groups.is_last_stage:
        for microbatch, indices, cur in zip(microbatches, samples, log_probs, strict=True):
            # Every microbatch on every rank, also after one is found: hooks may communicate.
            with (
                ErrorCollector().collecting(peers=groups.cp_size),
                use_parallel_context(loss_context(groups)),
            ):
                known = KnownTokens.of(config, microbatch.columns, microbatch.inputs.shards)
                own = torch.zeros_like(known.mask, dtype=torch.float32) if cur is None else cur
                found = first_non_finite(config, known, own)
                if found is not None and mine is None:
                    place = f"sample {indices[found.sample]}, position {found.position}"
                    mine = f"{found.source} is not finite at {place}"
    everywhere: list[str | None] = [None] * groups.world_size
    dist.all_gather_object(everywhere, mine)
    terms = [name for name in _TERMS if not math.isfinite(metrics.get(name, 0.0))]
    once = f"{terms[0]} is not finite, but it is when computed again" if terms else None
    return next((text for text in everywhere if text), once)
