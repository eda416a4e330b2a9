"""How vLLM and SGLang servers are asked for tokens, given weights, and asked which they have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from plugin.engines.expert_routes import RouteShape
from plugin.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.engines.servers.answers import (
    WrongLogProbs,
    field,
    finish_reason,
    kept_rows,
    log_probs,
    routes_of_int32,
    routes_of_npy,
    sampler_head,
    shown,
    token_ids,
)
from plugin.engines.servers.calls import MalformedAnswer, ServerCall
from plugin.weights.group import WeightGroup
from plugin.weights.lane import group_backend
from plugin.weights.tensor_layout import TensorSpec


@dataclass(frozen=True)
class ResponseShape:
    """What a response is checked against, in addition to the sampling parameters.

    max_model_len: tokens of prompt and response together
    interrupts: whether a response that new weights cut short is an answer
    """

    vocab_size: int
    max_model_len: int
    routes: RouteShape
    interrupts: bool = False


@dataclass(frozen=True)
class VllmDialect:
    """vLLM's OpenAI-compatible server.

    To be started with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs.

    load_method: the workers' method that loads a version, and the name of its argument
    """

    shape: ResponseShape
    #: Metrics that change while the server generates, or reads prompts.
    progress_metrics: ClassVar = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    load_method: ClassVar = ("reload_weights", "weights_path")

    def generation(self, request: GenerationRequest, parameters: SamplingParameters) -> ServerCall:
        """The call for the response to a request of one seed."""
        payload = {
            "prompt": list(request.prompt),
            "seed": request.seeds[0],
            "max_tokens": parameters.max_response_length,
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
            payload["logprobs"] = parameters.head
        return ServerCall("/v1/completions", payload)

    def parse(
        self, body: Any, request: GenerationRequest, parameters: SamplingParameters, version: int
    ) -> Generation:
        """The response in `body`, or `MalformedAnswer`."""
        choice = _only(field(body, "choices"))
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != list(request.prompt):
            raise MalformedAnswer("the answer is for another prompt")
        tokens = token_ids(field(choice, "token_ids"), parameters, self.shape.vocab_size)
        reason = choice.get("finish_reason")
        finished = finish_reason(reason, tokens, parameters, interrupts=self.shape.interrupts)
        routes = values = None
        if parameters.routed_experts:
            length = len(request.prompt) + tokens.numel()
            routes = routes_of_npy(choice.get("routed_experts"), length, self.shape.routes)
        if parameters.log_probs:
            values = log_probs(_token_logprobs(choice), tokens.numel())
        head = None
        if parameters.head:
            rows = _vllm_top_logprobs(choice)
            head = sampler_head(rows, tokens.numel(), parameters.head, self.shape.vocab_size)
        return Generation(tokens, finished, version, values, routes, head=head)

    def weight_update(self, directory: str, label: str, *, abort: bool) -> list[ServerCall]:
        """The calls after which the server has the weights in `directory` and says so.

        abort: responses may be running; they end at once with what they have
        """
        method, argument = self.load_method
        reload = {"method": method, "kwargs": {argument: directory}}
        # The label is changed last: a failure half-way leaves none that could be believed.
        return [
            ServerCall("/update_weight_version", {"new_version": f"loading {label}"}),
            ServerCall("/pause?mode=abort"),
            ServerCall("/collective_rpc", reload, check=_workers_succeeded),
            ServerCall("/reset_prefix_cache", check=_reset_succeeded),
            ServerCall("/update_weight_version", {"new_version": label}),
            ServerCall("/resume"),
            self.weight_label(label),
        ]

    def weight_label(self, label: str) -> ServerCall:
        """A call whose answer confirms that the server's weights are those named `label`."""
        return ServerCall("/weight_info", method="GET", check=_has_label(label))

    def label_of_response(self, body: Any) -> str | None:
        """The weights that the response says it came from; None where responses do not say."""
        return None

    def self_test(self, parameters: SamplingParameters) -> ServerCall | None:
        """A call that reveals a server with log-probs of a different distribution, if one can."""
        truncated = parameters.top_p != 1 or parameters.top_k is not None
        if not parameters.log_probs or (parameters.temperature == 1 and not truncated):
            return None
        # Among one candidate the sampled token has probability 1, so its log-prob is 0.
        greedy = SamplingParameters(top_k=1, max_response_length=1)
        call = self.generation(GenerationRequest((1,), (0,)), greedy)
        return ServerCall(call.path, call.payload, check=_is_processed)


class ExtendedVllmDialect(VllmDialect):
    """A vLLM server of the job's own: its workers have our `WorkerExtension`."""

    load_method: ClassVar = ("load_directory", "directory")


@dataclass(frozen=True)
class SglangDialect:
    """SGLang's native server, which can also join a process group with the trainer."""

    shape: ResponseShape
    #: As of `VllmDialect`. The counters move as responses end, the others every few steps.
    progress_metrics: ClassVar = (
        "sglang:generation_tokens_total",
        "sglang:prompt_tokens_total",
        "sglang:num_used_tokens",
        "sglang:token_usage",
        "sglang:gen_throughput",
    )

    def generation(self, request: GenerationRequest, parameters: SamplingParameters) -> ServerCall:
        sampling = {
            "max_new_tokens": parameters.max_response_length,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
            "top_k": parameters.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(parameters.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": request.seeds[0],
        }
        payload = {
            "input_ids": list(request.prompt),
            "sampling_params": sampling,
            "return_logprob": parameters.log_probs,
            "return_routed_experts": parameters.routed_experts,
            "stream": False,
        }
        if parameters.sampling_mask:
            payload["return_sampling_mask"] = True
        if parameters.head:
            payload["top_logprobs_num"] = parameters.head
        return ServerCall("/generate", payload)

    def parse(
        self, body: Any, request: GenerationRequest, parameters: SamplingParameters, version: int
    ) -> Generation:
        meta = field(body, "meta_info")
        prompt_tokens = field(meta, "prompt_tokens")
        if prompt_tokens != len(request.prompt):
            raise MalformedAnswer(
                f"the server read a prompt of {shown(prompt_tokens)} tokens instead of "
                f"{len(request.prompt)}"
            )
        tokens = token_ids(field(body, "output_ids"), parameters, self.shape.vocab_size)
        reason = field(meta, "finish_reason", "type")
        finished = finish_reason(reason, tokens, parameters, interrupts=self.shape.interrupts)
        routes = values = kept = None
        if parameters.routed_experts:
            length = len(request.prompt) + tokens.numel()
            found = meta.get("routed_experts")
            routes = routes_of_int32(found, length, self.shape.routes)
        if parameters.log_probs:
            values = log_probs(_sglang_log_probs(meta, tokens.tolist()), tokens.numel())
        if parameters.sampling_mask:
            kept = kept_rows(meta.get("output_token_sampling_mask"), tokens, self.shape.vocab_size)
            # Those above are of the distribution before truncation, these of the sampled one.
            if parameters.log_probs:
                values = log_probs(meta.get("output_token_sampling_logprobs"), tokens.numel())
        head = None
        if parameters.head:
            rows = _sglang_top_logprobs(meta)
            head = sampler_head(rows, tokens.numel(), parameters.head, self.shape.vocab_size)
        return Generation(tokens, finished, version, values, routes, kept, head=head)

    def weight_update(self, directory: str, label: str, *, abort: bool) -> list[ServerCall]:
        payload = {
            "model_path": directory,
            # Not that of the server, which may have been started with random weights.
            "load_format": "auto",
            "weight_version": label,
            "flush_cache": True,
        }
        # Without a pause the update waits until all running responses have ended.
        pause, resume = self.pause_calls() if abort else ([], [])
        update = ServerCall("/update_weights_from_disk", payload, check=_update_succeeded)
        return [*pause, update, *resume, self.weight_label(label)]

    def pause_calls(self) -> tuple[list[ServerCall], list[ServerCall]]:
        """What ends running responses at once, and what lets new ones begin."""
        pause = ServerCall("/pause_generation", {"mode": "abort"})
        return [pause], [ServerCall("/continue_generation", {})]

    def server_size(self) -> ServerCall:
        """A call that is answered with what `workers_of` reads."""
        return ServerCall("/get_server_info", method="GET")

    def workers_of(self, body: Any) -> int:
        """How many workers of a server receive weights."""
        size = field(body, "tp_size")
        if not isinstance(size, int) or size < 1:
            raise MalformedAnswer(f"the server has tensor parallel size {shown(size)}")
        return size

    def join_group(self, group: WeightGroup, sender: int, rank: int) -> ServerCall:
        """The call that makes a server's workers ranks `rank` and up of a sender's group."""
        payload = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": 1 + group.receivers,
            "group_name": group.lane_name(sender),
            "backend": group_backend(),
        }
        return ServerCall("/init_weights_update_group", payload, check=_update_succeeded)

    def receive(self, group_name: str, specs: Sequence[TensorSpec], label: str) -> ServerCall:
        """The call that has a server take one bucket, and name its weights `label`."""
        payload = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).split(".")[-1] for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group_name,
            # The bytes of all tensors, one after the other, in one broadcast.
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": label,
        }
        return ServerCall("/update_weights_from_distributed", payload, check=_update_succeeded)

    def name_weights(self, label: str) -> list[ServerCall]:
        """The calls after which the server says that its weights are those named `label`."""
        name = {"new_version": label, "abort_all_requests": False}
        return [ServerCall("/update_weight_version", name), self.weight_label(label)]

    def weight_label(self, label: str) -> ServerCall:
        return ServerCall("/get_model_info", method="GET", check=_has_label(label))

    def label_of_response(self, body: Any) -> str | None:
        found = field(body, "meta_info", "weight_version")
        return found if isinstance(found, str) else shown(found)

    def self_test(self, parameters: SamplingParameters) -> ServerCall | None:
        return None  # log-probs are after the temperature; truncation comes with its sampling mask


Dialect = VllmDialect | SglangDialect
DIALECTS: dict[str, type[Dialect]] = {
    "vllm": VllmDialect,
    "extended vllm": ExtendedVllmDialect,
    "sglang": SglangDialect,
}


#: Python refuses to read numbers of thousands of digits.
_TOKEN_ID = re.compile(r"(?:token_id:)?[0-9]{1,18}")


def _only(choices: Any) -> Any:
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedAnswer("the answer does not hold exactly one choice")
    return choices[0]


def _token_logprobs(choice: Any) -> Any:
    found = choice.get("logprobs")
    return found.get("token_logprobs") if isinstance(found, dict) else None


def _vllm_top_logprobs(choice: Any) -> Any:
    """A list of pairs (id, log-prob) for each token, from mappings of "token_id:<id>"."""
    found = choice.get("logprobs")
    rows = found.get("top_logprobs") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MalformedAnswer("the answer has no likeliest ids")
    wrong = [name for row in rows for name in row if not _TOKEN_ID.fullmatch(name)]
    if wrong:
        raise MalformedAnswer(f"likeliest id {shown(wrong[0])}; expected token_id:<id>")
    return [
        [(int(name.removeprefix("token_id:")), number) for name, number in row.items()]
        for row in rows
    ]


def _sglang_top_logprobs(meta: Any) -> Any:
    """The same from lists of (log-prob, id, text)."""
    rows = meta.get("output_top_logprobs")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(one, list) and len(one) >= 2 for one in row)
        for row in rows
    ):
        raise MalformedAnswer("the answer has no likeliest ids")
    return [[(one[1], one[0]) for one in row] for row in rows]


def _sglang_log_probs(meta: Any, tokens: list[int]) -> list[Any]:
    """The log-probs of (log-prob, token, text) rows whose tokens are `tokens`."""
    rows = meta.get("output_token_logprobs")
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) >= 2 for r in rows):
        raise MalformedAnswer("the answer has no log-probs")
    if [row[1] for row in rows] != tokens:
        raise MalformedAnswer(
            f"the log-probs of {len(rows)} tokens belong to other tokens than the {len(tokens)} of "
            "the response"
        )
    return [row[0] for row in rows]


def _has_label(label: str) -> Callable[[Any], None]:
    def check(body: Any) -> None:
        found = field(body, "weight_version")
        if found != label:
            raise MalformedAnswer(f"the server has weights {shown(found)}, not {label!r}")

    return check


def _reset_succeeded(body: Any) -> None:
    if isinstance(body, dict) and body.get("success") is False:
        raise MalformedAnswer("the server kept its prefix cache of old weights")


def _workers_succeeded(body: Any) -> None:
    results = body.get("results") if isinstance(body, dict) else None
    for refusal in results if isinstance(results, list) else []:
        if refusal is not None:
            raise MalformedAnswer(f"a worker did not load the weights: {refusal!s:.1000}")


def _update_succeeded(body: Any) -> None:
    if field(body, "success") is not True:
        reason = shown(body.get("message"))
        raise MalformedAnswer(f"the server did not load the weights: {reason}")


def _is_processed(body: Any) -> None:
    [number] = log_probs(_token_logprobs(_only(field(body, "choices"))), 1).tolist()
    if number < -1e-3:
        raise WrongLogProbs(
            f"the only candidate has log-prob {number} instead of 0: the server reports log-probs "
            "before temperature and truncation; start it with --logprobs-mode processed_logprobs"
        )
