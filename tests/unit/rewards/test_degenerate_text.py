"""Rewards on what a model writes when it goes wrong: time grows with the length, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from plugin.config.data import parse_rewards
from plugin.rewards.built_in import BUILT_IN, DETERMINISTIC, last_boxed
from plugin.rewards.code_tests import code_block
from plugin.rewards.pool import PoolScorer, RewardPool
from plugin.rewards.reward_set import RewardInput, RewardSet, Score

pytestmark = pytest.mark.hostile

LABELS: dict[str, Any] = {
    "exact": "x", "numeric": 7, "gsm8k": "#### 7", "boxed": "7", "choice": "B",
    "json_schema": {"type": "array", "items": {"type": "integer"}}, "length_penalty": None,
}  # fmt: skip

#: What is repeated: alone, and once followed by a long run of the second.
UNITS = [
    " ", "\n", " \n", "\t", "\r\n", "\x0b", "\u2028", "\0", "é", "A", "A\n", "A ", "(A", "*", "**", "*A", "A*", "(", ")",
    "answer", "answer ", "answer is ", "answer :", "Answer: **", "option\n", "choice is\n\n", "\\boxed{", "\\boxed{ ",
    "\\boxed{}", "\\boxed{\\text{", "\\boxed{1}", "{", "}", "{}", "\\text{", "`", "```", "``` ", "```\n", "```a\n", "```python\n",
    "```json\n1", "1", "1,", "1,111", "1,111,", "-1", "-", "+", "1.", ".1", "1e", "1e1", "#", "####", "#### 1", "#### ", "$",
    "[", "[1,", "[]", '{"a":', '"', '"\\', "\\", "1" * 50 + " ",
]  # fmt: skip
RUNS = [
    ("answer", " "), ("answer is", "\n"), ("answer:", "*"), ("\\boxed{", " "), ("\\boxed{", "{"), ("A", " "), ("A", "*"), ("```", " "),
    ("```", "a"), ("```a", "\t"), ("```\n", "`"), ("####", " "), ("####", "$"), ("####", "1"), ("-", "1"), ("1.", "1"), ("1e", "1"),
    ("1", ",111"), ("[", "[[["), ("\\boxed{", "1+"), ("\\boxed{", "^2"),
]  # fmt: skip
TEXTS: list[Callable[[int], str]] = [
    *(lambda n, unit=unit: unit * (n // len(unit)) for unit in UNITS),
    *(lambda n, first=first, then=then: first + then * (n // len(then)) for first, then in RUNS),
    *(lambda n, first=first, then=then: (then * 50 + first) * (n // 60) for first, then in RUNS),
]
SIZES = (2_000, 8_000, 25_000, 100_000)
SECONDS = 0.5


def check_linear(work: Callable[[str], object]) -> None:
    """CPU seconds, at growing lengths so that worse than linear fails early; noise is forgiven."""
    for number, text_of in enumerate(TEXTS):
        taken = []
        for size in SIZES:
            text = text_of(size)
            taken.append(min(_seconds(work, text) for _ in range(2 if size == SIZES[-1] else 1)))
            what = f"text {number} ({text[:20]!r}...) of {size}: {taken}"
            assert taken[-1] < SECONDS, what
        assert taken[-1] < 0.05 or taken[-1] < 12 * taken[-2], what


def _seconds(work: Callable[[str], object], text: str) -> float:
    began = time.process_time()
    work(text)
    return time.process_time() - began


@pytest.mark.parametrize("reward", LABELS)
def test_no_text_takes_a_reward_more_than_linear_time(reward: str) -> None:
    constants = {"max_response_length": 100, "timeout": 10.0, "url": None}
    rewards = RewardSet(parse_rewards((reward,)), constants=constants).load()
    row = {"answer": LABELS[reward]}
    rewards.score(RewardInput("\\boxed{8}", row))  # what it imports
    check_linear(lambda text: rewards.score(RewardInput(text, row)))


def test_no_text_takes_the_search_for_a_program_more_than_linear_time() -> None:
    check_linear(lambda text: code_block(text, ("python", "")))


def test_every_built_in_reward_is_tried_or_has_a_reason_not_to_be() -> None:
    assert set(BUILT_IN) == {*LABELS, "code_tests", "http"} == {*DETERMINISTIC, "http"}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed{a{b}c} }", "a{b}c"),
        (r"} \boxed{ \boxed{x} }", "x"),
        (r"\boxed{x} { } {", "x"),
        (r"\boxed{ \boxed{", None),
        (r"\boxed {x}", None),
    ],
)
def test_the_last_balanced_box_is_found(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("number", ["1" * 400, "-" + "9" * 400, "1e999", "1" * 5000])
def test_a_number_beyond_all_floats_is_neither_right_nor_a_label(number: str) -> None:
    numeric = RewardSet(parse_rewards(("numeric",))).load()
    for label in (number, f"#### {number}", 10**400):
        assert "it must be a number" in (numeric.label_problem({"answer": label}) or "")
        assert numeric.score(RewardInput(number, {"answer": label})).total == 0.0
    assert numeric.score(RewardInput(number, {"answer": 7})).total == 0.0


def test_a_built_in_reward_that_runs_out_of_time_is_wrong_and_no_group_is_sampled_again() -> None:
    schema = {"type": "string", "pattern": "^(a|a)*$"}
    settings = {"max_response_length": 100}
    chosen = RewardSet(parse_rewards(("json_schema", "length_penalty:0.5")), constants=settings)
    with RewardPool(chosen, workers=1, seconds=1.0, memory_mb=256) as pool:
        box = PoolScorer(pool)
        hostile = RewardInput('"' + "a" * 60 + '!"', {"answer": schema}, num_tokens=20)
        box.enqueue(hostile)
        ((_, score),) = box.finished(wait_seconds=60)
        # 0 + 0.5 * (-20 / 100)
        assert score == Score(-0.1, {"json_schema": 0.0, "length_penalty": -0.2})
        assert pool.restarts == 1


def test_time_is_no_verdict_on_a_reward_that_may_answer_the_next_time() -> None:
    given = RewardInput("text", {})
    for names in (("http",), ("exact", "http"), ("exact", "own.py:reward")):
        assert RewardSet(parse_rewards(names)).timed_out(given) is None
    assert RewardSet(parse_rewards(("exact", "choice:2"))).timed_out(given) == Score(
        0.0, {"exact": 0.0, "choice": 0.0}
    )
