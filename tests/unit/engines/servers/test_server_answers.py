"""Whatever a server answers, it costs another request, not the job; and a bounded amount of memory."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy
import pytest
import torch

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.controller.preflight.job_checks import _check_answer_size
from plugin.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.engines.servers.calls import MalformedAnswer, ServerCall, ServerSession, parse_json
from plugin.engines.servers.dialects import SglangDialect, VllmDialect
from plugin.engines.servers.http_engine import HttpEngine
from plugin.engines.vllm.engine import mask_rows
from plugin.errors import ConfigError
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3_moe
from tests.unit.engines.servers.good_answers import (
    EXPERTS,
    PARAMETERS,
    PROMPT,
    REQUEST,
    SHAPE,
    npy,
    sglang_answer,
    vllm_answer,
)
from tests.unit.engines.servers.misbehaving_server import TOKENS, Handler, MisbehavingServer
from tests.unit.engines.tiny_engines import http_engine, load

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("jumping_clock")]


HUGE = "9" * 400


def raw(body: Any, old: str, new: str) -> bytes:
    return json.dumps(body).replace(old, new, 1).encode()


def header(text: bytes, version: bytes = b"\x01\x00") -> str:
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + version + size + text).decode()


def archive() -> str:
    import io

    buffer = io.BytesIO()
    numpy.savez(buffer, a=EXPERTS)
    return base64.b64encode(buffer.getvalue()).decode()


def routed(array: Any) -> dict[str, Any]:
    return vllm_answer(routed_experts=npy(array))


TERABYTE = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000, 1000, 1000), }\n"
BAD = {
    "duplicate": (routed(numpy.zeros_like(EXPERTS)), r"token 0, MoE layer 0 name an expert twice: \[0, 0\]"),
    "out of range": (routed(EXPERTS + 1), "the model has experts 0..3"),
    "negative": (routed(-EXPERTS), "negative number"),
    "float": (routed(EXPERTS.astype(float)), "float64; they must be integers"),
    "bool": (routed(EXPERTS > 1), "bool; they must be integers"),
    "string": (routed(EXPERTS.astype(str)), "they must be integers"),
    "object": (vllm_answer(routed_experts=header(b"{'descr': '|O', 'fortran_order': False, 'shape': (4, 4, 2), }\n")), "object; they must be integers"),
    "flat": (routed(EXPERTS.reshape(-1)), "expected .tokens, layers, topk."),
    "three experts": (routed(numpy.tile(numpy.arange(3), (4, 4, 1))), "name 3 experts per token, the model chooses 2"),
    "too many layers": (routed(numpy.tile(EXPERTS, (1, 2, 1))), "of 8 layers for a model with 3 MoE layers among 4"),
    "too few tokens": (routed(EXPERTS[:2]), r"where \[4, layers, topk\] was expected"),
    "a terabyte": (vllm_answer(routed_experts=header(TERABYTE)), "have 0 bytes where their header says 8000000000000"),
    "a giant header": (vllm_answer(routed_experts=header(b"{" + b" " * 100_000 + b"}", b"\x02\x00")), "no .npy array"),
    "a nested header": (vllm_answer(routed_experts=header(b"(" * 5000)), "no .npy array"),
    "npz": (vllm_answer(routed_experts=archive()), "no .npy array"),
    "no base64": (vllm_answer(routed_experts="é"), "not base64"),
    "a list": (vllm_answer(routed_experts=EXPERTS.tolist()), "no routed experts"),
    "400 digits": (raw(vllm_answer(), "-0.5", "-" + HUGE), "log-prob -9999.*cannot be that of a sample"),
    "5000 digits": (raw(vllm_answer(), "-0.5", "9" * 5000), "not JSON"),
    "a bool log-prob": (raw(vllm_answer(), "-0.5", "false"), "log-prob False at token 0"),
    "log-probs of text": (vllm_answer(logprobs="none"), "no log-probs"),
    "log-probs in a list": (vllm_answer(logprobs=[1]), "no log-probs"),
    "log-probs in a number": (vllm_answer(logprobs=7), "no log-probs"),
    "log-probs in a dict": (vllm_answer(logprobs={"token_logprobs": {}}), "no log-probs"),
    "a 400-digit token": (raw(vllm_answer(), "11", HUGE), "is not among the model's 96"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep inside": (raw(vllm_answer(finish_reason=0), '"finish_reason": 0', '"finish_reason": ' + "[" * 900 + "]" * 900), "finish reason"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_is_neither_used_nor_an_error_of_python(case: str) -> None:
    body, message = BAD[case]
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(MalformedAnswer, match=message):
        VllmDialect(SHAPE).parse(parse_json(text), REQUEST, PARAMETERS, 0)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (numpy.zeros_like(EXPERTS), "name an expert twice"),
        (EXPERTS + 2, "the model has experts 0..3"),
        (EXPERTS - 1, "negative"),
        (EXPERTS[:3], "96 bytes of routed experts where 4 x 4 x 2 int32 were expected"),
    ],
)
def test_bad_routes_of_sglang_are_not_used(experts: Any, message: str) -> None:
    packed = base64.b64encode(experts.astype(numpy.int32).tobytes()).decode()
    with pytest.raises(MalformedAnswer, match=message):
        SglangDialect(SHAPE).parse(sglang_answer(routed_experts=packed), REQUEST, PARAMETERS, 0)


MASKED = replace(PARAMETERS, sampling_mask=True)
KEPT = [[token, (token + 5) % 96] for token in TOKENS]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "no kept ids for 3 tokens"),
        (KEPT[:-1], "2 entries of kept ids for 3 tokens"),
        ([*KEPT[:-1], "1 2"], "are no ids of 96"),
        ([*KEPT[:-1], [TOKENS[-1], 96]], "are no ids of 96"),
        ([*KEPT[:-1], [TOKENS[-1], 2.0]], "are no ids of 96"),
        ([*KEPT[:-1], [TOKENS[-1], TOKENS[-1]]], "at token 2 repeat one or lack"),
        ([*KEPT[:-1], []], "at token 2 repeat one or lack"),
    ],
)
def test_bad_kept_ids_of_sglang_are_not_used(kept: Any, message: str) -> None:
    meta = {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": [-0.5] * 3}
    with pytest.raises(MalformedAnswer, match=message):
        SglangDialect(SHAPE).parse(sglang_answer(**meta), REQUEST, MASKED, 0)


def test_sglang_reports_kept_ids_and_the_log_probs_over_them() -> None:
    call = SglangDialect(SHAPE).generation(REQUEST, MASKED)
    assert call.payload is not None and call.payload["return_sampling_mask"] is True
    meta = {
        "output_token_sampling_mask": [*KEPT[:-1], list(range(96))],
        "output_token_sampling_logprobs": [-0.5, 0.0, -0.25],
    }
    generation = SglangDialect(SHAPE).parse(sglang_answer(**meta), REQUEST, MASKED, 0)
    assert generation.sampling_mask is not None and generation.log_probs is not None
    # The whole vocabulary is an empty entry; the others ascend.
    expected = [sorted(row) for row in KEPT[:-1]] + [[]]
    assert [row.tolist() for row in generation.sampling_mask] == expected
    assert generation.log_probs.tolist() == [-0.5, 0.0, -0.25]


HEADED = replace(PARAMETERS, head=2, routed_experts=False)
#: Of the tokens of `good_answers`: the two likeliest ids, and the sampled token where it is none of them.
LIKELIEST = [[(3, -0.4), (5, -1.5)], [(9, -0.2), (1, -2.0), (2, -7.0)], [(7, -0.1), (0, -9999.0)]]


def vllm_head(rows: Any) -> dict[str, Any]:
    names = [{f"token_id:{id}": number for id, number in row} for row in rows]
    body = vllm_answer()
    body["choices"][0]["logprobs"] |= {"top_logprobs": names}
    return body


def sglang_head(rows: Any) -> dict[str, Any]:
    return sglang_answer(
        output_top_logprobs=[[[number, id, None] for id, number in row] for row in rows]
    )


def test_both_servers_are_asked_for_their_likeliest_ids_and_understood() -> None:
    for dialect, body, asked in (
        (VllmDialect(SHAPE), vllm_head(LIKELIEST), ("logprobs", 2)),
        (SglangDialect(SHAPE), sglang_head(LIKELIEST), ("top_logprobs_num", 2)),
    ):
        payload = dialect.generation(REQUEST, HEADED).payload
        assert payload is not None and payload[asked[0]] == asked[1]
        head = dialect.parse(body, REQUEST, HEADED, 1).head
        assert head is not None
        assert head.ids.tolist() == [[3, 5], [9, 1], [7, -1]]
        numbers = torch.tensor([[-0.4, -1.5], [-0.2, -2.0], [-0.1, 0.0]])
        assert torch.equal(head.log_probs, numbers)


@pytest.mark.parametrize(
    "rows, message",
    [
        (LIKELIEST[:2], "2 rows of likeliest ids for 3 tokens"),
        ([*LIKELIEST[:2], [(7, -0.1)]], "1 likeliest ids instead of 2 came back for token 2"),
        ([*LIKELIEST[:2], [(7, 0.5), (1, -1.0)]], "are no log-probs of 96 ids"),
        ([*LIKELIEST[:2], [(96, -0.5), (1, -1.0)]], "are no log-probs of 96 ids"),
        ([*LIKELIEST[:2], [(7, "x"), (1, -1.0)]], "are no log-probs of 96 ids"),
        ([*LIKELIEST[:2], [(7, float("nan")), (1, -1.0)]], "are no log-probs of 96 ids"),
        ([*LIKELIEST[:2], [(7, -9999.0), (1, -9999.0)]], "no likeliest id of token 2 has"),
    ],
)
def test_bad_likeliest_ids_are_not_used(rows: Any, message: str) -> None:
    for dialect, body in (
        (VllmDialect(SHAPE), vllm_head(rows)),
        (SglangDialect(SHAPE), sglang_head(rows)),
    ):
        with pytest.raises(MalformedAnswer, match=message):
            dialect.parse(body, REQUEST, HEADED, 1)


def test_an_answer_without_likeliest_ids_or_with_other_names_is_not_used() -> None:
    for body in (vllm_answer(), vllm_answer(logprobs=None), sglang_answer()):
        dialect = VllmDialect(SHAPE) if "choices" in body else SglangDialect(SHAPE)
        with pytest.raises(MalformedAnswer):
            dialect.parse(body, REQUEST, HEADED, 1)
    for name in (" the", f"token_id:{'9' * 5000}"):
        named = vllm_head(LIKELIEST)
        named["choices"][0]["logprobs"]["top_logprobs"][1] = {name: -0.2, "token_id:1": -2.0}
        with pytest.raises(MalformedAnswer, match="expected token_id:<id>"):
            VllmDialect(SHAPE).parse(named, REQUEST, HEADED, 1)


def test_both_forms_of_vllms_sampling_mask_are_read() -> None:
    lists = SimpleNamespace(token_ids=[[3, 7], [5]])
    flat = SimpleNamespace(token_ids=numpy.array([3, 7, 5]), offsets=[0, 2, 3])
    assert mask_rows(lists) == mask_rows(flat) == [[3, 7], [5]] and mask_rows(None) is None


def test_the_answers_that_are_spoiled_here_are_good() -> None:
    expected = EXPERTS[:, [0, 1, 3]].tolist()
    for array in (EXPERTS.astype(">i4"), numpy.asfortranarray(EXPERTS), EXPERTS.astype("u8")):
        generation = VllmDialect(SHAPE).parse(routed(array), REQUEST, PARAMETERS, 0)
        assert generation.routed_experts is not None
        assert generation.routed_experts[:-1].tolist() == expected
    generation = SglangDialect(SHAPE).parse(sglang_answer(), REQUEST, PARAMETERS, 0)
    assert generation.routed_experts is not None
    assert generation.routed_experts[:-1].tolist() == expected


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    started = MisbehavingServer()
    yield started
    started.close()


def moe_engine(server: MisbehavingServer, weights_dir: Path, **options: Any) -> HttpEngine:
    config = tiny_qwen3_moe(mlp_only_layers=[2])
    settings = {"rollout_request_timeout": 10.0, "rollout_request_retries": 1}
    settings |= {"rollout_weights_dir": str(weights_dir)}
    engine = http_engine(config.to_dict(), server.url, **(settings | options))
    load(engine, hf_state_dict(config, 0))
    return engine


def compressed(body: bytes) -> Any:
    def behave(handler: Handler) -> None:
        text = gzip.compress(body)
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    return behave


def test_every_bad_answer_is_asked_for_again_with_the_reason_in_the_log(
    server: MisbehavingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled = [lambda handler, body=body: handler.answer(body) for body, _ in BAD.values()]
    spoiled += [compressed(b" " * (8 << 20)), compressed(b"{")]
    bad, asked = len(spoiled), set[int]()

    def behave(handler: Handler) -> None:
        """Badly the first time that a seed comes, in whatever order they come."""
        seed = handler.payload["seed"]
        well = seed in asked
        asked.add(seed)
        handler.answer(vllm_answer()) if well else spoiled[seed](handler)

    server.always = behave
    engine = moe_engine(server, tmp_path, max_answer_bytes=1 << 20)
    requests = [GenerationRequest(PROMPT, (seed,)) for seed in range(bad)]
    with caplog.at_level(logging.WARNING, logger="plugin"):
        answers = engine.generate(requests, PARAMETERS)
    assert all(isinstance(answer, Generation) for [answer] in answers)
    assert len(server.asked) == 2 * bad
    assert engine.pool.servers[0].failed_calls == bad
    logged = [record.getMessage() for record in caplog.records]
    assert [f"failed call number {n}: " in text for n, text in zip((1, 2, 4, 8, 16), logged, strict=True)] == [True] * 5  # fmt: skip


def exchange(session: ServerSession, url: str, call: ServerCall) -> Any:
    async def run() -> Any:
        async with session:
            return await session.call(url, call, 10.0)

    return run()


CALL = ServerCall("/v1/completions", {})


def test_an_answer_is_not_decompressed_beyond_its_bound(server: MisbehavingServer) -> None:
    bomb = b'{"a": "' + b"0" * (16 << 20) + b'"}'

    async def ask(limit: int) -> Any:
        return await exchange(ServerSession(limit), server.url, CALL)

    server.script.append(compressed(bomb))
    with pytest.raises(MalformedAnswer, match=r"more than 1000000 bytes.*--max-answer-bytes"):
        asyncio.run(ask(1_000_000))
    server.script.append(lambda handler: handler.answer(bomb))
    with pytest.raises(MalformedAnswer, match="more than 1000000 bytes"):
        asyncio.run(ask(1_000_000))
    server.script.append(compressed(b'{"a": 1}'))
    assert asyncio.run(ask(8)) == {"a": 1}


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("br", b"{}", "encoded as br; only gzip is read"),
        ("gzip", b"{}", "not gzip"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], "cut off"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, "goes on after its gzip data"),
    ],
)
def test_a_wrong_encoding_is_a_bad_answer(
    server: MisbehavingServer, encoding: str, body: bytes, message: str
) -> None:
    def behave(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", encoding)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    async def ask() -> Any:
        return await exchange(ServerSession(1000), server.url, CALL)

    server.script.append(behave)
    with pytest.raises(MalformedAnswer, match=message):
        asyncio.run(ask())


class CountingSession(ServerSession):
    """Counts the bodies that are read at the same time; none is read before 16 could be."""

    reading = most = 0

    async def _body(self, response: aiohttp.ClientResponse) -> bytearray:
        self.reading += 1
        self.most = max(self.most, self.reading)
        while self.most < 16:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        try:
            return await super()._body(response)
        finally:
            self.reading -= 1


def test_all_answers_together_are_bounded(server: MisbehavingServer) -> None:
    server.always = lambda handler: handler.answer({})

    async def ask() -> int:
        async with CountingSession(1000) as session:
            await asyncio.gather(*(session.call(server.url, CALL, 30.0) for _ in range(40)))
            return session.most

    assert asyncio.run(ask()) == 16


def test_a_bad_answer_to_the_self_test_does_not_end_the_job(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    answers = [b"[" * 100_000, b'{"choices": [{"logprobs": 3}]}']
    well = Handler.generate

    class Confused(Handler):
        def generate(self) -> None:
            if answers and self.payload.get("top_k") == 1:
                self.answer(answers.pop())
            else:
                well(self)

    server.RequestHandlerClass = Confused
    server.always = lambda handler: handler.answer(vllm_answer())
    engine = moe_engine(server, tmp_path, rollout_request_retries=2)
    warm = SamplingParameters(0.7, max_response_length=4, stop_token_ids=(3,), routed_experts=True)
    [[answer]] = engine.generate([GenerationRequest(PROMPT, (1,))], warm)
    assert isinstance(answer, Generation) and not answers


def test_routes_that_cannot_fit_into_an_answer_are_found_at_the_start() -> None:
    source = ModelSource(tiny_qwen3_moe(max_position_embeddings=1 << 20).to_dict())
    settings = {
        "rollout_engine": "http",
        "rollout_url": "http://127.0.0.1:1",
        "rollout_weights_dir": "w",
        "rollout_server": "sglang",
        "use_rollout_routing_replay": True,
        "max_response_length": 1 << 18,
    }
    # (2**18 + 1024) tokens x 4 layers x 2 experts x 4 bytes x 4 / 3
    with pytest.raises(ConfigError, match="and the routed experts of 263168 tokens alone have 11228501"):  # fmt: skip
        _check_answer_size(JobConfig.from_sources(settings | {"max_answer_bytes": 1 << 20}), source)
    _check_answer_size(JobConfig.from_sources(settings), source)
    with pytest.raises(ConfigError, match="--max-answer-bytes is 2048 but --rollout-engine is tra"):
        JobConfig(max_answer_bytes=2048)
