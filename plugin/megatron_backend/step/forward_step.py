"""The two closures that Megatron's schedules call: the log-prob pass and the training pass.

A schedule calls `forward_step(data_iterator, model)` for every microbatch and model chunk, and gets
the chunk's output and, for the last stage, a function that turns that output into a loss. An error
inside such a function is collected and the rank goes on with a loss of zero, so that it keeps
taking part in the collectives of the others; one that leaves a peer in the middle of the function
is raised (see `rank_agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.loss.separable_loss import takes_separable_head
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
