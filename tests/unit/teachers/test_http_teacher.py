"""Teachers behind HTTP: what they say is believed only if it is about the tokens that were asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.config.teachers import TeacherSpec
from plugin.errors import ConfigError, EngineError
from plugin.tasks.copy_digits import CharacterTokenizer
from plugin.teachers.http_teacher import HttpTeacher
from tests.unit.teachers.stand_in_teacher import VOCAB, StandInTeacher

pytestmark = pytest.mark.usefixtures("jumping_clock")

TOKENIZER = CharacterTokenizer("abcdefghijk")
PROMPTS, RESPONSES = (2, 1, 3), (3, 0, 4)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugin.teachers.http_teacher._BACKOFF_SECONDS", 0.01)


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[StandInTeacher]:
    found = StandInTeacher(request.param)
    yield found
    found.close()


def batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(1)
    totals = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return RolloutBatch(
        {
            "unconcat_tokens": [torch.randint(0, VOCAB, (n,), generator=generator) for n in totals],
            "total_lengths": totals,
            "response_lengths": list(RESPONSES),
            "loss_masks": [torch.ones(n, dtype=torch.int64) for n in RESPONSES],
        }
    )


def teacher(
    server: StandInTeacher,
    *urls: str,
    topk: int = 3,
    max_batch: int = 64,
    idle: Any = lambda: None,
) -> HttpTeacher:
    spec = TeacherSpec("teacher", "--teacher-url", urls=urls or (server.url,))
    config = JobConfig().unchecked_copy(
        distill_topk=topk,
        teacher_server=server.dialect,
        teacher_request_retries=2,
        teacher_request_timeout=5.0,
        teacher_max_batch=max_batch,
    )
    return HttpTeacher(config, spec, VOCAB, idle)


@pytest.mark.parametrize("topk", [0, 3, VOCAB])
def test_scores_are_those_of_the_teachers_distribution(server: StandInTeacher, topk: int) -> None:
    samples = batch()
    calls: list[int] = []
    found = teacher(server, topk=topk, idle=lambda: calls.append(1)).score(samples)
    for i, (tokens, response) in enumerate(
        zip(samples.columns["unconcat_tokens"], RESPONSES, strict=True)
    ):
        rows = server.table[tokens[len(tokens) - response - 1 : -1]]
        own = rows.gather(1, tokens[len(tokens) - response :, None])[:, 0]
        torch.testing.assert_close(found["teacher_log_probs"][i], own)
        if topk and response:
            best = rows.topk(topk, dim=1)
            assert found["teacher_topk_ids"][i].tolist() == best.indices.tolist()
            torch.testing.assert_close(found["teacher_topk_log_probs"][i], best.values)
    assert found.keys() == ({"teacher_log_probs"} | ({"teacher_topk_ids", "teacher_topk_log_probs"} if topk else set()))  # fmt: skip
    assert len(server.asked) == 2 and calls  # a sample without a response is not asked about
    for name, values in found.items():
        samples = samples.with_column(name, values)
    samples.check(vocabulary=VOCAB)


def rows_of(answer: Any) -> Any:
    if "choices" in answer:
        return answer["choices"][0]["prompt_logprobs"]
    return answer["meta_info"]["input_token_logprobs"]


def short(answer: Any) -> Any:
    rows_of(answer)[:] = rows_of(answer)[-1:]
    return answer


def without_the_token(answer: Any) -> Any:
    if "choices" in answer:
        rows_of(answer)[-1] = {"0": {"logprob": -1.0}} if "0" not in rows_of(answer)[-1] else {}
    else:
        rows_of(answer)[-1][1] = (rows_of(answer)[-1][1] + 1) % VOCAB
    return answer


def no_number(answer: Any) -> Any:
    row = rows_of(answer)[-1]
    if isinstance(row, dict):
        for entry in row.values():
            entry["logprob"] = "often"
    else:
        row[0] = "often"
    return answer


def positive(answer: Any) -> Any:
    row = rows_of(answer)[-1]
    if isinstance(row, dict):
        for entry in row.values():
            entry["logprob"] = 0.5
    else:
        row[0] = 0.5
    return answer


def few_ids(answer: Any) -> Any:
    if "choices" in answer:
        rows = rows_of(answer)
        rows[:] = [row and dict(list(row.items())[-1:]) for row in rows]
        return answer
    for row in answer["meta_info"]["input_top_logprobs"]:
        if row:
            del row[1:]
    return answer


def twice(answer: Any) -> Any:
    """The first id of the last position again, instead of or besides the second."""
    if "choices" in answer:
        row = rows_of(answer)[-1]
        key = next(iter(row))
        row["0" + key] = row[key]
    else:
        row = answer["meta_info"]["input_top_logprobs"][-1]
        row[1] = row[0]
    return answer


def more_than_one(answer: Any) -> Any:
    if "choices" in answer:
        for entry in rows_of(answer)[-1].values():
            entry["logprob"] = -0.1
    else:
        for entry in answer["meta_info"]["input_top_logprobs"][-1]:
            entry[0] = -0.1
    return answer


FAULTS = [
    (twice, "an id came back twice at position"),
    (more_than_one, r"add up to .*, more than 1"),
    (short, "came back for"),
    (without_the_token, "is missing|is of token"),
    (no_number, "'often' at token"),
    (positive, "log-prob 0.5"),
    (few_ids, "ids came back at position|is missing"),
    (lambda answer: {"nothing": 1}, "the answer has no"),
    (lambda answer: [1, 2], "the answer has no"),
    (503, "HTTP 503"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_bad_answer_is_asked_for_again_and_finally_named(
    server: StandInTeacher, fault: Any, message: str
) -> None:
    server.spoil.append(fault)
    again = teacher(server, max_batch=1).score(batch())
    assert torch.equal(again["teacher_log_probs"].values, teacher(server).score(batch())["teacher_log_probs"].values)  # fmt: skip
    server.spoil.extend([fault] * 3)
    with pytest.raises(EngineError, match=f"sample 0: .*in 3 attempts, the last: .*({message})"):
        teacher(server, max_batch=1).score(batch())


def test_a_refused_call_is_not_repeated(server: StandInTeacher) -> None:
    server.spoil.append(400)
    with pytest.raises(EngineError, match="refuses: HTTP 400"):
        teacher(server, max_batch=1).score(batch())


def test_a_dead_server_costs_nothing_while_another_lives(server: StandInTeacher) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
    one = teacher(server, dead, server.url)
    expected = teacher(server).score(batch())
    for _ in range(2):
        found = one.score(batch())
        assert torch.equal(found["teacher_log_probs"].values, expected["teacher_log_probs"].values)
    with pytest.raises(EngineError, match=r"in 3 attempts, the last: .*cannot connect"):
        teacher(server, dead).score(batch())


def test_a_teacher_with_another_vocabulary_is_refused_before_the_start() -> None:
    messages: list[str] = []
    for dialect in ("vllm", "sglang"):
        smaller = StandInTeacher(dialect, vocab=VOCAB - 1)
        same = StandInTeacher(dialect)
        larger = StandInTeacher(dialect, vocab=VOCAB + 40)
        for one in (smaller, larger):
            one.tokenize = TOKENIZER.encode
        try:
            with pytest.raises(ConfigError, match=r"does not score the tokens 0 and 11.*HTTP 400"):
                teacher(smaller).check(TOKENIZER, messages.append)
            with pytest.raises(ConfigError, match="the teacher has a different vocabulary"):
                teacher(larger, topk=VOCAB).check(TOKENIZER, messages.append)
            same.tokenize = lambda text: [11 - number for number in TOKENIZER.encode(text)]
            with pytest.raises(
                ConfigError, match=r"has a different vocabulary: .* makes \[0, 1, 2"
            ):
                teacher(same).check(TOKENIZER, messages.append)
            assert not messages
            same.tokenize = TOKENIZER.encode
            teacher(same).check(TOKENIZER, messages.append)
            assert not messages
            same.spoil.append(500)  # a server that dies of an id that it lacks
            with pytest.raises(ConfigError, match=r"does not score the tokens 0 and 11.*HTTP 500"):
                teacher(same).check(TOKENIZER, messages.append)
            same.tokenize = None
            teacher(same).check(TOKENIZER, messages.append)
            assert "does not tell how it tokenizes" in messages.pop()
        finally:
            for one in (smaller, same, larger):
                one.close()
        with pytest.raises(ConfigError, match=r"cannot connect.*start the teacher before the job"):
            teacher(same).check(TOKENIZER, messages.append)
