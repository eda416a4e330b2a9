"""Score centering on real ranks: the same step on every layout, through both heads, with padding microbatches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutBatch, SamplerHead
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.ragged import Ragged
from plugin.vocabulary_ids import HEAD_IDS, HEAD_LOG_PROBS, kept_rows
from tests.parallel import tiny_models
from tests.parallel.training_jobs import (
    Layout,
    Outcome,
    RunRanks,
    Start,
    differences,
    exported,
    new_trainer,
    with_kept_ids,
)

K = 6
MASK = "plugin.ppo_utils.geometric_mask_function"
CENTERED = {"score_centering_topk": K}
PROBLEMS: dict[str, dict[str, Any]] = {
    "reinforce": {**CENTERED, "policy_loss": "reinforce"},
    "tis and mask": {
        **CENTERED,
        "policy_loss": "reinforce",
        "use_tis": True,
        "tis_clip": 1.3,
        "geometric_mask_low": 0.8,
        "geometric_mask_high": 1.1,
        "custom_tis_function_path": f"{MASK},plugin.ppo_utils.vanilla_tis_function",
    },
    "truncated": {**CENTERED, "policy_loss": "icepop", "icepop_ratio_high": 3.0},
}
ONE_BY_ONE = {"micro_batch_size": 1}  # 9 microbatches: two ranks have a padding one besides
LAYOUTS = {
    "DP2": Layout(2),
    "TP2": Layout(2, {"tensor_model_parallel_size": 2}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "CP2": Layout(2, {"context_parallel_size": 2}),
}

_in_one_process: dict[str, Outcome] = {}
"""What one process gave, by problem: every layout is compared with it."""


def with_heads(batch: RolloutBatch, *, garbage: bool) -> RolloutBatch:
    """The batch with heads of some sampler over the kept ids, and garbage where the loss mask is 0."""
    generator = torch.Generator().manual_seed(8)
    mask: Ragged = batch.columns["loss_masks"]
    tokens = len(mask.values)
    scores = 2 * torch.randn(tokens, tiny_models.VOCAB_SIZE, generator=generator)
    kept = kept_rows(batch.columns)
    if kept is not None:
        for row, ids in enumerate(kept):
            if len(ids):
                drop = torch.ones(tiny_models.VOCAB_SIZE, dtype=torch.bool)
                drop[ids.long()] = False
                scores[row, drop] = -torch.inf
    head = SamplerHead.of(scores.log_softmax(1), K)
    if garbage:
        masked = mask.values == 0
        head.ids[masked], head.log_probs[masked] = 10**6, math.nan
    batch = batch.with_column(HEAD_IDS, mask.like(head.ids))
    batch = batch.with_column(HEAD_LOG_PROBS, mask.like(head.log_probs))
    batch.check(vocabulary=tiny_models.VOCAB_SIZE)
    return batch.without_column("log_probs")  # the first update: the old policy is the current one


def centered_steps(
    groups: ParallelGroups, start: Start, problems: dict[str, dict[str, Any]], garbage: bool
) -> dict[str, Outcome]:
    found = {}
    for name, settings in problems.items():
        trainer = new_trainer(groups, start, settings)
        batch = with_kept_ids(start.batch) if "truncated" in name else start.batch
        batch = with_heads(batch, garbage=garbage)
        steps = [trainer.train_step(batch)]
        updated = exported(trainer)
        found[name] = Outcome([], steps, updated if groups.rank == 0 else None)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_centered_step_is_that_of_one_process(run_ranks: RunRanks, name: str) -> None:
    start, layout = Start.of("qwen3"), LAYOUTS[name]
    if not _in_one_process:
        whole = {"micro_batch_size": 64, "fused_lm_head": "off"}
        uncut = {key: {**p, **whole} for key, p in PROBLEMS.items()}
        uncut["not centered"] = {**uncut["reinforce"], "score_centering_topk": 0}
        _in_one_process.update(run_ranks(centered_steps, 1, start, uncut, False)[0])
    plain = _in_one_process["not centered"].steps[0]
    cut = {key: {**p, **ONE_BY_ONE, "fused_lm_head": "off"} for key, p in PROBLEMS.items()}
    cut |= {
        f"{key}, fused": {**p, **ONE_BY_ONE, "fused_lm_head": "on"} for key, p in PROBLEMS.items()
    }
    found = run_ranks(centered_steps, layout.ranks, start, cut, True, **layout.sizes)[0]
    for problem, outcome in found.items():
        # Without a log-prob pass the old log-probs are this pass's, and differences of perplexities round by 2e-5.
        expected = _in_one_process[problem.split(",")[0]]
        different = differences(outcome, expected, "qwen3", tolerance=1e-4)
        assert not different, f"{problem}: {different[:5]}"
        metrics = outcome.steps[0].metrics
        assert metrics["score_centering/size"] > 0.01
        assert 0.05 < metrics["score_centering/head_mass"] < 1
        assert (metrics["padding_microbatch_share"] > 0) == (name == "DP2")
    assert found["reinforce"].steps[0].grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
