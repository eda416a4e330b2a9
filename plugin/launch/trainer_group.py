"""All trainer ranks as one object on the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.launch.array_transport import batch_to_arrays
from plugin.launch.model_source import ModelSource
from plugin.launch.placement import Reservation, ResourcePlan
from plugin.launch.remote_calls import wait_for_all
from plugin.launch.trainer_actor import PolicyName, TrainerRank

#: How long Ray may take to notice that a process is gone.
_DEATH_SECONDS = 5.0


@dataclass(frozen=True)
class TrainedStep:
    """What the driver gets of an optimizer step.

    skipped: why no weight was changed, if so; log_probs: the step's own, [response] per sample, where watched
    live_routes: [tokens, moe_layers, topk] of the first samples, as the trainer's routers choose, where watched
    """

    metrics: dict[str, float]
    skipped: str | None
    log_probs: list[Tensor] | None
    live_routes: list[Tensor] | None = None


class TrainerGroup:
    """Starts the ranks, orders them by node and device, and calls all of them together."""

    def __init__(self, config: JobConfig, plan: ResourcePlan, reservation: Reservation) -> None:
        self._config, self._plan, self._reservation = config, plan, reservation
        self._idle: Callable[[], None] | None = None
        self._built: dict[PolicyName, ModelSource] = {}
        self._ranks = self._start()

    def _start(self) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor: Any = ray.remote(TrainerRank)
        group = self._reservation.trainer
        return [
            actor.options(
                num_cpus=self._plan.rank["CPU"],
                num_gpus=self._plan.rank.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote(self._config)
            for bundle in self._reservation.trainer_nodes
            for _ in range(self._config.ranks_per_node)
        ]

    def restart(self) -> None:
        """Ends every rank and builds the models anew, on other nodes if some have left the cluster."""
        self.close()
        idle, self._idle = self._idle, None
        self._reservation.wait_for_nodes(self._config.start_timeout)
        self._ranks = self._start()
        self.join()
        for name, source in self._built.items():
            self.build(name, source)
        self._idle = idle

    def dead_ranks(self) -> list[str]:
        """Names of the ranks whose process is gone; one that is busy or blocked counts as alive."""
        import ray

        calls = dict(zip([r.place.remote() for r in self._ranks], self._names(), strict=True))
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_DEATH_SECONDS)
        dead = []
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayError:
                dead.append(calls[call])
        return dead

    def join(self) -> None:
        """Numbers the ranks by node and device, and connects them."""
        timeout = self._config.start_timeout
        names = [f"trainer actor {number}" for number in range(len(self._ranks))]
        places = wait_for_all([r.place.remote() for r in self._ranks], names, timeout=timeout)
        nodes = list(dict.fromkeys(place.node_id for place in places))
        order = sorted(
            range(len(places)), key=lambda i: (nodes.index(places[i].node_id), places[i].device, i)
        )
        self._ranks = [self._ranks[i] for i in order]
        self.places = [places[i] for i in order]
        first = self._ranks[0].open_rendezvous.remote()
        [rendezvous] = wait_for_all([first], ["rank 0"], timeout=timeout)
        calls = [rank.join.remote(i, rendezvous) for i, rank in enumerate(self._ranks)]
        wait_for_all(calls, self._names(), timeout=timeout)

    def build(self, name: PolicyName, source: ModelSource) -> None:
        """Builds a model on every rank and loads its weights."""
        import ray

        self._built[name] = source
        self._call("build", name, ray.put(source), timeout=self._config.start_timeout)

    def while_waiting(self, pump: Callable[[], None] | None) -> None:
        """What the driver does while the ranks work: keep the engines busy."""
        self._idle = pump

    def log_probs(self, name: PolicyName, batch: RolloutBatch) -> list[Tensor]:
        """One [response] tensor per sample, by a forward-only pass of one of the policies."""
        return _per_sample(self._call("log_probs", name, _shared(batch))[0], batch)

    def train(self, batch: RolloutBatch, version: int, learning_rate: float) -> TrainedStep:
        """One optimizer step."""
        result = self._call("train", _shared(batch), version, learning_rate)[0]
        skipped = None
        if not result["updated"]:
            where = result["bad_parameter"] or "no single parameter"
            skipped = f"gradient norm {result['grad_norm']} ({where})"
        log_probs = None
        if result["log_probs"] is not None:
            log_probs = _per_sample(result["log_probs"], batch)
        return TrainedStep(result["metrics"], skipped, log_probs, result["live_routes"])

    def export_weights(self) -> list[Any]:
        """References to the policy's weight buckets in the object store."""
        return self._call("export_weights")[0]

    def save_checkpoint(self, root: str, step: int, user_state: dict[str, Any]) -> None:
        """Writes the policy, its optimizer and the driver's state as the newest checkpoint in `root`."""
        self._call("save_checkpoint", root, step, user_state, self._config.keep_checkpoints)

    def load_checkpoint(self, root: str) -> dict[str, Any]:
        """Loads the newest checkpoint in `root` and returns the driver's state."""
        return self._call("load_checkpoint", root, timeout=self._config.start_timeout)[0]

    def save_hf(self, directory: str, tokenizer_from: str | None) -> None:
        """Writes the policy as a Hugging Face directory."""
        self._call("save_hf", directory, tokenizer_from)

    def close(self) -> None:
        """Ends the actors; what they compute is lost."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return wait_for_all(
            calls,
            self._names(),
            timeout=timeout or self._config.step_timeout,
            while_waiting=self._idle,
        )

    def _names(self) -> list[str]:
        return [f"rank {i} on {place.address}" for i, place in enumerate(self.places)]


def _per_sample(flat: np.ndarray, batch: RolloutBatch) -> list[Tensor]:
    lengths = [int(length) for length in batch.columns["response_lengths"]]
    return list(torch.from_numpy(flat.copy()).split(lengths))


def _shared(batch: RolloutBatch) -> Any:
    """The batch once in the object store, for all ranks."""
    import ray

    return ray.put(batch_to_arrays(batch))


def places_as_text(group: TrainerGroup) -> str:
    """For the log: how many ranks are where."""
    counts: dict[str, int] = {}
    for place in group.places:
        counts[place.address] = counts.get(place.address, 0) + 1
    return ", ".join(f"{count} on {address}" for address, count in counts.items())
