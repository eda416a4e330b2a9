"""The log-probs a training step hands out are those of a log-prob pass before it, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.cluster.array_transport import from_arrays, to_arrays
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.batch_share import BatchShare
from tests.parallel.training_jobs import Layout, RunRanks, Start, new_trainer


def both_passes(groups: ParallelGroups, start: Start) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of the log-prob pass, and of the training step after it."""
    trainer = new_trainer(groups, start, {"max_tokens_per_gpu": 20})
    before = trainer.compute_log_probs(start.batch)
    step = trainer.train_step(start.batch, with_log_probs=True)
    assert step.log_probs is not None and step.updated
    assert trainer.train_step(start.batch).log_probs is None
    return before, step.log_probs


def share_and_whole(groups: ParallelGroups, start: Start) -> Any:
    """Log-probs and metrics of a step on this rank's share alone, and on the whole batch."""
    results = []
    for own_share in (True, False):
        trainer = new_trainer(groups, start, {"max_tokens_per_gpu": 20})
        batch: Any = start.batch
        if own_share:
            batch = from_arrays(BatchShare, to_arrays(trainer._share_of(start.batch)))
        before = trainer.compute_log_probs(batch)
        step = trainer.train_step(batch, with_log_probs=True)
        assert step.log_probs is not None and len(before) == len(step.log_probs)
        results.append((step.log_probs, step.metrics, batch.samples if own_share else None))
    return groups.is_last_stage, *results


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2), id="DP2 with padding microbatches"),
        pytest.param(Layout(2, {"pipeline_model_parallel_size": 2}), id="PP2"),
        pytest.param(Layout(2, {"context_parallel_size": 2}), id="CP2"),
    ],
)
def test_a_step_hands_out_the_log_probs_it_was_computed_with(
    run_ranks: RunRanks, layout: Layout
) -> None:
    start = Start.of("qwen3")
    for before, during in run_ranks(both_passes, layout.ranks, start, **layout.sizes):
        assert len(before) == len(during) == 9
        for mine, theirs, mask in zip(
            before, during, start.batch.columns["loss_masks"], strict=True
        ):
            # What carries no loss need not be computed by a training step.
            kept = mask != 0
            torch.testing.assert_close(mine[kept], theirs[kept], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2), id="DP2 with padding microbatches"),
        pytest.param(Layout(2, {"pipeline_model_parallel_size": 2}), id="PP2"),
        pytest.param(Layout(2, {"context_parallel_size": 2}), id="CP2"),
    ],
)
def test_a_rank_with_its_share_alone_trains_as_with_the_whole_batch(
    run_ranks: RunRanks, layout: Layout
) -> None:
    start = Start.of("qwen3")
    for last_stage, apart, whole in run_ranks(share_and_whole, layout.ranks, start, **layout.sizes):
        log_probs, metrics, samples = apart
        assert metrics == whole[1]
        for number, mine in zip(samples, log_probs, strict=True):
            if last_stage:
                assert torch.equal(mine, whole[0][number])
