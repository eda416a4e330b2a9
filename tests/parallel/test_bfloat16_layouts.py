"""bfloat16 on every layout: steps, replayed routes, checkpoints and export are near those of one rank.

Here on local layers. `tests/gpu/test_transformer_engine_layouts.py` runs the same bodies on Transformer Engine's, which have no
float32 attention for packed rows and so cannot be compared to five digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel import replay_jobs, tiny_models
from tests.parallel.rank_pool import RankPool
from tests.parallel.test_checkpointing import (
    DENSE,
    MOE,
    USER_STATE,
    assert_same_tensors,
    resume_train,
    tensors_of,
    train_save_train,
)
from tests.parallel.training_jobs import (
    Case,
    Layout,
    RunRanks,
    Start,
    exported,
    new_trainer,
    run_cases,
    uneven_batch,
    weights_of,
)

pytestmark = pytest.mark.slow  # float32 shows more on CPU

LOCAL = {"train_dtype": "bfloat16", "transformer_impl": "local"}
#: Log-probs around -4 of a random model of 4 layers, two roundings of 2^-8 relative; metrics are means of such.
CLOSE = 0.06

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "TP2": (Layout(2, TP2), {}),
    "TP2 with sequence parallelism": (Layout(2, TP2), SP),
    "PP2": (Layout(2, PP2), {}),
    "VPP2": (Layout(2, {**PP2, "virtual_pipeline_model_parallel_size": 2}), {}),
    "CP2": (Layout(2, CP2), {}),
    "DP2 with the distributed optimizer": (Layout(2), SHARDED),
    "CP2 and TP2 with sequence parallelism": (Layout(4, {**CP2, **TP2}), SP),
}


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """The settings that choose dtype and layers."""
    return LOCAL


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def assert_near(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name in ("loss", "mismatch_kl", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=CLOSE, abs=CLOSE / 10), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_steps_are_near_those_of_one_rank(
    run_ranks: RunRanks, layers: dict[str, Any], name: str
) -> None:
    layout, settings = LAYOUTS[name]
    case = Case(settings={**layers, "policy_loss": "icepop", "max_tokens_per_gpu": 24, **settings})
    expected = run_cases(run_ranks, Layout(), {"steps": case.uncut()})["steps"]
    found = run_cases(run_ranks, layout, {"steps": case})["steps"]
    assert largest_difference(found.log_probs, expected.log_probs) < CLOSE
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert mine.updated
        assert_near(mine.metrics, theirs.metrics)


MOE_LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "EP2": (Layout(2, EP2), {"max_tokens_per_gpu": 40}),
    "TP2 with sequence parallelism": (Layout(2, TP2), SP),
    "PP2 with a stage without experts": (Layout(2, PP2), {}),
    "CP2": (Layout(2, CP2), {"max_tokens_per_gpu": 24}),
    "EP2 and PP2": (Layout(4, {**EP2, **PP2}), {}),
}


# Routers of layouts that round differently choose differently now and then; replayed routes are the same.
@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_replayed_steps_use_the_given_experts_and_are_near_those_of_one_rank(
    run_ranks: RunRanks, layers: dict[str, Any], name: str
) -> None:
    layout, settings = MOE_LAYOUTS[name]
    weights = tiny_models.hf_state_dict(MOE, seed=3)
    settings = {**layers, "use_rollout_routing_replay": True, **settings}
    job = replay_jobs.train_with_replay
    [expected] = run_ranks(job, 1, MOE, weights, {**layers, "use_rollout_routing_replay": True})
    results = run_ranks(
        job, layout.ranks, MOE, weights, {**settings, **layout.sizes}, **layout.sizes
    )
    assert largest_difference(results[0]["log_probs"], expected["log_probs"]) < CLOSE
    for mine, theirs in zip(results[0]["metrics"], expected["metrics"], strict=True):
        assert_near(mine, theirs)
    routes = replay_jobs.with_routes(uneven_batch(), 2, 4, 2).columns["rollout_routed_experts"]
    counts = sum(result["expert_counts"] for result in results)
    torch.testing.assert_close(counts, replay_jobs.expert_counts(routes, 4).float())
    assert all(result["routers_left_clean"] for result in results)


@pytest.mark.parametrize("onto", ["the same layers", "local layers"])
@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [(DENSE, TP2, PP2), (DENSE, PP2, {}), (MOE, EP2, PP2)],
    ids=["TP2 to PP2", "PP2 to DP2", "EP2 to PP2"],
)
def test_a_checkpoint_moves_unchanged_to_another_layout_and_onto_local_layers(
    rank_pool: RankPool,
    layers: dict[str, Any],
    tmp_path: Path,
    onto: str,
    model: Any,
    saved: dict[str, int],
    loaded: dict[str, int],
) -> None:
    root, copy = tmp_path / "checkpoints", tmp_path / "copy"
    weights = tiny_models.hf_state_dict(model)
    source = (model, weights, {**layers, **SHARDED}, str(root))
    expected = rank_pool.run_ranks(train_save_train, 2, *source, **saved)
    settings = {**(LOCAL if onto == "local layers" else layers), **SHARDED}
    resumed = rank_pool.run_ranks(resume_train, 2, model, settings, str(root), str(copy), **loaded)
    assert (resumed[0]["step"], resumed[0]["user_state"]) == (2, USER_STATE)
    before = tensors_of(root, tmp_path / "a")
    assert not any("_extra_state" in name for name in before)
    assert_same_tensors(before, tensors_of(copy, tmp_path / "b"))
    if model is DENSE:  # routers of other layouts choose differently now and then
        # The first step only: ratios at a clip bound make the gradient of the second jump with a rounding.
        assert resumed[0]["next"][0] == pytest.approx(expected[0]["next"][0], rel=CLOSE)


def exported_on_rank(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> dict[str, Tensor]:
    """All weights as a checkpoint for engines has them, before any update."""
    return exported(new_trainer(groups, start, settings))


@pytest.mark.parametrize(
    ("family", "sizes", "settings"),
    [
        ("qwen3", TP2, {}),
        ("qwen3", PP2, {}),
        ("qwen3_moe", EP2, {}),
        ("qwen3_moe", TP2, SP),
    ],
    ids=["dense TP2", "dense PP2", "moe EP2", "moe TP2"],
)
def test_exported_weights_are_the_loaded_ones_in_bfloat16(
    run_ranks: RunRanks,
    layers: dict[str, Any],
    family: str,
    sizes: dict[str, int],
    settings: dict[str, Any],
) -> None:
    found = run_ranks(exported_on_rank, 2, Start.of(family), {**layers, **settings}, **sizes)[0]
    weights = weights_of(family)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name].bfloat16(), value.bfloat16()), name
