"""Corrections with thresholds over the whole batch: every layout finds the threshold, and keeps the tokens, of one process."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.batch_types import RolloutBatch
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.training_jobs import (
    Case,
    Layout,
    RunRanks,
    Start,
    differences,
    new_trainer,
    run_cases,
)

HOOK, OWN = "plugin.ppo_utils.", "tests.parallel.batch_hooks:"
SMALL_BUDGET = {"max_tokens_per_gpu": 20}


def chain(*hooks: str, **settings: Any) -> dict[str, Any]:
    paths = [hook if ":" in hook else f"{HOOK}{hook}_function" for hook in hooks]
    return {"use_tis": True, "custom_tis_function_path": ",".join(paths), **settings}


#: With bounds that cut something off in the batch; `fingerprint` tells which tokens are left.
PROBLEMS: dict[str, dict[str, Any]] = {
    "m2po": chain("m2po", f"{OWN}fingerprint", m2po_threshold=0.02),
    "m2po inside the LM head": chain("m2po", m2po_threshold=0.02),
    "m2po of kept tokens": chain("m2po", m2po_threshold=0.02, loss_denominator="kept"),
    "automatic clip": {"use_tis": True, "tis_clip": "auto:ess=0.93", "policy_loss": "cispo"},
    "ess": chain("ess_tis", policy_loss="reinforce"),
    "kpop and segments": chain(
        "kpop", "segment_tis", f"{OWN}fingerprint", kpop_threshold=0.002, segment_tis_length=3,
        sequence_tis_clip=1.2,
    ),
    "icepop and turns": chain(
        "rejection", f"{OWN}fingerprint", policy_loss="icepop", segment_tis_length="turn",
        rejection_rules="segment_k2=:0.02",
    ),
    "own": chain(f"{OWN}centered"),
    "clip_cov": {
        "policy_loss": "clip_cov", "clip_cov_low": 0.0, "clip_cov_high": 50.0, "clip_cov_ratio": 0.2,
    },
    "kl_cov and m2po": chain(
        "m2po", policy_loss="kl_cov", kl_cov_ratio=0.2, kl_cov_coef=0.5, m2po_threshold=0.02
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2), id="DP2"),
        *(
            pytest.param(Layout(2, sizes), id=name, marks=pytest.mark.slow)
            for name, sizes in {
                "TP2": {"tensor_model_parallel_size": 2},
                "CP2": {"context_parallel_size": 2},
                "PP2": {"pipeline_model_parallel_size": 2},
            }.items()
        ),
    ],
)
def test_a_threshold_over_the_whole_batch_does_not_depend_on_the_layout(
    run_ranks: RunRanks, layout: Layout
) -> None:
    cases = {name: Case(settings=settings) for name, settings in PROBLEMS.items()}
    expected = run_cases(run_ranks, Layout(), {n: c.uncut() for n, c in cases.items()})
    cut = {name: case.cut(**SMALL_BUDGET) for name, case in cases.items()}
    outcomes = run_cases(run_ranks, layout, cut)
    for name, outcome in outcomes.items():
        found = differences(outcome, expected[name], "qwen3")
        assert not found, f"{name}: {len(found)} differences: {found[:8]}"
    metrics = {name: outcome.steps[0].metrics for name, outcome in outcomes.items()}
    for name in ("m2po", "m2po of kept tokens", "kpop and segments"):
        assert 0 < metrics[name]["is_masked"] < 1, name
    assert 0 < metrics["clip_cov"]["is_masked"] < 1
    assert 0.1 < metrics["kl_cov and m2po"]["kl_cov_pulled"] < 0.3
    assert 0 < metrics["icepop and turns"]["rejected_by_segment_k2"] < 1
    # The rest of the mean is that of the whole batch, which no microbatch knows.
    assert 1 < metrics["automatic clip"]["tis_clip_found"] < 10
    assert 0 < metrics["ess"]["ess_share"] < 1
    assert metrics["kpop and segments"]["chain/1_kpop/removed"] == pytest.approx(
        metrics["kpop and segments"]["is_masked"]
    )


def test_a_microbatch_alone_would_keep_other_tokens(run_ranks: RunRanks) -> None:
    case = Case(settings=PROBLEMS["m2po"], mutation="statistics of microbatches").cut(
        **SMALL_BUDGET
    )
    right = Case(settings=PROBLEMS["m2po"]).cut(**SMALL_BUDGET)
    outcomes = run_cases(run_ranks, Layout(), {"wrong": case, "right": right})
    wrong, good = (outcomes[name].steps[0].metrics for name in ("wrong", "right"))
    assert wrong["is_masked"] != pytest.approx(good["is_masked"], rel=1e-3)


@pytest.mark.parametrize(
    ("hook", "message"),
    [("of_no_common_size", "numbers on one rank and"), ("failing_on_one_rank", "this rank cannot")],
)
def test_a_declaration_that_differs_between_ranks_is_an_error_on_all(
    run_ranks: RunRanks, hook: str, message: str
) -> None:
    case = Case(settings=chain(f"{OWN}{hook}"), steps=1)
    with pytest.raises(Exception, match=message):
        run_cases(run_ranks, Layout(2), {hook: case.cut(**SMALL_BUDGET)})


def train_without_train_log_probs(groups: ParallelGroups, start: Start) -> None:
    batch = start.batch_of(Case())
    columns = {name: values for name, values in batch.columns.items() if name != "log_probs"}
    new_trainer(groups, start, PROBLEMS["m2po"]).train_step(RolloutBatch(columns))


def test_a_batch_without_the_trainers_log_probs_is_refused(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match="call compute_log_probs"):
        run_ranks(train_without_train_log_probs, 1, Start.of("qwen3"))
