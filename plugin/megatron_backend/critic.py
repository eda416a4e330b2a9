"""CriticTrainer: one rank of a value model, on the backbone of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.loss.normalization import token_weights
from plugin.loss.policy_losses import clipped_value_loss
from plugin.megatron_backend.model.family_layers import WholeWeight
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.rank_model import RankModel, without_replay
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.megatron_backend.step.loss_scaling import LossScale
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import (
    ForwardStep,
    LossClosure,
    forward_only_step,
    run_model,
)
from plugin.megatron_backend.step.sequence_packing import SequenceLayout
from plugin.megatron_backend.trainer import StepResult
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.ragged import Ragged


class ValueHead(WholeWeight):
    """Replaces the LM head: one number per token, the same on all tensor parallel ranks.

    The weight starts at 0, so a critic predicts 0 before its first update.
    """

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        zeros = torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        super().__init__(config, zeros, tp_group)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Hidden states [S, B, H] (this rank's slice of S under SP) -> values [S, B, 1]."""
        if self.config.sequence_parallel:
            # Every rank computes the whole sequence, so each already has the whole gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return F.linear(hidden, self.weight), None


class CriticTrainer(RankModel):
    """Value model and optimizer of one rank; weights of the backbone come from a policy.

    Routes are never replayed: they are the policy's.
    """

    def __init__(
        self,
        config: TrainerConfig,
        hf_config: Any,
        groups: ParallelGroups,
        weights: str | Path | Mapping[str, Tensor],
        *,
        value_clip: float | None,
        layout: SequenceLayout = "packed",
        seed: int = 1234,
    ) -> None:
        config = without_replay(config)
        super().__init__(config, hf_config, groups, layout=layout, trainable=False, seed=seed)
        self.value_clip = value_clip
        self.load_hf_weights(weights)
        for model in self.chunks:
            # The LM head is gone, so a tied one is no longer shared with the embedding.
            model.share_embeddings_and_output_weights = False
            if model.post_process:
                model.output_layer = ValueHead(model.config, groups.tp_group).to(self.device)
        self._add_optimizer()

    def compute_values(self, batch: RolloutBatch | BatchShare) -> Ragged:
        """Values [response] of every sample, each before its token is known.

        Of a whole batch: on every rank. Of a share: of its samples, on the last pipeline stage.
        """
        errors = ErrorCollector(self.device)
        step = self._prepared(batch, errors)
        forward_step = forward_only_step(
            lambda output, _, microbatch: _response_values(output, microbatch), errors, peers=1
        )
        results = self._forward_only(forward_step, step)
        errors.agree("the critic's pass")
        return self._gathered(results, step)

    def train_critic(self, batch: RolloutBatch | BatchShare) -> StepResult:
        """One optimizer step towards `returns`; needs `values`, those before the first step."""
        assert self.optimizer is not None
        errors = ErrorCollector(self.device)
        with errors.collecting():
            columns = batch.batch if isinstance(batch, BatchShare) else batch
            for name in ("values", "returns"):
                if name not in columns:
                    raise BatchError(f"the batch has no {name}; compute values and returns first")
        step = self._prepared(batch, errors)
        table = StatisticsTable(self.device)
        scale = self._begin_update(step)
        forward_step = self._training_step(scale, table, errors)
        self.pipeline.run(forward_step, self.chunks, step.microbatches)
        last = self.groups.is_last_stage
        errors.agree("the critic's step", table.digest() if last else None)
        metrics = table.reduced(self.groups.dp_cp_group).means() if last else None
        metrics = self.pipeline.from_last_stage(metrics)
        if self.optimizer.scaler is not None:
            metrics["critic/loss_scale"] = self.optimizer.loss_scale
        updated, grad_norm = self.optimizer.step()
        metrics["critic/grad_norm"] = grad_norm
        metrics["critic/skipped_steps"] = float(self.optimizer.skipped_steps)
        return StepResult(metrics, updated, grad_norm, overflow=self.optimizer.overflowed)

    def _training_step(
        self, scale: LossScale, table: StatisticsTable, errors: ErrorCollector
    ) -> ForwardStep:
        def forward_step(
            data: Iterator[PreparedMicrobatch], model: Any
        ) -> tuple[Tensor, LossClosure]:
            microbatch = next(data)
            output, _ = run_model(model, microbatch, None, fused=False)

            def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                values = _response_values(output, microbatch)
                # Attached also where it fails: the backward pass has collectives.
                loss = values.sum() * 0.0
                tokens = torch.zeros((), dtype=torch.int, device=output.device)
                with errors.collecting():
                    loss, tokens = self._loss(values, microbatch, scale, table)
                return loss, tokens, {}

            return output, loss_of

        return forward_step

    def _loss(
        self,
        values: Tensor,
        microbatch: PreparedMicrobatch,
        scale: LossScale,
        table: StatisticsTable,
    ) -> tuple[Tensor, Tensor]:
        columns, shards = microbatch.columns, microbatch.inputs.shards
        masks = Ragged.of(columns["loss_masks"])
        mask = shards.local_mask(masks)
        old, returns = (shards.flat(name, columns[name]) for name in ("values", "returns"))
        assert old is not None and returns is not None
        losses, clipped = clipped_value_loss(values, old, returns, mask, self.value_clip)
        weights = token_weights(
            shards,
            mask,
            masks,
            per_token=self.config.per_token,
            mask_sums=columns.get("rollout_mask_sums"),
        )
        weighted = losses * weights
        table.add("critic/loss:sum", weighted.detach().double().sum())
        table.add("critic/loss:count", weights.double().sum())
        table.add_mean("critic/clipped", clipped.float(), mask)
        return scale.for_megatron(weighted.sum(), mask.sum())


def _response_values(output: Tensor, microbatch: PreparedMicrobatch) -> Tensor:
    """[R] float32: the values at the rows that predict the local response tokens."""
    return output.reshape(-1)[microbatch.inputs.rows].float()
