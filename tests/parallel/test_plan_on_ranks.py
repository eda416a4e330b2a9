"""A plan says what real ranks hold to the byte, what they send, and their peak of memory within 15 %."""

from __future__ import annotations

import dataclasses

import pytest

from plugin.tools.plan.planned_rank import MeasuredRank, parallel_sizes
from tests.parallel.plan_jobs import PlanCase, plan_rank, run_for_real

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2, CP2 = {"expert_model_parallel_size": 2}, {"context_parallel_size": 2}
SP, SHARDED = {"sequence_parallel": True}, {"use_distributed_optimizer": True}
BF16 = {"train_dtype": "bfloat16"}
REPLAY = {"use_rollout_routing_replay": "ids"}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

MOE = "qwen3_moe"
CASES = {
    "TP2 PP2 SP EP2 MoE, recompute": PlanCase(4, MOE, TP2 | PP2 | SP | EP2 | REPLAY | RECOMPUTE),
}
FURTHER = {
    "one process": PlanCase(1),
    "DP2 sharded, bfloat16": PlanCase(2, settings=SHARDED | BF16),
    "one process, MoE": PlanCase(1, MOE, REPLAY),
    "one process, MoE, recompute": PlanCase(1, MOE, REPLAY | RECOMPUTE),
    "TP2": PlanCase(2, settings=TP2),
    "TP2 SP MoE": PlanCase(2, MOE, TP2 | SP | REPLAY),
    "PP2": PlanCase(2, settings=PP2),
    "PP2, recompute, padding": PlanCase(2, settings=PP2 | RECOMPUTE, padding=1),
    "PP2, two chunks per stage": PlanCase(
        2, settings=PP2 | {"virtual_pipeline_model_parallel_size": 2}, microbatches=4
    ),
    "TP2 PP2 SP": PlanCase(4, settings=TP2 | PP2 | SP),
    "CP2": PlanCase(2, settings=CP2),
    "CP2, recompute": PlanCase(2, settings=CP2 | RECOMPUTE),
    "EP2": PlanCase(2, MOE, EP2 | REPLAY),
    "EP2, recompute": PlanCase(2, MOE, EP2 | REPLAY | RECOMPUTE),
    "EP2 PP2, recompute": PlanCase(4, MOE, EP2 | PP2 | REPLAY | RECOMPUTE),
    "DP2 sharded": PlanCase(2, settings=SHARDED),
    "DP2 sharded, overlapped": PlanCase(2, settings=SHARDED | BF16 | OVERLAP),
    "DP2 sharded, MoE": PlanCase(2, MOE, SHARDED | REPLAY),
    "DP2 sharded, float16": PlanCase(
        2, settings=SHARDED | {"train_dtype": "float16", "initial_loss_scale": 16.0}
    ),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]
)
def test_a_planned_rank_is_like_the_real_one(run_ranks, name: str) -> None:
    case = (CASES | FURTHER)[name]
    sizes = parallel_sizes(case.config())
    real = run_ranks(run_for_real, case.ranks, case, timeout=300, **sizes)
    # The stages before the last hear its metrics, a pickled object of that many bytes.
    heard = real[-1].collectives.get(("PIPELINE_MODEL_PARALLEL_GROUP", "broadcast"))
    for rank in range(case.ranks):
        planned = plan_rank(rank, case, object_bytes=heard[1] - 8 if heard else 0)
        assert differences(planned, real[rank]) == {}, f"rank {rank}"


def differences(planned: MeasuredRank, real: MeasuredRank) -> dict[str, object]:
    found: dict[str, object] = {}
    for field in ("rank", "parameters", "resident", "collectives"):
        ours, theirs = getattr(planned, field), getattr(real, field)
        if ours != theirs:
            found[field] = (ours, theirs)
    ratio = (planned.activations + planned.logits) / real.activations
    if not 0.85 <= ratio <= 1.15:
        found["activations"] = ratio
    return found


def test_a_plan_that_forgets_something_is_noticed() -> None:
    real = MeasuredRank(
        0, 10, {"parameters": 40}, 1000, collectives={("data", "all_reduce"): (1, 40)}
    )
    assert differences(dataclasses.replace(real, activations=860), real) == {}
    wrong = dataclasses.replace(real, activations=840, resident={"parameters": 36}, collectives={})
    assert set(differences(wrong, real)) == {"activations", "resident", "collectives"}
