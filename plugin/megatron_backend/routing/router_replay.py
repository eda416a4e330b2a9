"""Replay MoE routes inside a schedule: the engine's, or those of the trainer's own log-prob pass.

For the length of one schedule every router of the *live* model gets a replacement for Megatron's
`RouterReplay`, which is told which microbatch a forward pass belongs to. A router call outside a
forward pass is an activation recomputation in backward; these come in the order of the forward
passes, so a queue per router says which microbatch is being recomputed, also under 1F1B and
interleaved schedules and with padding microbatches in between. Nothing is global and nothing
outlives the schedule, also after an exception.

Expert indices are replayed; scores are gathered from the live logits, so the router keeps its
gradient.

Routes arrive as [tokens, moe_layers, topk] per sample, in any integer type that holds every expert;
samples of one microbatch may differ. A token may have *no route*: a row in which every entry, in
all layers, is -1, where an engine cannot say which experts it used. In an unsigned type every value
is an expert. The routers of a token without a route choose live, in the forward pass and again in
recomputation. It counts in `replay/live_tokens`, lowers `replay/coverage` and has no part in
`replay/agreement`. A token without a route in some layers only is an error.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from plugin.batch_types import (
    Microbatch,
    holds_experts,
    no_route,
    route_dtype,
    route_faults,
)
from plugin.errors import ReplayError
from plugin.megatron_backend.model.hf_weights import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.live_routes import LiveRoutes
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.megatron_backend.step.sequence_packing import ModelInputs
from plugin.ragged import Integers, Ragged, as_integers


@dataclass(frozen=True)
class RoutedModel:
    """The routers of this rank's live chunks and what the whole model looks like.

    routers: index among all MoE layers of the model (not of this stage) -> router
    """

    routers: dict[int, TopKRouter]
    num_layers: int
    num_experts: int
    topk: int

    @property
    def route_layers(self) -> list[int]:
        """The MoE layers whose routes this rank is given: its own.

        A stage without any gets those of the first, which say which tokens have a route.
        """
        return sorted(self.routers) or [0]

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> RoutedModel:
        """Find the routers by walking the live model; refuse what replay could not reach."""
        config = unwrap(chunks[0]).config
        mtp_layers = getattr(config, "mtp_num_layers", None)
        for refused, reason in (
            (
                not config.num_moe_experts,
                "routing replay needs a MoE model, and this one is dense; drop the replay flag",
            ),
            (
                config.moe_router_fusion,
                "--moe-router-fusion chooses experts in a fused kernel that never asks for "
                "replayed routes; turn it off",
            ),
            (
                config.moe_router_load_balancing_type == "sinkhorn",
                "sinkhorn load balancing never asks for replayed routes; use another type",
            ),
            (
                mtp_layers,
                f"{mtp_layers} MTP layers number themselves like decoder layers, so routes cannot "
                "be told apart; train without MTP",
            ),
        ):
            if refused:
                raise ReplayError(reason)
        pattern = config.moe_layer_freq
        if isinstance(pattern, int):
            pattern = [i % pattern == 0 for i in range(config.num_layers)]
        # Layer numbers are 1-based, as routers carry them.
        moe_layers = [i + 1 for i, is_moe in enumerate(pattern) if is_moe]
        routers: dict[int, TopKRouter] = {}
        modules = (pair for chunk in chunks for pair in unwrap(chunk).named_modules())
        for name, module in modules:
            if not isinstance(module, TopKRouter):
                continue
            number = module.layer_number
            if number not in moe_layers:
                raise ReplayError(
                    f"router {name} says it is layer {number}, which is no MoE layer of the model; "
                    "it would run without routes"
                )
            index = moe_layers.index(number)
            if index in routers:
                raise ReplayError(f"router {name} and another one both say they are layer {number}")
            routers[index] = module
        return cls(routers, len(moe_layers), config.num_moe_experts, config.moe_router_topk)


class MicrobatchRoutes(NamedTuple):
    """Routes of one microbatch in the order in which this rank's routers see the tokens.

    experts: [rows, layers of this stage, topk]; has_route: [rows] bool, or None if all have one
    """

    experts: Tensor
    has_route: Tensor | None


def routes_of(
    microbatch: Microbatch,
    inputs: ModelInputs,
    model: RoutedModel,
    groups: ParallelGroups,
    *,
    sequence_parallel: bool,
    sample_numbers: Sequence[int] | Integers | None = None,
) -> MicrobatchRoutes:
    """Check a microbatch's routes and bring them into the routers' order.

    Padding gets valid dummy routes, experts 0..topk-1.
    sample_numbers: what errors call the samples; None = their places in the microbatch
    """
    columns = microbatch.batch.columns
    if "rollout_routed_experts" not in columns:
        raise ReplayError(
            "--use-rollout-routing-replay needs rollout_routed_experts and the batch has none; "
            "make the engine return its routed experts"
        )
    routes: Ragged = columns["rollout_routed_experts"]
    check_routes(routes, columns["total_lengths"], model, sample_numbers)
    dummy = torch.arange(model.topk).expand(1, len(model.route_layers), model.topk)
    # The dummy comes last: padding is at place -1.
    flat = torch.cat([routes.values.long(), dummy])
    routed = torch.cat([~no_route(routes.values).all(dim=1), torch.ones(1, dtype=torch.bool)])
    starts = torch.from_numpy(np.append(routes.starts, 0))
    places = token_places(inputs, starts, groups, sequence_parallel)
    has_route = routed[places]
    experts = torch.where(has_route[:, None, None], flat[places], dummy)
    device = inputs.tokens.device
    experts = experts.to(route_dtype(model.num_experts)).to(device)
    return MicrobatchRoutes(experts, None if bool(has_route.all()) else has_route.to(device))


def token_places(
    inputs: ModelInputs, starts: Tensor, groups: ParallelGroups, sequence_parallel: bool
) -> Tensor:
    """[rows] int64: which token each row is that this rank's routers see, -1 where it is padding.

    starts: the number of the first token of every sample of the microbatch
    """
    sample_ids = router_order(inputs.sample_ids, groups, sequence_parallel)
    positions = router_order(inputs.position_ids.cpu(), groups, sequence_parallel)
    return torch.where(sample_ids >= 0, starts[sample_ids] + positions, -1)


def router_order(values: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """[B, S_local] values -> [rows] in the order in which this rank's routers see the tokens.

    Routers flatten sequence-major hidden states; under sequence parallelism each sees its slice of
    the sequence.
    """
    ordered = values.t()
    if sequence_parallel:
        ordered = ordered.chunk(groups.tp_size)[groups.tp_rank]
    return ordered.reshape(-1)


def check_routes(
    routes: Ragged,
    total_lengths: Sequence[int] | Tensor,
    model: RoutedModel,
    sample_numbers: Sequence[int] | Integers | None = None,
) -> None:
    """Check shape, range and distinctness of samples' routes; a `ReplayError` names the place."""
    numbers = range(len(routes)) if sample_numbers is None else sample_numbers
    per_token, expected = tuple(routes.values.shape[1:]), (len(model.route_layers), model.topk)
    wrong_shape = (routes.lengths != as_integers(total_lengths)) | (per_token != expected)
    for i in np.flatnonzero(wrong_shape)[:1]:
        raise ReplayError(
            f"routes of sample {numbers[i]} have shape {(int(routes.lengths[i]), *per_token)}, "
            f"expected {(int(total_lengths[i]), *expected)}: [tokens, moe layers, topk]; the "
            "engine and the trainer must run the same model"
        )
    if not holds_experts(routes.values.dtype, model.num_experts):
        raise ReplayError(
            f"routes are {routes.values.dtype}, which does not hold experts "
            f"0..{model.num_experts - 1}; give {route_dtype(model.num_experts)}"
        )
    outside, repeated = route_faults(routes.values, model.num_experts)
    for wrong, problem in (
        (
            outside,
            f"are {{}}; the model has experts 0..{model.num_experts - 1}, and a row of -1 in a "
            "signed type means no route",
        ),
        (
            repeated,
            f"name an expert twice: {{}}; each token goes to {model.topk} different experts",
        ),
    ):
        places = wrong.nonzero()
        if len(places):
            place, layer = places[0].tolist()
            sample, token = routes.place_of(place)
            raise ReplayError(
                f"routes of sample {numbers[sample]}, token {token}, MoE layer {layer} "
                + problem.format(routes.values[place, layer].tolist())
            )
    missing = no_route(routes.values)
    partly = (missing.any(dim=1) & ~missing.all(dim=1)).nonzero()
    if len(partly):
        sample, token = routes.place_of(int(partly[0]))
        raise ReplayError(
            f"token {token} of sample {numbers[sample]} has routes in some layers only; give all "
            "or none"
        )


def share_fingerprint(share: BatchShare) -> bytes:
    """What routes depend on besides the weights: every token, and the cut into microbatches."""
    tokens: Ragged = share.batch.columns["unconcat_tokens"]
    digest = hashlib.blake2b(tokens.values.long().cpu().contiguous().numpy().data)
    for part in (tokens.lengths, share.counts):
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


@dataclass(frozen=True)
class RecordedRoutes:
    """What this rank's routers chose, by microbatch and MoE layer; for one plan of one batch."""

    fingerprint: Any
    routes: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def require(self, fingerprint: Any) -> None:
        """Raise if the routes are not those of this plan of this batch."""
        if self.fingerprint != fingerprint:
            raise ReplayError(
                "--use-routing-replay: the routes were recorded for another batch or another cut "
                "of it; run the log-prob pass on exactly the batch that is trained on"
            )


class RouterReplaySession:
    """Replays (or records) the routes of every microbatch of one schedule.

    Use as a context manager around the schedule, and `microbatch(k)` around each forward pass.
    """

    def __init__(
        self,
        model: RoutedModel,
        real: Sequence[Tensor],
        *,
        replayed: Sequence[MicrobatchRoutes] | None = None,
        recorded: RecordedRoutes | None = None,
        live: LiveRoutes | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`real`: per microbatch [rows] bool, False where padding.

        recorded: filled where it has no routes yet, replayed where it has
        live: collects what the routers would choose without replay
        """
        self.model, self.replayed, self.recorded, self.live = model, replayed, recorded, live
        self.real = [rows.to(device) for rows in real]
        self.active: int | None = None
        self._layers = {index: _LayerReplay(self, index) for index in model.routers}
        self._previous: dict[int, Any] = {}
        # Sums over tokens: per layer [agreement, tokens]; [routed tokens, tokens].
        self.agreement = torch.zeros(2, model.num_layers, dtype=torch.float64, device=device)
        self._coverage = torch.zeros(2, dtype=torch.float64, device=device)
        for routes, rows in zip(replayed or (), self.real, strict=replayed is not None):
            routed = rows if routes.has_route is None else rows & routes.has_route
            self._coverage += torch.stack([routed.sum(), rows.sum()])

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
        """Raise unless every router used each microbatch once and recomputed all or none."""
        for index, layer in self._layers.items():
            wrong = [k for k, count in enumerate(layer.forward_calls) if count != 1]
            if wrong:
                raise ReplayError(
                    f"the router of MoE layer {index} used the routes of microbatch {wrong[0]} "
                    f"{layer.forward_calls[wrong[0]]} times instead of once; it does not take part "
                    "in replay"
                )
            if layer.recomputed not in (0, len(layer.forward_calls)):
                raise ReplayError(
                    f"MoE layer {index} recomputed {layer.recomputed} of "
                    f"{len(layer.forward_calls)} microbatches; routes were left unconsumed"
                )

    def metrics(self, groups: ParallelGroups, *, sequence_parallel: bool) -> dict[str, float]:
        """Coverage, and agreement with live routing per layer, over all ranks; a collective."""
        # Count every token once: stages repeat them, and so do TP ranks without sequence parallel.
        counts = groups.pp_rank == 0 and (sequence_parallel or groups.tp_rank == 0)
        packed = torch.cat([self.agreement.reshape(-1), self._coverage * counts])
        dist.all_reduce(packed)
        share, count = packed[:-2].view(2, -1).cpu()
        metrics = {
            f"replay/agreement/layer_{i}": float(share[i] / count[i].clamp(min=1))
            for i in range(self.model.num_layers)
        }
        metrics["replay/agreement"] = float(share.sum() / count.sum().clamp(min=1))
        if self.replayed is not None:
            routed, real = packed[-2:].tolist()
            metrics["replay/coverage"] = routed / max(real, 1.0)
            metrics["replay/live_tokens"] = real - routed
        return metrics


class _LayerReplay:
    """Takes the place of `RouterReplay` on one router; Megatron calls `get_replay_topk`."""

    def __init__(self, session: RouterReplaySession, index: int) -> None:
        self.session, self.index = session, index
        self.column = session.model.route_layers.index(index)
        self.forward_calls = [0] * len(session.real)
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
        """Scores [rows, experts] -> scores of the chosen experts, indices, both [rows, topk]."""
        assert default_compute_topk is not None
        session = self.session
        number, first_time = self._microbatch()
        target, has_route = self._target(number, scores.shape[0], topk)
        if target is not None and has_route is None and not first_time:
            return scores.gather(1, target), target
        with torch.set_grad_enabled(torch.is_grad_enabled() and target is None):
            values, live = default_compute_topk(
                scores, topk, num_groups=num_groups, group_topk=group_topk
            )
        if first_time and session.live is not None:
            session.live.add(number, self.index, live.detach())
        if target is None:
            if first_time and session.recorded is not None:
                session.recorded.routes[number, self.index] = live.detach()
            return values, live
        if first_time:
            same = (target[:, :, None] == live[:, None, :]).any(2).double().mean(1)
            weight = session.real[number].double()
            if has_route is not None:
                weight = weight * has_route
            session.agreement[:, self.index] += torch.stack([(same * weight).sum(), weight.sum()])
        chosen = target if has_route is None else torch.where(has_route[:, None], target, live)
        return scores.gather(1, chosen), chosen

    def _microbatch(self) -> tuple[int, bool]:
        """The microbatch of this call, and whether it is a forward pass (else recomputation)."""
        if self.session.active is not None:
            self.forward_calls[self.session.active] += 1
            self._pending.append(self.session.active)
            return self.session.active, True
        if not self._pending:
            raise ReplayError(
                f"the router of MoE layer {self.index} ran outside a forward step and has nothing "
                "to recompute"
            )
        self.recomputed += 1
        return self._pending.popleft(), False

    def _target(self, number: int, rows: int, topk: int) -> tuple[Tensor | None, Tensor | None]:
        """Routes [rows, topk] to replay, None = live; and which rows have one, None = all."""
        recorded, has_route = self.session.recorded, None
        if self.session.replayed is not None:
            experts, has_route = self.session.replayed[number]
            target = experts[:, self.column]
        elif recorded is not None and (number, self.index) in recorded.routes:
            target = recorded.routes[number, self.index]
        else:
            return None, None
        if tuple(target.shape) != (rows, topk):
            raise ReplayError(
                f"MoE layer {self.index}: routes have shape {tuple(target.shape)} for {rows} "
                f"tokens and topk {topk}"
            )
        return target.long(), has_route
