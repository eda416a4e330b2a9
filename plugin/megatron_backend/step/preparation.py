"""What happens to the microbatches of a step on this rank before any schedule starts.

They are laid out, and corrections learn what they need to know of the whole batch. Errors can still
be raised on all ranks together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.batch_types import FIELDS, PER_RESPONSE_TOKEN, Microbatch
from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.loss.hook_chain import batch_declarations
from plugin.loss.inputs import KnownTokens
from plugin.loss.interfaces import LossInputs, declared_values
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.sequence_packing import (
    ModelInputs,
    SequenceLayout,
    model_inputs,
    row_length,
)
from plugin.ppo_utils.batch_statistics import Declaration, Statistics, wants_advantages
from plugin.ragged import Ragged, as_integers
from plugin.vocabulary_ids import kept_rows


@dataclass(frozen=True)
class PreparedMicrobatch:
    """A microbatch ready for the model: its layout and its columns, local to this rank.

    response_rows, loss_rows: bool [B * S_local] on the CPU, the rows that predict a response token,
        and those of them whose loss mask is 1
    loss_tokens: [n] int64, the local response tokens whose loss mask is 1
    kept: [B * S_local] entries, the ids that truncated sampling kept for the token that each row
        predicts, empty where it kept all; None where the batch has none
    """

    number: int
    inputs: ModelInputs
    columns: dict[str, Any]
    is_padding: bool
    response_rows: Tensor
    loss_rows: Tensor
    loss_tokens: Tensor
    kept: Ragged | None = None

    @cached_property
    def loss_kept(self) -> Ragged | None:
        """[n] entries: those of the rows with loss."""
        if self.kept is None:
            return None
        return self.kept.select(as_integers(self.loss_rows.nonzero()[:, 0]))


def prepare(
    microbatches: Sequence[Microbatch],
    groups: ParallelGroups,
    *,
    layout: SequenceLayout = "packed",
    transformer_engine: bool = False,
    sequence_parallel: bool = False,
    alignment: int = 1,
    equal_rows: bool = False,
    device: torch.device | str = "cpu",
) -> list[PreparedMicrobatch]:
    """Lay out every microbatch of a step for this rank.

    alignment: what the rows of a matrix have to be a multiple of (FP8)
    equal_rows: fill up all rows to the longest
    """
    at_least = 0
    if groups.vpp_size or equal_rows:
        # The interleaved schedule announces the shapes of its messages to the next and to the
        # previous stage at once. With two stages these are one peer, and the shapes of different
        # microbatches come out swapped.
        at_least = max(row_length(m.batch, groups, layout, sequence_parallel) for m in microbatches)
    prepared = []
    for number, microbatch in enumerate(microbatches):
        inputs = model_inputs(
            microbatch.batch,
            groups,
            layout=layout,
            transformer_engine=transformer_engine,
            sequence_parallel=sequence_parallel,
            at_least=at_least,
            alignment=alignment,
            device=device,
        )
        with_loss = inputs.shards.local(microbatch.batch.columns["loss_masks"]).cpu() != 0
        rows = inputs.host_rows
        response_rows = torch.zeros(inputs.tokens.numel(), dtype=torch.bool)
        loss_rows = response_rows.clone()
        response_rows[rows], loss_rows[rows] = True, with_loss
        prepared.append(
            PreparedMicrobatch(
                number,
                inputs,
                _local_columns(microbatch, inputs),
                microbatch.is_padding,
                response_rows,
                loss_rows,
                with_loss.nonzero()[:, 0].to(device, non_blocking=True),
                _kept_of_rows(microbatch, inputs, rows),
            )
        )
    return prepared


def _kept_of_rows(microbatch: Microbatch, inputs: ModelInputs, rows: Tensor) -> Ragged | None:
    """[B * S_local] entries of kept ids; those of the local response tokens are at `rows`."""
    whole = kept_rows(microbatch.batch.columns)
    if whole is None:
        return None
    local = inputs.shards.local_rows(whole)
    local = local.like(local.values.to(inputs.shards.device, non_blocking=True))
    return local.spread(rows, inputs.tokens.numel())


def _local_columns(microbatch: Microbatch, inputs: ModelInputs) -> dict[str, Any]:
    """Cut per-token columns to this CP rank's tokens; masks stay whole, as hooks expect."""
    shards, columns = inputs.shards, dict(microbatch.batch.columns)
    for name, values in columns.items():
        if name == "loss_masks":
            # A copy: hooks may write into it, and the batch may lie in shared, read-only memory.
            columns[name] = values.like(
                values.values.to(shards.device, copy=True, non_blocking=True)
            )
        elif FIELDS[name].shape in PER_RESPONSE_TOKEN:
            local = shards.local(values).to(shards.device, non_blocking=True)
            columns[name] = Ragged(local, shards.held)
    return columns


def add_batch_statistics(
    config: TrainerConfig,
    microbatches: Sequence[PreparedMicrobatch],
    groups: ParallelGroups,
    errors: ErrorCollector,
) -> None:
    """Give every microbatch what loss and corrections declared of the whole batch; a collective.

    Does nothing where none declares anything. The last stage computes the loss and alone needs it.
    """
    declared = batch_declarations(config)
    if not declared:
        return
    looked_at: dict[str, Tensor] = {}
    with errors.collecting():
        inputs = [_inputs_before_update(config, m, declared) for m in microbatches]
        for path, declaration in declared.items():
            parts = [declared_values(declaration, part) for part in inputs]
            looked_at[path] = torch.cat(parts, dim=-1)
    errors.agree("looking at the whole batch")
    if groups.is_last_stage:
        found = {
            path: _rounds(path, declaration, looked_at[path], config, groups.dp_cp_group, errors)
            for path, declaration in declared.items()
        }
        for microbatch in microbatches:
            microbatch.columns["batch_statistics"] = found
    errors.agree("looking at the whole batch")


def _inputs_before_update(
    config: TrainerConfig, microbatch: PreparedMicrobatch, declared: dict[str, Declaration]
) -> LossInputs:
    """The loss inputs of the local tokens, with the trainer's log-probs as the current ones."""
    known = KnownTokens.of(config, microbatch.columns, microbatch.inputs.shards)
    train, rollout = known.fields["train_log_probs"], known.fields["rollout_log_probs"]
    with_ratios = [path for path, found in declared.items() if not wants_advantages(found)]
    if train is None or (with_ratios and rollout is None):
        looks_at = "train and rollout" if with_ratios else "the trainer's"
        raise BatchError(
            f"{', '.join(declared)} looks at {looks_at} log-probs of the whole batch first, "
            "and the batch has no log_probs; call compute_log_probs on it and add the column"
        )
    return known.at_policy(config, train, None, check=False)


def _rounds(
    path: str,
    declaration: Declaration,
    looked_at: Tensor,
    config: TrainerConfig,
    group: dist.ProcessGroup,
    errors: ErrorCollector,
) -> Statistics:
    """The sums of every round. A rank that fails says so before the others wait for its numbers."""
    known: list[Tensor] = []
    while True:
        part: Tensor | None = None
        with errors.collecting():
            part = declaration(looked_at, config, known)
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
