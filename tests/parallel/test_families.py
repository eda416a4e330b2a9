"""Every family of the table computes, exports and learns what transformers' model does, on every layout.

`make test-families` runs all of it and writes the table of what was compared into the docs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.model.hf_weights import export_hf_weights
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.schedule_runs import forward_log_probs, loaded_model, train_one_step
from tests.parallel.tiny_models import (
    ALL_FAMILIES,
    VOCAB_SIZE,
    hf_log_probs,
    hf_model,
    hf_state_dict,
)

TP, PP, EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
ETP = "expert_tensor_parallel_size"
SP = TrainerConfig(sequence_parallel=True, tensor_model_parallel_size=2)

# name -> (ranks, parallel sizes, settings)
DENSE_LAYOUTS: dict[str, tuple[int, dict[str, int], TrainerConfig]] = {
    "one rank": (1, {}, TrainerConfig()),
    "TP2": (2, {TP: 2}, TrainerConfig()),
    "TP2+SP": (2, {TP: 2}, SP),
    "PP2": (2, {PP: 2}, TrainerConfig()),
}
# A MoE model under TP needs SP.
MOE_LAYOUTS = {name: DENSE_LAYOUTS[name] for name in ("one rank", "TP2+SP", "PP2")} | {
    "EP2": (2, {EP: 2}, TrainerConfig()),
}


def is_moe(family: str) -> bool:
    config = ALL_FAMILIES[family]()
    return "num_moe_experts" in FAMILIES[family].transformer_arguments(config)


def layouts(family: str) -> dict[str, tuple[int, dict[str, int], TrainerConfig]]:
    return MOE_LAYOUTS if is_moe(family) else DENSE_LAYOUTS


# One representative of every mechanism; all others with `-m slow`.
DEFAULT_CASES = {("qwen2", "TP2"), ("mistral", "PP2")}
CASES = [
    pytest.param(
        family,
        layout,
        id=f"{family}, {layout}",
        marks=() if (family, layout) in DEFAULT_CASES else pytest.mark.slow,
    )
    for family in ALL_FAMILIES
    for layout in layouts(family)
]


def microbatches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (2, 12), generator=generator) for _ in range(4)]


def family_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    tokens: list[Tensor],
    settings: TrainerConfig,
) -> dict[str, Any]:
    """Log-probs, what differs after a round trip, and what one training step leaves."""
    chunks = loaded_model(config, state, groups, settings)
    before = forward_log_probs(chunks, tokens, groups)
    exported = {name: tensor.clone() for name, tensor in export_hf_weights(chunks, groups)}
    changed = sorted(exported.keys() ^ state.keys()) + [
        name for name in state if name in exported and not torch.equal(exported[name], state[name])
    ]
    per_rank = len(tokens) // groups.dp_size
    own = tokens[groups.dp_rank * per_rank : (groups.dp_rank + 1) * per_rank]
    wrapped, grad_norm = train_one_step(chunks, own, groups, TrainerConfig(lr=1e-2))
    after = forward_log_probs(wrapped, tokens, groups)
    return {"before": before, "changed": changed, "grad_norm": grad_norm, "after": after}


_one_rank: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_family_computes_exports_and_learns_the_same_on_every_layout(
    run_ranks: Any, family: str, layout: str
) -> None:
    config, tokens = ALL_FAMILIES[family](), microbatches()
    state = hf_state_dict(config)

    def run(name: str) -> list[dict[str, Any]]:
        ranks, sizes, settings = layouts(family)[name]
        return run_ranks(family_on_rank, ranks, config, state, tokens, settings, **sizes)

    if family not in _one_rank:
        (_one_rank[family],) = run("one rank")
    results = [_one_rank[family]] if layout == "one rank" else run(layout)
    model = hf_model(config)
    expected = [hf_log_probs(model, rows) for rows in tokens]
    last_stage = [result for result in results if result["before"] is not None]
    assert last_stage
    for result in last_stage:
        for got, want in zip(result["before"], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        for got, want in zip(result["after"], _one_rank[family]["after"], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
    for result in results:
        assert result["changed"] == [], "exported tensors are those that were loaded, bit for bit"
        assert result["grad_norm"] == pytest.approx(_one_rank[family]["grad_norm"], rel=1e-4)
    moved = (last_stage[0]["after"][0] - expected[0]).abs().max()
    assert moved > 1e-2, "the step must have changed the model"


def test_every_family_of_the_table_has_a_tiny_model() -> None:
    assert ALL_FAMILIES.keys() == FAMILIES.keys()
