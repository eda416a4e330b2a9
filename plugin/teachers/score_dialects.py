"""The requests and answers of vLLM and SGLang servers for log-probs of given tokens.

Both report log-probs of the whole distribution at temperature 1, whatever they sample with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.engines.servers.answers import field, log_probs, shown
from plugin.engines.servers.calls import MalformedAnswer, ServerCall

#: Of one position; servers round their log-probs.
_MOST_PROBABILITY = 1.01
#: Digits of an id; Python refuses to read a number of thousands.
_MOST_DIGITS = 18


@dataclass(frozen=True)
class ScoreRequest:
    """A prompt and the response whose tokens are scored.

    topk: ids that are wanted for every response token, the most likely first; 0 = none
    """

    tokens: tuple[int, ...]
    response_length: int
    topk: int = 0

    @property
    def response(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.response_length :]


class Scores(NamedTuple):
    """Log-probs [response] of the tokens; ids and log-probs [response, k] of the top-k ids."""

    log_probs: Tensor
    topk_ids: Tensor
    topk_log_probs: Tensor


class VllmScores:
    """`prompt_logprobs` of vLLM's completions; one token is generated and discarded."""

    def call(self, request: ScoreRequest) -> ServerCall:
        """The call for one sample."""
        payload = {
            "prompt": list(request.tokens),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": request.topk,
            "return_token_ids": True,
            "stream": False,
        }
        return ServerCall("/v1/completions", payload)

    def parse(self, body: Any, request: ScoreRequest, vocab_size: int) -> Scores:
        """The scores in `body`, or `MalformedAnswer`."""
        choice = field(body, "choices", 0)
        echoed = choice.get("prompt_token_ids") if isinstance(choice, dict) else None
        if echoed is not None and echoed != list(request.tokens):
            raise MalformedAnswer("the answer is for a different prompt")
        rows = field(choice, "prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(request.tokens):
            found = len(rows) if isinstance(rows, list) else "no"
            raise MalformedAnswer(
                f"{found} rows of prompt log-probs came back for {len(request.tokens)} tokens"
            )
        rows = rows[len(rows) - request.response_length :]
        own, top = [], []
        for position, (row, token) in enumerate(zip(rows, request.response, strict=True)):
            entries = _vllm_entries(row, position)
            if token not in entries:
                raise MalformedAnswer(
                    f"the log-prob of token {token} at position {position} is missing"
                )
            own.append(entries[token])
            top.append(list(entries.items()))
        return _scores(own, top, request, vocab_size)


class SglangScores:
    """`input_token_logprobs` and `input_top_logprobs` of SGLang's native server."""

    def call(self, request: ScoreRequest) -> ServerCall:
        payload = {
            "input_ids": list(request.tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The position before the response predicts its first token.
            "logprob_start_len": max(0, len(request.tokens) - request.response_length - 1),
            "top_logprobs_num": request.topk,
            "stream": False,
        }
        return ServerCall("/generate", payload)

    def parse(self, body: Any, request: ScoreRequest, vocab_size: int) -> Scores:
        meta = field(body, "meta_info")
        read = field(meta, "prompt_tokens")
        if read != len(request.tokens):
            raise MalformedAnswer(
                f"the server read {shown(read)} tokens instead of {len(request.tokens)}"
            )
        own = _sglang_rows(field(meta, "input_token_logprobs"), request, "log-probs")
        entries = [_sglang_entry(row, n) for n, row in enumerate(own)]
        for position, ((found, _), token) in enumerate(zip(entries, request.response, strict=True)):
            if found != token:
                raise MalformedAnswer(
                    f"the log-prob at position {position} is of token {shown(found)}, not {token}"
                )
        top: list[list[tuple[Any, Any]]] = [[] for _ in entries]
        if request.topk:
            rows = _sglang_rows(field(meta, "input_top_logprobs"), request, "rows of top-k ids")
            top = [
                [_sglang_entry(entry, n) for entry in row] if isinstance(row, list) else []
                for n, row in enumerate(rows)
            ]
        return _scores([number for _, number in entries], top, request, vocab_size)


SCORE_DIALECTS: dict[str, type[VllmScores] | type[SglangScores]] = {
    "vllm": VllmScores,
    "sglang": SglangScores,
}


def _vllm_entries(row: Any, position: int) -> dict[int, Any]:
    """id -> log-prob of one position."""
    if not isinstance(row, dict) or not all(
        key.isdecimal() and len(key) <= _MOST_DIGITS for key in row
    ):
        raise MalformedAnswer(f"the log-probs at position {position} are {shown(row)}")
    entries = {int(key): field(entry, "logprob") for key, entry in row.items()}
    if len(entries) != len(row):
        raise MalformedAnswer(f"an id came back twice at position {position}")
    return entries


def _sglang_rows(rows: Any, request: ScoreRequest, what: str) -> list[Any]:
    """The last rows, one per response token; SGLang has one without a value before them."""
    if not isinstance(rows, list) or len(rows) < request.response_length:
        found = len(rows) if isinstance(rows, list) else "no"
        raise MalformedAnswer(f"{found} {what} came back for {request.response_length} tokens")
    return rows[len(rows) - request.response_length :]


def _sglang_entry(row: Any, position: int) -> tuple[Any, Any]:
    """(id, log-prob) of SGLang's (log-prob, id, text)."""
    if not isinstance(row, list) or len(row) < 2:
        raise MalformedAnswer(f"the log-prob at position {position} is {shown(row)}")
    return row[1], row[0]


def _scores(
    own: list[Any], top: Sequence[list[tuple[Any, Any]]], request: ScoreRequest, vocab_size: int
) -> Scores:
    ids, numbers = [], []
    for position, entries in enumerate(top if request.topk else ()):
        if len(entries) < request.topk:
            raise MalformedAnswer(
                f"{len(entries)} ids came back at position {position}, not {request.topk}; a vLLM "
                "server returns at most --max-logprobs"
            )
        bad = [n for n, _ in entries if type(n) is not int or not 0 <= n < vocab_size]
        if bad:
            raise MalformedAnswer(
                f"token {shown(bad[0])} at position {position} is not among the policy's "
                f"{vocab_size}: the teacher has a different vocabulary"
            )
        log_probs([number for _, number in entries], len(entries))  # are numbers, at most 0
        # A server that adds the sampled token to the top k adds it below them.
        best = sorted(entries, key=lambda entry: -entry[1])[: request.topk]
        ids.append([number for number, _ in best])
        numbers.append([number for _, number in best])
        if len(set(ids[-1])) != len(best):
            raise MalformedAnswer(f"an id came back twice at position {position}")
        total = sum(math.exp(number) for number in numbers[-1])
        if total > _MOST_PROBABILITY:
            raise MalformedAnswer(
                f"the probabilities of the top {request.topk} ids at position {position} add up to "
                f"{total:.3g}, more than 1"
            )
    shape = (request.response_length, request.topk)
    return Scores(
        log_probs(own, request.response_length),
        torch.tensor(ids, dtype=torch.int32).reshape(shape),
        torch.tensor(numbers, dtype=torch.float32).clamp(max=0.0).reshape(shape),
    )
