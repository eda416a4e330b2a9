"""A stand-in for an engine's actor that places workers as vLLM's Ray executor does; imported by Ray's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugin.cluster.remote_calls import ReportingActor
from plugin.engines.protocol import EngineHealth


class StandIn(ReportingActor):
    """An engine's actor that only places workers."""

    def __init__(self, config: Any, hf_config: Any, name: str, environment: Mapping[str, str]):
        super().__init__()
        self._name, self._environment = name, environment

    def health(self) -> EngineHealth:
        return EngineHealth(self._name, -1, 0)

    def workers(self) -> list[tuple[str, list[int]]]:
        """Node and GPUs of a worker in each bundle that the pool names."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.get_current_placement_group()
        bundles = map(int, self._environment["VLLM_RAY_BUNDLE_INDICES"].split(","))

        @ray.remote(num_gpus=1, num_cpus=0)
        class Worker:
            def place(self) -> tuple[str, list[int]]:
                return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

        self._workers = [
            Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, b)).remote()
            for b in bundles
        ]
        return ray.get([worker.place.remote() for worker in self._workers])
