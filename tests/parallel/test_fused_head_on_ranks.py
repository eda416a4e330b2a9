"""The fused LM head inside real training steps: the same step as through logits, on every kind of rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.logprobs.fused_lm_head import fused_log_probs_of_ids
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step import output_head
from plugin.megatron_backend.trainer import MegatronTrainer, StepResult
from tests.parallel import tiny_models
from tests.parallel.training_jobs import (
    SMOOTH_ADAM,
    Case,
    Layout,
    RunRanks,
    differences,
    exported,
    global_batch,
    metric_differences,
    run_cases,
)

THROUGH_LOGITS = Case(settings={"fused_lm_head": "off", "entropy_coef": 0.01})
LAYOUTS = {
    "one process": (Layout(), {}),
    "TP2": (Layout(2, {"tensor_model_parallel_size": 2}), {}),
    "TP2 with SP": (Layout(2, {"tensor_model_parallel_size": 2}), {"sequence_parallel": True}),
    "PP2": (Layout(2, {"pipeline_model_parallel_size": 2}), {}),
    "DP2 with padding": (Layout(2), {"max_tokens_per_gpu": 30}),
}


@pytest.mark.slow  # tests/parallel/test_layout_equality.py has a shorter form
def test_fused_and_through_logits_give_the_same_step_on_every_layout(run_ranks) -> None:
    want = run_cases(run_ranks, Layout(), {"logits": THROUGH_LOGITS.uncut()})["logits"]
    for name, (layout, settings) in LAYOUTS.items():
        cases = {
            choice: THROUGH_LOGITS.cut(fused_lm_head=choice, **settings)
            for choice in ("on", "auto")
        }
        for choice, got in run_cases(run_ranks, layout, cases).items():
            found = differences(got, want, THROUGH_LOGITS.family)
            assert not found, (name, choice, found)


def step_of_odd_vocabulary(
    groups: ParallelGroups, config: Any, weights: dict[str, Tensor], batch: Any, settings: Any
) -> tuple[StepResult, dict[str, Tensor], int]:
    """A step of a model whose vocabulary the ranks do not divide, and how many fused heads it ran."""
    settings = {**SMOOTH_ADAM, "tensor_model_parallel_size": groups.tp_size, **settings}
    trainer = MegatronTrainer(TrainerConfig(**settings), config, groups)
    trainer.load_hf_weights(weights)
    with mock.patch.object(
        output_head, "fused_log_probs_of_ids", wraps=fused_log_probs_of_ids
    ) as fused:
        result = trainer.train_step(batch)
    return result, exported(trainer), fused.call_count


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"sequence_parallel": True}, marks=pytest.mark.slow)]
)
def test_the_head_stays_fused_where_the_vocabulary_is_padded(
    run_ranks: RunRanks, settings: dict[str, Any]
) -> None:
    # 97 = 2 * 49 - 1: the second rank holds one row of padding; the embedding is the output layer.
    config = tiny_models.tiny_qwen3(vocab_size=97, tie_word_embeddings=True)
    weights = tiny_models.hf_state_dict(config)
    arguments = step_of_odd_vocabulary, config, weights, global_batch("qwen3")
    [(one, wanted, _)] = run_ranks(
        arguments[0], 1, *arguments[1:], {"fused_lm_head": "off", "entropy_coef": 0.01}
    )
    for result, got, calls in run_ranks(
        arguments[0],
        2,
        *arguments[1:],
        {"fused_lm_head": "on", "entropy_coef": 0.01, **settings},
        tensor_model_parallel_size=2,
    ):
        assert calls > 0 and not metric_differences(result, one, 1e-5)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
