"""The built-in rewards: what each takes for right, and which labels it refuses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from plugin.config import JobConfig
from plugin.config.data import BUILT_IN_REWARDS, parse_rewards
from plugin.errors import BatchError, ConfigError, EngineError, HookLoadError
from plugin.rewards.reward_set import BUILT_IN, RewardInput, Rewards, RewardSet

CONSTANTS = {"max_response_length": 100, "timeout": 10.0, "url": None}
SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
READS = "a, b = map(int, input().split())\nprint(a + b)"


def rewards(*texts: str, **constants: Any) -> Rewards:
    return RewardSet(parse_rewards(texts), constants={**CONSTANTS, **constants}).load()


def score(reward: str, response: str, label: Any, **more: Any) -> float:
    given = RewardInput(response, {"answer": label}, **more)
    return rewards(reward).score(given).total


RIGHT: list[tuple[str, str, Any]] = [
    ("exact", " Paris\n", "Paris"),
    ("exact", "7", 7),
    ("numeric", "first 12, then 1,234.50", "1234.5"),
    ("numeric", "x = 5-3, that is $2.", 2),
    ("numeric", "it falls to -4", -4.0),
    ("numeric", "1e3", "so it is\n#### 1,000"),
    ("gsm8k", "5 * 3 = 15\n#### 15", "3 * 5 = <<3*5=15>>15\n#### 15"),
    ("gsm8k", "#### 3\nno:\n#### $1,200", "1200"),
    ("boxed", r"hence \boxed{\frac{1}{2}}", "0.5"),
    ("boxed", r"\boxed{x^{2}+1}", r"we get $\boxed{1 + x^2}$"),
    ("boxed", r"\boxed{3} no, \boxed{ 4 }", 4),
    ("choice", "The answer is (B).", "B"),
    ("choice", r"Option A is wrong. \boxed{C}", "(c)"),
    ("choice", "I think\nD", "D"),
    ("json_schema", '{"a": 1}', SCHEMA),
    ("json_schema", 'Here:\n```json\n{"a": 2}\n```', json.dumps(SCHEMA)),
    ("code_tests", ADD, "assert add(2, 3) == 5"),
    ("code_tests", f"First:\n```\nx\n```\nBetter:\n{ADD}", ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]),
    ("code_tests", READS, {"inputs": ["2 3\n", "1 1"], "outputs": ["5\n", "2"]}),
]  # fmt: skip

WRONG: list[tuple[str, str, Any]] = [
    ("exact", "paris", "Paris"),
    ("numeric", "no number at all", 3),
    ("numeric", "12, later 13", 12),
    ("gsm8k", "it is 15", "15"),
    ("gsm8k", "#### fifteen", "15"),
    ("boxed", "the answer is 4", 4),
    ("boxed", r"\boxed{5}", 4),
    ("boxed", r"\boxed{4", 4),
    ("boxed", r"\boxed{\frac{1}{0}}", 4),
    ("choice", "A or B, who knows", "A"),
    ("choice", "The answer is A", "B"),
    ("json_schema", '{"a": "1"}', SCHEMA),
    ("json_schema", "no JSON", SCHEMA),
    ("code_tests", "", "assert True"),
    ("code_tests", "def add(a, b): return a - b", "assert add(2, 3) == 5"),
    ("code_tests", "import sys; sys.exit(0)", "assert False"),
    ("code_tests", READS, {"inputs": ["2 3", "1 1"], "outputs": ["5", "3"]}),
]


@pytest.mark.parametrize(("reward", "response", "label"), RIGHT)
def test_a_right_response_earns_1(reward: str, response: str, label: Any) -> None:
    assert rewards(reward).label_problem({"answer": label}) is None
    assert score(reward, response, label) == 1.0


@pytest.mark.parametrize(("reward", "response", "label"), WRONG)
def test_a_wrong_response_earns_0(reward: str, response: str, label: Any) -> None:
    assert rewards(reward).label_problem({"answer": label}) is None
    assert score(reward, response, label) == 0.0


BAD_LABELS: list[tuple[str, Any, str]] = [
    ("exact", None, "it must be text or a number"),
    ("exact", ["a"], "of type list; it must be text"),
    ("numeric", "about five", "it must be a number"),
    ("numeric", True, "of type bool; it must be a number"),
    ("gsm8k", {"n": 1}, "of type dict"),
    ("boxed", None, "it must be text or a number"),
    ("choice", 2, "it must be one letter"),
    ("choice", "AB", "it must be one letter"),
    ("json_schema", "{", "not JSON"),
    ("json_schema", {"type": "nothing"}, "no JSON schema"),
    ("json_schema", 3, "it must be a JSON schema|no JSON schema"),
    ("code_tests", "assert add(", "its tests are not Python"),
    ("code_tests", {"inputs": ["1"], "outputs": []}, "of equal length"),
    ("code_tests", [], "holds no test"),
]


@pytest.mark.parametrize(("reward", "label", "message"), BAD_LABELS)
def test_a_label_of_the_wrong_type_is_named(reward: str, label: Any, message: str) -> None:
    problem = rewards(reward).label_problem({"answer": label}) or ""
    assert problem.startswith(f"the label 'answer' does not fit --reward {reward}: ")
    assert re.search(message, problem), problem


def test_the_weighted_sum_counts_and_every_part_is_kept() -> None:
    given = RewardInput("#### 7", {"answer": "7"}, num_tokens=25)
    # 2 * 1 + 0.4 * (-25 / 100) = 1.9
    found = rewards("gsm8k:2", "length_penalty:0.4").score(given)
    assert found.total == pytest.approx(1.9)
    assert found.parts == {"gsm8k": 1.0, "length_penalty": -0.25}


OWN = """
import math

def plain(response, row):
    return len(response)

def curious(response, row, label, *, prompt, truncated, scale=3.0):
    return scale * (prompt == "p") * truncated * (label == "7")

def nan(response, row):
    return math.nan

def odd(response, row, mood):
    return 0.0

def short(response):
    return 0.0
"""


def test_a_reward_of_ones_own_gets_what_its_arguments_name(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    given = RewardInput("abc", {"answer": "7"}, prompt="p", truncated=True)
    found = rewards(f"{file}:plain:0.5", f"{file}:curious").score(given)
    assert found.total == 4.5 and found.parts == {"plain": 3.0, "curious": 3.0}
    with pytest.raises(BatchError, match="reward nan is nan; it must be a finite number"):
        rewards(f"{file}:nan").score(given)
    with pytest.raises(HookLoadError, match=r"odd asks for 'mood'; .* among label, max_response"):
        rewards(f"{file}:odd")
    with pytest.raises(HookLoadError, match=r"does not take \(response, row\)"):
        rewards(f"{file}:short")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("gsm9k",), "choose one of exact, numeric"),
        (("gsm8k:0",), "must be a finite number other than 0"),
        (("gsm8k:1e999",), "must be a finite number"),
        (("gsm8k", "gsm8k:2"), "two rewards are called 'gsm8k'"),
    ],
)
def test_a_reward_that_is_none_is_refused(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources({"hf_checkpoint": "m", "prompt_data": "p", "reward": list(texts)})


def test_flags_of_rewards_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs --prompt-data"):
        JobConfig.from_sources({"reward": ["exact"]})
    base = {"hf_checkpoint": "m", "prompt_data": "p"}
    with pytest.raises(ConfigError, match="--reward http needs --reward-url"):
        JobConfig.from_sources({**base, "reward": "http"})
    with pytest.raises(
        ConfigError, match=r"--reward-url .* would do nothing: it needs --reward http"
    ):
        JobConfig.from_sources({**base, "reward_url": "http://127.0.0.1:1"})


def test_every_name_has_a_function() -> None:
    assert set(BUILT_IN) == set(BUILT_IN_REWARDS)


class _Server(BaseHTTPRequestHandler):
    answers: ClassVar[list[tuple[int, bytes]]] = []
    seen: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.seen.append(json.loads(self.rfile.read(length)))
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/score"
        running.shutdown()


def test_a_reward_server_is_asked_again_after_an_error_of_its_own(server: str) -> None:
    given = RewardInput("seven", {"answer": "7", "id": 3}, prompt="3+4")
    _Server.seen.clear()
    _Server.answers[:] = [(503, b""), (200, b'{"reward": 0.25}'), (200, b"0.5")]
    http = rewards("http", url=server)
    assert [http.score(given).total for _ in range(2)] == [0.25, 0.5]
    assert _Server.seen[0] == {
        "prompt": "3+4",
        "response": "seven",
        "label": "7",
        "row": {"answer": "7", "id": 3},
    }
    for status, body in ((404, b""), (200, b'{"score": 1}'), (200, b'"much"')):
        _Server.answers[:] = [(status, body)]
        with pytest.raises(EngineError, match="--reward-url"):
            http.score(given)
    _Server.answers[:] = [(200, b"NaN")]
    with pytest.raises(BatchError, match="reward http is nan"):
        http.score(given)
