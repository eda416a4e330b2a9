"""A teacher that dies, stalls, redirects, talks nonsense or sends without end: one line, in time."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from typing import Any

import pytest
import torch

from plugin.config import JobConfig
from plugin.config.teachers import TeacherSpec
from plugin.errors import ConfigError, EngineError
from plugin.tasks.copy_digits import CharacterTokenizer
from plugin.teachers.http_teacher import HttpTeacher
from tests.hostile_server import ATTACKS, Attack, hostile, redirects, stalls
from tests.unit.teachers.stand_in_teacher import VOCAB, StandInTeacher
from tests.unit.teachers.test_http_teacher import TOKENIZER, batch, short_waits

pytestmark = pytest.mark.usefixtures("jumping_clock")

__all__ = ["short_waits"]


def teacher(*urls: str, dialect: str = "vllm") -> HttpTeacher:
    spec = TeacherSpec("teacher", "--teacher-url", urls=urls)
    config = JobConfig().unchecked_copy(
        distill_topk=3,
        teacher_server=dialect,
        teacher_request_retries=1,
        teacher_request_timeout=0.5,
        teacher_max_batch=64,
        max_answer_bytes=1 << 20,
    )
    return HttpTeacher(config, spec, VOCAB)


@pytest.mark.timeout(60)  # of a hang
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_teacher_ends_the_step_with_one_line_in_bounded_memory(attack: Attack) -> None:
    with hostile(attack) as server:
        one, samples = teacher(server.url), batch()
        tracemalloc.start()
        try:
            with pytest.raises(EngineError, match=server.url) as caught:
                one.score(samples)
            memory = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert memory < 64 << 20
        assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 1000


def test_prompts_do_not_follow_a_redirect_of_a_teacher() -> None:
    with hostile(stalls) as stranger:

        def redirects_to_it(connection: socket.socket, over: threading.Event) -> None:
            answer = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {stranger.url}/\r\n"
            connection.sendall(answer.encode() + b"Content-Length: 0\r\n\r\n")

        with hostile(redirects_to_it) as server:
            with pytest.raises(EngineError, match="HTTP 307"):
                teacher(server.url).score(batch())
            assert server.connections and not stranger.connections


@pytest.mark.parametrize("digits", [19, 5000])
def test_an_id_of_many_digits_is_a_bad_answer(digits: int) -> None:
    def spoil(answer: Any) -> Any:
        answer["choices"][0]["prompt_logprobs"][-1]["9" * digits] = {"logprob": -1.0}
        return answer

    server = StandInTeacher("vllm")
    try:
        server.spoil.extend([spoil] * 4)
        with pytest.raises(EngineError, match="the log-probs at position") as caught:
            teacher(server.url).score(batch())
        assert len(str(caught.value)) < 1000
    finally:
        server.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", [a for a in ATTACKS if a is not redirects])
def test_a_hostile_teacher_beside_a_good_one_changes_no_score(attack: Attack) -> None:
    good = StandInTeacher("vllm")
    try:
        expected = teacher(good.url).score(batch())
        with hostile(attack) as server:
            found = teacher(server.url, good.url).score(batch())
        for name, column in expected.items():
            assert torch.equal(found[name].values, column.values)
    finally:
        good.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_teacher_is_refused_before_the_start(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugin.teachers.http_teacher._PROBE_TIMEOUT", 0.5)
    tokenizer: CharacterTokenizer = TOKENIZER
    with hostile(attack) as server, pytest.raises(ConfigError, match=server.url) as caught:
        teacher(server.url).check(tokenizer, lambda line: None)
    assert len(str(caught.value).splitlines()) == 1
