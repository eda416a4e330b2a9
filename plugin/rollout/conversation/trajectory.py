"""What comes back for one response to a prompt: one training sample, several, or the reason for none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plugin.rollout.engines.protocol import Generation


@dataclass(frozen=True)
class Segment:
    """One training sample of a trajectory.

    prompt: the tokens before the first sampled one
    generation: what follows them; over several turns, tool output is among its tokens
    loss_mask: [response] 1 where the policy sampled the token; None if it sampled all of them
    """

    prompt: tuple[int, ...]
    generation: Generation
    loss_mask: Tensor | None = None


@dataclass(frozen=True)
class Trajectory:
    """One response, of one turn or several.

    segments: its training samples, none if it failed
    reward: what the environment gave; None where the driver's task scores the response
    error: why there is nothing to train on
    turns: how often the policy was asked
    """

    segments: tuple[Segment, ...]
    reward: float | None = None
    error: str | None = None
    turns: int = 1

    @property
    def weight_version(self) -> int:
        """The oldest weights that any token came from."""
        return min(segment.generation.weight_version for segment in self.segments)


def failed(reason: str) -> Trajectory:
    """A trajectory that cannot be trained on."""
    return Trajectory((), error=reason)
