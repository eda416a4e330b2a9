"""What ways of getting experts from their ranks to the workers cost: groups and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertWay:
    """What a version costs by one way of getting experts from their ranks to the workers.

    groups: that a worker is a member of
    worker_bytes: what comes in at every worker
    sender_bytes: what the busiest sender puts on its network link
    gathered_bytes: what it gets from the other expert ranks before
    """

    groups: int
    worker_bytes: int
    sender_bytes: int
    gathered_bytes: int = 0

    def seconds(self, network: float, link: float) -> float:
        """At these bytes per second, with the gather beside the transfer."""
        busiest = max(self.worker_bytes, self.sender_bytes)
        return max(busiest / network, self.gathered_bytes / link)


def expert_ways(
    shared: int, experts: int, *, stages: int, ranks: int, owners: int
) -> dict[str, ExpertWay]:
    """The ways to send a model with experts, by name.

    shared, experts: bytes of what is not an expert and of all experts
    stages, ranks: of the pipeline, and expert ranks of each stage
    owners: workers of an engine, each of which needs its part of the experts
    """
    total = shared + experts
    of_stage = total // stages
    # A worker's part comes from so many ranks, each of which is in a group with its owners.
    sources = max(1, ranks // owners)
    own_experts = experts // (stages * ranks)
    return {
        "own": ExpertWay(stages, total, of_stage),
        "gathered": ExpertWay(stages, total, of_stage, experts // stages * (ranks - 1) // ranks),
        "sharded": ExpertWay(
            stages * (1 + sources),
            shared + experts // owners,
            shared // stages + own_experts,
        ),
    }
