"""The loss of one microbatch in the training pass, from logits or hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.logprobs.separable_lm_head import separable_lm_head
from plugin.loss.distillation import TeacherSupport, topk_reverse_kl
from plugin.loss.inputs import KnownTokens
from plugin.loss.interfaces import LossInputs, LossOutputs
from plugin.loss.normalization import token_weights
from plugin.loss.objective import compute_loss
from plugin.loss.partial_objective import differs, losses_of_part
from plugin.loss.score_centering import RolloutHead
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.megatron_backend.step.loss_scaling import LossScale
from plugin.megatron_backend.step.output_head import response_log_probs
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.step_metrics import record_step
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.sharding.parallel_context import use_parallel_context


class MicrobatchLoss(NamedTuple):
    """Loss and token count of a loss closure, and the log-probs [R]; None where it failed."""

    loss: Tensor
    log_probs: Tensor | None = None
    num_tokens: Tensor | None = None


@dataclass
class TrainingLoss:
    """Computes losses and records them in the step's table.

    An error is collected and the loss becomes zero, but stays attached: the backward pass of a rank
    that fails still takes part in every collective of the LM head and of the model.
    """

    config: TrainerConfig
    groups: ParallelGroups
    scale: LossScale
    table: StatisticsTable
    errors: ErrorCollector

    def two_phases(
        self, output: Tensor, head_weight: Tensor | None, microbatch: PreparedMicrobatch
    ) -> MicrobatchLoss:
        """Log-probs of all tokens first, then the loss of all tokens.

        output: logits [B, S_local, V/tp], or with `head_weight` [V/tp, H] hidden states [B,
            S_local, H]
        """
        support: TeacherSupport | None = None
        head: RolloutHead | None = None
        with self.errors.collecting():
            if self.config.distill_topk is not None:
                support = TeacherSupport.of(microbatch.columns, microbatch.inputs.shards)
            head = RolloutHead.of(self.config, microbatch.columns, microbatch.inputs.shards)
        likeliest = support or head
        cur, entropy, of_ids = response_log_probs(
            self.config,
            output,
            head_weight,
            microbatch.inputs,
            self.groups,
            microbatch.loss_rows,
            kept=microbatch.kept,
            ids=None if likeliest is None else likeliest.ids,
        )
        failed = MicrobatchLoss(cur[:0].sum(), cur.detach())
        with self._collecting():
            known = KnownTokens.of(self.config, microbatch.columns, microbatch.inputs.shards)
            further: dict[str, Any] = {}
            if support is not None and of_ids is not None:
                further["distill_kl"] = topk_reverse_kl(of_ids, support.log_probs, known.mask)
            if head is not None and of_ids is not None:
                further["head"] = head.at_policy(of_ids, known.mask)
            inputs = known.at_policy(self.config, cur, entropy, **further)
            outputs = compute_loss(self.config, inputs, with_weights=True)
            loss, tokens = self._reduce(
                microbatch, inputs, outputs, self._weights(known, microbatch)
            )
            return MicrobatchLoss(loss, cur.detach(), tokens)
        return failed

    def inside_lm_head(
        self, hidden: Tensor, head_weight: Tensor, microbatch: PreparedMicrobatch
    ) -> MicrobatchLoss:
        """Each block's loss while its logits exist; then the whole loss again for the metrics.

        hidden: [B, S_local, H]; head_weight: [V, H]
        """
        config, layout = self.config, microbatch.inputs
        attached = [tensor.reshape(-1)[:0].float().sum() for tensor in (hidden, head_weight)]
        failed = MicrobatchLoss(attached[0] + attached[1])
        with self._collecting():
            known = KnownTokens.of(config, microbatch.columns, layout.shards)
            weights = self._weights(known, microbatch)
            index = microbatch.loss_tokens
            losses = weights.new_zeros(index.numel())

            def row_losses(block: slice, log_probs: Tensor, entropy: Tensor) -> Tensor:
                tokens = index[block]
                values = losses_of_part(config, known, tokens, log_probs, entropy) * weights[tokens]
                losses[block] = values.detach()
                return values

            log_probs, entropies, anchor = separable_lm_head(
                hidden.reshape(-1, hidden.shape[-1]),
                head_weight,
                layout.targets[index],
                row_losses,
                rows=layout.rows[index],
                temperature=config.rollout_temperature,
                expected_gradient=self.scale.gradient_of_weighted_sum,
                kept=microbatch.loss_kept,
                entropy_of=config.entropy_of,
            )
            cur, entropy = (
                torch.zeros_like(weights).index_copy(0, index, values)
                for values in (log_probs, entropies)
            )
            failed = MicrobatchLoss(anchor * 0.0, cur)
            with torch.no_grad():
                inputs = known.at_policy(config, cur, entropy)
                outputs = compute_loss(config, inputs, with_weights=True)
                if config.validates_on(hidden.device):
                    _require_separable(losses, (outputs.total * weights)[index])
                value, tokens = self._reduce(microbatch, inputs, outputs, weights)
            carrier, _ = self.scale.for_megatron(anchor, tokens)
            return MicrobatchLoss(carrier + value, cur, tokens)
        return failed

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Collect errors of a loss; its sequence-level parts communicate over CP ranks."""
        with (
            self.errors.collecting(peers=self.groups.cp_size),
            use_parallel_context(loss_context(self.groups)),
        ):
            yield

    def _weights(self, known: KnownTokens, microbatch: PreparedMicrobatch) -> Tensor:
        return token_weights(
            known.shards,
            known.mask,
            known.loss_masks,
            per_token=self.config.per_token,
            mask_sums=microbatch.columns.get("rollout_mask_sums"),
        )

    def _reduce(
        self,
        microbatch: PreparedMicrobatch,
        inputs: LossInputs,
        outputs: LossOutputs,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Record the microbatch; return (loss, num_tokens) as a loss closure returns them."""
        record_step(self.table, self.config, inputs, outputs, weights, microbatch.columns)
        weighted = torch.where(weights > 0, outputs.total, 0.0) * weights
        return self.scale.for_megatron(weighted.sum(), outputs.denominator.sum())


def _require_separable(apart: Tensor, together: Tensor) -> None:
    if differs(apart, together):
        off, largest = (apart - together).abs().max(), together.abs().max()
        raise BatchError(
            "the loss or a correction is declared @token_separable, but a token's loss differs by "
            f"{float(off):.3g} (of at most {float(largest):.3g}) when computed separately; "
            "remove the declaration, or --separable-fast-path off"
        )
