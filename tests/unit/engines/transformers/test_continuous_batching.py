"""Responses that join and leave a running batch, over the engine and over the loop around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plugin.engines.protocol import (
    Answer,
    Finished,
    Generation,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import ResponseStream
from plugin.engines.transformers import decode_batch
from plugin.engines.transformers.decode_batch import (
    blocks_of,
    decode_attention,
    masks_of,
    passes_of,
    runs_of,
)
from plugin.engines.transformers.engine import TransformersEngine
from plugin.environments.group_server import GroupServer, SingleTurnPlayer
from plugin.errors import EngineError
from tests.parallel.tiny_models import FAMILIES, hf_model
from tests.unit.engines.tiny_engines import (
    PARAMETERS,
    REQUESTS,
    loaded_engine,
    reference_log_probs,
)

#: Prompts of 1 to 13 tokens, so that some are longer than what the running rows have read.
MANY = [GenerationRequest(tuple(range(10, 11 + i % 13)), (2 * i, 2 * i + 1)) for i in range(12)]


def joined_one_by_one(
    engine: TransformersEngine, parameters: SamplingParameters
) -> dict[tuple[int, int], Generation]:
    """Responses of which one request joins at every step."""
    waiting, done = list(enumerate(MANY)), {}
    while waiting or engine.running:
        if waiting and engine.room >= 2:
            number, request = waiting.pop(0)
            engine.add(number, request, parameters)
        for ticket, place, answer in engine.step():
            assert isinstance(answer, Generation)
            done[ticket, place] = answer
    return done


@pytest.mark.hostile
def test_an_engine_in_the_middle_of_long_responses_is_not_silent() -> None:
    stream = ResponseStream(loaded_engine(), max_batch=4)
    stream.add("mine", MANY[0], SamplingParameters(max_response_length=4))
    seen = [stream.progress]
    while stream.open:
        stream.step()
        seen.append(stream.progress)
    # Two responses of 4 tokens, and the responses themselves.
    assert seen == [0, 2, 4, 6, 8 + 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_that_join_a_running_batch_are_those_of_the_model(family: str) -> None:
    model, engine = hf_model(FAMILIES[family]()), loaded_engine(family, max_batch=6)
    parameters = SamplingParameters(
        temperature=0.7,
        max_response_length=10,
        stop_token_ids=PARAMETERS.stop_token_ids,
        routed_experts=family == "qwen3_moe",
    )
    done = joined_one_by_one(engine, parameters)
    assert len({len(g.tokens) for g in done.values()}) > 2
    for (number, place), generation in done.items():
        request = MANY[number]
        expected = reference_log_probs(model, request, generation, parameters)
        assert generation.log_probs is not None
        assert torch.allclose(generation.log_probs, expected, atol=1e-5)
        alone = loaded_alone(family).generate(
            [GenerationRequest(request.prompt, (request.seeds[place],))], parameters
        )[0][0]
        assert isinstance(alone, Generation) and torch.equal(alone.tokens, generation.tokens)
        if generation.routed_experts is not None and alone.routed_experts is not None:
            assert torch.equal(alone.routed_experts, generation.routed_experts)


ALONE: dict[str, TransformersEngine] = {}


def loaded_alone(family: str) -> TransformersEngine:
    return ALONE.setdefault(family, loaded_engine(family))


def test_a_long_response_does_not_hold_up_those_that_come_after_it() -> None:
    engine = loaded_engine(max_batch=4)
    stream, order, lengths, steps = ResponseStream(engine, 0), [], {}, 0
    # A random model ends most responses soon, and a few late.
    often = SamplingParameters(max_response_length=30, stop_token_ids=tuple(range(3, 20)))
    for number in range(24):
        stream.add(number, GenerationRequest((10, 11), (number,)), often)
    while stream.open:
        steps += 1
        for number, _, answer in stream.step():
            assert isinstance(answer, Generation)
            order.append(number)
            lengths[number] = len(answer.tokens)
        assert engine.running <= 4
    assert order != sorted(order)
    # Four at a time until the longest of them ends.
    chunks = sum(max(lengths[n] for n in range(start, start + 4)) for start in range(0, 24, 4))
    assert sum(lengths.values()) / 4 <= steps < 0.85 * chunks


def test_equal_requests_to_an_idle_engine_give_equal_digits() -> None:
    first, second = (loaded_engine(max_batch=5).generate(MANY, PARAMETERS) for _ in range(2))
    for mine, theirs in zip(first, second, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert isinstance(a, Generation) and isinstance(b, Generation)
            assert a.log_probs is not None and b.log_probs is not None
            assert torch.equal(a.log_probs, b.log_probs)


def test_other_parameters_wait_until_the_batch_is_empty() -> None:
    stream = ResponseStream(loaded_engine(), 0)
    stream.add(0, REQUESTS[0], SamplingParameters(max_response_length=3))
    stream.add(1, REQUESTS[0], SamplingParameters(max_response_length=5))
    lengths: dict[int, set[int]] = {0: set(), 1: set()}
    while stream.open:
        for ticket, _, answer in stream.step():
            assert isinstance(answer, Generation)
            lengths[ticket].add(len(answer.tokens))
    assert lengths == {0: {3}, 1: {5}}


def test_an_aborted_engine_is_empty_and_generates_as_before() -> None:
    engine = loaded_engine()
    expected = engine.generate(REQUESTS, PARAMETERS)
    engine.add(7, REQUESTS[0], PARAMETERS)
    engine.step()
    engine.add(8, REQUESTS[1], PARAMETERS)
    engine.abort()
    assert engine.running == 0
    again = engine.generate(REQUESTS, PARAMETERS)
    assert [[a.tokens.tolist() for a in group] for group in again] == [  # type: ignore[union-attr]
        [a.tokens.tolist() for a in group]  # type: ignore[union-attr]
        for group in expected
    ]


class Whole:
    """An engine of the user's own that only has `generate`."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Answer]]:
        self.calls.append(sum(len(request.seeds) for request in requests))
        answer = Generation(torch.tensor([1, 2]), "length", 0, torch.zeros(2))
        return [[answer] * len(request.seeds) for request in requests]


class Changed(TransformersEngine):
    """Has its own `generate` and the `step` of its parent."""

    generate = Whole.generate  # type: ignore[assignment]


def test_an_engine_with_generate_alone_is_given_whole_batches() -> None:
    engine: Any = Whole()
    stream = ResponseStream(engine, 5)
    for number in range(4):
        stream.add(number, GenerationRequest((1,), (1, 2)), SamplingParameters())
    stream.add(4, GenerationRequest((1,), tuple(range(7))), SamplingParameters())
    found: list[Finished] = []
    while stream.open:
        found += stream.step()
    # Two requests of 2, two more, then 7 responses in parts of at most 5.
    assert engine.calls == [4, 4, 5, 2]
    assert sorted(f.place for f in found if f.ticket == 4) == list(range(7))
    assert ResponseStream(Changed.__new__(Changed), 5).lockstep


class Gated:
    """A `SteppingEngine` that finishes a response when it is told to."""

    max_batch = 2

    def __init__(self) -> None:
        self.open: list[tuple[int, int]] = []
        self.tickets = threading.Semaphore(0)
        self.fails = False

    running = property(lambda self: len(self.open))
    room = property(lambda self: self.max_batch - len(self.open))

    def generate(self, requests: Any, parameters: Any) -> Any:
        raise NotImplementedError

    def add(self, ticket: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        self.open += [(ticket, place) for place in range(len(request.seeds))]

    def step(self) -> list[Finished]:
        if self.fails:
            raise ValueError("the engine broke")
        if not self.tickets.acquire(timeout=0.005):
            return []
        ticket, place = self.open.pop(0)
        answer = Generation(torch.tensor([1]), "stop", 0, torch.zeros(1))
        return [Finished(ticket, place, answer)]

    def abort(self) -> None:
        self.open = []


def server_over(engine: Any) -> GroupServer:
    server = GroupServer(SingleTurnPlayer(ResponseStream(engine, 0))).start()
    with server.changing(0, last=True, interrupts=False):
        pass
    return server


def ask(server: GroupServer, *groups: int, at_least: int = 0) -> None:
    requests = {group: GenerationRequest((1,), (1,)) for group in groups}
    server.submit(requests, SamplingParameters(), at_least)


def test_groups_are_collected_as_they_finish_while_others_run() -> None:
    engine = Gated()
    server = server_over(engine)
    ask(server, 0, 1, 2)
    engine.tickets.release()
    assert [group for group, _ in server.collect(0)] == [0]
    engine.tickets.release(2)
    assert [group for group, _ in server.collect(0)] == [1, 2]


def test_weights_wait_for_responses_under_way_and_groups_wait_for_their_weights() -> None:
    engine = Gated()
    server = server_over(engine)
    ask(server, 0, 1, 2)
    ask(server, 3, at_least=1)
    loaded = threading.Event()
    while len(engine.open) < 2:
        time.sleep(0.001)

    def load() -> None:
        with server.changing(1, last=True, interrupts=False):
            assert not engine.open
            loaded.set()

    thread = threading.Thread(target=load)
    thread.start()
    assert not loaded.wait(0.1) and len(engine.open) == 2
    engine.tickets.release(2)
    # 2 had not begun and is generated with the new weights, 3 because it asked for them.
    assert loaded.wait(10)
    thread.join()
    engine.tickets.release(2)
    groups: list[int] = []
    while len(groups) < 4:
        groups += [group for group, _ in server.collect(0)]
    assert groups == [0, 1, 2, 3]


def test_canceled_groups_never_come_back() -> None:
    engine = Gated()
    server = server_over(engine)
    ask(server, 0, 1, 2)
    # One call waits when they are canceled, another comes too late.
    collected: list[Any] = []
    waiting = threading.Thread(target=lambda: collected.append(server.collect(0)))
    waiting.start()
    server.cancel(1)
    waiting.join(10)
    assert collected == [[]] and server.collect(0) == []
    while engine.open:
        time.sleep(0.001)
    ask(server, 7)
    engine.tickets.release(1)
    assert [group for group, _ in server.collect(1)] == [7]


def test_what_ends_the_generation_is_raised_by_whoever_waits_for_groups() -> None:
    engine = Gated()
    server = server_over(engine)
    engine.fails = True
    ask(server, 0)
    with pytest.raises(ValueError, match="the engine broke"):
        server.collect(0)
    with (
        pytest.raises(ValueError, match="the engine broke"),
        server.changing(1, last=True, interrupts=False),
    ):
        pass


def test_an_answer_of_the_wrong_length_names_its_prompt() -> None:
    engine: Any = Whole()
    stream = ResponseStream(engine, 4)
    stream.add(0, GenerationRequest((1,), (1,), 5), SamplingParameters(max_response_length=1))
    with pytest.raises(EngineError, match="got a response of 2 tokens"):
        stream.step()


def test_all_groups_that_fit_join_at_one_step() -> None:
    # Room for 6 responses: three groups of two at once, the fourth when two responses have left.
    engine = loaded_engine("qwen3", max_batch=6)
    player = SingleTurnPlayer(ResponseStream(engine, 6))
    server = GroupServer(player)
    requests = {i: GenerationRequest((i + 1,), (2 * i, 2 * i + 1)) for i in range(4)}
    server.submit(requests, SamplingParameters(max_response_length=4))
    server.step()
    assert player.open == 3 and engine.running == 6


def test_rows_of_similar_length_are_a_block() -> None:
    # 60 is more than 0.6 of 90; 9 is not, and 8 is more than 0.6 of 9.
    assert blocks_of(torch.tensor([90, 60, 9, 8]), 100) == [(0, 2, 10), (2, 4, 91)]
    assert blocks_of(torch.tensor([7]), 7) == [(0, 1, 0)]


@pytest.mark.parametrize("value_size", [8, 5])
def test_blocks_attend_to_what_the_whole_padded_cache_gives(value_size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths, size = torch.tensor([40, 37, 12, 3, 1]), 40
    query = torch.randn(5, 6, 1, 8, generator=draw)
    key = torch.randn(5, 2, size, 8, generator=draw)
    value = torch.randn(5, 2, size, value_size, generator=draw)
    mask = (torch.arange(size) >= size - lengths[:, None])[:, None, None]
    blocks = blocks_of(lengths, size)
    assert len(blocks) == 4
    masks = masks_of(blocks, lengths, key)
    assert [mask is None for mask in masks] == [False, True, True, True]
    found, _ = decode_attention(
        torch.nn.Module(), query, key, value, None, blocks=blocks, masks=masks, scaling=0.3
    )
    whole = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(3, dim=1),
        value.repeat_interleave(3, dim=1),
        attn_mask=mask,
        scale=0.3,
    )
    assert torch.allclose(found, whole.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("value_size", [8, 5, 11])
def test_contexts_side_by_side_attend_to_themselves_alone(
    value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def without_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        # What torch's kernels that hold no scores [S, S] ask for.
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and "attn_mask" not in options
        return attend(q, k, v, **options)

    monkeypatch.setattr(decode_batch, "scaled_dot_product_attention", without_scores)
    draw = torch.Generator().manual_seed(0)
    lengths = [5, 5, 3, 1]
    query = torch.randn(1, 6, sum(lengths), 8, generator=draw)
    key = torch.randn(1, 2, sum(lengths), 8, generator=draw)
    value = torch.randn(1, 2, sum(lengths), value_size, generator=draw)
    runs = runs_of(torch.tensor(lengths))
    assert runs == [(2, 5), (1, 3), (1, 1)]
    found, _ = decode_attention(torch.nn.Module(), query, key, value, None, runs=runs, scaling=0.3)
    sample = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    own = (sample[:, None] == sample).tril()
    whole = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(3, dim=1),
        value.repeat_interleave(3, dim=1),
        attn_mask=own,
        scale=0.3,
    )
    assert torch.allclose(found, whole.transpose(1, 2), atol=1e-6)


def read_by(engine: TransformersEngine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Shapes of what goes through the model until every request has a token."""
    shapes: list[list[int]] = []
    embedding: Any = engine.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _m, args, _o: shapes.append([*args[0].shape]))
    engine.generate(requests, SamplingParameters(max_response_length=1))
    handle.remove()
    return shapes


def test_prompts_are_read_without_padding_in_passes_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = loaded_engine()
    # 3 + 8 + 1 tokens, however many responses they get.
    assert read_by(engine, REQUESTS) == [[1, 12]]
    expected = engine.generate(REQUESTS, PARAMETERS)
    monkeypatch.setattr(decode_batch, "_READ_AT_ONCE", 4)
    assert read_by(engine, REQUESTS) == [[1, 8], [1, 4]]
    for mine, theirs in zip(engine.generate(REQUESTS, PARAMETERS), expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert isinstance(a, Generation) and isinstance(b, Generation)
            assert torch.equal(a.tokens, b.tokens)


def test_a_pass_has_as_many_contexts_as_fit_or_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_batch, "_READ_AT_ONCE", 10)
    lengths = torch.tensor([3, 11, 6, 4])
    passes = passes_of(torch.tensor([1, 2, 3, 0]), lengths)
    assert [one.tolist() for one in passes] == [[1], [2, 3], [0]]


def test_reading_a_prompt_asks_for_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        masks.append(kwargs.get("attn_mask"))
        return attend(*args, **kwargs)

    monkeypatch.setattr(decode_batch, "scaled_dot_product_attention", watched)
    engine = loaded_engine()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    engine.generate(REQUESTS, SamplingParameters(max_response_length=1))
    assert len(masks) == 3 * 4 and all(mask is None for mask in masks)  # prompts x layers
