"""All trainer ranks as one object on the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.launch.array_transport import batch_to_arrays
from plugin.launch.model_source import ModelSource
from plugin.launch.placement import Reservation, ResourcePlan
from plugin.launch.remote_calls import wait_for_all
from plugin.launch.trainer_actor import PolicyName, TrainerRank


class TrainerGroup:
    """Starts the ranks, orders them by node and device, and calls all of them together."""

    def __init__(self, config: JobConfig, plan: ResourcePlan, reservation: Reservation) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._config = config
        self._idle: Callable[[], None] | None = None
        actor: Any = ray.remote(TrainerRank)
        self._ranks = [
            actor.options(
                num_cpus=plan.rank["CPU"],
                num_gpus=plan.rank.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.trainer, bundle),
            ).remote(config)
            for bundle in reservation.trainer_nodes
            for _ in range(config.ranks_per_node)
        ]

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

        self._call("build", name, ray.put(source), timeout=self._config.start_timeout)

    def while_waiting(self, pump: Callable[[], None] | None) -> None:
        """What the driver does while the ranks work: keep the engines busy."""
        self._idle = pump

    def log_probs(self, name: PolicyName, batch: RolloutBatch) -> list[Tensor]:
        """One [response] tensor per sample, by a forward-only pass of one of the policies."""
        flat = self._call("log_probs", name, _shared(batch))[0]
        lengths = [int(length) for length in batch.columns["response_lengths"]]
        return list(torch.from_numpy(flat.copy()).split(lengths))

    def train(
        self, batch: RolloutBatch, version: int, learning_rate: float
    ) -> tuple[dict[str, float], str | None]:
        """One optimizer step; metrics and, if it was skipped, why."""
        result = self._call("train", _shared(batch), version, learning_rate)[0]
        skipped = None
        if not result["updated"]:
            where = result["bad_parameter"] or "no single parameter"
            skipped = f"gradient norm {result['grad_norm']} ({where})"
        return result["metrics"], skipped

    def export_weights(self) -> list[Any]:
        """References to the policy's weight buckets in the object store."""
        return self._call("export_weights")[0]

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
