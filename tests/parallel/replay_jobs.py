"""Module-level functions that ranks run in the router replay tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from plugin.batch_types import RolloutBatch, route_dtype
from plugin.config import TrainerConfig
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing import router_replay
from plugin.megatron_backend.routing.routes import RoutedModel, router_order
from plugin.megatron_backend.step import batch_share as share_module
from plugin.megatron_backend.step.microbatching import MicrobatchPlan
from plugin.megatron_backend.trainer import MegatronTrainer
from tests.parallel.training_jobs import near_policy, uneven_batch

NO_ROUTE = -1


def with_routes(
    batch: RolloutBatch,
    layers: int,
    experts: int,
    topk: int,
    *,
    without: float = 0.0,
    seed: int = 11,
) -> RolloutBatch:
    """Add random valid routes and weights of them; a share `without` of the tokens gets none."""
    generator = torch.Generator().manual_seed(seed)
    columns, weights = [], []
    for total in batch.columns["total_lengths"]:
        scores = torch.rand(total, layers, experts, generator=generator)
        routes = scores.topk(topk, dim=2).indices.to(route_dtype(experts))
        routes[torch.rand(total, generator=generator) < without] = NO_ROUTE
        columns.append(routes)
        weights.append(torch.rand(total, layers, topk, generator=generator).softmax(dim=2))
    batch = batch.with_column("rollout_routed_experts", columns)
    return batch.with_column("rollout_routed_weights", weights)


def expert_counts(routes: Sequence[Tensor], experts: int) -> Tensor:
    """[layers, experts]: how many tokens the routes send to every expert."""
    flat = torch.cat(list(routes)).long()
    one_hot = torch.nn.functional.one_hot(flat, experts).sum(2)
    return one_hot.sum(0)


class RouterSpy:
    """Counts, per MoE layer and expert, the real tokens that routers really sent there in forward passes."""

    def __init__(self, trainer: MegatronTrainer) -> None:
        assert trainer.routed_model is not None
        model = trainer.routed_model
        self.counts = torch.zeros(model.num_layers, model.num_experts)
        self.trainer = trainer
        self.handles = [
            router.register_forward_hook(self._hook(index))
            for index, router in model.routers.items()
        ]

    def _hook(self, index: int) -> Any:
        def count(router: TopKRouter, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            session = router.router_replay.session
            if session.active is not None:
                chosen = output[1]
                real = session.real[session.active].to(chosen.device)
                self.counts[index] += chosen[real].sum(0).float().cpu()

        return count


def train_with_replay(
    groups: ParallelGroups,
    hf_config: Any,
    state_dict: dict[str, Tensor],
    settings: dict[str, Any],
    without: float = 0.0,
    steps: int = 2,
) -> dict[str, Any]:
    """Log-prob pass and updates with routes that differ from what the routers would choose."""
    trainer = MegatronTrainer(
        TrainerConfig(**{"lr": 1e-2, "adam_eps": 1e-2, **settings}), hf_config, groups
    )
    trainer.load_hf_weights(state_dict)
    batch = uneven_batch()
    model = trainer.routed_model
    spy = None
    if model is not None and settings.get("use_rollout_routing_replay"):
        batch = with_routes(batch, model.num_layers, model.num_experts, model.topk, without=without)
        spy = RouterSpy(trainer)
    log_probs = trainer.compute_log_probs(batch)
    batch = batch.with_column("log_probs", log_probs)
    batch = batch.with_column("rollout_log_probs", near_policy(log_probs, spread=0.3, seed=5))
    if spy is not None:
        spy.counts.zero_()
    results = [trainer.train_step(batch) for _ in range(steps)]
    weights = {name: value.detach().clone().cpu() for name, value in trainer.export_hf_weights()}
    return {
        "log_probs": log_probs,
        "metrics": [result.metrics for result in results],
        "weights": weights if groups.rank == 0 else None,
        "expert_counts": None if spy is None else spy.counts / steps,
        "routers_left_clean": _routers_are_clean(trainer),
    }


def _routers_are_clean(trainer: MegatronTrainer) -> bool:
    modules = [m for chunk in trainer.chunks for m in unwrap(chunk).modules()]
    return all(m.router_replay is None for m in modules if isinstance(m, TopKRouter))


def train_with_padding_in_the_middle(
    groups: ParallelGroups,
    hf_config: Any,
    state_dict: dict[str, Tensor],
    settings: dict[str, Any],
    policy: str,
) -> dict[str, Any]:
    """As above, with a padding microbatch between real ones; `policy` may be one of two wrong ones."""
    original_plan = share_module.plan_microbatches
    original_call = router_replay._LayerReplay._microbatch

    def plan(*args: Any, **kwargs: Any) -> MicrobatchPlan:
        ranks = original_plan(*args, **kwargs).ranks
        return MicrobatchPlan(tuple((*rank[:3], (), *rank[3:]) for rank in ranks))

    def clear_on_padding(self: Any) -> tuple[int, bool]:
        if self.session.active == 3:
            self._pending.clear()
        return original_call(self)

    def keep_last_targets(self: Any) -> tuple[int, bool]:
        number, first_time = original_call(self)
        self.latest = number if first_time else self.latest
        return self.latest, first_time

    wrong = {"clear on padding": clear_on_padding, "keep last targets": keep_last_targets}
    try:
        share_module.plan_microbatches = plan
        router_replay._LayerReplay._microbatch = wrong.get(policy, original_call)
        return train_with_replay(groups, hf_config, state_dict, settings, steps=1)
    finally:
        share_module.plan_microbatches = original_plan
        router_replay._LayerReplay._microbatch = original_call


def record_then_break(
    groups: ParallelGroups, hf_config: Any, state_dict: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """Two models in one process, an exception inside a schedule, and a batch that was not recorded."""
    config = TrainerConfig(**{"lr": 1e-2, "adam_eps": 1e-2, **settings})
    orphan = MegatronTrainer(config, hf_config, groups)
    trainer = MegatronTrainer(config, hf_config, groups)
    trainer.load_hf_weights(state_dict)
    batch = uneven_batch()
    errors = []
    try:
        trainer.train_step(batch)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    batch = batch.with_column("log_probs", trainer.compute_log_probs(batch))
    recorded = sum(len(found.routes) for found in trainer.recorded_routes.values())
    try:
        trainer.train_step(uneven_batch(6).with_column("log_probs", batch.columns["log_probs"][:6]))
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    try:
        other = batch.columns["unconcat_tokens"]
        trainer.train_step(batch.with_column("unconcat_tokens", [*other[:-1], other[-1].flip(0)]))
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    first = trainer.train_step(batch)
    second = trainer.train_step(batch)
    return {
        "errors": errors,
        "recorded": recorded,
        "agreement": [first.metrics["replay/agreement"], second.metrics["replay/agreement"]],
        "orphan_untouched": _routers_are_clean(orphan),
        "clean": _routers_are_clean(trainer),
    }


def _trainer_and_routed_batch(
    groups: ParallelGroups, hf_config: Any, state_dict: dict[str, Tensor], settings: dict[str, Any]
) -> tuple[MegatronTrainer, RolloutBatch]:
    trainer = MegatronTrainer(TrainerConfig(**{"lr": 1e-2, **settings}), hf_config, groups)
    trainer.load_hf_weights(state_dict)
    model = trainer.routed_model
    assert model is not None
    batch = with_routes(uneven_batch(), model.num_layers, model.num_experts, model.topk)
    return trainer, batch


def replay_each(
    groups: ParallelGroups, hf_config: Any, settings: dict[str, Any], columns: list[list[Tensor]]
) -> list[dict[str, Any]]:
    """The first training step from the same weights with each of the given columns of routes."""
    results = []
    for routes in columns:
        config = TrainerConfig(**{"lr": 1e-2, **settings})
        trainer = MegatronTrainer(config, hf_config, groups)
        spy = RouterSpy(trainer)
        batch = uneven_batch().with_column("rollout_routed_experts", routes)
        metrics = trainer.train_step(batch).metrics
        results.append({"metrics": metrics, "expert_counts": spy.counts})
    return results


def fail_inside_schedule(
    groups: ParallelGroups, hf_config: Any, state_dict: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """An exception in the model, on every rank, while routes are being replayed; then a good step."""
    trainer, batch = _trainer_and_routed_batch(groups, hf_config, state_dict, settings)
    batch = batch.with_column("log_probs", trainer.compute_log_probs(batch))
    calls = []

    def explode(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the model failed")

    handle = unwrap(trainer.chunks[0]).decoder.register_forward_hook(explode)
    message = ""
    try:
        trainer.train_step(batch)
    except ValueError as error:
        message = str(error)
    handle.remove()
    clean = _routers_are_clean(trainer)
    return {"message": message, "clean": clean, "loss": trainer.train_step(batch).metrics["loss"]}


def misnumber_routers(groups: ParallelGroups, hf_config: Any) -> dict[str, str]:
    """What is said about an orphan router, one that aliases another, one that never asks for its routes, bad routes."""
    settings = {"lr": 1e-2, "use_rollout_routing_replay": True}
    trainer = MegatronTrainer(TrainerConfig(**settings), hf_config, groups)
    model = trainer.routed_model
    assert model is not None
    messages = {}
    for name, number in (("orphan", 99), ("alias", 1)):
        model.routers[1].layer_number = number
        try:
            RoutedModel.of(trainer.chunks)
        except router_replay.ReplayError as error:
            messages[name] = str(error)
    router = model.routers[2]
    router.routing = _live_routing(router)
    batch = with_routes(uneven_batch(), model.num_layers, model.num_experts, model.topk)
    try:
        trainer.compute_log_probs(batch)
    except router_replay.ReplayError as error:
        messages["bypassed"] = str(error)
    batch.columns["rollout_routed_experts"][-1][0, 0] = 99
    try:
        trainer.compute_log_probs(batch)
    except router_replay.ReplayError as error:
        messages["out of range"] = str(error)
    return messages


def _live_routing(router: TopKRouter) -> Any:
    """A routing function that, like a fused kernel, never looks at the replay."""
    original = type(router).routing

    def routing(*args: Any, **kwargs: Any) -> Any:
        held, router.router_replay = router.router_replay, None
        try:
            return original(router, *args, **kwargs)
        finally:
            router.router_replay = held

    return routing


class RouteReader:
    """Reads, token by token and layer by layer, which experts the routers of this rank used in forward passes."""

    def __init__(self, trainer: MegatronTrainer, batch: RolloutBatch) -> None:
        model = trainer.routed_model
        assert model is not None
        self.trainer, self.model = trainer, model
        totals = batch.columns["total_lengths"]
        self.seen = [torch.full((n, model.num_layers, model.topk), -1) for n in totals]
        self._places: list[tuple[Tensor, Tensor]] = []
        self._lay_out = trainer._laid_out
        trainer._laid_out = self._remember_places  # type: ignore[method-assign]
        for index, router in model.routers.items():
            router.register_forward_hook(self._hook(index))

    def _remember_places(self, microbatches: Any) -> Any:
        """Per microbatch, the global sample and the position of every row that the routers see."""
        prepared = self._lay_out(microbatches)
        plan = self.trainer_plan
        self._places = []
        for laid_out, samples in zip(prepared, plan, strict=True):
            local, positions = (
                router_order(values, self.trainer.groups, self.trainer.config.sequence_parallel)
                for values in (laid_out.inputs.sample_ids, laid_out.inputs.position_ids)
            )
            table = torch.tensor([*samples, -1])
            self._places.append((table[local], positions))
        return prepared

    @property
    def trainer_plan(self) -> Any:
        return self._plan.ranks[self.trainer.groups.dp_rank]

    def planned(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        self._plan = plan
        return plan

    def _hook(self, index: int) -> Any:
        def read(router: TopKRouter, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            session = router.router_replay.session
            if session.active is None:
                return
            samples, positions = self._places[session.active]
            experts = output[1].float().topk(self.model.topk, dim=1).indices.sort(dim=1).values
            for row in (samples >= 0).nonzero().flatten().tolist():
                self.seen[int(samples[row])][int(positions[row]), index] = experts[row]

        return read


def read_routes(
    groups: ParallelGroups,
    hf_config: Any,
    state_dict: dict[str, Tensor],
    settings: dict[str, Any],
    routes: list[Tensor] | None,
) -> list[Tensor]:
    """Experts that this rank's routers used, per sample [tokens, layers, topk] (-1 = not on this rank).

    Without `routes` the routers choose and are recorded; with them they replay, in a training step too.
    """
    original_plan = share_module.plan_microbatches
    config = TrainerConfig(**{"lr": 1e-2, **settings})
    trainer = MegatronTrainer(config, hf_config, groups)
    trainer.load_hf_weights(state_dict)
    batch = uneven_batch()
    if routes is not None:
        batch = batch.with_column("rollout_routed_experts", routes)
    reader = RouteReader(trainer, batch)
    try:
        share_module.plan_microbatches = lambda *a, **k: reader.planned(original_plan(*a, **k))
        log_probs = trainer.compute_log_probs(batch)
        if routes is not None:
            trainer.train_step(batch.with_column("log_probs", log_probs))
    finally:
        share_module.plan_microbatches = original_plan
    return reader.seen


def live_routes_of_a_step(
    groups: ParallelGroups, hf_config: Any, state_dict: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """A training step on a batch with random routes of the engine, and what the routers choose by themselves."""
    trainer, batch = _trainer_and_routed_batch(groups, hf_config, state_dict, settings)
    result = trainer.train_step(batch, with_live_routes=True)
    return {
        "routes": result.live_routes,
        "metrics": result.metrics,
        "clean": _routers_are_clean(trainer),
    }


def mix_experts(
    groups: ParallelGroups, hf_config: Any, state_dict: dict[str, Tensor], keep: bool
) -> dict[str, Any]:
    """One MoE layer with the engine's experts and weights: output, and gradients of <output, probe>."""
    trainer = MegatronTrainer(
        TrainerConfig(use_rollout_routing_replay="ids+weights"), hf_config, groups, trainable=False
    )
    trainer.load_hf_weights(state_dict)
    model = trainer.routed_model
    assert model is not None
    generator = torch.Generator().manual_seed(2)
    rows, experts, topk = 7, model.num_experts, model.topk
    hidden = torch.randn(rows, 1, hf_config.hidden_size, generator=generator, requires_grad=True)
    probe = torch.randn(rows, 1, hf_config.hidden_size, generator=generator)
    routes = torch.rand(rows, model.num_layers, experts, generator=generator).topk(topk).indices
    weights = torch.rand(rows, model.num_layers, topk, generator=generator)
    session = router_replay.RouterReplaySession(
        model,
        [torch.ones(rows, dtype=torch.bool)],
        replayed=[router_replay.MicrobatchRoutes(routes, None, weights)],
        keep_gradient=keep,
    )
    layer = unwrap(trainer.chunks[0]).decoder.layers[1].mlp
    with session, session.microbatch(0):
        output, _ = layer(hidden)
    (output * probe).sum().backward()
    return {
        "hidden": hidden.detach(),
        "probe": probe,
        "routes": routes[:, 1],
        "weights": weights[:, 1],
        "output": output.detach(),
        "hidden_grad": hidden.grad,
        "router_grad": layer.router.weight.grad,
    }
