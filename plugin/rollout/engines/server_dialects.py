"""How vLLM and SGLang servers are asked for tokens, given weights, and asked which weights they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from plugin.rollout.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.rollout.engines.server_answers import (
    MalformedAnswer,
    field,
    finish_reason,
    log_probs,
    routes_of_int32,
    routes_of_npy,
    token_ids,
)


@dataclass(frozen=True)
class ServerCall:
    """One HTTP call; `check` raises `MalformedAnswer` on an answer (parsed JSON) that does not confirm it."""

    path: str
    payload: Mapping[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"
    check: Callable[[Any], None] = lambda body: None


@dataclass(frozen=True)
class ResponseShape:
    """What a response must fit besides the sampling parameters.

    max_model_len: tokens of prompt and response together
    moe_layers: numbers of the layers that have experts; topk: experts per token
    """

    vocab_size: int
    max_model_len: int
    num_layers: int = 0
    moe_layers: tuple[int, ...] = ()
    topk: int = 0


class Dialect(Protocol):
    """A kind of server."""

    def generation(
        self, request: GenerationRequest, seed: int, max_tokens: int, parameters: SamplingParameters
    ) -> ServerCall:
        """The call for one response."""
        ...

    def parse(
        self,
        body: Any,
        request: GenerationRequest,
        max_tokens: int,
        parameters: SamplingParameters,
        shape: ResponseShape,
        weight_version: int,
    ) -> Generation:
        """The response in `body`, or `MalformedAnswer`."""
        ...

    def weight_update(self, directory: str, label: str) -> list[ServerCall]:
        """The calls after which the server generates with the weights in `directory` and says so."""
        ...

    def weight_label(self, label: str) -> ServerCall:
        """A call whose answer confirms that the server's weights are those named `label`."""
        ...

    def label_of_response(self, body: Any) -> str | None:
        """The weights that the response says it came from; None where responses do not say."""
        ...

    def self_test(self, parameters: SamplingParameters) -> ServerCall | None:
        """A call that finds a server which reports log-probs of another distribution; None = none needed."""
        ...


class VllmDialect:
    """vLLM's OpenAI-compatible server, started with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs."""

    def generation(
        self, request: GenerationRequest, seed: int, max_tokens: int, parameters: SamplingParameters
    ) -> ServerCall:
        """See `Dialect`."""
        payload = {
            "prompt": list(request.prompt),
            "seed": seed,
            "max_tokens": max_tokens,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
            "top_k": parameters.top_k or 0,
            # Whatever the model's generation config says, these are off.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(parameters.stop_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            # Log-probs are labeled by id, so that a server without a tokenizer can answer.
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stream": False,
        }
        if parameters.log_probs:
            payload["logprobs"] = 0
        return ServerCall("/v1/completions", payload)

    def parse(
        self,
        body: Any,
        request: GenerationRequest,
        max_tokens: int,
        parameters: SamplingParameters,
        shape: ResponseShape,
        weight_version: int,
    ) -> Generation:
        """See `Dialect`."""
        choice = _only(field(body, "choices"))
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != list(request.prompt):
            raise MalformedAnswer("the answer is for another prompt")
        tokens = token_ids(field(choice, "token_ids"), parameters, shape.vocab_size)
        routes = None
        if parameters.routed_experts:
            routes = routes_of_npy(
                choice.get("routed_experts"), len(request.prompt) + tokens.numel(), shape.moe_layers
            )
        return Generation(
            tokens=tokens,
            finish_reason=finish_reason(
                choice.get("finish_reason"), tokens, max_tokens, parameters
            ),
            weight_version=weight_version,
            log_probs=log_probs(_token_logprobs(choice), tokens.numel())
            if parameters.log_probs
            else None,
            routed_experts=routes,
        )

    def weight_update(self, directory: str, label: str) -> list[ServerCall]:
        """See `Dialect`. The label is changed last, so that a failure half-way leaves none that could be believed."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        return [
            ServerCall("/update_weight_version", {"new_version": f"loading {label}"}),
            ServerCall("/pause?mode=abort"),
            ServerCall("/collective_rpc", reload),
            ServerCall("/reset_prefix_cache", check=_reset_succeeded),
            ServerCall("/update_weight_version", {"new_version": label}),
            ServerCall("/resume"),
            self.weight_label(label),
        ]

    def weight_label(self, label: str) -> ServerCall:
        """See `Dialect`."""
        return ServerCall("/weight_info", method="GET", check=_has_label(label, "weight_version"))

    def label_of_response(self, body: Any) -> str | None:
        """See `Dialect`: completions do not say."""
        return None

    def self_test(self, parameters: SamplingParameters) -> ServerCall | None:
        """See `Dialect`. Among one candidate the sampled token has probability 1, so its log-prob is 0."""
        untouched = (
            parameters.temperature == 1 and parameters.top_p == 1 and parameters.top_k is None
        )
        if untouched or not parameters.log_probs:
            return None
        one = SamplingParameters(top_k=1, max_response_length=1)
        call = self.generation(GenerationRequest((1,), (0,)), 0, 1, one)
        return ServerCall(call.path, call.payload, check=_is_processed)


class SglangDialect:
    """SGLang's native server."""

    def generation(
        self, request: GenerationRequest, seed: int, max_tokens: int, parameters: SamplingParameters
    ) -> ServerCall:
        """See `Dialect`."""
        sampling = {
            "max_new_tokens": max_tokens,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
            "top_k": parameters.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(parameters.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": seed,
        }
        return ServerCall(
            "/generate",
            {
                "input_ids": list(request.prompt),
                "sampling_params": sampling,
                "return_logprob": parameters.log_probs,
                "return_routed_experts": parameters.routed_experts,
                "stream": False,
            },
        )

    def parse(
        self,
        body: Any,
        request: GenerationRequest,
        max_tokens: int,
        parameters: SamplingParameters,
        shape: ResponseShape,
        weight_version: int,
    ) -> Generation:
        """See `Dialect`."""
        meta = field(body, "meta_info")
        prompt_tokens = field(meta, "prompt_tokens")
        if prompt_tokens != len(request.prompt):
            raise MalformedAnswer(
                f"the server read a prompt of {prompt_tokens} tokens instead of {len(request.prompt)}"
            )
        tokens = token_ids(field(body, "output_ids"), parameters, shape.vocab_size)
        length = len(request.prompt) + tokens.numel()
        routes = None
        if parameters.routed_experts:
            routes = routes_of_int32(
                meta.get("routed_experts"), length, shape.num_layers, shape.topk, shape.moe_layers
            )
        return Generation(
            tokens=tokens,
            finish_reason=finish_reason(
                field(meta, "finish_reason", "type"), tokens, max_tokens, parameters
            ),
            weight_version=weight_version,
            log_probs=log_probs(_sglang_log_probs(meta, tokens.tolist()), tokens.numel())
            if parameters.log_probs
            else None,
            routed_experts=routes,
        )

    def weight_update(self, directory: str, label: str) -> list[ServerCall]:
        """See `Dialect`."""
        payload = {"model_path": directory, "weight_version": label, "flush_cache": True}
        return [
            ServerCall("/update_weights_from_disk", payload, check=_update_succeeded),
            self.weight_label(label),
        ]

    def weight_label(self, label: str) -> ServerCall:
        """See `Dialect`."""
        return ServerCall(
            "/get_model_info", method="GET", check=_has_label(label, "weight_version")
        )

    def label_of_response(self, body: Any) -> str | None:
        """See `Dialect`."""
        return str(field(body, "meta_info", "weight_version"))

    def self_test(self, parameters: SamplingParameters) -> ServerCall | None:
        """See `Dialect`: log-probs are after the temperature, and truncation is refused with the flags."""
        return None


DIALECTS: dict[str, type[VllmDialect] | type[SglangDialect]] = {
    "vllm": VllmDialect,
    "sglang": SglangDialect,
}


def _only(choices: Any) -> Any:
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedAnswer("the answer does not hold exactly one choice")
    return choices[0]


def _token_logprobs(choice: Any) -> Any:
    return (choice.get("logprobs") or {}).get("token_logprobs")


def _sglang_log_probs(meta: Any, tokens: list[int]) -> list[Any]:
    """The log-probs of (log-prob, token, text) rows whose tokens are `tokens`."""
    rows = meta.get("output_token_logprobs")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) >= 2 for row in rows
    ):
        raise MalformedAnswer("the answer has no log-probs")
    if [row[1] for row in rows] != tokens:
        raise MalformedAnswer(
            f"the log-probs of {len(rows)} tokens belong to other tokens than the {len(tokens)} of the response"
        )
    return [row[0] for row in rows]


def _has_label(label: str, key: str) -> Callable[[Any], None]:
    def check(body: Any) -> None:
        found = field(body, key)
        if found != label:
            raise MalformedAnswer(f"the server has weights {found!r}, not {label!r}")

    return check


def _reset_succeeded(body: Any) -> None:
    if isinstance(body, dict) and body.get("success") is False:
        raise MalformedAnswer("the server kept its prefix cache of old weights")


def _update_succeeded(body: Any) -> None:
    if field(body, "success") is not True:
        raise MalformedAnswer(f"the server did not load the weights: {body.get('message')}")


def _is_processed(body: Any) -> None:
    values = _token_logprobs(_only(field(body, "choices")))
    number = field(values, 0)
    if not isinstance(number, (int, float)) or abs(number) > 1e-3:
        raise MalformedAnswer(
            f"the only candidate has log-prob {number} instead of 0: the server reports log-probs before temperature and "
            "truncation; start it with --logprobs-mode processed_logprobs"
        )
