"""Rollouts of one turn: a prompt, a response, the end."""

from __future__ import annotations

from collections.abc import Sequence

from plugin.rollout.conversation.trajectory import Segment, Trajectory, failed
from plugin.rollout.engines.protocol import (
    Generation,
    GenerationFailure,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    check_generations,
)


def run_single_turn(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], parameters: SamplingParameters
) -> list[list[Trajectory]]:
    """For each request, one trajectory per seed; what the engine could not generate is a failed one."""
    answers = engine.generate(requests, parameters)
    check_generations(requests, answers, parameters)
    return [
        [_trajectory(request, generation) for generation in answer]
        for request, answer in zip(requests, answers, strict=True)
    ]


def _trajectory(
    request: GenerationRequest, generation: Generation | GenerationFailure
) -> Trajectory:
    if isinstance(generation, GenerationFailure):
        return failed(generation.reason)
    if generation.tokens.numel() == 0:
        return failed("empty response")
    return Trajectory((Segment(request.prompt, generation),))
