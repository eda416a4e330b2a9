"""What a rollout engine is: prompts in, tokens with their log-probs out, weights with a version.

An engine runs in a process of its own and knows nothing of rewards, groups or training. The
protocol is the same for an engine that lives in a Ray actor and for a client of a server elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from plugin.batch_types import SamplerHead, is_log_prob
from plugin.errors import EngineError
from plugin.ragged import Ragged
from plugin.weights.group import WeightGroup

#: abort: interrupted by new weights; the engine continues it before it answers.
FinishReason = Literal["stop", "length", "abort"]
#: The weights wake first, so that new ones can be sent while the trainer still has its own.
EnginePart = Literal["weights", "cache"]


@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are sampled; `log_probs` and the fields after it select what else is reported.

    head: how many of the likeliest ids of each distribution that a token is drawn from
    drop_bad_log_probs: whether tokens are masked whose log-prob is none (--bad-log-probs)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_response_length: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    log_probs: bool = True
    routed_experts: bool = False
    sampling_mask: bool = False
    routed_weights: bool = False
    head: int = 0
    drop_bad_log_probs: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the seeds of its responses: one response per seed.

    A response depends on the weights, the prompt and its own seed, not on what else is in the batch
    (up to rounding), so a request can be sent again, to another engine, after a failure.

    prompt_index: the task's number of the prompt, for tasks that play several turns
    """

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    prompt_index: int = 0


@dataclass(frozen=True)
class Generation:
    """One response.

    tokens: [response] int64, with the stop token if one was sampled
    log_probs: [response] float32, of the distribution each token was drawn from; None if not asked
        for
    routed_experts: [prompt + response, moe_layers, topk] integers, -1 = no route; None if not
        asked for
    sampling_mask: [response] entries of ascending token ids, those that top-k and top-p kept; an
        empty one = the whole vocabulary; None if not asked for
    routed_weights: as `routed_experts`, float32: what each expert's output was multiplied with
    weight_version: of the weights that sampled each token, [response] int64; or one number for all
        of them
    head: the likeliest ids of the distribution that each of the [response] tokens was drawn from;
        None if not asked for
    loss_mask: [response], 0 for tokens that are not trained on; None = all are. Engines leave it
    """

    tokens: Tensor
    finish_reason: FinishReason
    weight_version: int | Tensor
    log_probs: Tensor | None = None
    routed_experts: Tensor | None = None
    sampling_mask: Ragged | None = None
    routed_weights: Tensor | None = None
    head: SamplerHead | None = None
    loss_mask: Tensor | None = None

    def token_mask(self) -> Tensor:
        """[response] int64: the loss mask."""
        return torch.ones_like(self.tokens) if self.loss_mask is None else self.loss_mask

    def token_versions(self) -> Tensor:
        """[response] int64: the weight version of each token."""
        if isinstance(self.weight_version, Tensor):
            return self.weight_version
        return torch.full_like(self.tokens, self.weight_version)


@dataclass(frozen=True)
class GenerationFailure:
    """A response that could not be generated although the engine lives, and why."""

    reason: str


Answer = Generation | GenerationFailure


@dataclass(frozen=True)
class EngineHealth:
    """What an engine says about itself."""

    name: str
    weight_version: int
    generated_tokens: int


class RolloutEngine(Protocol):
    """The engine as its owner sees it. Calls are served one after the other."""

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> Sequence[Sequence[Answer]]:
        """For each request, one answer per seed, in order; raises if the engine is broken."""
        ...

    def load_weights(self, version: int, bucket: bytes, *, last: bool) -> None:
        """Take a safetensors bucket of Hugging Face tensors; the last one completes `version`."""
        ...

    def health(self) -> EngineHealth:
        """Answer when the engine is alive and idle."""
        ...


class BroadcastEngine(RolloutEngine, Protocol):
    """An engine whose workers can join a process group with the trainer (--weight-sync)."""

    def weight_receivers(self) -> int:
        """How many workers receive weights."""
        ...

    def weight_devices(self) -> list[str]:
        """The device of each (`weights.ipc.device_id`); asked with --weight-sync ipc only."""
        ...

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Take all of `version` from the members of `group`.

        The engine's workers are numbers `first` and up of the receivers. After a `TransferError`
        the engine has half a version, and refuses to generate until it has received a whole one.
        """
        ...


class SleepingEngine(Protocol):
    """Further methods of a `RolloutEngine` that can lend its devices to the trainer (--colocate).

    A sleeping engine has no weights that it could answer for: it refuses to generate until it is
    awake and has been sent a version. Both calls are idempotent.
    """

    def sleep(self, level: int) -> None:
        """Give up the device's memory; nothing is being generated.

        level: 1 = the weights wait in host memory; 2 = they are thrown away, buffers are kept
        """
        ...

    def wake(self, part: EnginePart) -> None:
        """Take memory for `part` again."""
        ...


class Finished(NamedTuple):
    """The response to seed number `place` of the request that was added as `ticket`.

    An engine is given numbers as tickets; a `ResponseStream` takes anything.
    """

    ticket: Any
    place: int
    answer: Answer


class SteppingEngine(Protocol):
    """Further methods of a `RolloutEngine` whose batch changes between two decode steps.

    One that also has `progress: int`, its tokens so far, is known to be alive before a response is
    complete (`EngineTraits.reports_tokens`).

    An engine without these methods is asked for whole batches through `generate`. All of them are
    called by one thread; `load_weights` may come from another, between two steps, while responses
    are under way only with --partial-rollouts.
    """

    @property
    def running(self) -> int:
        """Responses that were added and have not finished."""
        ...

    @property
    def room(self) -> int:
        """How many more may be added now."""
        ...

    def add(self, ticket: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Begin a request, one response per seed; those under way have the same parameters."""
        ...

    def step(self) -> Sequence[Finished]:
        """Get every response a token further, or wait a moment for one; those that finished."""
        ...

    def abort(self) -> None:
        """Forget the responses under way."""
        ...


def without_bad_log_probs(answer: Answer) -> Answer:
    """The answer with tokens masked whose log-prob is none; a failure where no other is left."""
    if isinstance(answer, GenerationFailure) or answer.log_probs is None:
        return answer
    good = is_log_prob(answer.log_probs)
    if bool(good.all()):
        return answer
    if not bool(good.any()):
        return GenerationFailure("no token of the response has a finite log-prob")
    return replace(answer, loss_mask=good.long())


def check_generations(
    requests: Sequence[GenerationRequest],
    answers: Sequence[Sequence[Answer]],
    parameters: SamplingParameters,
) -> None:
    """Whether an engine answered what it was asked, or an `EngineError` that names the request."""
    if len(answers) != len(requests):
        raise EngineError(f"the engine answered {len(answers)} of {len(requests)} requests")
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if len(answer) != len(request.seeds):
            raise EngineError(
                f"request {number} asked for {len(request.seeds)} responses and got {len(answer)}"
            )
        for generation in answer:
            check_answer(number, request, generation, parameters)


def check_answer(
    number: int, request: GenerationRequest, generation: Answer, parameters: SamplingParameters
) -> None:
    """An `EngineError` that names request `number` unless the response has what was asked for."""
    if isinstance(generation, GenerationFailure):
        return
    length = generation.tokens.numel()
    if length > parameters.max_response_length:
        raise EngineError(
            f"request {number} got a response of {length} tokens; at most "
            f"{parameters.max_response_length} were asked for"
        )
    total = len(request.prompt) + length
    versions = generation.weight_version
    per_token = versions if isinstance(versions, Tensor) else None
    head_ids = None if generation.head is None else generation.head.ids
    for what, asked, value, rows in (
        ("weight versions", per_token is not None, per_token, length),
        ("log-probs", parameters.log_probs, generation.log_probs, length),
        ("routed experts", parameters.routed_experts, generation.routed_experts, total),
        ("rows of kept ids", parameters.sampling_mask, generation.sampling_mask, length),
        ("weights of routes", parameters.routed_weights, generation.routed_weights, total),
        ("rows of likeliest ids", parameters.head > 0, head_ids, length),
    ):
        if asked and (value is None or len(value) != rows):
            found = "none" if value is None else str(len(value))
            raise EngineError(
                f"request {number} got {found} {what} where {rows} were expected; "
                "use an engine version that reports them for every token"
            )
