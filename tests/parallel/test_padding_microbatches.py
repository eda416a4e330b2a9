"""Padding microbatches contribute nothing to anything, and take part in every collective."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plugin.batch_types import FIELDS, Field, Microbatch, RolloutBatch
from plugin.megatron_backend import rank_model
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step import batch_share as share_module
from plugin.megatron_backend.step.microbatching import MicrobatchPlan
from plugin.megatron_backend.trainer import StepResult
from tests.parallel.rank_pool import RankError
from tests.parallel.training_jobs import (
    Case,
    Layout,
    RunRanks,
    Start,
    differences,
    further,
    metric_differences,
    new_trainer,
    run_cases,
)

#: Uses every optional field that a loss can use.
EVERY_FIELD = {
    "policy_loss": "icepop",
    "teacher_tau": 0.1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_rollout_kl_loss": True,
    "rollout_kl_loss_coef": 0.1,
    "entropy_coef": 0.05,
    "get_mismatch_metrics": True,
    "max_tokens_per_gpu": 20,
}
PER_SAMPLE = {
    "policy_loss": "gspo",
    "use_tis": True,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "loss_denominator": "kept",
    "max_tokens_per_gpu": 20,
}
LAYOUTS = {
    "one process": Layout(),
    "TP2": Layout(2, {"tensor_model_parallel_size": 2}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "DP2": Layout(2),
    "EP2": Layout(2, {"expert_model_parallel_size": 2}),
    "CP2": Layout(2, {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("name", ["DP2", "EP2", *further("CP2", "one process", "TP2", "PP2")])
def test_four_more_padding_microbatches_change_nothing(run_ranks: RunRanks, name: str) -> None:
    family = "qwen3_moe" if name == "EP2" else "qwen3"
    cases = {
        "per token": Case(family, settings=EVERY_FIELD),
        "per sample": Case(family, settings=PER_SAMPLE),
    }
    padded = {
        f"{problem}, padded": Case(family, settings=case.settings, mutation="more padding")
        for problem, case in cases.items()
    }
    outcomes = run_cases(run_ranks, LAYOUTS[name], {**cases, **padded})
    for problem in cases:
        plain, more = outcomes[problem], outcomes[f"{problem}, padded"]
        added = (
            more.steps[0].metrics["num_microbatches"] - plain.steps[0].metrics["num_microbatches"]
        )
        assert added == 4
        # Not one bit of a metric: padding adds 0 to every sum and -inf to every maximum.
        first = {k: v for k, v in plain.steps[0].metrics.items() if _is_a_sum(k)}
        assert {k: v for k, v in more.steps[0].metrics.items() if _is_a_sum(k)} == first
        # The per-sample factor n * dp / weight is divided by n again, and n has changed: its rounding remains.
        assert not differences(more, plain, family, tolerance=1e-6)
    token_norms = [
        outcomes[key].steps[0].metrics["grad_norm"] for key in ("per token", "per token, padded")
    ]
    assert token_norms[0] == token_norms[1]


def _is_a_sum(metric: str) -> bool:
    return metric not in ("grad_norm", "num_microbatches", "padding_microbatch_share")


def collectives_of_a_step(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], plans: dict[str, Any]
) -> dict[str, Counter[str]]:
    """How often each collective ran in a training step, by plan."""
    counts = {}
    for name, ranks in plans.items():
        trainer = new_trainer(groups, start, settings)
        plan = MicrobatchPlan(ranks)
        trainer.train_step(start.batch)  # hooks are probed on their first call
        with (
            patch.object(share_module, "plan_microbatches", lambda *_, plan=plan, **__: plan),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        ):
            trainer.train_step(start.batch.select(range(4)))
        # The raw events: `profile.events()` takes seconds to arrange them.
        events = [event.name() for event in profile.profiler.kineto_results.events()]
        counts[name] = Counter(event for event in events if event.startswith("c10d::"))
    return counts


@pytest.mark.parametrize("name", ["PP2", "EP2", pytest.param("TP2", marks=pytest.mark.slow), "CP2"])
def test_a_padding_microbatch_runs_the_collectives_of_a_real_one(
    run_ranks: RunRanks, name: str
) -> None:
    layout = LAYOUTS[name]
    family = "qwen3_moe" if name == "EP2" else "qwen3"
    samples = ((0, 1), (2, 3))
    real = (samples,) if name != "EP2" else (((0,), (1,)), ((2,), (3,)))
    with_padding = (((0, 1, 2, 3), ()),) if name != "EP2" else (((0, 2), (1,)), ((3,), ()))
    plans = {"real": real, "with padding": with_padding}
    # A fused head has no row to compute on padding and then, on every TP rank alike, nothing to reduce.
    settings = {**PER_SAMPLE, "fused_lm_head": "off"}
    for counts in run_ranks(
        collectives_of_a_step, layout.ranks, Start.of(family), settings, plans, **layout.sizes
    ):
        assert counts["real"].total() > 5
        assert counts["with padding"] == counts["real"]


@pytest.mark.parametrize(
    "field",
    [
        *("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages"),
        *("rollout_log_probs", "ref_log_probs", "teacher_log_probs"),
    ],
)
def test_a_padding_microbatch_without_a_field_would_be_noticed(
    run_ranks: RunRanks, field: str
) -> None:
    settings = {**EVERY_FIELD, "micro_batch_size": 1, "max_tokens_per_gpu": None}
    case = Case(settings=settings, steps=1, mutation=f"padding without {field}")
    with pytest.raises(RankError, match=field):
        run_cases(run_ranks, LAYOUTS["DP2"], {"mutated": case})


def masked_samples_on_one_rank(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> list[tuple[bool, float]]:
    """(is padding, tokens) of the microbatches of a step in which one rank has only fully masked samples."""
    batch = start.batch.select(range(4))
    masks = [torch.zeros_like(m) if i < 2 else m for i, m in enumerate(batch.columns["loss_masks"])]
    batch = batch.with_column("loss_masks", masks)
    plan = MicrobatchPlan((((0,), (1,)), ((2,), (3,))))
    seen: list[tuple[bool, float]] = []
    prepare = rank_model.prepare

    def spied(microbatches: list[Microbatch], *args: Any, **options: Any) -> Any:
        prepared = prepare(microbatches, *args, **options)
        seen.extend((m.is_padding, float(m.inputs.tokens.numel())) for m in prepared)
        return prepared

    trainer = new_trainer(groups, start, settings)
    with (
        patch.object(share_module, "plan_microbatches", lambda *_, **__: plan),
        patch.object(rank_model, "prepare", spied),
    ):
        log_probs = trainer.compute_log_probs(batch)
        step = trainer.train_step(batch)
    assert step.updated and all(bool((values < 0).all()) for values in log_probs)
    return seen


@pytest.mark.parametrize("settings", [EVERY_FIELD, PER_SAMPLE])
def test_real_samples_that_are_fully_masked_are_not_padding(
    run_ranks: RunRanks, settings: dict[str, Any]
) -> None:
    by_rank = run_ranks(masked_samples_on_one_rank, 2, Start.of("qwen3"), settings)
    # Lengths 9, 6 (fully masked, rank 0) and 11, 11 (rank 1), in the log-prob pass and in the step.
    assert by_rank[0] == [(False, 9.0), (False, 6.0)] * 2
    assert by_rank[1] == [(False, 11.0), (False, 11.0)] * 2


def step_with_a_new_field(
    groups: ParallelGroups, start: Start, fields: list[Field]
) -> list[dict[str, Any]]:
    """The columns of padding microbatches in a step after fields were added to the table."""
    seen: list[dict[str, Any]] = []
    prepare = rank_model.prepare

    def spied(microbatches: list[Microbatch], *args: Any, **options: Any) -> Any:
        prepared = prepare(microbatches, *args, **options)
        seen.extend(m.columns for m in prepared if m.is_padding)
        return prepared

    with (
        patch.dict(FIELDS, {field.name: field for field in fields}),
        patch.object(rank_model, "prepare", spied),
    ):
        batch = _with_new_fields(start.batch.select(range(3)), fields)
        new_trainer(groups, start, {"micro_batch_size": 1}).train_step(batch)
    return seen


def _with_new_fields(batch: RolloutBatch, fields: list[Field]) -> RolloutBatch:
    lengths = {"tokens": "total_lengths", "response": "response_lengths"}
    for field in fields:
        if field.shape == "scalar":
            values: list[Any] = [float(i) for i in range(len(batch))]
        else:
            values = [torch.ones(n, dtype=field.dtype) for n in batch.columns[lengths[field.shape]]]
        batch = batch.with_column(field.name, values)
    return batch


def test_a_field_added_to_the_table_appears_in_padding_microbatches_on_ranks(
    run_ranks: RunRanks,
) -> None:
    fields = [
        Field("token_weights", "tokens", torch.float16, optional=True, padding=0.5),
        Field("critic_values", "response", torch.float32, optional=True),
        Field("difficulty", "scalar", torch.float32, optional=True, padding=-1),
    ]
    by_rank = run_ranks(step_with_a_new_field, 2, Start.of("qwen3"), fields)
    # 3 samples over 2 ranks: one rank has one padding microbatch.
    (columns,) = by_rank[0] + by_rank[1]
    assert columns["token_weights"][0].tolist() == [0.5, 0.5]
    assert columns["token_weights"][0].dtype == torch.float16
    assert columns["critic_values"][0].tolist() == [0.0]
    assert columns["difficulty"].tolist() == [-1.0]


def step_without_responses(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> tuple[StepResult, list[int]]:
    """A step in which one microbatch consists of a sample that has a prompt and no response."""
    batch = start.batch.select(range(3))
    empty = {
        name: values[:0] if FIELDS[name].shape == "response" else values
        for name, (values, *_) in batch.columns.items()
    }
    empty |= {"unconcat_tokens": torch.tensor([1, 2, 3]), "total_lengths": 3, "response_lengths": 0}
    batch = batch.concatenated(RolloutBatch({name: [value] for name, value in empty.items()}))
    trainer = new_trainer(groups, start, settings)
    log_probs = trainer.compute_log_probs(batch)
    return trainer.train_step(batch), [len(values) for values in log_probs]


@pytest.mark.parametrize("name", ["DP2", "CP2", *further("one process", "TP2")])
def test_a_sample_without_a_response_neither_fails_nor_counts(
    run_ranks: RunRanks, name: str
) -> None:
    layout = LAYOUTS[name]
    for settings in (EVERY_FIELD, PER_SAMPLE):
        one_by_one = {**settings, "max_tokens_per_gpu": None, "micro_batch_size": 1}
        case = Case(settings=one_by_one, samples=3, steps=1)
        expected = run_cases(run_ranks, layout, {"without it": case})["without it"]
        for step, lengths in run_ranks(
            step_without_responses, layout.ranks, Start.of("qwen3"), one_by_one, **layout.sizes
        ):
            assert lengths == [6, 1, 9, 0]
            assert not metric_differences(step, expected.steps[0], 1e-6)
