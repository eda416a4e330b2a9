"""Megatron's schedules: the closures that they call, how they are run, and what they return.

A schedule calls `forward_step(data_iterator, model)` for every microbatch and model chunk, and gets
the chunk's output and, for the last stage, a function that turns that output into a loss. An error
inside such a function is collected and the rank continues with a loss of zero, so that it keeps
taking part in the collectives of the others; one that leaves a peer in the middle of the function
is raised (see `rank_agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.loss.partial_objective import takes_separable_head
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.router_replay import RouterReplaySession
from plugin.megatron_backend.step.loss_scaling import LossScale
from plugin.megatron_backend.step.microbatch_loss import TrainingLoss
from plugin.megatron_backend.step.output_head import (
    response_log_probs,
    skip_output_layer,
    use_fused_head,
)
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.ragged import Integers

LossClosure = Callable[..., Any]
ForwardStep = Callable[[Iterator[PreparedMicrobatch], Any], tuple[Tensor, LossClosure]]


def run_model(
    model: Any, microbatch: PreparedMicrobatch, replay: RouterReplaySession | None, *, fused: bool
) -> tuple[Tensor, Tensor | None]:
    """Call the model on a microbatch, inside its replay.

    Returns logits [B, S_local, V/tp] and None; with `fused`, hidden states [B, S_local, H] and the
    LM head's weight [V/tp, H].
    """
    inputs = microbatch.inputs
    with (
        nullcontext() if replay is None else replay.microbatch(microbatch.number),
        skip_output_layer(model) if fused else nullcontext() as weights,
    ):
        output = model(
            input_ids=inputs.tokens,
            position_ids=inputs.position_ids,
            attention_mask=None,
            packed_seq_params=inputs.packed_seq_params,
        )
    return output, weights[0] if weights else None


def forward_only_step(
    compute: Callable[[Tensor, Tensor | None, PreparedMicrobatch], Any],
    errors: ErrorCollector,
    *,
    peers: int,
    fuses: Callable[[Any, PreparedMicrobatch], bool] = lambda model, microbatch: False,
    replay: RouterReplaySession | None = None,
) -> ForwardStep:
    """Build the closure of a pass without gradient: what `compute` returns for each microbatch.

    None for one that is padding or failed.
    compute: gets logits and None; or, where the model `fuses` its LM head, hidden states and the
        head's weight
    peers: ranks that meet in collectives of `compute`
    """

    def forward_step(data: Iterator[PreparedMicrobatch], model: Any) -> tuple[Tensor, LossClosure]:
        microbatch = next(data)
        output, head_weight = run_model(model, microbatch, replay, fused=fuses(model, microbatch))

        def collect(output: Tensor, non_loss_data: bool = True) -> Any:
            with errors.collecting(peers=peers), torch.no_grad():
                found = compute(output, head_weight, microbatch)
                return None if microbatch.is_padding else found
            return None

        return output, collect

    return forward_step


def log_prob_forward_step(
    config: TrainerConfig,
    groups: ParallelGroups,
    errors: ErrorCollector,
    replay: RouterReplaySession | None = None,
) -> ForwardStep:
    """Build the closure of the log-prob pass: [R] per microbatch."""

    def fuses(model: Any, microbatch: PreparedMicrobatch) -> bool:
        rows = microbatch.response_rows
        return use_fused_head(config, model, microbatch.inputs, rows, training=False)

    def log_probs(output: Tensor, head_weight: Tensor | None, m: PreparedMicrobatch) -> Tensor:
        return response_log_probs(
            *(config, output, head_weight, m.inputs, groups, m.response_rows),
            with_entropy=False,
            kept=m.kept,
        )[0]

    return forward_only_step(log_probs, errors, peers=groups.tp_size, fuses=fuses, replay=replay)


def training_forward_step(
    config: TrainerConfig,
    groups: ParallelGroups,
    scale: LossScale,
    table: StatisticsTable,
    errors: ErrorCollector,
    replay: RouterReplaySession | None = None,
    kept_log_probs: list[Tensor | None] | None = None,
) -> ForwardStep:
    """Build the closure of the training pass: loss and metrics of a microbatch.

    kept_log_probs: gets each microbatch's log-probs [R] on the last stage, None for a padding
        microbatch
    """
    separable = takes_separable_head(config, groups.tp_size)
    loss = TrainingLoss(config, groups, scale, table, errors)

    def forward_step(data: Iterator[PreparedMicrobatch], model: Any) -> tuple[Tensor, LossClosure]:
        microbatch = next(data)
        fused = use_fused_head(
            config,
            model,
            microbatch.inputs,
            microbatch.loss_rows,
            training=True,
            separable=separable,
        )
        output, head_weight = run_model(model, microbatch, replay, fused=fused)

        def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            if separable and head_weight is not None:
                result = loss.inside_lm_head(output, head_weight, microbatch)
            else:
                result = loss.two_phases(output, head_weight, microbatch)
            if kept_log_probs is not None:
                kept_log_probs.append(None if microbatch.is_padding else result.log_probs)
            none = torch.zeros((), dtype=torch.int, device=output.device)
            return result.loss, none if result.num_tokens is None else result.num_tokens, {}

        return output, loss_of

    return forward_step


class Pipeline:
    """What the pipeline stages of a model do together.

    A collaborator of `RankModel`: a plan of a job passes one that counts messages.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups

    def run(
        self,
        forward_step: Callable[..., Any],
        chunks: Sequence[Any],
        microbatches: Sequence[PreparedMicrobatch],
        *,
        forward_only: bool = False,
    ) -> list[Any]:
        """Run one pass of the schedule that fits the layout: none, 1F1B or interleaved.

        Returns what the loss closures reported, on the last stage, in schedule order.
        """
        groups = self.groups
        schedule = get_forward_backward_func(groups.pp_size, groups.vpp_size)
        iterators = [iter(microbatches) for _ in chunks]
        rows, row_length = microbatches[0].inputs.tokens.shape
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            # Stages exchange the real shapes (variable_seq_lengths); these two only have to be
            # plausible.
            seq_length=row_length * groups.cp_size,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def from_last_stage(self, value: Any) -> Any:
        """Return the last stage's `value`, any object, on every stage."""
        if self.groups.pp_size == 1:
            return value
        boxed = [value]
        dist.broadcast_object_list(boxed, src=self._last_rank, group=self.groups.pp_group)
        return boxed[0]

    def tensor_from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return the last stage's `tensor` on every stage; it has one shape on all of them."""
        if self.groups.pp_size > 1:
            dist.broadcast(tensor, src=self._last_rank, group=self.groups.pp_group)
        return tensor

    @property
    def _last_rank(self) -> int:
        return dist.get_global_rank(self.groups.pp_group, self.groups.pp_size - 1)


def gather_responses(
    results: Sequence[Tensor | None],
    microbatches: Sequence[PreparedMicrobatch],
    starts: Sequence[Integers],
    size: int,
    group: dist.ProcessGroup,
    groups: ParallelGroups,
    device: torch.device,
    trailing: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gather per-token results [size, *trailing] of `group`, on its ranks of the last stage.

    results: on the last stage [R, *trailing] per microbatch, None where padding
    starts: per microbatch, where the response of each sample begins in the result
    Every position is written by exactly one rank, so a sum over ranks assembles them.
    """
    flat = torch.zeros((size, *trailing), dtype=dtype, device=device)
    if not groups.is_last_stage:
        return flat
    for result, microbatch, first in zip(results, microbatches, starts, strict=True):
        if result is None or microbatch.is_padding:
            continue
        shards = microbatch.inputs.shards
        places = torch.from_numpy(np.repeat(first, shards.held))
        places = places.to(device, non_blocking=True) + shards.positions
        flat[places] = result
    if group.size() > 1:
        dist.all_reduce(flat, group=group)
    return flat
