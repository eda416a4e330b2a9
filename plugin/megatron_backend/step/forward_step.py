"""The two closures that Megatron's schedules call: the log-prob pass and the training pass.

A schedule calls `forward_step(data_iterator, model)` for every microbatch and model chunk, and gets the chunk's
output and, for the last stage, a function that turns that output into a loss. Everything that can be done
before the schedule starts is done in `prepare`, where an error can still be raised on all ranks together; an
error inside a loss closure is collected and the rank goes on with a loss of zero, so that it keeps
taking part in the collectives of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.batch_types import FIELDS, Microbatch
from plugin.config import TrainerConfig
from plugin.loss.interfaces import LossInputs, LossOutputs
from plugin.loss.normalization import kept_token_scale, token_weights
from plugin.loss.policy_loss import compute_loss, loss_inputs
from plugin.loss.token_program import TokenProgram
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.megatron_backend.routing.router_replay import RouterReplaySession
from plugin.megatron_backend.step.loss_scaling import LossScale
from plugin.megatron_backend.step.output_head import (
    passed_over_output_layer,
    response_log_probs,
    use_fused_head,
)
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.separable_path import SeparableMicrobatch, separable_program
from plugin.megatron_backend.step.sequence_packing import (
    ModelInputs,
    SequenceLayout,
    model_inputs,
    row_length,
)
from plugin.megatron_backend.step.step_metrics import record_step
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.sharding.parallel_context import use_parallel_context

LossClosure = Callable[..., Any]


class MicrobatchLoss(NamedTuple):
    """The loss and token count as Megatron wants them, and the log-probs [R]; it failed where they are None."""

    loss: Tensor
    log_probs: Tensor | None = None
    num_tokens: Tensor | None = None


@dataclass(frozen=True)
class PreparedMicrobatch:
    """A microbatch ready for the model: its layout and the columns that its loss needs, local to this rank.

    response_rows, loss_rows: bool [B * S_local] on the CPU, the rows that predict a response token, and those of
        them whose loss mask is 1
    """

    number: int
    inputs: ModelInputs
    columns: dict[str, Any]
    is_padding: bool
    response_rows: Tensor
    loss_rows: Tensor


def prepare(
    microbatches: Sequence[Microbatch],
    groups: ParallelGroups,
    *,
    layout: SequenceLayout = "packed",
    transformer_engine: bool = False,
    sequence_parallel: bool = False,
    device: torch.device | str = "cpu",
) -> list[PreparedMicrobatch]:
    """Lay out every microbatch of a step for this rank."""
    at_least = 0
    if groups.vpp_size:
        # The interleaved schedule announces the shapes of its messages to the next and to the previous stage at
        # once. With two stages these are one peer, and the shapes of different microbatches come out swapped.
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
            device=device,
        )
        columns = _local_columns(microbatch, inputs)
        rows = _needed_rows(microbatch, inputs)
        prepared.append(PreparedMicrobatch(number, inputs, columns, microbatch.is_padding, *rows))
    return prepared


def _needed_rows(microbatch: Microbatch, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
    masks = [torch.as_tensor(mask).cpu() for mask in microbatch.batch.columns["loss_masks"]]
    response = torch.zeros(inputs.tokens.numel(), dtype=torch.bool)
    with_loss = response.clone()
    rows = inputs.rows.cpu()
    response[rows] = True
    with_loss[rows] = inputs.shards.local(masks) != 0
    return response, with_loss


def _local_columns(microbatch: Microbatch, inputs: ModelInputs) -> dict[str, Any]:
    """Per-token columns cut to this CP rank's tokens; masks stay whole, as corrections expect them."""
    columns = dict(microbatch.batch.columns)
    for name, values in columns.items():
        if FIELDS[name].shape == "response" and name != "loss_masks":
            local = inputs.shards.local([torch.as_tensor(value) for value in values])
            columns[name] = list(local.split(inputs.shards.local_lengths))
    device = inputs.shards.device
    columns["loss_masks"] = [torch.as_tensor(mask).to(device) for mask in columns["loss_masks"]]
    return columns


class ModelRunner:
    """Calls the model for a microbatch, inside its replay, with the output layer fused where that was chosen."""

    def __init__(
        self,
        config: TrainerConfig,
        groups: ParallelGroups,
        replay: RouterReplaySession | None = None,
        *,
        training: bool,
    ) -> None:
        self.config, self.groups, self.replay, self.training = config, groups, replay, training

    def __call__(
        self, model: Any, microbatch: PreparedMicrobatch, *, separable: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weight of the LM head if the output is hidden states of the last stage)."""
        inputs = microbatch.inputs
        rows = microbatch.loss_rows if self.training else microbatch.response_rows
        fused = use_fused_head(
            self.config.fused_lm_head,
            model,
            inputs,
            int(rows.sum()),
            training=self.training,
            separable=separable,
        )
        with (
            nullcontext() if self.replay is None else self.replay.microbatch(microbatch.number),
            passed_over_output_layer(model) if fused else nullcontext() as weights,
        ):
            output = model(
                input_ids=inputs.tokens,
                position_ids=inputs.position_ids,
                attention_mask=None,
                packed_seq_params=inputs.packed_seq_params,
            )
        return output, weights[0] if weights else None

    def log_probs(
        self,
        output: Tensor,
        head_weight: Tensor | None,
        microbatch: PreparedMicrobatch,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob and entropy [R] of the microbatch's local response tokens."""
        return response_log_probs(
            output,
            head_weight,
            microbatch.inputs,
            self.groups,
            temperature=self.config.rollout_temperature,
            row_mask=microbatch.loss_rows if self.training else microbatch.response_rows,
            sequence_parallel=self.config.sequence_parallel,
            **options,
        )


def log_prob_forward_step(
    config: TrainerConfig,
    groups: ParallelGroups,
    errors: ErrorCollector,
    replay: RouterReplaySession | None = None,
) -> Callable[[Iterator[PreparedMicrobatch], Any], tuple[Tensor, LossClosure]]:
    """Closure of the log-prob pass: collects [R] log-probs per microbatch (None where padding or failed)."""

    runner = ModelRunner(config, groups, replay, training=False)

    def forward_step(data: Iterator[PreparedMicrobatch], model: Any) -> tuple[Tensor, LossClosure]:
        microbatch = next(data)
        output, head_weight = runner(model, microbatch)

        def collect(output: Tensor, non_loss_data: bool = True) -> Tensor | None:
            with errors.collecting(), torch.no_grad():
                log_probs, _ = runner.log_probs(output, head_weight, microbatch, with_entropy=False)
                return None if microbatch.is_padding else log_probs
            return None

        return output, collect

    return forward_step


def training_forward_step(
    config: TrainerConfig,
    groups: ParallelGroups,
    scale: LossScale,
    table: StatisticsTable,
    errors: ErrorCollector,
    replay: RouterReplaySession | None = None,
    kept_log_probs: list[Tensor | None] | None = None,
) -> Callable[[Iterator[PreparedMicrobatch], Any], tuple[Tensor, LossClosure]]:
    """Closure of the training pass: policy loss, corrections, regularizers and metrics of a microbatch.

    kept_log_probs: gets each microbatch's log-probs [R] on the last stage, None for a padding microbatch
    """

    runner = ModelRunner(config, groups, replay, training=True)

    def two_phase_loss(
        output: Tensor, head_weight: Tensor | None, microbatch: PreparedMicrobatch
    ) -> MicrobatchLoss:
        cur, entropy = runner.log_probs(
            output,
            head_weight,
            microbatch,
            entropy_grad=config.entropy_coef != 0,
            inplace_grad=config.inplace_logits_grad,
        )
        # The loss of a rank that fails: zero, and attached, so that its backward pass still takes part in
        # every collective of the LM head and of the model.
        failed = MicrobatchLoss(cur[:0].sum(), cur.detach())
        with errors.collecting(), use_parallel_context(loss_context(groups)):
            loss, tokens = _microbatch_loss(config, scale, table, microbatch, cur, entropy)
            return MicrobatchLoss(loss, cur.detach(), tokens)
        return failed

    def separable_loss(
        program: TokenProgram,
        output: Tensor,
        head_weight: Tensor | None,
        microbatch: PreparedMicrobatch,
    ) -> MicrobatchLoss:
        attached = [tensor for tensor in (output, head_weight) if tensor is not None]
        failed = MicrobatchLoss(
            torch.stack([t.reshape(-1)[:0].float().sum() for t in attached]).sum()
        )
        with errors.collecting(), use_parallel_context(loss_context(groups)):
            rows = SeparableMicrobatch(config, program, microbatch.inputs, microbatch.columns)
            cur, entropy, anchor = rows.log_probs(
                output, head_weight, microbatch.loss_rows, scale.gradient_of_weighted_sum
            )
            failed = MicrobatchLoss(anchor * 0.0, cur)
            with torch.no_grad():
                value, tokens = _microbatch_loss(
                    config, scale, table, microbatch, cur, entropy, verify=rows.verify
                )
            carrier, _ = scale.for_megatron(anchor, tokens)
            return MicrobatchLoss(carrier + value, cur, tokens)
        return failed

    def forward_step(data: Iterator[PreparedMicrobatch], model: Any) -> tuple[Tensor, LossClosure]:
        microbatch = next(data)
        program = _program(config, groups, microbatch)
        output, head_weight = runner(model, microbatch, separable=program is not None)

        def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            if program is None:
                result = two_phase_loss(output, head_weight, microbatch)
            else:
                result = separable_loss(program, output, head_weight, microbatch)
            if kept_log_probs is not None:
                kept_log_probs.append(None if microbatch.is_padding else result.log_probs)
            none = torch.zeros((), dtype=torch.int, device=output.device)
            return result.loss, none if result.num_tokens is None else result.num_tokens, {}

        return output, loss_of

    return forward_step


def _program(
    config: TrainerConfig, groups: ParallelGroups, microbatch: PreparedMicrobatch
) -> TokenProgram | None:
    """The program of a loss that is evaluated row by row; None for the two-phase path."""
    has_train = config.use_rollout_logprobs or microbatch.columns.get("log_probs") is not None
    return separable_program(config, groups.tp_size, microbatch.inputs.tokens.device, has_train)


def _microbatch_loss(
    config: TrainerConfig,
    scale: LossScale,
    table: StatisticsTable,
    microbatch: PreparedMicrobatch,
    cur: Tensor,
    entropy: Tensor | None,
    verify: Callable[[LossInputs], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, count) of one microbatch as Megatron wants them, from log-probs and entropy [R]."""
    inputs = loss_inputs(config, microbatch.columns, cur, entropy)
    if verify is not None:
        verify(inputs)
    outputs = compute_loss(config, config, inputs)
    weights = token_weights(
        inputs.shards,
        inputs.mask,
        inputs.loss_masks,
        per_token=config.per_token,
        mask_sums=microbatch.columns.get("rollout_mask_sums"),
    )
    policy, denominator = _policy_loss(config, inputs, outputs)
    total = policy
    for term in outputs.regularizers:
        if term.coefficient:
            total = total + term.coefficient * term.values
    record_step(
        table, config, inputs, outputs, weights, policy, total, denominator, microbatch.columns
    )
    weighted = (torch.where(weights > 0, total, 0.0) * weights).sum()
    return scale.for_megatron(weighted, denominator.sum())


def _policy_loss(
    config: TrainerConfig, inputs: LossInputs, outputs: LossOutputs
) -> tuple[Tensor, Tensor]:
    """The policy loss [T] and the tokens (bool [T]) in the denominator of a per-token mean."""
    if config.loss_denominator == "original":
        return outputs.policy.loss, inputs.mask
    if config.per_token:
        return outputs.policy.loss, outputs.policy.kept
    scale = kept_token_scale(outputs.policy.kept, inputs.mask, inputs.shards)
    return outputs.policy.loss * scale, inputs.mask
