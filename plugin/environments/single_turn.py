"""Single-turn rollouts: a prompt and its response."""

from __future__ import annotations

import torch

from plugin.batch_types import RolloutSample
from plugin.engines.protocol import (
    Answer,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import ResponseStream
from plugin.environments.group_server import PlayedGroup
from plugin.environments.trajectory import Trajectory, failed


class SingleTurnPlayer:
    """A `Player` whose groups are done when the last of their responses is."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self._groups: dict[int, list[Trajectory | None]] = {}  # one per seed

    @property
    def open(self) -> int:
        """Groups that were begun and are not done."""
        return len(self._groups)

    def has_room(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        """Whether the responses would be generated at once."""
        return self._stream.has_room(request, parameters)

    def begin(self, group: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Ask for the responses to a request."""
        self._groups[group] = [None] * len(request.seeds)
        self._stream.add((group, request.prompt), request, parameters)

    def step(self) -> list[PlayedGroup]:
        """Advance what is open; returns the groups that are done."""
        done: list[PlayedGroup] = []
        for (group, prompt), place, answer in self._stream.step():
            self._groups[group][place] = trajectory_of(prompt, answer)
            found = [trajectory for trajectory in self._groups[group] if trajectory is not None]
            if len(found) == len(self._groups[group]):
                del self._groups[group]
                done.append((group, found))
        return done

    def abort(self) -> None:
        """Drop what is open."""
        self._groups.clear()
        self._stream.abort()


def trajectory_of(prompt: tuple[int, ...], answer: Answer) -> Trajectory:
    """The trajectory of one response; a failed one if there is nothing to train on."""
    if isinstance(answer, GenerationFailure):
        return failed(answer.reason)
    if answer.tokens.numel() == 0:
        return failed("empty response")
    sample = RolloutSample(
        tokens=torch.cat([torch.tensor(prompt), answer.tokens]),
        response_length=answer.tokens.numel(),
        loss_mask=torch.ones_like(answer.tokens),
        weight_version=answer.token_versions(),
        rollout_log_probs=answer.log_probs,
        routed_experts=answer.routed_experts,
        sampling_mask=answer.sampling_mask,
        routed_weights=answer.routed_weights,
    )
    return Trajectory((sample,), truncated=answer.finish_reason == "length")
