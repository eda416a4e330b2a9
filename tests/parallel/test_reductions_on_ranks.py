"""Every reduction over samples and prompts is, on ranks, that of transformers and plain autograd.

9 uneven samples of 4 prompts under a budget of 20 tokens: prompts are spread over microbatches and ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel import tiny_models
from tests.parallel.test_policy_losses_on_ranks import _model_terms
from tests.parallel.training_jobs import RunRanks, Start, new_trainer

#: Sample 1, which carries no loss, is one of three of its prompt.
GROUPS = [0, 0, 1, 1, 0, 2, 2, 2, 5]
REDUCTIONS = ("fixed-length", "prompt-mean", "group-mean")


def steps_of(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> dict[str, tuple[float, float, float]]:
    """Loss, KL term and gradient norm of one step with every reduction."""
    found = {}
    batch = start.batch.with_column("group_index", GROUPS)
    for reduction in REDUCTIONS:
        options = {"loss_reduction": reduction, "loss_fixed_length": 10, "policy_loss": "reinforce"}
        kl = {"use_rollout_kl_loss": True, "rollout_kl_loss_coef": 0.3}
        trainer = new_trainer(groups, start, {**options, **kl, **settings})
        metrics = trainer.train_step(batch).metrics
        found[reduction] = tuple(metrics[name] for name in ("loss", "rollout_kl", "grad_norm"))
    return found


def by_hand(start: Start, reduction: str) -> tuple[float, float, float]:
    model = tiny_models.hf_model(tiny_models.FAMILIES[start.family]())
    cur, _, mask, advantages, _, rollout, _, sample = _model_terms(model, start, 1.0)
    kl = (cur - rollout).square() / 2
    group, with_loss = torch.tensor(GROUPS)[sample], mask != 0

    def reduced(values: Tensor) -> Tensor:
        by_sample = {
            i: values[with_loss & (sample == i)]
            for i in range(len(GROUPS))
            if bool((with_loss & (sample == i)).any())
        }
        if reduction == "fixed-length":
            return torch.stack([v.sum() / 10 for v in by_sample.values()]).mean()
        if reduction == "prompt-mean":
            return torch.stack(
                [values[with_loss & (group == g)].mean() for g in set(GROUPS)]
            ).mean()
        means = [
            torch.stack([v.mean() for i, v in by_sample.items() if GROUPS[i] == g]).mean()
            for g in set(GROUPS)
        ]
        return torch.stack(means).mean()

    loss = reduced(-advantages * cur + 0.3 * kl)
    loss.backward()
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return loss.item(), reduced(kl).item(), float(torch.stack(gradients).norm())


@pytest.mark.parametrize(
    "ranks, sizes, settings",
    [
        pytest.param(2, {}, {"max_tokens_per_gpu": 20}, id="DP2 uneven"),
        pytest.param(
            2,
            {"context_parallel_size": 2},
            {"max_tokens_per_gpu": 14, "separable_fast_path": "off"},
            id="CP2",
        ),
        pytest.param(1, {}, {"micro_batch_size": 1}, id="a microbatch per sample"),
    ],
)
def test_reductions_do_not_depend_on_how_the_batch_is_cut(
    run_ranks: RunRanks, ranks: int, sizes: dict[str, int], settings: dict[str, Any]
) -> None:
    start = Start.of("qwen3")
    [found, *others] = run_ranks(steps_of, ranks, start, settings, **sizes)
    for reduction in REDUCTIONS:
        assert found[reduction] == pytest.approx(by_hand(start, reduction), rel=1e-5), reduction
    assert all(other == found for other in others)
