"""A teacher in the job: the same scores and steps on every layout, and exactly nothing from one's own weights."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.logprobs import lm_head_tiles
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.teacher import TeacherTrainer
from plugin.ragged import Ragged
from plugin.vocabulary_ids import TOPK_IDS, TOPK_LOG_PROBS
from tests.parallel import tiny_models
from tests.parallel.rank_pool import RankError
from tests.parallel.training_jobs import (
    Layout,
    Outcome,
    RunRanks,
    Start,
    differences,
    exported,
    new_trainer,
)

#: Teacher alone: what remains of a step is what the teacher says.
ALONE = {"policy_loss": "reinforce", "adv_tau": 0.0}
TOKEN = {**ALONE, "teacher_tau": 0.7}
TOPK = {**ALONE, "teacher_tau": 0.3, "distill_topk": 5, "distill_coef": 0.8}
ONE_BY_ONE = {"micro_batch_size": 1}  # 9 microbatches: two ranks have a padding one besides

LAYOUTS = {
    "DP2": Layout(2),
    "TP2": Layout(2, {"tensor_model_parallel_size": 2}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "CP2": Layout(2, {"context_parallel_size": 2}),
}


_in_one_process: dict[str, tuple[dict[str, Ragged], Outcome]] = {}
"""What one process gave, by problem: every layout is compared with it."""


def with_scores(batch: RolloutBatch, scores: dict[str, Ragged]) -> RolloutBatch:
    """The batch with what a teacher says, and garbage where nothing may be computed with it."""
    masked = batch.columns["loss_masks"].values == 0
    for name, column in scores.items():
        values = column.values.clone()
        values[masked] = 10**6 if name.endswith("ids") else math.nan
        batch = batch.with_column(name, column.like(values))
    return batch


def taught_steps(
    groups: ParallelGroups, start: Start, problems: dict[str, dict[str, Any]], own_weights: bool
) -> dict[str, tuple[dict[str, Ragged], Outcome]]:
    """By problem: the teacher's scores, and two steps on them (one where the teacher is the policy)."""
    found = {}
    for name, settings in problems.items():
        trainer = new_trainer(groups, start, settings)
        weights = dict(start.weights)
        if not own_weights:
            generator = torch.Generator().manual_seed(5)
            weights = {
                key: value + 0.1 * value.std() * torch.randn(value.shape, generator=generator)
                for key, value in weights.items()
            }
        hf_config = tiny_models.FAMILIES[start.family]()
        teacher = TeacherTrainer(trainer.config, hf_config, groups, weights)
        # Columns in several tiles, as of a large vocabulary: ways through the head then round apart.
        with patch.dict(lm_head_tiles.TILE_BYTES, {"cpu": 128} if own_weights else {}):
            scores = teacher.compute_scores(start.batch)
            batch = with_scores(start.batch, scores)
            steps = [trainer.train_step(batch) for _ in range(1 if own_weights else 2)]
        updated = exported(trainer)
        found[name] = scores, Outcome([], steps, updated if groups.rank == 0 else None)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_teacher_gives_the_scores_and_steps_of_one_process(
    run_ranks: RunRanks, name: str
) -> None:
    start, layout = Start.of("qwen3"), LAYOUTS[name]
    problems = {"token": TOKEN, "topk": TOPK}
    if not _in_one_process:
        whole = {"micro_batch_size": 64, "fused_lm_head": "off"}
        uncut = {key: {**p, **whole} for key, p in problems.items()}
        _in_one_process.update(run_ranks(taught_steps, 1, start, uncut, False)[0])
    expected = _in_one_process
    cut = {key: {**p, **ONE_BY_ONE} for key, p in problems.items()}
    cut["topk, fused"] = {**TOPK, **ONE_BY_ONE, "fused_lm_head": "on"}
    by_rank = run_ranks(taught_steps, layout.ranks, start, cut, False, **layout.sizes)
    mask = start.batch.columns["loss_masks"].values != 0
    for problem, (scores, outcome) in by_rank[0].items():
        theirs, wanted = expected[problem.split(",")[0]]
        found = differences(outcome, wanted, "qwen3")
        assert not found, f"{problem}: {found[:5]}"
        assert scores.keys() == theirs.keys()
        for column, values in scores.items():
            mine, other = values.values[mask], theirs[column].values[mask]
            if column.endswith("ids"):
                assert torch.equal(mine, other)
            else:
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        metrics = outcome.steps[0].metrics
        assert metrics["teacher_kl"] != 0 and outcome.steps[0].grad_norm > 1e-3
        assert ("distill_kl" in metrics) == ("topk" in problem)
        assert metrics.get("distill_kl", 1.0) > 0
        assert (metrics["padding_microbatch_share"] > 0) == (name == "DP2")


@pytest.mark.parametrize("name", ["one process", *LAYOUTS])
def test_a_teacher_with_the_weights_of_the_policy_gives_exactly_nothing(
    run_ranks: RunRanks, name: str
) -> None:
    layout = LAYOUTS.get(name, Layout())
    problems = {
        "inside the head": TOKEN,
        "token": {**TOKEN, "separable_fast_path": "off"},
        "logits": {**TOPK, "fused_lm_head": "off"},
        "fused": {**TOPK, "fused_lm_head": "on"},
    }
    start = Start.of("qwen3")
    problems = {key: {**p, **ONE_BY_ONE} for key, p in problems.items()}
    by_rank = run_ranks(taught_steps, layout.ranks, start, problems, True, **layout.sizes)
    for problem, (_, outcome) in by_rank[0].items():
        (step,) = outcome.steps
        assert step.metrics["teacher_kl"] == 0.0, problem
        assert step.metrics.get("distill_kl", 0.0) == 0.0, problem
        assert step.metrics["loss"] == 0.0 and step.grad_norm == 0.0, problem


def padded_scores(
    groups: ParallelGroups, start: Start, heads: tuple[str, ...]
) -> list[dict[str, Ragged]]:
    """Scores by a teacher whose vocabulary is padded with 13 ids, the likeliest of all."""
    vocabulary = tiny_models.VOCAB_SIZE
    weights = dict(start.weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own = weights[name]
        # Beside every hidden state there is a padded row with a large logit, or with its negative.
        weights[name] = torch.cat([own, 30.0 * own[:13]])
    found = []
    for head in heads:
        trainer = new_trainer(groups, start, {**TOPK, **ONE_BY_ONE, "fused_lm_head": head})
        hf_config = tiny_models.FAMILIES[start.family](vocab_size=vocabulary + 13)
        teacher = TeacherTrainer(trainer.config, hf_config, groups, weights, vocab_size=vocabulary)
        found.append(teacher.compute_scores(start.batch))
    return found


def test_ids_that_only_the_teacher_has_are_never_among_the_likeliest(run_ranks: RunRanks) -> None:
    start, heads = Start.of("qwen3"), ("off", "on")
    mask = start.batch.columns["loss_masks"].values != 0
    whole = run_ranks(padded_scores, 1, start, heads)[0]
    cut = run_ranks(padded_scores, 2, start, heads, **LAYOUTS["TP2"].sizes)[0]
    expected = whole[0][TOPK_IDS].values[mask]
    assert int(expected.max()) < tiny_models.VOCAB_SIZE
    for scores in (*whole, *cut):
        assert torch.equal(scores[TOPK_IDS].values[mask], expected)
        # The padding took most of the probability, and it still counts.
        log_probs = scores[TOPK_LOG_PROBS].values[mask]
        assert float(log_probs.exp().sum(1).median()) < 0.5


def small_teacher(groups: ParallelGroups, start: Start) -> None:
    trainer = new_trainer(groups, start, TOKEN)
    weights = dict(start.weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:50]
    hf_config = tiny_models.FAMILIES[start.family](vocab_size=50)
    TeacherTrainer(trainer.config, hf_config, groups, weights).compute_scores(start.batch)


def test_a_token_that_the_teacher_lacks_is_an_error_that_names_the_teacher(
    run_ranks: RunRanks,
) -> None:
    with pytest.raises(RankError, match="sampled token 95, and the teacher has logits for 50 ids"):
        run_ranks(small_teacher, 1, Start.of("qwen3"))


def scores_of_a_share(groups: ParallelGroups, start: Start) -> list[int]:
    """Lengths of what the teacher says of this rank's share of one sample."""
    trainer = new_trainer(groups, start, TOKEN)
    hf_config = tiny_models.FAMILIES[start.family]()
    teacher = TeacherTrainer(trainer.config, hf_config, groups, start.weights)
    scores = teacher.compute_scores(teacher._share_of(start.batch.select([0])))
    return [len(values) for values in scores["teacher_log_probs"]]


def test_a_rank_without_samples_has_no_scores(run_ranks: RunRanks) -> None:
    start = Start.of("qwen3")
    length = int(start.batch.columns["response_lengths"][0])
    assert sorted(run_ranks(scores_of_a_share, 2, start)) == [[], [length]]
