"""The fused LM head inside real training steps: the same step as through logits, on every kind of rank."""

from __future__ import annotations

import pytest

from tests.parallel.training_jobs import Case, Layout, differences, run_cases

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
