"""Replay MoE routes inside a schedule: the engine's, or those of the trainer's own log-prob pass.

For the length of one schedule every router of the *live* model gets a replacement for Megatron's
`RouterReplay`, which is told which microbatch a forward pass belongs to. A router call outside a
forward pass is an activation recomputation in backward; these come in the order of the forward
passes, so a queue per router says which microbatch is being recomputed, also under 1F1B and
interleaved schedules and with padding microbatches in between. Nothing is global and nothing
outlives the schedule, also after an exception.

Expert indices are replayed; scores are gathered from the live logits, so the router keeps its
gradient. Where the engine's weights are replayed too, they take the place of what the router
returns, after softmax, renormalization and scaling: they are what the experts' outputs were
multiplied with. The router then has no gradient, or that of its own weights (`keep_gradient`).

`LiveRoutes` collects what the routers would choose without replay.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import ReplayError
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.routes import MicrobatchRoutes, RoutedModel
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.ragged import Ragged


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

    routes: dict[tuple[int, int], Tensor] = field(default_factory=dict)


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
        keep_gradient: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`real`: per microbatch [rows] bool, False where padding.

        recorded: filled where it has no routes yet, replayed where it has
        live: collects what the routers would choose without replay
        keep_gradient: where weights are replayed, the router has the gradient of its own
        """
        self.model, self.replayed, self.recorded, self.live = model, replayed, recorded, live
        self.keep_gradient = keep_gradient
        self.real = [rows.to(device) for rows in real]
        self.active: int | None = None
        self._layers = {index: _LayerReplay(self, index) for index in model.routers}
        self._previous: dict[int, Any] = {}
        self._handles: list[Any] = []
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
            if self.replays_weights:
                self._handles.append(router.register_forward_hook(self._layers[index].mix))
        return self

    @property
    def replays_weights(self) -> bool:
        return any(routes.weights is not None for routes in self.replayed or ())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for index, router in self.model.routers.items():
            router.router_replay = self._previous[index]
        for handle in self._handles:
            handle.remove()
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
            if self.replays_weights and layer.unmixed is not None:
                raise ReplayError(
                    f"MoE layer {index} chose the experts of microbatch {layer.unmixed} and never "
                    "asked for their weights"
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
        #: The microbatch whose experts were chosen and whose weights are still to come.
        self.unmixed: int | None = None

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
        self.unmixed = number
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

    def mix(self, _router: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> Any:
        """Return the router's output with the engine's weights; a forward hook of the router.

        output: probs [rows, experts], 0 where not chosen; map [rows, experts] bool
        """
        probs, chosen = output
        number, self.unmixed = self.unmixed, None
        if number is None or self.session.replayed is None:
            raise ReplayError(f"the router of MoE layer {self.index} never asked for its routes")
        experts, has_route, weights = self.session.replayed[number]
        assert weights is not None
        engine = torch.zeros_like(probs).scatter(
            1, experts[:, self.column].long(), weights[:, self.column].to(probs.dtype)
        )
        if self.session.keep_gradient:
            # (p - p) is 0 whatever p is: the value is the engine's to the last bit.
            engine = engine + (probs - probs.detach())
        # A token without a route is mixed live. Selecting keeps the router in the graph, with a
        # gradient of 0: a parameter without one would be missing in Megatron's reductions.
        live = torch.zeros_like(probs[:, :1], dtype=torch.bool)
        if has_route is not None:
            live = ~has_route[:, None]
        return torch.where(live, probs, engine), chosen

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
            experts, has_route, _ = self.session.replayed[number]
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


class LiveRoutes:
    """The experts that the trainer's routers would choose without replay, gathered from all ranks.

    Compared with the engine's routes on the driver they show whether engine and trainer route
    alike, and if not, why. The first samples of a batch are enough to judge: only those are kept.
    Filled by the routers during one schedule; `gathered` is a collective.
    """

    def __init__(
        self,
        num_layers: int,
        topk: int,
        lengths: Sequence[int],
        places: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """Watch the first samples of the global batch, whose total lengths are `lengths`.

        places: per microbatch of this rank [rows], which token of the global batch a row is;
            negative or past the end where it is padding
        """
        self._lengths = list(lengths)
        tokens = sum(self._lengths)
        watched = [(place >= 0) & (place < tokens) for place in places]
        # One row more takes what is not watched: no mask, and so no wait for the device.
        self._experts = torch.full(
            (tokens + 1, num_layers, topk), -1, dtype=torch.int32, device=device
        )
        self._places = [
            torch.where(inside, place, tokens).to(device)
            for place, inside in zip(places, watched, strict=True)
        ]
        self._watched = [bool(inside.any()) for inside in watched]

    def add(self, number: int, layer: int, chosen: Tensor) -> None:
        """Experts [rows, topk] that the router of `layer` chose for microbatch `number`."""
        if self._watched[number]:
            self._experts[self._places[number], layer] = chosen.to(torch.int32)

    def gathered(self) -> list[Tensor]:
        """Routes [tokens, layers, topk] of the first samples; -1 where no router was asked."""
        experts = self._experts[:-1]
        # Ranks that see a token all route it alike; a rank that has not seen it has -1.
        dist.all_reduce(experts, op=dist.ReduceOp.MAX)
        return list(experts.cpu().split(self._lengths))
