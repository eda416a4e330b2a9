"""Context parallel and interleaved steps are those of one process, also for losses that look at whole sequences.

The batch has responses of 1 and 2 tokens: with two context parallel ranks, one of them holds no response token of
these samples and still has to run every collective.
"""

from __future__ import annotations

import pytest

from plugin.sharding.sequence_shards import response_spans
from tests.parallel.test_policy_losses_on_ranks import LOSSES
from tests.parallel.training_jobs import (
    PROMPTS,
    RESPONSES,
    Case,
    Layout,
    RunRanks,
    differences,
    run_cases,
)

CP2 = Layout(2, {"context_parallel_size": 2})
CP2_TP2 = Layout(4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2})
VPP2 = Layout(2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2})
CP2_PP2 = Layout(4, {"context_parallel_size": 2, "pipeline_model_parallel_size": 2})

SMALL_BUDGET = {"max_tokens_per_gpu": 14}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def losses(**settings: object) -> dict[str, Case]:
    return {
        name: Case(settings={"policy_loss": name, **LOSSES[name], **settings}) for name in LOSSES
    }


def check(run_ranks: RunRanks, layout: Layout, cases: dict[str, Case]) -> None:
    expected = run_cases(run_ranks, Layout(), {name: case.uncut() for name, case in cases.items()})
    outcomes = run_cases(run_ranks, layout, cases)
    found = {
        name: differences(outcomes[name], expected[name], cases[name].family) for name in cases
    }
    assert not any(found.values()), found


def test_some_rank_holds_no_token_of_some_response() -> None:
    lengths = [(p + r, r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    held = [
        sum(end - start for start, end in response_spans(total, response, rank, 2))
        for total, response in lengths
        for rank in (0, 1)
    ]
    assert 0 in held and sum(held) == sum(RESPONSES)


def test_every_policy_loss_and_correction_on_two_context_parallel_ranks(
    run_ranks: RunRanks,
) -> None:
    check(run_ranks, CP2, losses(**SMALL_BUDGET))


# Replayed routes take a MoE model with recompute through this layout as well (test_router_replay.py).
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["gspo"], id="dense"),
        pytest.param(["ppo", "icepop", "moe"], id="more losses and moe", marks=pytest.mark.slow),
    ],
)
def test_context_parallel_with_tensor_and_sequence_parallel(
    run_ranks: RunRanks, names: list[str]
) -> None:
    cases = losses(**SMALL_BUDGET, sequence_parallel=True)
    cases["moe"] = Case(
        "qwen3_moe", settings={"sequence_parallel": True, **SMALL_BUDGET, **RECOMPUTE}
    )
    check(run_ranks, CP2_TP2, {name: cases[name] for name in names})


def test_context_parallel_with_pipeline(run_ranks: RunRanks) -> None:
    check(run_ranks, CP2_PP2, {"gspo": losses(**SMALL_BUDGET, **RECOMPUTE)["gspo"]})


def test_the_interleaved_schedule(run_ranks: RunRanks) -> None:
    cases = {name: losses(**SMALL_BUDGET)[name] for name in ("ppo", "gspo", "ipo_kl")}
    cases["recompute"] = cases["ppo"].cut(**RECOMPUTE)
    cases["odd number of microbatches"] = Case(settings={"micro_batch_size": 2})
    cases["one real and one padding microbatch"] = Case(settings={"micro_batch_size": 64})
    cases["moe"] = Case("qwen3_moe", settings=SMALL_BUDGET)
    check(run_ranks, VPP2, cases)
