"""A teacher that dies, stalls, redirects, talks nonsense or sends without end: one line, in time."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from plugin.config import JobConfig
from plugin.config.teachers import TeacherSpec
from plugin.errors import ConfigError, EngineError
from plugin.tasks.copy_digits import CharacterTokenizer
from plugin.teachers.http_teacher import HttpTeacher
from tests.hostile_server import ATTACKS, Attack, hostile, redirects
from tests.unit.teachers.stand_in_teacher import VOCAB, StandInTeacher
from tests.unit.teachers.test_http_teacher import TOKENIZER, batch, short_waits

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
