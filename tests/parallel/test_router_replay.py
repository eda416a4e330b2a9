"""Router replay on real ranks: the same step for every layout, and exactly the given experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel import replay_jobs, tiny_models
from tests.parallel.training_jobs import uneven_batch

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
REPLAY = {"use_rollout_routing_replay": True}
WEIGHTS = {"use_rollout_routing_replay": "ids+weights"}
KEEP = {**WEIGHTS, "router_gradient": "keep"}

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "pp2_recompute": (2, {"pipeline_model_parallel_size": 2}, FULL_RECOMPUTE),
    "vpp2_recompute": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        FULL_RECOMPUTE,
    ),
    "ep2": (2, {"expert_model_parallel_size": 2}, {"max_tokens_per_gpu": 40}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}, {"max_tokens_per_gpu": 24}),
    "cp2_tp2_sp_recompute": (
        4,
        {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
        {"sequence_parallel": True, **FULL_RECOMPUTE},
    ),
}


@pytest.fixture(scope="module")
def dense_first() -> tuple[Any, dict[str, torch.Tensor]]:
    """A MoE model whose first two layers are dense: with PP2 the first stage has no router at all."""
    config = tiny_models.tiny_qwen3_moe(mlp_only_layers=[0, 1])
    return config, tiny_models.hf_state_dict(config, seed=3)


def assert_same_step(
    got: dict[str, Any], want: dict[str, Any], layout: str = "", tolerance: float = 2e-5
) -> None:
    for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
        for name, value in theirs.items():
            if "micro" not in name:
                assert mine[name] == pytest.approx(value, rel=tolerance, abs=1e-6), (layout, name)
    for name, value in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], value, rtol=1e-4, atol=tolerance)


ALSO_WITHOUT_ROUTES = ("pp2_recompute", "tp2_sp", "cp2")


@pytest.mark.parametrize(
    ("without", "layouts"),
    [
        pytest.param(
            0.0,
            [name for name in LAYOUTS if name not in ALSO_WITHOUT_ROUTES],
            id="every sample has routes",
            marks=pytest.mark.slow,
        ),
        pytest.param(0.3, ALSO_WITHOUT_ROUTES, id="some have none"),
        pytest.param(
            0.0,
            ALSO_WITHOUT_ROUTES,
            id="every sample has routes, more layouts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_replay_gives_the_same_step_on_every_layout(
    run_ranks, dense_first, without, layouts
) -> None:
    want = run_ranks(replay_jobs.train_with_replay, 1, *dense_first, REPLAY, without)[0]
    live = run_ranks(replay_jobs.train_with_replay, 1, *dense_first, {}, without)[0]
    assert abs(live["metrics"][0]["grad_norm"] - want["metrics"][0]["grad_norm"]) > 1e-3
    for name in layouts:
        ranks, sizes, settings = LAYOUTS[name]
        settings = {**REPLAY, **settings, **sizes}
        results = run_ranks(
            replay_jobs.train_with_replay, ranks, *dense_first, settings, without, **sizes
        )
        assert_same_step(results[0], want, layout=name)
        assert all(result["routers_left_clean"] for result in results)


MIXED = ("pp2_recompute",)


@pytest.mark.parametrize(
    ("replay", "layouts"),
    [
        pytest.param(KEEP, MIXED, id="router gradient kept"),
        pytest.param(WEIGHTS, MIXED, id="router gradient stopped", marks=pytest.mark.slow),
        pytest.param(
            KEEP,
            [name for name in LAYOUTS if name not in MIXED],
            id="router gradient kept, more layouts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            WEIGHTS,
            [name for name in LAYOUTS if name not in MIXED],
            id="router gradient stopped, more layouts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_replayed_weights_give_the_same_step_on_every_layout(
    run_ranks, dense_first, replay, layouts
) -> None:
    want = run_ranks(replay_jobs.train_with_replay, 1, *dense_first, replay, 0.3)[0]
    ids = run_ranks(replay_jobs.train_with_replay, 1, *dense_first, REPLAY, 0.3)[0]
    assert abs(ids["metrics"][0]["grad_norm"] - want["metrics"][0]["grad_norm"]) > 1e-3
    for name in layouts:
        ranks, sizes, settings = LAYOUTS[name]
        settings = {**replay, **settings, **sizes}
        results = run_ranks(
            replay_jobs.train_with_replay, ranks, *dense_first, settings, 0.3, **sizes
        )
        assert_same_step(results[0], want, layout=name)
        assert all(result["routers_left_clean"] for result in results)


@pytest.mark.parametrize("keep", [False, True])
def test_experts_are_mixed_exactly_as_the_engine_mixed_them(run_ranks, keep) -> None:
    config = tiny_models.tiny_qwen3_moe()
    state = tiny_models.hf_state_dict(config, seed=3)
    got = run_ranks(replay_jobs.mix_experts, 1, config, state, keep)[0]
    hidden = got["hidden"].double()[:, 0].requires_grad_(True)
    router = state["model.layers.1.mlp.gate.weight"].double().requires_grad_(True)
    outputs = torch.stack([expert_output(state, 1, e, hidden) for e in range(4)], dim=1)
    chosen = got["routes"]
    weights = got["weights"].double()
    # Straight-through: the value is the engine's, the derivative that of softmax over the chosen.
    live = (hidden @ router.t()).gather(1, chosen).softmax(dim=1)
    mixing = weights + (live - live.detach()) if keep else weights
    picked = outputs.gather(1, chosen[:, :, None].expand(-1, -1, outputs.shape[2]))
    want = (mixing[:, :, None] * picked).sum(dim=1)
    (want * got["probe"].double()[:, 0]).sum().backward()
    torch.testing.assert_close(got["output"].double()[:, 0], want.detach(), rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(got["hidden_grad"].double()[:, 0], hidden.grad, rtol=2e-5, atol=1e-5)
    if keep:
        assert float(router.grad.abs().max()) > 1e-2
        torch.testing.assert_close(got["router_grad"].double(), router.grad, rtol=2e-5, atol=1e-5)
    else:
        # Still in the graph, with a gradient of exactly 0.
        assert got["router_grad"] is not None and not bool(got["router_grad"].any())


def expert_output(
    state: dict[str, torch.Tensor], layer: int, expert: int, hidden: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of one expert in float64, from the checkpoint's own tensors."""
    gate, up, down = (
        state[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"].double()
        for name in ("gate", "up", "down")
    )
    return (torch.nn.functional.silu(hidden @ gate.t()) * (hidden @ up.t())) @ down.t()


@pytest.mark.slow  # the test that goes token by token says more
def test_routers_use_exactly_the_given_experts_layer_by_layer(run_ranks) -> None:
    config = tiny_models.tiny_qwen3_moe(mlp_only_layers=[0])
    state = tiny_models.hf_state_dict(config, seed=3)
    routes = replay_jobs.with_routes(uneven_batch(), 3, 4, 2).columns["rollout_routed_experts"]
    want = replay_jobs.expert_counts(routes, 4).float()
    for ranks, sizes, settings in (
        LAYOUTS["dp2"],
        LAYOUTS["pp2_recompute"],
        LAYOUTS["cp2"],
        LAYOUTS["tp2_sp"],
    ):
        settings = {**REPLAY, **settings, **sizes}
        results = run_ranks(replay_jobs.train_with_replay, ranks, config, state, settings, **sizes)
        # DP, PP, CP and SP ranks see different tokens or layers, so their counts add up.
        counts = sum(result["expert_counts"] for result in results)
        torch.testing.assert_close(counts, want)


def test_padding_in_the_middle_of_a_recomputed_pipeline_keeps_the_gradient(run_ranks) -> None:
    sizes = {"pipeline_model_parallel_size": 2}
    # Routers on both stages: the early stage holds several microbatches pending for recomputation.
    config = tiny_models.tiny_qwen3_moe()
    model = (config, tiny_models.hf_state_dict(config, seed=3))
    job, base = replay_jobs.train_with_padding_in_the_middle, {**REPLAY, **sizes}
    want = run_ranks(job, 2, *model, base, "ours", **sizes)[0]
    got = run_ranks(job, 2, *model, {**base, **FULL_RECOMPUTE}, "ours", **sizes)[0]
    assert_same_step(got, want)
    # Recomputing with the targets of the latest forward pass: routes of another microbatch, of another length.
    with pytest.raises(Exception, match="routes have shape"):
        run_ranks(job, 2, *model, {**base, **FULL_RECOMPUTE}, "keep last targets", **sizes)
    # Dropping what is pending when padding comes by: microbatches before it cannot be recomputed any more.
    with pytest.raises(Exception, match=r"routes have shape|nothing to recompute"):
        run_ranks(job, 2, *model, {**base, **FULL_RECOMPUTE}, "clear on padding", **sizes)


def test_own_routes_are_recorded_and_replayed_by_the_live_model_only(run_ranks) -> None:
    config = tiny_models.tiny_qwen3_moe()
    state = tiny_models.hf_state_dict(config, seed=3)
    settings = {"use_routing_replay": True, **FULL_RECOMPUTE}
    for result in run_ranks(replay_jobs.record_then_break, 2, config, state, settings):
        assert "ReplayError" in result["errors"][0] and "compute_log_probs" in result["errors"][0]
        # Fewer samples; then as many of the same lengths, with other tokens in one of them.
        assert "ReplayError" in result["errors"][1] and "a different batch" in result["errors"][1]
        assert "ReplayError" in result["errors"][2] and "a different batch" in result["errors"][2]
        # 9 samples over 2 ranks: 5 microbatches (one of them padding on one rank) x 4 MoE layers
        assert result["recorded"] == 5 * 4
        assert result["agreement"][0] == 1.0 and result["agreement"][1] < 1.0
        assert result["orphan_untouched"] and result["clean"]


def test_an_exception_inside_the_schedule_leaves_no_replay_state(run_ranks, dense_first) -> None:
    result = run_ranks(replay_jobs.fail_inside_schedule, 1, *dense_first, REPLAY)[0]
    assert result["message"] == "the model failed" and result["clean"]
    assert torch.isfinite(torch.tensor(result["loss"]))


def test_routers_that_cannot_be_matched_to_routes_are_refused(run_ranks) -> None:
    config = tiny_models.tiny_qwen3_moe()
    messages = run_ranks(replay_jobs.misnumber_routers, 1, config)[0]
    assert "is no MoE layer" in messages["orphan"]
    assert "both say they are layer 1" in messages["alias"]
    assert "instead of once" in messages["bypassed"]
    # Its place in the global batch; every microbatch has one sample.
    assert "routes of sample 8, token 0" in messages["out of range"]


def test_routes_recorded_on_one_layout_are_used_token_by_token_on_another(run_ranks) -> None:
    config = tiny_models.tiny_qwen3_moe(mlp_only_layers=[0])
    model = (config, tiny_models.hf_state_dict(config, seed=3))
    _, sizes, settings = LAYOUTS["pp2_recompute"]
    recording = {"use_routing_replay": True, **settings, **sizes}
    recorded = joined(run_ranks(replay_jobs.read_routes, 2, *model, recording, None, **sizes))
    # Shift every route to the next expert: routers would never choose these by themselves.
    routes = [((sample + 1) % 4).to(torch.uint8) for sample in recorded]
    want = [sample.long().sort(dim=2).values for sample in routes]
    for name in ("dp2", "ep2", "tp2_sp", "cp2"):
        ranks, sizes, settings = LAYOUTS[name]
        settings = {**REPLAY, **settings, **sizes}
        results = run_ranks(replay_jobs.read_routes, ranks, *model, settings, routes, **sizes)
        assert all(map(torch.equal, joined(results), want)), name


def test_live_routes_are_the_same_on_every_layout_and_with_replay(run_ranks, dense_first) -> None:
    recorded = run_ranks(
        replay_jobs.read_routes, 1, *dense_first, {"use_routing_replay": True}, None
    )
    watch = {"detect_routing": True}
    want = run_ranks(replay_jobs.live_routes_of_a_step, 1, *dense_first, watch)[0]
    assert same_experts(want["routes"], joined(recorded))
    for name in ("dp2", "pp2_recompute", "vpp2_recompute", "ep2", "tp2_sp", "cp2"):
        ranks, sizes, settings = LAYOUTS[name]
        settings = {**watch, **settings, **sizes}
        for result in run_ranks(
            replay_jobs.live_routes_of_a_step, ranks, *dense_first, settings, **sizes
        ):
            assert same_experts(result["routes"], want["routes"]), name
            assert result["metrics"]["loss"] == pytest.approx(want["metrics"]["loss"], rel=1e-5)
            assert not any(key.startswith("replay/") for key in result["metrics"]), name
            assert result["clean"]
    # Replay changes what later layers see, and the first MoE layer's own choice not at all.
    replayed = run_ranks(replay_jobs.live_routes_of_a_step, 1, *dense_first, REPLAY)[0]["routes"]
    assert same_experts([r[:, :1] for r in replayed], [r[:, :1] for r in want["routes"]])
    assert not same_experts(replayed, want["routes"])


def same_experts(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether all samples have the same experts, in whatever order."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.long().sort(2).values, b.long().sort(2).values) for a, b in pairs)


def joined(results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The routes that the ranks saw, put together; every token of every layer was seen somewhere."""
    samples = [torch.stack(parts).amax(dim=0) for parts in zip(*results, strict=True)]
    assert all(int(sample.min()) >= 0 for sample in samples)
    return samples
