"""What corrections need to know of the whole batch, found before the training pass.

Both log-probs are columns of the batch, so this takes no forward pass: a few small sums over the
ranks that hold different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.loss.hook_chain import batch_declarations
from plugin.loss.inputs import KnownTokens
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.ppo_utils.batch_statistics import Declaration, Statistics
from plugin.ppo_utils.importance_ratio import log_ratio


def add_batch_statistics(
    config: TrainerConfig,
    microbatches: Sequence[PreparedMicrobatch],
    groups: ParallelGroups,
    errors: ErrorCollector,
) -> None:
    """Give every microbatch what the corrections declared of the whole batch; a collective.

    Does nothing where none declares anything. The last stage computes the loss and alone needs it.
    """
    declared = batch_declarations(config)
    if not declared:
        return
    log_ratios: Tensor | None = None
    with errors.collecting():
        log_ratios = torch.cat([_log_ratios(config, m, declared) for m in microbatches])
    errors.agree("looking at the whole batch")
    assert log_ratios is not None
    if groups.is_last_stage:
        found = {
            path: _rounds(path, declaration, log_ratios, config, groups.dp_cp_group, errors)
            for path, declaration in declared.items()
        }
        for microbatch in microbatches:
            microbatch.columns["batch_statistics"] = found
    errors.agree("looking at the whole batch")


def _log_ratios(
    config: TrainerConfig, microbatch: PreparedMicrobatch, declared: dict[str, Declaration]
) -> Tensor:
    """[n]: train - rollout of the local tokens with loss."""
    known = KnownTokens.of(config, microbatch.columns, microbatch.inputs.shards)
    train, rollout = known.fields["train_log_probs"], known.fields["rollout_log_probs"]
    if train is None or rollout is None:
        raise BatchError(
            f"{', '.join(declared)} looks at train and rollout log-probs of the whole batch first, "
            "and the batch has no log_probs; call compute_log_probs on it and add the column"
        )
    return log_ratio(train, rollout, known.mask)[known.mask]


def _rounds(
    path: str,
    declaration: Declaration,
    log_ratios: Tensor,
    config: TrainerConfig,
    group: dist.ProcessGroup,
    errors: ErrorCollector,
) -> Statistics:
    """The sums of every round. A rank that fails says so before the others wait for its numbers."""
    known: list[Tensor] = []
    while True:
        part: Tensor | None = None
        with errors.collecting():
            part = declaration(log_ratios, config, known)
        if not _all_the_same(path, part, group, errors) or part is None:
            return tuple(known)
        part = part.detach().clone()
        if group.size() > 1:
            dist.all_reduce(part, group=group)
        known.append(part.cpu())


def _all_the_same(
    path: str, part: Tensor | None, group: dist.ProcessGroup, errors: ErrorCollector
) -> bool:
    """Whether no rank failed and all want to add up equally many numbers; a collective."""
    size = -1 if part is None else part.numel()
    largest = torch.tensor([int(errors.error is not None), size, -size], device=errors.device)
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    failed, most, least = largest.tolist()
    with errors.collecting():
        if not failed and most != -least:
            raise BatchError(
                f"the batch statistics of {path} have {-least} numbers on one rank and {most} on "
                "another; their size may depend on the flags and on earlier rounds alone"
            )
    return not failed and most == -least
