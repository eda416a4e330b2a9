"""What a version costs between processes, counted from manifests: groups, messages and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugin.weights.lane import BUFFERS
from plugin.weights.manifest import Manifest, in_turns

#: Connections of a member to the driver's store; see `GroupStore`.
_CONNECTIONS = 2


@dataclass(frozen=True)
class Traffic:
    """Of a version after the first, but for the first three.

    groups: that a worker is a member of
    connections: to the driver's store
    manifest_bytes: what every worker learns with the first version
    messages: in the driver's store
    operations: in all process groups
    sender_bytes: what the busiest sender puts on its network link
    worker_bytes: what comes in at every worker
    buffer_bytes: of a worker
    """

    groups: int
    connections: int
    manifest_bytes: int
    messages: int
    operations: int
    sender_bytes: int
    worker_bytes: int
    buffer_bytes: int


def traffic_of(
    manifests: Sequence[Manifest], *, per_stage: int, per_lane: int, workers: int, engines: int
) -> Traffic:
    """The traffic of senders with these manifests."""
    lanes = [manifests[first : first + per_lane] for first in range(0, len(manifests), per_lane)]
    # At worst a lane's buffers hold its largest buckets at the same time.
    largest = [
        sorted(sum(spec.nbytes for spec in bucket) for m in lane for bucket in m.buckets)[-BUFFERS:]
        for lane in lanes
    ]
    of_lanes = [sum(manifest.nbytes for manifest in lane) for lane in lanes]
    return Traffic(
        groups=len(lanes),
        connections=_CONNECTIONS * (len(manifests) + workers),
        manifest_bytes=sum(len(manifest.encoded()) for manifest in manifests),
        # Every engine counts itself, the last one writes a key, a sender of every lane waits for it
        # and reads it.
        messages=engines + 1 + 2 * len(lanes),
        operations=len(in_turns(manifests, per_stage)) + len(manifests),
        # Members of a lane pass on what they get, so that each sends what the lane carries.
        sender_bytes=max(of_lanes),
        worker_bytes=sum(of_lanes),
        buffer_bytes=sum(map(sum, largest)),
    )


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
