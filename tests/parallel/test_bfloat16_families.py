"""Every family in bfloat16 on every layout is near the local layers of one rank: log-probs, two steps, weights.

Here the layouts have local layers, too. `tests/gpu/test_transformer_engine_families.py` runs the same bodies on the layers that
`--transformer-impl auto` chooses on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.model.layout_rules import check_model
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel import replay_jobs, tiny_models
from tests.parallel.rank_pool import RankPool
from tests.parallel.test_bfloat16_layouts import CLOSE, LOCAL, assert_near, largest_difference

pytestmark = pytest.mark.slow

#: Attention kernels take heads of a multiple of 8.
ALIGNED: dict[str, dict[str, Any]] = {"deepseek_v3": {"q_lora_rank": 16, "v_head_dim": 16}}
TP, CP, EP = (f"{kind}_parallel_size" for kind in ("tensor_model", "context", "expert_model"))
PP, ETP = "pipeline_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
#: Parallel sizes and settings, two ranks each.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "TP2 with sequence parallelism": ({TP: 2}, SP),
    "TP2 with whole experts": ({TP: 2, ETP: 1}, SP),
    "PP2": ({PP: 2}, {}),
    "CP2": ({CP: 2}, {"max_tokens_per_gpu": 24}),
    "EP2": ({EP: 2}, {}),
}


def model_of(family: str) -> Any:
    """A tiny model of the family that kernels of a GPU take."""
    return tiny_models.ALL_FAMILIES[family](**ALIGNED.get(family, {}))


def is_routed(family: str) -> bool:
    return "num_moe_experts" in FAMILIES[family].transformer_arguments(model_of(family))


def settings_of(family: str, layers: dict[str, Any]) -> dict[str, Any]:
    # Routers that round differently choose differently: the experts are given.
    return {**layers, **({"use_rollout_routing_replay": True} if is_routed(family) else {})}


def fits(family: str, layout: str) -> bool:
    sizes, settings = LAYOUTS[layout]
    if not is_routed(family) and (EP in sizes or ETP in sizes):
        return False
    try:
        check_model(model_of(family), TrainerConfig(**sizes, **settings))
    except ConfigError:
        return False
    return True


CASES = [
    pytest.param(family, layout, id=f"{family}, {layout}")
    for family in tiny_models.ALL_FAMILIES
    for layout in LAYOUTS
    if fits(family, layout)
]


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """The settings that choose dtype and layers of the layouts."""
    return LOCAL


def on_rank(
    groups: ParallelGroups, family: str, weights: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    return replay_jobs.train_with_replay(groups, model_of(family), weights, settings)


_local: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_family_is_near_the_local_layers_of_one_rank(
    rank_pool: RankPool, layers: dict[str, Any], family: str, layout: str
) -> None:
    weights = tiny_models.hf_state_dict(model_of(family), seed=3)
    if family not in _local:
        # With the layers that the test names, on GPUs as well.
        settings = settings_of(family, LOCAL)
        [_local[family]] = rank_pool.run_ranks(on_rank, 1, family, weights, settings)
    expected = _local[family]
    sizes, more = LAYOUTS[layout]
    ranks = 2 if sizes else 1
    settings = {**settings_of(family, layers), **sizes, **more}
    found = rank_pool.run_ranks(on_rank, ranks, family, weights, settings, **sizes)
    assert largest_difference(found[0]["log_probs"], expected["log_probs"]) < CLOSE
    for mine, theirs in zip(found[0]["metrics"], expected["metrics"], strict=True):
        assert_near(mine, theirs)
    exported = next(result["weights"] for result in found if result["weights"] is not None)
    assert exported.keys() == weights.keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        moved = (weight.float() - weights[name].float()).norm()
        off = (exported[name].float() - weight.float()).norm()
        # Two small steps of Adam; a weight that is cut or joined wrongly is off by its whole size.
        assert off <= 0.1 * weight.float().norm() + moved, name
    assert all(result["routers_left_clean"] for result in found)
    assert torch.isfinite(torch.tensor([m["grad_norm"] for m in found[0]["metrics"]])).all()
