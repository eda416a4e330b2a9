"""Replay in a model with as many experts as 8 bits have values."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import replay_jobs, tiny_models
from tests.parallel.training_jobs import uneven_batch

pytestmark = pytest.mark.hostile


EXPERTS = 256


def test_tokens_routed_to_expert_255_never_choose_live(run_ranks) -> None:
    config = tiny_models.tiny_qwen3_moe(
        num_experts=EXPERTS,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
        num_hidden_layers=1,
        norm_topk_prob=False,
    )
    routes = replay_jobs.with_routes(uneven_batch(), 1, EXPERTS, 1).columns[
        "rollout_routed_experts"
    ]
    for sample in routes:
        sample[::2] = EXPERTS - 1
    want = replay_jobs.expert_counts(routes, EXPERTS).float()
    settings = {"use_rollout_routing_replay": True, "micro_batch_size": 9}
    types = (torch.uint8, torch.int16, torch.int64)
    in_one_type, in_three = run_ranks(
        replay_jobs.replay_each,
        1,
        config,
        settings,
        [routes, [sample.to(types[i % 3]) for i, sample in enumerate(routes)]],
    )[0]
    for result in (in_one_type, in_three):
        assert result["metrics"]["replay/coverage"] == 1.0
        torch.testing.assert_close(result["expert_counts"], want)
    assert in_three["metrics"] == pytest.approx(in_one_type["metrics"])
