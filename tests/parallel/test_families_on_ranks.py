"""Every family of the table computes, exports and learns what transformers' model does, on every layout.

`make test-families` runs all of it and writes the table of what was compared into the docs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import JobConfig, TrainerConfig
from plugin.engines.choice import check_engine_model
from plugin.errors import ConfigError
from plugin.megatron_backend.hf_weights.export import export_hf_weights, export_own_part
from plugin.megatron_backend.lora.targets import check_lora
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.model.layout_rules import check_model
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.router_replay import RouterReplaySession
from plugin.megatron_backend.routing.routes import MicrobatchRoutes, RoutedModel
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.weights.tensor_layout import TensorSpec
from tests.parallel import family_table
from tests.parallel.schedule_runs import forward_log_probs, loaded_model, train_one_step
from tests.parallel.tiny_models import (
    ALL_FAMILIES,
    VOCAB_SIZE,
    hf_log_probs,
    hf_model,
    hf_state_dict,
    tiny_deepseek_v3,
    tiny_gemma3,
    tiny_glm4_moe,
    tiny_moonlight,
    tiny_qwen2,
    tiny_qwen3_next,
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
    # experts whole, attention and dense layers cut
    "TP2+SP ETP1": (2, {TP: 2, ETP: 1}, SP),
    "EP2": (2, {EP: 2}, TrainerConfig()),
}


def is_moe(family: str) -> bool:
    config = ALL_FAMILIES[family]()
    return "num_moe_experts" in FAMILIES[family].transformer_arguments(config)


def layouts(family: str) -> dict[str, tuple[int, dict[str, int], TrainerConfig]]:
    found = MOE_LAYOUTS if is_moe(family) else DENSE_LAYOUTS
    # experts with biases cannot be cut
    return {name: found[name] for name in found if (family, name) != ("gpt_oss", "TP2+SP")}


# One representative of every mechanism; all others with `-m slow`.
DEFAULT_CASES = {
    # biases, windows
    ("qwen2", "TP2"),
    # norms after attention and MLP, RoPE over neighboring channels
    ("glm4", "TP2+SP"),
    # two RoPEs, norms around 0, scaled and tied embeddings
    ("gemma3_text", "PP2"),
    # latent attention, sigmoid scores with a bias, groups of experts, shared experts
    ("deepseek_v3", "EP2"),
    # gated delta rule and gated attention, a gated shared expert
    ("qwen3_next", "TP2+SP"),
    # sinks, biases of experts and routers, experts cut otherwise than attention
    ("gpt_oss", "TP2+SP ETP1"),
}
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


def wrongly_described(chunks: Any, groups: ParallelGroups) -> list[str]:
    """What a rank would send otherwise than a manifest made from tensors without memory says."""
    wrong = []
    for gathers in (False, True):
        found = [
            [
                item and TensorSpec.of(*item)
                for item in export_own_part(
                    chunks, groups, round_bytes=1, gathers_experts=gathers, described=described
                )
            ]
            for described in (False, True)
        ]
        if found[0] != found[1]:
            wrong.append(f"{found[1]} is said to be sent and {found[0]} is")
    return wrong


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
    changed += wrongly_described(chunks, groups)
    per_rank = len(tokens) // groups.dp_size
    own = tokens[groups.dp_rank * per_rank : (groups.dp_rank + 1) * per_rank]
    # Such a large epsilon makes the step proportional to the gradient; otherwise Adam would make a
    # full step also of what is only rounding.
    optimizer = TrainerConfig(lr=0.5, adam_eps=1.0, weight_decay=0.0)
    wrapped, grad_norm = train_one_step(chunks, own, groups, optimizer)
    after = forward_log_probs(wrapped, tokens, groups)
    return {"before": before, "changed": changed, "grad_norm": grad_norm, "after": after}


_one_rank: dict[str, dict[str, Any]] = {}
#: What was compared, by family and layout: log-probs, export, step, replay.
_compared: dict[tuple[str, str], str] = {}


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
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    for result in results:
        assert result["changed"] == [], "exported tensors are those that were loaded, bit for bit"
        assert result["grad_norm"] == pytest.approx(_one_rank[family]["grad_norm"], rel=1e-4)
    moved = (last_stage[0]["after"][0] - expected[0]).abs().max()
    assert moved > 1e-2, "the step must have changed the model"
    _compared[family, layout] = "LES"


def forced_routes(model: Any) -> tuple[list[Any], list[Tensor]]:
    """Make the routers of a transformers model choose the neighbors of their experts; live weights.

    Returns the hooks, and per call of a router [rows, topk] what it was made to choose.
    """
    chosen: list[Tensor] = []

    def force(router: Any, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, experts = output
        logits, experts = logits.view(-1, router.num_experts), (experts + 1) % router.num_experts
        chosen.append(experts)
        if hasattr(router, "routed_scaling_factor"):
            scores = logits.sigmoid().gather(1, experts)
            weights = scores / scores.sum(1, keepdim=True) * router.routed_scaling_factor
        else:
            weights = logits.gather(1, experts).softmax(1)
        return logits, weights, experts

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    return [router.register_forward_hook(force) for router in routers], chosen


def replayed_on_rank(
    groups: ParallelGroups, config: Any, state: dict[str, Tensor], rows: Tensor, routes: Tensor
) -> tuple[list[Tensor] | None, dict[str, float]]:
    """Log-probs of [B, S] tokens with routes [S * B, layers, topk], and the metrics of the replay."""
    chunks = loaded_model(config, state, groups)
    model = RoutedModel.of(chunks)
    own = MicrobatchRoutes(routes[:, model.route_layers], None)
    session = RouterReplaySession(model, [torch.ones(len(routes)).bool()], replayed=[own])
    with session, session.microbatch(0):
        log_probs = forward_log_probs(chunks, [rows], groups)
    session.check_consumed()
    return log_probs, session.metrics(groups, sequence_parallel=False)


MOE_FAMILIES = [family for family in ALL_FAMILIES if is_moe(family)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family,
            layout,
            id=f"{family}, {layout}",
            marks=() if (family, layout) == ("deepseek_v3", "EP2") else pytest.mark.slow,
        )
        for family in MOE_FAMILIES
        for layout in ("EP2", "PP2")
    ],
)
def test_replayed_experts_get_the_weights_that_their_live_scores_give(
    run_ranks: Any, family: str, layout: str
) -> None:
    config, rows = ALL_FAMILIES[family](), microbatches()[0]
    model = hf_model(config)
    live = hf_log_probs(model, rows)
    _, chosen = forced_routes(model)
    expected = hf_log_probs(model, rows)
    assert (expected - live).abs().max() > 1e-2, "other experts must give another model"
    # transformers' routers see [B * S] tokens, Megatron's [S * B]
    batch, length = rows.shape
    routes = (
        torch.stack(chosen, 1).view(batch, length, len(chosen), -1).transpose(0, 1).flatten(0, 1)
    )
    results = run_ranks(
        replayed_on_rank, 2, config, hf_state_dict(config), rows, routes, **MOE_LAYOUTS[layout][1]
    )
    for log_probs, metrics in results:
        assert metrics["replay/coverage"] == 1.0
        assert metrics["replay/agreement"] < 1.0
        for got in log_probs or ():
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert any(log_probs for log_probs, _ in results)
    _compared[family, layout] = _compared.get((family, layout), "") + "R"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_moonlight(), id="Moonlight"),
        pytest.param(tiny_glm4_moe(attention_bias=False, use_qk_norm=False), id="GLM-4.5-Air"),
        pytest.param(tiny_deepseek_v3(first_k_dense_replace=0), id="no dense layer"),
        pytest.param(tiny_gemma3(tie_word_embeddings=False), id="Gemma 3, not tied"),
        pytest.param(tiny_qwen2(tie_word_embeddings=True), id="Qwen2.5, tied"),
    ],
)
@pytest.mark.slow
def test_other_settings_of_a_family_match_transformers_too(run_ranks: Any, config: Any) -> None:
    tokens, state = microbatches(), hf_state_dict(config)
    for result in run_ranks(family_on_rank, 2, config, state, tokens, TrainerConfig(), **{PP: 2}):
        assert result["changed"] == []
        model = hf_model(config)
        for got, rows in zip(result["before"] or (), tokens, strict=False):
            torch.testing.assert_close(got, hf_log_probs(model, rows), rtol=0, atol=1e-4)


def saved_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    settings: TrainerConfig,
    root: str,
) -> None:
    trainer = MegatronTrainer(settings, config, groups)
    trainer.load_hf_weights(state)
    trainer.save_checkpoint(root, 1, {})


def loaded_on_rank(groups: ParallelGroups, config: Any, root: str) -> dict[str, Tensor]:
    trainer = MegatronTrainer(TrainerConfig(), config, groups, seed=99)
    trainer.load_checkpoint(root)
    return {name: tensor.clone() for name, tensor in trainer.export_hf_weights()}


@pytest.mark.slow
def test_a_checkpoint_of_gated_delta_nets_moves_to_another_layout(
    run_ranks: Any, tmp_path: Path
) -> None:
    """Heads of each of their parts are cut over tensor parallel ranks."""
    config = tiny_qwen3_next()
    state, root = hf_state_dict(config), str(tmp_path / "checkpoints")
    run_ranks(saved_on_rank, 2, config, state, SP, root, **{TP: 2})
    for found in run_ranks(loaded_on_rank, 2, config, root, **{PP: 2}):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_what_the_gated_delta_rule_cannot_do_is_refused() -> None:
    config = tiny_qwen3_next()
    with pytest.raises(ConfigError, match="--context-parallel-size 2: the gated delta rule"):
        check_model(config, TrainerConfig(context_parallel_size=2))
    with pytest.raises(ConfigError, match="--lora-rank 4 with qwen3_next"):
        check_lora(config, TrainerConfig(lora_rank=4))
    with pytest.raises(ConfigError, match="use --transformer-impl auto or local"):
        check_model(config, TrainerConfig(transformer_impl="transformer_engine"))
    with pytest.raises(ConfigError, match="use vllm, http, sglang, vllm_server"):
        check_engine_model(JobConfig(), config.to_dict())


def test_every_family_of_the_table_has_a_tiny_model() -> None:
    assert ALL_FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.slow
def test_the_table_in_the_docs_says_what_was_compared() -> None:
    cases = {case.values for case in CASES}
    if missing := cases - _compared.keys():
        pytest.skip(f"{len(missing)} cases did not run or failed")
    assert not family_table.written(_compared), f"{family_table.PAGE} was old and is now rewritten"
