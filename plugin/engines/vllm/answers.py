"""What vLLM is asked for, and its outputs as answers."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.config.engines import ENGINES
from plugin.engines.expert_routes import RouteShape, complete_routes
from plugin.engines.protocol import (
    Answer,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.servers.answers import MalformedAnswer, kept_rows
from plugin.errors import ConfigError, EngineError

#: vLLM raises lower temperatures to this one without saying so in the answer.
LOWEST_TEMPERATURE = ENGINES["vllm"].lowest_temperature


def require_temperature(parameters: SamplingParameters) -> None:
    """A `ConfigError` for a temperature that vLLM would change."""
    if parameters.temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"temperature {parameters.temperature} is below {LOWEST_TEMPERATURE}, to which "
            "vLLM raises it; the log-probs would be of another distribution than the "
            "trainer's; choose a higher one"
        )


def sampling_params(seed: int, max_tokens: int, parameters: SamplingParameters) -> Any:
    """How vLLM is asked for one response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=parameters.top_k or 0,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(parameters.stop_token_ids),
        # Only the task's stop tokens end a response.
        ignore_eos=True,
        logprobs=0 if parameters.log_probs else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class AnswerReader(NamedTuple):
    """Turns vLLM's outputs into answers.

    name: of the engine, for errors
    interrupts: whether weights may change in the middle of a response
    """

    name: str
    vocab_size: int
    routes: RouteShape
    interrupts: bool

    def read(
        self,
        request: GenerationRequest,
        output: Any,
        parameters: SamplingParameters,
        version: int,
    ) -> Answer:
        """The answer to `request`; `version` is that of the engine's weights now."""
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            return GenerationFailure(f"vLLM ended the response with {completion.finish_reason!r}")
        tokens = torch.tensor(list(completion.token_ids), dtype=torch.int64)
        log_probs = routes = kept = None
        if parameters.log_probs and completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            log_probs = torch.tensor([position[token].logprob for token, position in pairs])
            if not bool(log_probs.isfinite().all()):
                return GenerationFailure("vLLM reported a log-prob that is not finite")
        if parameters.routed_experts and completion.routed_experts is not None:
            length = len(request.prompt) + tokens.numel()
            found = torch.as_tensor(completion.routed_experts)
            routes = complete_routes(found, length, self.routes)
        if parameters.sampling_mask:
            try:
                rows = mask_rows(getattr(completion, "sampling_mask", None))
                kept = kept_rows(rows, tokens, self.vocab_size)
            except MalformedAnswer as error:
                return GenerationFailure(f"vLLM: {error}")
        return Generation(
            tokens=tokens,
            finish_reason=completion.finish_reason,
            weight_version=self._versions(completion, version),
            log_probs=log_probs,
            routed_experts=routes,
            sampling_mask=kept,
        )

    def _versions(self, completion: Any, version: int) -> int | Tensor:
        """The version of the weights that sampled every token, or [response] of each."""
        spans = getattr(completion, "weight_versions", None) or ()
        wrong = [span for span in spans if span.version != str(version)]
        if not wrong:
            return version
        if not self.interrupts:
            raise EngineError(
                f"{self.name}: vLLM generated with weight version {wrong[0].version}, expected "
                f"{version}"
            )
        return torch.cat([torch.full((s.end - s.start,), int(s.version)) for s in spans])


def mask_rows(mask: Any) -> list[list[int]] | None:
    """The kept ids of every token, of a vLLM that reports lists or flat ids with offsets."""
    if mask is None:
        return None
    offsets = getattr(mask, "offsets", None)
    if offsets is None:
        return [list(map(int, row)) for row in mask.token_ids]
    ids = list(map(int, mask.token_ids))
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]
