"""What comes back for one response: one training sample, several, or the reason for none."""

from __future__ import annotations

from dataclasses import dataclass

from plugin.batch_types import RolloutSample


@dataclass(frozen=True)
class Trajectory:
    """One response, of one turn or several.

    samples: its training samples, none if it failed; reward and group are the driver's to fill in
    reward: what the environment gave; None where the driver's task scores the response
    error: why there is nothing to train on
    turns: how often the policy was asked
    truncated: whether the last reply was cut at --max-response-length
    """

    samples: tuple[RolloutSample, ...]
    reward: float | None = None
    error: str | None = None
    turns: int = 1
    truncated: bool = False

    @property
    def weight_version(self) -> int:
        """The oldest weights that any token came from."""
        return min(sample.weight_version for sample in self.samples)


def failed(reason: str) -> Trajectory:
    """A trajectory that cannot be trained on."""
    return Trajectory((), error=reason)
