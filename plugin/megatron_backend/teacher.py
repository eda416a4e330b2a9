"""TeacherTrainer: one rank of a model that scores the policy's tokens and is never trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.logprobs.separable_lm_head import separable_log_probs
from plugin.loss.partial_objective import takes_separable_head
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.rank_model import RankModel, without_replay
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.megatron_backend.step.output_head import (
    response_log_probs,
    response_top_ids,
    use_fused_head,
)
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import ForwardStep, forward_only_step
from plugin.megatron_backend.step.sequence_packing import SequenceLayout
from plugin.ragged import Integers, Ragged
from plugin.vocabulary_ids import TOPK_IDS, TOPK_LOG_PROBS

LOG_PROBS = "teacher_log_probs"


class TeacherTrainer(RankModel):
    """A teacher in the layout of the policy; only its forward pass is used.

    It computes log-probs exactly as the policy's training pass does, down to the rows that share a
    matrix product: a teacher with the policy's weights gives the policy's log-probs bit for bit.
    Routes are its own, never replayed.

    vocab_size: of the policy; ids beyond it, with which the teacher's vocabulary is padded, are
        never among the most likely. None = the teacher's own
    """

    def __init__(
        self,
        config: TrainerConfig,
        hf_config: Any,
        groups: ParallelGroups,
        weights: str | Path | Mapping[str, Tensor],
        *,
        vocab_size: int | None = None,
        layout: SequenceLayout = "packed",
        seed: int = 1234,
    ) -> None:
        config = without_replay(config)
        super().__init__(config, hf_config, groups, layout=layout, trainable=False, seed=seed)
        self.load_hf_weights(weights)
        self._vocab_size = min(vocab_size or hf_config.vocab_size, hf_config.vocab_size)

    def _check_batch(self, batch: RolloutBatch, numbers: Integers | None = None) -> None:
        tokens, size = batch.columns["unconcat_tokens"].values, self.hf_config.vocab_size
        # A data parallel rank may have no samples.
        largest = int(tokens.max()) if len(tokens) else -1
        if largest >= size:
            raise BatchError(
                f"the policy sampled token {largest}, and the teacher has logits for {size} ids; "
                "use a teacher with the policy's vocabulary, or a policy that does not sample ids "
                "that its tokenizer lacks"
            )
        super()._check_batch(batch, numbers)

    def compute_scores(self, batch: RolloutBatch | BatchShare) -> dict[str, Ragged]:
        """The columns of a batch that a teacher fills in; undefined where the loss mask is 0.

        `teacher_log_probs` [response], and with --distill-topk `teacher_topk_ids` and
        `teacher_topk_log_probs` [response, k]. Of a whole batch: on every rank. Of a share: of its
        samples, on the last pipeline stage.
        """
        errors = ErrorCollector(self.device)
        step = self._prepared(batch, errors)
        results = self._forward_only(self._scoring_step(errors), step)
        errors.agree("the teacher's pass")
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {LOG_PROBS: ((), torch.float32)}
        if k := self.config.distill_topk:
            shapes |= {TOPK_IDS: ((k,), torch.int32), TOPK_LOG_PROBS: ((k,), torch.float32)}
        return {
            name: self._gathered(
                [None if found is None else found[name] for found in results], step, *shape
            )
            for name, shape in shapes.items()
        }

    def _scoring_step(self, errors: ErrorCollector) -> ForwardStep:
        separable = takes_separable_head(self.config, self.groups.tp_size)

        def fuses(model: Any, microbatch: PreparedMicrobatch) -> bool:
            return use_fused_head(
                *(self.config, model, microbatch.inputs, microbatch.loss_rows),
                training=True,
                separable=separable,
            )

        def scores(
            output: Tensor, head_weight: Tensor | None, microbatch: PreparedMicrobatch
        ) -> dict[str, Tensor]:
            if separable and head_weight is not None:
                return self._scores_in_blocks(output, head_weight, microbatch)
            return self._scores(output, head_weight, microbatch)

        return forward_only_step(scores, errors, peers=self.groups.tp_size, fuses=fuses)

    def _scores(
        self, output: Tensor, head_weight: Tensor | None, microbatch: PreparedMicrobatch
    ) -> dict[str, Tensor]:
        """As `TrainingLoss.two_phases` computes them, with the entropy that is not needed here."""
        config, inputs, groups = self.config, microbatch.inputs, self.groups
        ids = None
        if config.distill_topk is not None:
            ids = response_top_ids(
                *(config, output, head_weight, inputs, groups, config.distill_topk),
                self._vocab_size,
            )
        log_probs, _, of_ids = response_log_probs(
            *(config, output, head_weight, inputs, groups, microbatch.loss_rows),
            kept=microbatch.kept,
            ids=ids,
        )
        found = {LOG_PROBS: log_probs}
        if ids is not None and of_ids is not None:
            found |= {TOPK_IDS: ids.int(), TOPK_LOG_PROBS: of_ids}
        return found

    def _scores_in_blocks(
        self, hidden: Tensor, head_weight: Tensor, microbatch: PreparedMicrobatch
    ) -> dict[str, Tensor]:
        """As `TrainingLoss.inside_lm_head` computes them."""
        inputs, index = microbatch.inputs, microbatch.loss_tokens
        log_probs = separable_log_probs(
            hidden.reshape(-1, hidden.shape[-1]),
            head_weight,
            inputs.targets[index],
            rows=inputs.rows[index],
            temperature=self.config.rollout_temperature,
            kept=microbatch.loss_kept,
            entropy_of=self.config.entropy_of,
        )
        whole = log_probs.new_zeros(inputs.targets.numel())
        return {LOG_PROBS: whole.index_copy(0, index, log_probs)}
