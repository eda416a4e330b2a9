"""Replays MoE routes inside a schedule: the engine's, or the ones of the trainer's own log-prob pass.

For the length of one schedule every router of the *live* model gets a stand-in for Megatron's `RouterReplay`.
The stand-in is told which microbatch a forward pass belongs to. A router call outside a forward pass is an activation
recomputation in backward; these come in the order of the forward passes, so a queue per router says which
microbatch is being recomputed, also under 1F1B and interleaved schedules and with padding microbatches in between.
Nothing is global and nothing outlives the schedule, also after an exception.

Expert indices are replayed; scores are gathered from the live logits, so the router keeps its gradient. Tokens
without a route choose live. Routes arrive as [tokens, moe_layers, topk] per sample, in the smallest unsigned type
that holds the expert count; a row filled with that type's largest value means "no route".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from plugin.batch_types import Microbatch
from plugin.errors import ReplayError
from plugin.megatron_backend.model.hf_weights import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.live_routes import LiveRoutes
from plugin.megatron_backend.step.sequence_packing import ModelInputs


@dataclass(frozen=True)
class RoutedModel:
    """The routers of this rank's live chunks and what the whole model looks like.

    routers: index among all MoE layers of the model (not of this stage) -> router
    """

    routers: dict[int, TopKRouter]
    num_layers: int
    num_experts: int
    topk: int

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> RoutedModel:
        """Find the routers by walking the live model; refuse what replay could not reach."""
        config = unwrap(chunks[0]).config
        if not config.num_moe_experts:
            raise ReplayError(
                "routing replay needs a MoE model, and this one is dense; drop the replay flag"
            )
        if config.moe_router_fusion:
            raise ReplayError(
                "--moe-router-fusion chooses experts in a fused kernel that never asks for replayed routes; "
                "turn it off"
            )
        if config.moe_router_load_balancing_type == "sinkhorn":
            raise ReplayError(
                "sinkhorn load balancing never asks for replayed routes; use another type"
            )
        if getattr(config, "mtp_num_layers", None):
            raise ReplayError(
                f"{config.mtp_num_layers} MTP layers number themselves like decoder layers, so routes cannot be told "
                "apart; train without MTP"
            )
        order = _moe_layer_numbers(config)
        routers: dict[int, TopKRouter] = {}
        for chunk in chunks:
            for name, module in unwrap(chunk).named_modules():
                if isinstance(module, TopKRouter):
                    _add_router(routers, order, name, module)
        return cls(routers, len(order), config.num_moe_experts, config.moe_router_topk)


def _moe_layer_numbers(config: Any) -> dict[int, int]:
    """Layer number (1-based, as routers carry it) -> index among the MoE layers."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(config.num_layers)]
    numbers = [i + 1 for i, is_moe in enumerate(pattern) if is_moe]
    return {number: index for index, number in enumerate(numbers)}


def _add_router(
    routers: dict[int, TopKRouter], order: dict[int, int], name: str, router: TopKRouter
) -> None:
    number = router.layer_number
    if number not in order:
        raise ReplayError(
            f"router {name} says it is layer {number}, which is no MoE layer of the model; it would run without routes"
        )
    if order[number] in routers:
        raise ReplayError(f"router {name} and another one both say they are layer {number}")
    routers[order[number]] = router


@dataclass(frozen=True)
class MicrobatchRoutes:
    """Routes of one microbatch in the order in which this rank's routers see the tokens.

    experts: [rows, moe_layers, topk]; has_route: [rows] bool or None = all; real: [rows] bool, not padding
    """

    experts: Tensor
    has_route: Tensor | None
    real: Tensor
    num_real: int
    num_routed: int


def routes_of(
    microbatch: Microbatch,
    inputs: ModelInputs,
    model: RoutedModel,
    groups: ParallelGroups,
    *,
    sequence_parallel: bool,
) -> MicrobatchRoutes:
    """Check a microbatch's routes and bring them into the routers' order: sequence-major, this rank's tokens.

    Rows that only fill up get valid dummy routes, experts 0..topk-1.
    """
    columns = microbatch.batch.columns
    if "rollout_routed_experts" not in columns:
        raise ReplayError(
            "--use-rollout-routing-replay needs rollout_routed_experts and the batch has none; make the engine "
            "return its routed experts"
        )
    samples = columns["rollout_routed_experts"]
    for i, routes in enumerate(samples):
        check_routes(routes, i, int(columns["total_lengths"][i]), model)
    starts = torch.tensor([0, *columns["total_lengths"]]).cumsum(0)
    flat = torch.cat([*(routes.long() for routes in samples), _dummy_route(model)])
    missing = torch.iinfo(samples[0].dtype).max
    sample_ids = router_order(inputs.sample_ids, groups, sequence_parallel)
    positions = router_order(inputs.position_ids.cpu(), groups, sequence_parallel)
    index = torch.where(sample_ids >= 0, starts[sample_ids] + positions, len(flat) - 1)
    experts = flat[index]
    has_route = (experts != missing).all(dim=2).all(dim=1)
    experts = torch.where(has_route[:, None, None], experts, _dummy_route(model))
    real = (sample_ids >= 0) & torch.tensor(not microbatch.is_padding)
    device, wire = inputs.tokens.device, _wire_dtype(model.num_experts)
    return MicrobatchRoutes(
        experts.to(wire).to(device),
        None if bool(has_route.all()) else has_route.to(device),
        real.to(device),
        int(real.sum()),
        int((real & has_route).sum()),
    )


def router_order(values: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """[B, S_local] values -> [rows] in the order in which this rank's routers see the tokens.

    Routers flatten sequence-major hidden states; under sequence parallelism each sees its slice of the sequence.
    """
    ordered = values.t()
    if sequence_parallel:
        share = ordered.shape[0] // groups.tp_size
        ordered = ordered[groups.tp_rank * share : (groups.tp_rank + 1) * share]
    return ordered.reshape(-1)


def check_routes(routes: Any, sample: int, total: int, model: RoutedModel) -> None:
    """Shape, range and distinctness of one sample's routes, or a `ReplayError` that names the place."""
    if routes is None:
        raise ReplayError(
            f"sample {sample} has no routes but others have; every sample must carry them"
        )
    expected = (total, model.num_layers, model.topk)
    if tuple(routes.shape) != expected:
        raise ReplayError(
            f"routes of sample {sample} have shape {tuple(routes.shape)}, expected {expected}: [tokens, moe layers, "
            "topk]; the engine and the trainer must run the same model"
        )
    missing = torch.iinfo(routes.dtype).max
    wide = routes.long()
    unrouted = (wide == missing).all(dim=2)
    wrong = ((wide < 0) | (wide >= model.num_experts)).any(dim=2) & ~unrouted
    if bool(wrong.any()):
        token, layer = (int(v) for v in wrong.nonzero()[0])
        raise ReplayError(
            f"routes of sample {sample}, token {token}, MoE layer {layer} are {wide[token, layer].tolist()}; the model has "
            f"experts 0..{model.num_experts - 1}"
        )
    ordered = wide.sort(dim=2).values
    doubled = (ordered[..., 1:] == ordered[..., :-1]).any(dim=2) & ~unrouted
    if bool(doubled.any()):
        token, layer = (int(v) for v in doubled.nonzero()[0])
        raise ReplayError(
            f"routes of sample {sample}, token {token}, MoE layer {layer} name an expert twice: "
            f"{wide[token, layer].tolist()}; each token goes to {model.topk} different experts"
        )
    partly = unrouted.any(dim=1) & ~unrouted.all(dim=1)
    if bool(partly.any()):
        raise ReplayError(
            f"token {int(partly.nonzero()[0])} of sample {sample} has routes in some layers only; give all or none"
        )


def _dummy_route(model: RoutedModel) -> Tensor:
    return torch.arange(model.topk).expand(1, model.num_layers, model.topk)


def _wire_dtype(num_experts: int) -> torch.dtype:
    return torch.uint8 if num_experts <= 255 else torch.int16


class RouterReplaySession:
    """Replays (or records) the routes of every microbatch of one schedule.

    Use as a context manager around the schedule, and `microbatch(k)` around each forward pass.
    """

    def __init__(
        self,
        model: RoutedModel,
        num_microbatches: int,
        *,
        replayed: Sequence[MicrobatchRoutes] | None = None,
        recorded: RecordedRoutes | None = None,
        real: Sequence[Tensor] | None = None,
        live: LiveRoutes | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`real`: per microbatch bool [rows], False where padding; needed to report on recorded routes.

        live: collects what the routers would choose without replay
        """
        self.model = model
        self.live = live
        self.real = real if replayed is None else [routes.real for routes in replayed]
        self.active: int | None = None
        self._layers = {
            index: _LayerReplay(self, index, num_microbatches, replayed, recorded)
            for index in model.routers
        }
        self._previous: dict[int, Any] = {}
        self._agreement = torch.zeros(2, model.num_layers, dtype=torch.float64, device=device)
        routes = replayed or []
        self._coverage = (sum(r.num_routed for r in routes), sum(r.num_real for r in routes))
        self._reports_coverage = replayed is not None

    def __enter__(self) -> RouterReplaySession:
        for index, router in self.model.routers.items():
            self._previous[index] = router.router_replay
            router.router_replay = self._layers[index]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for index, router in self.model.routers.items():
            router.router_replay = self._previous[index]
        self.active = None

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Router calls of the body belong to the forward pass of microbatch `number`."""
        self.active = number
        try:
            yield
        finally:
            self.active = None

    def check_consumed(self) -> None:
        """Every router must have taken the routes of every microbatch exactly once, and recomputed all or none."""
        for index, layer in self._layers.items():
            wrong = [k for k, count in enumerate(layer.forward_calls) if count != 1]
            if wrong:
                raise ReplayError(
                    f"the router of MoE layer {index} used the routes of microbatch {wrong[0]} "
                    f"{layer.forward_calls[wrong[0]]} times instead of once; it does not take part in replay"
                )
            if layer.recomputed not in (0, len(layer.forward_calls)):
                raise ReplayError(
                    f"MoE layer {index} recomputed {layer.recomputed} of {len(layer.forward_calls)} microbatches; "
                    "routes were left unconsumed"
                )

    def add_agreement(self, index: int, agreeing: Tensor, weight: Tensor) -> None:
        self._agreement[0, index] += (agreeing * weight).sum()
        self._agreement[1, index] += weight.sum()

    def metrics(self, groups: ParallelGroups, *, sequence_parallel: bool) -> dict[str, float]:
        """Coverage, and agreement with live routing per layer, over all ranks; a collective."""
        # Every token is counted once: stages repeat the tokens, and so do TP ranks unless they split the sequence.
        counts = groups.pp_rank == 0 and (sequence_parallel or groups.tp_rank == 0)
        coverage = self._agreement.new_tensor(self._coverage if counts else (0, 0))
        packed = torch.cat([self._agreement.reshape(-1), coverage])
        dist.all_reduce(packed)
        share, count = packed[:-2].view(2, -1).cpu()
        metrics = {
            f"replay/agreement/layer_{i}": float(share[i] / count[i].clamp(min=1))
            for i in range(self.model.num_layers)
        }
        metrics["replay/agreement"] = float(share.sum() / count.sum().clamp(min=1))
        if self._reports_coverage:
            routed, real = packed[-2:].tolist()
            metrics["replay/coverage"] = routed / max(real, 1.0)
            metrics["replay/live_tokens"] = real - routed
        return metrics


class RecordedRoutes:
    """What the routers of this rank chose, by microbatch and MoE layer; valid for one plan of one batch."""

    def __init__(self, fingerprint: Any) -> None:
        self.fingerprint = fingerprint
        self.routes: dict[tuple[int, int], Tensor] = {}

    def require(self, fingerprint: Any) -> None:
        if self.fingerprint != fingerprint:
            raise ReplayError(
                "--use-routing-replay: the routes were recorded for another batch or another cut of it; run the "
                "log-prob pass on exactly the batch that is trained on"
            )


class _LayerReplay:
    """Takes the place of `RouterReplay` on one router; Megatron calls `get_replay_topk`."""

    def __init__(
        self,
        session: RouterReplaySession,
        index: int,
        num_microbatches: int,
        replayed: Sequence[MicrobatchRoutes] | None,
        recorded: RecordedRoutes | None,
    ) -> None:
        self.session, self.index = session, index
        self.replayed, self.recorded = replayed, recorded
        self.forward_calls = [0] * num_microbatches
        self.recomputed = 0
        self._pending: deque[int] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [rows, experts] -> (scores of the chosen experts, their indices), both [rows, topk]."""
        assert default_compute_topk is not None
        number, first_time = self._microbatch()

        def live() -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        target = self._target(number, scores.shape[0], topk)
        if target is None:
            values, chosen = live()
            if first_time:
                self._keep(number, chosen.detach())
            return values, chosen
        chosen = target.to(scores.device).long()
        chosen = self._with_live_tokens(number, chosen, live, first_time)
        return scores.gather(1, chosen), chosen

    def _keep(self, number: int, chosen: Tensor) -> None:
        if self.recorded is not None:
            self.recorded.routes[number, self.index] = chosen
        if self.session.live is not None:
            self.session.live.add(number, self.index, chosen)

    def _microbatch(self) -> tuple[int, bool]:
        """The microbatch of this call, and whether it is its forward pass (else a recomputation)."""
        if self.session.active is not None:
            self.forward_calls[self.session.active] += 1
            self._pending.append(self.session.active)
            return self.session.active, True
        if not self._pending:
            raise ReplayError(
                f"the router of MoE layer {self.index} ran outside a forward step and has nothing to recompute"
            )
        self.recomputed += 1
        return self._pending.popleft(), False

    def _target(self, number: int, rows: int, topk: int) -> Tensor | None:
        """Routes [rows, topk] to replay for a microbatch, or None to choose live (recording, first time)."""
        if self.replayed is not None:
            target = self.replayed[number].experts[:, self.index]
        elif self.recorded is not None and (number, self.index) in self.recorded.routes:
            target = self.recorded.routes[number, self.index]
        else:
            return None
        if tuple(target.shape) != (rows, topk):
            raise ReplayError(
                f"MoE layer {self.index}: routes have shape {tuple(target.shape)} for {rows} tokens and topk {topk}"
            )
        return target

    def _with_live_tokens(
        self,
        number: int,
        chosen: Tensor,
        live: Callable[[], tuple[Tensor, Tensor]],
        first_time: bool,
    ) -> Tensor:
        """Let tokens without a route choose for themselves, and measure how often the others would agree."""
        routes = self.replayed[number] if self.replayed is not None else None
        has_route = None if routes is None else routes.has_route
        if not first_time and has_route is None:
            return chosen
        with torch.no_grad():
            _, live_choice = live()
            if first_time:
                if self.session.live is not None:
                    self.session.live.add(number, self.index, live_choice)
                same = (chosen[:, :, None] == live_choice[:, None, :]).any(2).double().mean(1)
                real = self.session.real
                weight = torch.ones_like(same) if real is None else real[number].double()
                if has_route is not None:
                    weight = weight * has_route
                self.session.add_agreement(self.index, same, weight)
        if has_route is None:
            return chosen
        return torch.where(has_route[:, None], chosen, live_choice)
