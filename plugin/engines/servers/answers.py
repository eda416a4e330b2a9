"""Parses and checks servers' answers; nothing is trained on that fails here."""

from __future__ import annotations

import base64
import io
import math
import reprlib
from typing import Any

import numpy
import torch
from torch import Tensor

from plugin.batch_types import SamplerHead
from plugin.engines.expert_routes import RouteShape, complete_routes
from plugin.engines.protocol import FinishReason, SamplingParameters
from plugin.engines.servers.calls import MalformedAnswer
from plugin.errors import EngineError
from plugin.ragged import Ragged

#: vLLM writes this in place of minus infinity, which JSON does not have.
_VLLM_MINUS_INFINITY = -9999.0

_NPY_HEADERS = {
    (1, 0): numpy.lib.format.read_array_header_1_0,
    (2, 0): numpy.lib.format.read_array_header_2_0,
}


class WrongLogProbs(MalformedAnswer):
    """A server that reports log-probs of a different distribution than it samples from."""


_short = reprlib.Repr()
_short.maxstring = 200
#: `repr` of what a server sent, cut where it is long or nested deeply.
shown = _short.repr


def field(body: Any, *path: str | int) -> Any:
    """The value at `path` of nested mappings and lists."""
    value = body
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise MalformedAnswer(f"the answer has no {where}") from None
    return value


def token_ids(value: Any, parameters: SamplingParameters, vocab_size: int) -> Tensor:
    """[response] int64 of a JSON list of token ids."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise MalformedAnswer("the answer's token ids are not a list of integers")
    if not value:
        raise MalformedAnswer("the answer has no tokens")
    max_tokens = parameters.max_response_length
    if len(value) > max_tokens:
        raise MalformedAnswer(
            f"{len(value)} tokens came back where at most {max_tokens} were asked for"
        )
    outside = [token for token in value if not 0 <= token < vocab_size]
    if outside:
        raise MalformedAnswer(f"token {shown(outside[0])} is not among the model's {vocab_size}")
    return torch.tensor(value, dtype=torch.int64)


def log_probs(value: Any, length: int) -> Tensor:
    """[response] float32 of a JSON list of log-probs, one for each of `length` tokens."""
    if not isinstance(value, list):
        raise MalformedAnswer("the answer has no log-probs")
    if len(value) != length:
        raise MalformedAnswer(f"{len(value)} log-probs came back for {length} tokens")
    for position, number in enumerate(value):
        # An int is compared as it is: one of 400 digits would not fit into a float.
        if type(number) not in (int, float) or not _VLLM_MINUS_INFINITY < number <= 1e-3:
            raise MalformedAnswer(
                f"log-prob {shown(number)} at token {position} cannot be that of a sample"
            )
    return torch.tensor(value, dtype=torch.float32).clamp(max=0.0)


def kept_rows(value: Any, tokens: Tensor, vocab_size: int) -> Ragged:
    """[response] entries of ascending ids from a JSON list of lists, each with its sampled token.

    An entry of the whole vocabulary becomes an empty one.
    """
    if not isinstance(value, list) or len(value) != tokens.numel():
        found = f"{len(value)} entries of" if isinstance(value, list) else "no"
        raise MalformedAnswer(
            f"the answer has {found} kept ids for {tokens.numel()} tokens; use a version that "
            "reports the sampling mask"
        )
    rows = []
    for position, (row, token) in enumerate(zip(value, tokens.tolist(), strict=True)):
        if not isinstance(row, list) or not all(
            type(kept) is int and 0 <= kept < vocab_size for kept in row
        ):
            raise MalformedAnswer(
                f"kept ids {shown(row)} at token {position} are no ids of {vocab_size}"
            )
        if len(set(row)) != len(row) or token not in row:
            raise MalformedAnswer(
                f"the kept ids at token {position} repeat one or lack the sampled {token}"
            )
        rows.append(torch.tensor(sorted(row) if len(row) < vocab_size else [], dtype=torch.int32))
    return Ragged.of(rows)


def sampler_head(value: Any, length: int, k: int, vocab_size: int) -> SamplerHead:
    """The k likeliest ids of each of `length` tokens, from a list of pairs (id, log-prob) for each.

    The sampled token may be there besides; what truncation left out has minus infinity.
    """
    if not isinstance(value, list) or len(value) != length:
        found = f"{len(value)} rows of" if isinstance(value, list) else "no"
        raise MalformedAnswer(f"the answer has {found} likeliest ids for {length} tokens")
    ids, numbers = [], []
    for position, row in enumerate(value):
        if not all(type(id) is int and 0 <= id < vocab_size for id, _ in row) or not all(
            type(number) in (int, float) and number <= 1e-3 for _, number in row
        ):
            raise MalformedAnswer(
                f"likeliest ids {shown(row)} at token {position} are no log-probs of {vocab_size} "
                "ids"
            )
        if len(dict(row)) < min(k, vocab_size):
            raise MalformedAnswer(
                f"{len(row)} likeliest ids instead of {k} came back for token {position}; raise "
                "the server's limit (vLLM: --max-logprobs)"
            )
        best = sorted(dict(row).items(), key=lambda pair: -pair[1])[:k]
        best = [pair for pair in best if pair[1] > _VLLM_MINUS_INFINITY]
        if not best:
            raise MalformedAnswer(f"no likeliest id of token {position} has a probability")
        ids.append([id for id, _ in best] + [-1] * (k - len(best)))
        numbers.append([min(number, 0.0) for _, number in best] + [0.0] * (k - len(best)))
    return SamplerHead(
        torch.tensor(ids, dtype=torch.int32).view(-1, k),
        torch.tensor(numbers, dtype=torch.float32).view(-1, k),
    )


def finish_reason(
    value: Any, tokens: Tensor, parameters: SamplingParameters, *, interrupts: bool
) -> FinishReason:
    """`stop` or `length`, if consistent with the tokens; `abort` where `interrupts`."""
    max_tokens = parameters.max_response_length
    stops = torch.isin(tokens, torch.tensor(parameters.stop_token_ids, dtype=torch.int64))
    if bool(stops[:-1].any()):
        raise MalformedAnswer("the response goes on after a stop token")
    if value == "abort" and interrupts:
        if bool(stops[-1]):
            return "stop"
        return "length" if tokens.numel() == max_tokens else "abort"
    if value not in ("stop", "length"):
        raise MalformedAnswer(f"finish reason {shown(value)}; expected stop or length")
    if value == "stop" and not bool(stops[-1]):
        raise MalformedAnswer(
            f"finish reason stop, but the last token {int(tokens[-1])} is no stop token of the task"
        )
    if value == "length" and tokens.numel() != max_tokens:
        raise MalformedAnswer(f"finish reason length with {tokens.numel()} of {max_tokens} tokens")
    return "stop" if bool(stops[-1]) else "length"


def routes_of_npy(value: Any, length: int, shape: RouteShape) -> Tensor:
    """[length, MoE layers, topk] of a base64 text that holds an .npy file."""
    data = _decoded(value)
    stream = io.BytesIO(data)
    try:
        # numpy.load would allocate whatever the header claims, and read archives.
        version = numpy.lib.format.read_magic(stream)
        dimensions, fortran_order, dtype = _NPY_HEADERS[version](stream)
    except Exception as error:  # of tokenizer, parser and dtype, whatever the header holds
        raise MalformedAnswer(f"the routed experts are no .npy array ({error!r:.200})") from None
    if dtype.kind not in "iu":
        raise MalformedAnswer(f"the routed experts are {dtype!s:.50}; they must be integers")
    if len(dimensions) != 3 or min(dimensions) < 0:
        raise MalformedAnswer(
            f"routed experts of shape {shown(dimensions)}; expected [tokens, layers, topk]"
        )
    found, claimed = len(data) - stream.tell(), math.prod(dimensions) * dtype.itemsize
    if found != claimed:
        raise MalformedAnswer(
            f"the routed experts have {found} bytes where their header says {shown(claimed)}"
        )
    array = numpy.frombuffer(data, dtype, offset=stream.tell())
    array = array.reshape(dimensions, order="F" if fortran_order else "C")
    return _completed(torch.from_numpy(array.astype(dtype.newbyteorder("="))), length, shape)


def routes_of_int32(value: Any, length: int, shape: RouteShape) -> Tensor:
    """[length, MoE layers, topk] of base64 int32 for all layers and all tokens but the last."""
    data, num_layers = _decoded(value), shape.num_layers or shape.layers[-1] + 1
    if len(data) != 4 * (length - 1) * num_layers * shape.topk:
        raise MalformedAnswer(
            f"{len(data)} bytes of routed experts where {length - 1} x {num_layers} x {shape.topk} "
            "int32 were expected"
        )
    array = numpy.frombuffer(data, dtype=numpy.int32).astype(numpy.int64)
    return _completed(
        torch.from_numpy(array).view(length - 1, num_layers, shape.topk), length, shape
    )


def _decoded(value: Any) -> bytes:
    if not isinstance(value, str):
        raise MalformedAnswer(
            "the answer has no routed experts; start the server with --enable-return-routed-experts"
        )
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:  # binascii.Error is one; so is text that is not ASCII
        raise MalformedAnswer(f"the routed experts are not base64 ({error})") from None


def _completed(routes: Tensor, length: int, shape: RouteShape) -> Tensor:
    try:
        return complete_routes(routes, length, shape)
    except EngineError as error:
        raise MalformedAnswer(str(error)) from None
