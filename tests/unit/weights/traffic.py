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
