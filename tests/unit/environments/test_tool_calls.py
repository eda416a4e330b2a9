"""Tool calls are found in a reply's text, made, and answered; nothing in them is a crash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plugin.environments.environment_protocol import (
    MalformedToolCall,
    Reply,
    ToolCall,
    answer_of,
    parse_tool_calls,
)
from plugin.environments.tool_environment import ToolEnvironment


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def test_calls_are_found_in_order() -> None:
    text = "I look.\n" + call('{"name": "a", "arguments": {"x": [1]}}') + call('{"name": "b"}')
    assert parse_tool_calls(text) == [ToolCall("a", {"x": [1]}), ToolCall("b", {})]
    assert parse_tool_calls("nothing to call") == []


def test_a_call_that_is_only_thought_of_is_not_made() -> None:
    thought, made = call('{"name": "a"}'), call('{"name": "b"}')
    assert parse_tool_calls(f"<think>{thought}</think>{made}") == [ToolCall("b", {})]
    assert parse_tool_calls(f"{thought}</think>") == []
    assert parse_tool_calls(f"<think>{thought}") == []
    assert answer_of("<think>a</think>b") == "b"
    assert answer_of("plain") == "plain"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call('{"name": "a", "arguments": {'), "not JSON"),
        (call(""), "not JSON"),
        (call("[1]"), "not a JSON object"),
        (call('{"arguments": {}}'), '"name" is not a string'),
        (call('{"name": "a", "arguments": "x"}'), '"arguments" is not an object'),
        ('<tool_call>{"name": "a"}', "</tool_call> is missing"),
        (call("[" * 100_000), "not JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text: str, reason: str) -> None:
    [found] = parse_tool_calls(text)
    assert isinstance(found, MalformedToolCall)
    assert reason in found.reason


def test_a_call_that_never_ends_does_not_swallow_the_next() -> None:
    found = parse_tool_calls("<tool_call>{" + call('{"name": "b"}'))
    assert isinstance(found[0], MalformedToolCall)
    assert found[1:] == [ToolCall("b", {})]


@given(st.text(alphabet='<>/tool_calhink{}":[]ne1, ', max_size=80))
@example("<tool_call></think><tool_call>")
def test_no_text_breaks_the_parser(text: str) -> None:
    parse_tool_calls(text)
    parse_tool_calls(call(text))


def divide(numerator: int, denominator: int) -> float:
    return numerator / denominator


def environment() -> ToolEnvironment:
    return ToolEnvironment(
        {"divide": divide, "name": lambda: "Ada"}, lambda answer, ending: float(answer == "2.0")
    )


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"name": "divide", "arguments": {"numerator": 6, "denominator": 3}}', "2.0"),
        ('{"name": "name"}', "Ada"),
        ('{"name": "divide", "arguments": {"numerator": 6, "denominator": 0}}', "error: ZeroDivisionError: division by zero"),
        ('{"name": "multiply"}', "error: there is no tool 'multiply'; there are divide, name"),
        ('{"name": "name", "arguments": {"x": 1}}', "error: TypeError"),
        ('{"name": ', "error: the tool call is malformed: not JSON"),
    ],
)  # fmt: skip
def test_the_output_of_a_call_or_its_error_goes_back_to_the_model(text: str, content: str) -> None:
    step = environment().step(Reply(call(text)), [])
    assert not step.done
    [message] = step.messages
    assert message["role"] == "tool"
    assert message["content"].startswith(content)


def test_a_reply_without_a_call_is_the_answer_and_the_end() -> None:
    tools = environment()
    step = tools.step(Reply("<think>6 / 3</think>2.0"), [])
    assert step.done
    assert tools.reward("done") == 1.0


def test_several_calls_of_a_reply_are_answered_in_order() -> None:
    both: Any = call('{"name": "name"}') + call('{"name": "other"}')
    messages = environment().step(Reply(both), []).messages
    assert [message["content"][:5] for message in messages] == ["Ada", "error"]
