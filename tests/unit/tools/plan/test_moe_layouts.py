"""Every layout of a MoE model plans, whatever the number of tokens; ranks of one kind are alike."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.tools.plan.estimates import gpu_named
from plugin.tools.plan.job_plan import JobPlan, Models, plan_job
from plugin.tools.plan.planned_rank import StageRun, built_rank
from plugin.tools.plan.workload import sample_lengths
from tests.unit.tools.plan.model_facts import MODELS

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "vocab_size": 301,
}


def moe_model(**changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**(MODELS["Qwen3-30B-A3B"] | SMALL | changes))


def job(tp: int, pp: int, cp: int, ep: int, etp: int = 1, **more: Any) -> JobConfig:
    return JobConfig.from_sources(
        {
            "hf_checkpoint": "model",
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "max_response_length": 96,
            "max_prompt_length": 40,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 5,
        }
        | more
    )


def planned(config: JobConfig, gpu: str | None = "h100-80g", **arguments: Any) -> JobPlan:
    model = moe_model()
    lengths = sample_lengths(config, "lognormal:50:0.7", model.max_position_embeddings)
    chosen = None if gpu is None else gpu_named(gpu)
    return plan_job(config, Models(model), lengths, chosen, **arguments)


# 101 is prime: no number of tokens divides by experts or ranks.
LAYOUTS = [
    (tp, pp, cp, ep, etp)
    for tp, pp, cp, ep, etp in product((1, 2, 4), (1, 2), (1, 2), (1, 2, 8), (1, 2))
    if (tp * cp) % etp == 0 or etp == 1
]
SOME = [(1, 1, 2, 2, 1), (4, 1, 1, 8, 1), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, marks=() if sizes in SOME else pytest.mark.slow)
        for sizes in sorted({*SOME, *LAYOUTS})
    ],
    ids=lambda sizes: "TP{} PP{} CP{} EP{} ETP{}".format(*sizes),
)
def test_an_odd_number_of_tokens_plans_in_every_layout(sizes: tuple[int, ...]) -> None:
    tp, pp, cp, ep, etp = sizes
    world = max(tp * cp, ep * etp) * pp * 2
    plan = planned(job(*sizes, max_tokens_per_gpu=101, num_gpus_per_node=world))
    assert sum(kind.count for kind in plan.kinds) == world
    assert all(kind.bytes["activations"] > 0 for kind in plan.kinds)


def test_a_rank_with_padding_microbatches_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # 15 samples over 4 ranks, one per microbatch: 4 on each, one of them padding on the last
    seen = []
    run = StageRun._run

    def watched(self: StageRun, microbatches: int, padding: int = 0) -> Any:
        seen.append((microbatches, padding))
        return run(self, microbatches, padding)

    monkeypatch.setattr(StageRun, "_run", watched)
    replay = {"use_rollout_routing_replay": "ids", "num_gpus_per_node": 4}
    plan = planned(job(1, 1, 1, 2, micro_batch_size=1, **replay))
    assert (plan.batching.microbatches, plan.batching.padding) == (4, 1)
    assert seen == [(1, 0), (2, 1)]
    seen.clear()
    # 16 samples: none
    plan = planned(job(1, 1, 1, 2, n_samples_per_prompt=4, rollout_batch_size=4, **replay))
    assert (plan.batching.padding, seen) == (0, [(1, 0)])


@pytest.mark.parametrize(
    "stages, replicas", [(2, 2), pytest.param(4, 4, marks=pytest.mark.slow)], ids=["8", "32"]
)
def test_ranks_of_one_kind_hold_the_same_bytes(stages: int, replicas: int) -> None:
    """All ranks of TP2 EP2, built and stepped one by one."""
    per_stage = 2 * replicas
    world = {"num_gpus_per_node": per_stage * stages, "max_tokens_per_gpu": 101}
    config = job(2, stages, 1, 2, **world, use_distributed_optimizer=True)
    plan = planned(config, gpu=None)
    kinds: Counter[Any] = Counter()
    for kind in plan.kinds:
        kinds[kind.stage, kind.parameters, *map(kind.bytes.__getitem__, RESIDENT)] += kind.count
    real: Counter[Any] = Counter()
    for rank in range(plan.world_size):
        real[rank // per_stage, *held_by(rank, plan)] += 1
    assert kinds == real
    # The last shards of a bucket are partly padding.
    assert len(plan.kinds) > stages
    for kind in plan.kinds:
        bytes_of = tuple(kind.bytes[part] for part in RESIDENT)
        assert held_by(kind.example_rank, plan) == (kind.parameters, *bytes_of)


RESIDENT = ("parameters", "gradients", "main_parameters", "optimizer")


def held_by(rank: int, plan: JobPlan) -> tuple[int, ...]:
    with built_rank(
        rank, plan.world_size, plan.config, plan.model, "packed", on_gpu=False
    ) as built:
        run = StageRun(built, plan.config, plan.model, plan.lengths, plan.batching)
        measured = run._run(1)
    return measured.parameters, *map(measured.resident.__getitem__, RESIDENT)


@pytest.mark.parametrize("lora", [0, 4])
def test_a_plan_says_the_host_memory_of_kept_weight_versions(lora: int) -> None:
    asked = {"train_log_probs": "engine-version", "async_rollouts": True, "max_weight_staleness": 3}
    config = job(2, 1, 1, 1, **asked, lora_rank=lora, train_dtype="float32")
    [kind] = planned(config, gpu=None).kinds
    assert kind.host_bytes == 3 * 4 * kind.trained > 0
    assert (kind.trained < kind.parameters) == bool(lora)
    [kind] = planned(job(2, 1, 1, 1), gpu=None).kinds
    assert kind.host_bytes == 0
