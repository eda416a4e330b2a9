"""Rollouts of one turn: a prompt, a response, the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plugin.batch_types import RolloutSample
from plugin.rollout.conversation.trajectory import Trajectory, failed
from plugin.rollout.engines.protocol import (
    Answer,
    GenerationFailure,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    check_generations,
)


def run_single_turn(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], parameters: SamplingParameters
) -> list[list[Trajectory]]:
    """For each request, one trajectory per seed; a failed generation is a failed trajectory."""
    answers = engine.generate(requests, parameters)
    check_generations(requests, answers, parameters)
    return [
        [_trajectory(request.prompt, answer) for answer in group]
        for request, group in zip(requests, answers, strict=True)
    ]


def _trajectory(prompt: tuple[int, ...], answer: Answer) -> Trajectory:
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
